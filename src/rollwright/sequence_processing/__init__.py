"""Sequence generation and log-probabilities for notebooks and experiments, on the built-in engine and the training code.

``SequenceProcessor`` is all of it in one object; ``config`` says how, ``batches`` what comes back, ``models`` which module
computes, ``generation`` and ``scoring`` do the work, ``shards`` keeps very large experiments on disk.
"""

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.formats import Example
from rollwright.sequence_processing.batches import BatchedSequences, LogprobResults
from rollwright.sequence_processing.config import GenerationConfig
from rollwright.sequence_processing.processor import SequenceProcessor
from rollwright.sequence_processing.stop_after_answer import StopAfterAnswer

__all__ = [
    "DATASET_REGISTRY",
    "BatchedSequences",
    "Example",
    "GenerationConfig",
    "LogprobResults",
    "SequenceProcessor",
    "StopAfterAnswer",
]
