"""Class decorators and functions under Trinity-RFT's names, and both systems' workers that compare answers.

Reward processes import this file, so it loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rollwright.errors import DataError
from rollwright.rewards.math import accuracy

Marked = TypeVar("Marked")


def Deprecated(marked: Marked) -> Marked:  # noqa: N802
    """Return a class or function unchanged: its author marked it as deprecated."""
    return marked


#: The same for classes and functions marked as experimental.
Experimental = Deprecated


def build_mm_message(prompt: str, images: Sequence[Any] | None = None, videos: Sequence[Any] | None = None) -> dict[str, Any]:
    """Build a user message from text and images.

    Each ``<image>`` marks the position of one image; images without a mark come first.

    Raises:
        DataError: there are more marks than images, or there are videos.
    """
    from rollwright.data.vision import MARK  # loads torch

    if videos or "<video>" in prompt:
        raise DataError("build_mm_message got videos, which are not supported; give images.")
    pieces, blocks = prompt.split(MARK), [{"type": "image", "image": image} for image in images or ()]
    if (places := len(pieces) - 1) > len(blocks):
        raise DataError(
            f"the prompt has places for {places} images and the task has {len(blocks)}; give as many as there are places."
        )
    if not blocks:
        return {"role": "user", "content": prompt}
    content, placed = blocks[: len(blocks) - places], blocks[len(blocks) - places :]
    for number, piece in enumerate(pieces):
        content += ([{"type": "text", "text": piece}] if piece else []) + placed[number : number + 1]
    return {"role": "user", "content": content}


class MathVerifyWorker:
    """Compares answers with math-verify, as AReaL's reward functions call it.

    Call it from a reward function run by ``AsyncRewardWrapper``, which kills the call at its time limit.
    """

    def verify(self, response: str, ground_truth: str) -> float:
        """Return 1 if the answer of ``response`` equals ``ground_truth``, else 0, like ``accuracy_reward``."""
        return accuracy(response, ground_truth)


def get_math_verify_worker() -> MathVerifyWorker:
    """Return a worker that compares answers."""
    return MathVerifyWorker()


def verify_math_answer(response_text: str, ground_truth: Any) -> tuple[float, dict[str, Any]]:
    """Return 1 if ``accuracy`` finds that a response's answer equals the truth, else 0; and a dict with the truth and the result."""
    value = accuracy(response_text, ground_truth)
    return value, {"ground_truth": ground_truth, "is_correct": bool(value)}
