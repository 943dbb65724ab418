"""The experience store: holds groups of experiences between the processes that sample them and the one that trains on them."""

from rollwright.store.file_store import FileStore
from rollwright.store.groups import StoredBatch, StoredGroup
from rollwright.store.sampling import ORDERS, PRIORITY_FUNCTIONS, Sampling
from rollwright.store.store import ExperienceStore, StoreStatus, open_store
from rollwright.store.task_leases import TaskClaim
from rollwright.store.trainer import Announcement

#: The former name of :class:`StoredBatch`.
Batch = StoredBatch

__all__ = [
    "ORDERS",
    "PRIORITY_FUNCTIONS",
    "Announcement",
    "Batch",
    "ExperienceStore",
    "FileStore",
    "Sampling",
    "StoreStatus",
    "StoredBatch",
    "StoredGroup",
    "TaskClaim",
    "open_store",
]
