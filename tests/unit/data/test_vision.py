"""Images in prompts: where they stand, how they are read, and the pictures of the counting task."""

import io

import numpy as np
import pytest
from PIL import Image
from worlds.counting import counting_squares

from rollwright.config.tasksets import DatasetConfig
from rollwright.data.datasets import get_dataset
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.data.vision import VISION_PIECES, VisionProcessor, as_images, new_image_processor, place_images
from rollwright.errors import DataError


def user(content):
    return [{"role": "system", "content": "s"}, {"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("content", "count", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}], 1, "a#b"),
        ("a<image>b<image>", 2, "a#b#"),
        ("a", 2, "##a"),
        ("a#", 1, "a#"),
        ("a", 0, "a"),
    ],
)
def test_images_stand_where_the_prompt_says_or_first(content, count, text):
    assert place_images(user(content), count, "#") == user(text)
    if isinstance(content, str):
        assert place_images(content, count, "#") == text


def test_places_and_images_must_agree():
    with pytest.raises(DataError, match="places for 1 images and the task has 2"):
        place_images("a<image>", 2, "#")
    with pytest.raises(DataError, match="type 'audio'"):
        place_images(user([{"type": "audio"}]), 0, "#")


def test_images_are_read_from_what_datasets_hold(tmp_path):
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    image.save(tmp_path / "a.png")
    given = [image, buffer.getvalue(), tmp_path / "a.png", {"bytes": buffer.getvalue(), "path": None}]
    assert all(np.array_equal(np.asarray(opened), np.asarray(image)) for opened in as_images(given))
    with pytest.raises(DataError, match="task 7: image 0 is int"):
        as_images([3], "task 7")
    with pytest.raises(DataError, match="image 0 cannot be read"):
        as_images([b"no image"])


def test_the_processor_counts_tokens_as_the_model_does():
    processor = VisionProcessor(build_character_tokenizer(pieces=VISION_PIECES), new_image_processor(8, 2, 256, 16 * 256))
    outputs = processor(images=[Image.new("RGB", (48, 32)), Image.new("RGB", (16, 16))], text="<|image_pad|>a<|image_pad|>")
    assert outputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2]]
    assert (outputs["input_ids"] == processor.image_token_id).sum() == 6 + 1
    with pytest.raises(DataError, match="0 image tokens for 1 images"):
        processor(images=[Image.new("RGB", (16, 16))], text="a")


def bright_areas(bright):
    """Areas of bright pixels that hang together by their sides."""
    rest, areas = {(int(y), int(x)) for y, x in np.argwhere(bright)}, 0
    while rest:
        areas += 1
        edge = [rest.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & rest
            rest -= near
            edge += near
    return areas


def test_pictures_show_as_many_squares_as_the_answer_says():
    for row in counting_squares("train", size=40, seed=5):
        assert bright_areas(np.asarray(row["images"][0]).max(axis=-1) > 40) == int(row["answer"])


def test_splits_share_no_picture_and_counts_are_balanced():
    splits = {split: counting_squares(split, size=300) for split in ("train", "valid", "test")}
    seen = {split: {row["images"][0].tobytes() for row in rows} for split, rows in splits.items()}
    assert all(len(pictures) == 300 for pictures in seen.values())
    assert not seen["train"] & seen["valid"]
    assert not seen["train"] & seen["test"]
    assert all(35 <= sum(row["answer"] == str(n) for row in splits["train"]) <= 85 for n in range(1, 6))
    assert counting_squares("test", size=3)[0]["messages"] == splits["test"][0]["messages"]
    rows = get_dataset(DatasetConfig(path="counting_squares", split="valid", type="sft", kwargs={"size": 2}))
    assert rows[0]["completion"] == rows[0]["answer"]
    with pytest.raises(DataError, match="most=10"):
        counting_squares(most=10)
