"""Sequence generation and log-probabilities for notebooks and experiments, on the built-in engine and the training code.

``SequenceProcessor`` is all of it in one object; ``generation`` and ``scoring`` do the work, ``batches`` is what comes back,
``models`` says which module computes and what fits beside it in memory, ``shards`` keeps very large experiments on disk.
"""

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.formats import Example
from rollwright.sequence_processing.batches import BatchedSequences, LogprobResults
from rollwright.sequence_processing.generation import GenerationConfig, StopAfterAnswer
from rollwright.sequence_processing.processor import SequenceProcessor

__all__ = [
    "DATASET_REGISTRY",
    "BatchedSequences",
    "Example",
    "GenerationConfig",
    "LogprobResults",
    "SequenceProcessor",
    "StopAfterAnswer",
]
