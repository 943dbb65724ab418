"""All that a run can be told: dataclasses, YAML, overrides, interpolation, validation. No torch in this room.

Each section is a dataclass whose fields carry ``metadata={"help": ..., "ge": ..., "le": ..., "choices": ...}``. A key that is
here does what its help says; a key that is not here is refused with the nearest right name.
"""
