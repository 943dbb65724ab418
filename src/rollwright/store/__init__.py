"""The experience store: groups of experiences wait here between the processes that sample them and the one that trains on them."""

from rollwright.store.drawing import ORDERS, PRIORITY_FUNCTIONS, Sampling
from rollwright.store.files import FileStore
from rollwright.store.groups import Announcement, Batch, StoredGroup, StoreStatus, TaskClaim
from rollwright.store.store import ExperienceStore, open_store

__all__ = [
    "ORDERS",
    "PRIORITY_FUNCTIONS",
    "Announcement",
    "Batch",
    "ExperienceStore",
    "FileStore",
    "Sampling",
    "StoreStatus",
    "StoredGroup",
    "TaskClaim",
    "open_store",
]
