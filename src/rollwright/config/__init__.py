"""All that a run can be told: standard dataclasses, read from YAML and overrides, validated by pydantic. No torch.

``source`` reads a file, merges overrides and resolves interpolations; ``validation`` makes the dataclasses and their JSON Schema;
``rules`` are between keys; ``loading`` is the pipeline. A field carries ``metadata={"help": ..., "ge": ..., "le": ..., "choices":
..., "registry": ...}``. A key that is here does what its help says; another is refused with the nearest right name.
"""
