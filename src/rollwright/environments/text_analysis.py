"""How text becomes the terms of a lexical index: words, folded, without function words, plurals merged."""

from __future__ import annotations

import re
import unicodedata

_WORD = re.compile(r"\w+")

#: Function words that say nothing about a passage's subject.
STOP_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "been",
        "but",
        "by",
        "did",
        "do",
        "does",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "his",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "me",
        "my",
        "no",
        "not",
        "of",
        "on",
        "or",
        "our",
        "she",
        "so",
        "such",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whom",
        "whose",
        "why",
        "will",
        "with",
        "you",
        "your",
    ]
)


def fold(text: str) -> str:
    """Lower case without diacritics: ``"Röntgen"`` becomes ``"rontgen"``."""
    text = text.lower()
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))


def stem(word: str) -> str:
    """Merge a plural with its singular, and nothing more (Harman's S-stemmer, JASIS 42(1), 1991)."""
    if len(word) < 4 or not word.endswith("s"):
        return word
    if word.endswith("ies") and word[-4] not in "ae":
        return word[:-3] + "y"
    if word.endswith("es") and word[-3] not in "aeo":
        return word[:-1]
    if word[-2] not in "us":
        return word[:-1]
    return word


def terms(text: str) -> list[str]:
    """The index terms of a text, in order, with repetitions.

    Text that consists of function words only keeps them, so that "The Who" can be found.
    """
    words = _WORD.findall(fold(text))
    kept = [stem(word) for word in words if word not in STOP_WORDS]
    return kept or words
