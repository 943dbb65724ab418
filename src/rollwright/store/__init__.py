"""The experience store, which holds groups of experiences between the processes that sample them and the one that trains on them."""

from rollwright.store.announcements import Announcement
from rollwright.store.batches import BatchRequest, StoredBatch, TrainingStore
from rollwright.store.file_store import FileStore
from rollwright.store.groups import StoredGroup
from rollwright.store.sampling import ORDERS, PRIORITY_FUNCTIONS, Sampling
from rollwright.store.store import ExperienceStore, StoreStatus, open_store
from rollwright.store.task_leases import TaskClaim

#: The former name of :class:`StoredBatch`.
Batch = StoredBatch

__all__ = [
    "ORDERS",
    "PRIORITY_FUNCTIONS",
    "Announcement",
    "Batch",
    "BatchRequest",
    "ExperienceStore",
    "FileStore",
    "Sampling",
    "StoreStatus",
    "StoredBatch",
    "StoredGroup",
    "TaskClaim",
    "TrainingStore",
    "open_store",
]
