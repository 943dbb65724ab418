"""Names, keys and files of other systems; no other package knows them.

``dialects`` lists the config files that can be translated. ``foreign_keys`` and ``replacements`` are tables for
hints in messages. The other files define public names that only ported code uses.
"""

#: Top-level packages whose names ``rollwright`` provides itself.
PACKAGES = ("areal", "trinity", "sequence_processing", "rlp_datasets", "rlp_sequence_processing")
#: Extras for ported files -> their purpose.
EXTRAS = {"areal": "workflows from AReaL"}
#: Import name of a package that ported files need -> what to install.
PIP_NAMES = {"aiofiles": "'rollwright[areal]'"}
#: What to add to a description of the KL to the reference.
KL_NOTE = "; AReaL's kl_ctl takes it from the reward instead, which is actor.kl_in: reward here (docs/coming-from.md)"
