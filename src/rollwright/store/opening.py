"""Which store a config asks for."""

from __future__ import annotations

from pathlib import Path

from rollwright.config.modes import StoreConfig
from rollwright.errors import ConfigError
from rollwright.store.file import FileStore
from rollwright.store.store import ExperienceStore


def open_store(config: StoreConfig, directory: str | Path, *, run: str, create: bool = True) -> ExperienceStore | FileStore:
    """Opens the store of a run.

    Args:
        config: the run's ``store`` section.
        directory: the run directory, where the store is kept unless ``url`` says otherwise.
        run: identity of the run.
        create: make the store where it does not exist.

    Returns:
        A database for ``sql`` and ``queue``, a :class:`FileStore` for ``file``.

    Raises:
        ConfigError: keys contradict one another.
        StoreError: the store belongs to another run or is damaged.
    """
    once_in_order = config.order == "fifo" and config.uses == 1 and config.cooldown_seconds == 0
    if config.type != "sql" and not once_in_order:
        raise ConfigError(
            f"store.type={config.type} is first in, first out, each used once, but store.order is {config.order}, uses {config.uses} and "
            f"cooldown_seconds {config.cooldown_seconds:g}: set store.type=sql, or take these keys out."
        )
    if config.type == "file":
        path = config.url or str(Path(directory) / "experiences.jsonl")
        if "://" in path:
            raise ConfigError(f"store.type=file, but store.url is {path!r}: give the path of a JSONL file.")
        return FileStore(path)
    if config.type not in ("sql", "queue"):
        raise ConfigError(f"store.type is {config.type!r}: choose from sql, queue, file.")
    url = config.url or f"sqlite:///{Path(directory) / 'experiences.db'}"
    return ExperienceStore(url, run=run, create=create)
