"""F1 of the words of an answer: how question answering is scored when wording may differ."""

from __future__ import annotations

import re
import string
from collections import Counter

_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}“”‘’–—]")


def answer_words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles (SQuAD's normalisation, arXiv 1606.05250)."""
    return [word for word in _PUNCTUATION.sub(" ", text.lower()).split() if word not in _ARTICLES]


def f1_score(prediction: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words, repeated words counted as often as they stand.

    Where either has no word left, 1.0 if both have none, else 0.0.
    """
    predicted, expected = Counter(answer_words(prediction)), Counter(answer_words(truth))
    if not predicted or not expected:
        return float(predicted == expected)
    common = (predicted & expected).total()
    return 2.0 * common / (predicted.total() + expected.total())


def best_f1(prediction: str, accepted: list[str]) -> float:
    """The best F1 with any of the accepted answers; 0.0 where none is accepted."""
    return max((f1_score(prediction, truth) for truth in accepted), default=0.0)
