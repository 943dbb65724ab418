"""Generated pictures whose squares are to be counted."""

from __future__ import annotations

import random
from typing import Any

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.data.splits import check_split, split_of
from rollwright.errors import DataError

#: Colours that contrast with the dark background.
_COLOURS = ((230, 60, 60), (60, 200, 80), (80, 120, 240), (240, 200, 60), (220, 110, 220), (240, 240, 240))
_GROUND = (16, 16, 24)


@DATASET_REGISTRY.register("counting_squares")
def counting_squares(
    split: str = "train",
    size: int = 2000,
    most: int = 5,
    cells: int = 3,
    cell_pixels: int = 16,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Dark pictures with 1 to ``most`` squares of several colours and sizes, each in a cell of its own.

    A hash of its content assigns a picture to a split, so the splits are disjoint.

    Args:
        split: train, valid or test.
        size: number of tasks; all counts are about equally frequent.
        most: most squares.
        cells: cells a side.
        cell_pixels: side of a cell; the picture is ``cells * cell_pixels`` pixels wide and high.
        seed: which pictures, and in which order.

    Returns:
        Rows with ``messages`` (an image and the question ``squares?``), ``images`` (one PIL image), ``answer`` and
        ``completion`` (the number in digits), ``query_id``.

    Raises:
        DataError: an argument is out of range.
    """
    check_split("counting_squares", split)
    if not 1 <= most <= cells * cells or cell_pixels < 8 or size < 1:
        raise DataError(
            f"counting_squares: most={most} must be 1 to cells² = {cells * cells}, cell_pixels={cell_pixels} at least 8 and "
            f"size={size} at least 1."
        )
    draw = random.Random(f"{seed}/{split}")
    rows, known = [], set()
    while len(rows) < size:
        picture = _picture(draw, most, cells, cell_pixels)
        name = repr(picture)
        if split_of(name) == split and name not in known:
            known.add(name)
            rows.append(_row(picture, cells * cell_pixels, f"squares/{split}/{len(rows)}"))
    return rows


Square = tuple[int, int, int, tuple[int, int, int]]  # left, top, side, colour


def _picture(draw: random.Random, most: int, cells: int, cell_pixels: int) -> list[Square]:
    squares = []
    for cell in sorted(draw.sample(range(cells * cells), draw.randint(1, most))):
        side = draw.randint(cell_pixels // 2, cell_pixels - 3)
        left = cell % cells * cell_pixels + draw.randint(1, cell_pixels - side - 1)
        top = cell // cells * cell_pixels + draw.randint(1, cell_pixels - side - 1)
        squares.append((left, top, side, draw.choice(_COLOURS)))
    return squares


def _row(squares: list[Square], pixels: int, name: str) -> dict[str, Any]:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (pixels, pixels), _GROUND)
    pencil = ImageDraw.Draw(image)
    for left, top, side, colour in squares:
        pencil.rectangle((left, top, left + side - 1, top + side - 1), fill=colour)
    answer = str(len(squares))
    question = [{"type": "image"}, {"type": "text", "text": "squares?"}]
    return {
        "messages": [{"role": "user", "content": question}],
        "images": [image],
        "answer": answer,
        "completion": answer,
        "query_id": name,
    }
