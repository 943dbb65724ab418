"""Sequence generation and log-probabilities for notebooks and experiments, on the built-in engine and the training code.

``SequenceProcessor`` is the interface. ``generation`` and ``scoring`` do the work, ``batches`` defines the results, ``models`` unwraps
models and estimates batch sizes, and ``shards`` writes very large experiments to disk.
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
