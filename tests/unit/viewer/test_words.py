"""Tasks, right answers and answers as people read them, from the shapes that tasks have."""

from __future__ import annotations

import pytest

from rollwright.viewer.words import LONGEST, answer_of_text, expected_of_task, one_line, title_of, words_of_task

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("task", "words", "expected"),
    [
        ({"messages": [{"role": "user", "content": "86+59="}], "answer": "145"}, "86+59=", "145"),
        ({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?\n"}]}, "Who?", ""),
        ({"question": "Why?", "messages": [{"role": "user", "content": "Answer. Why?"}], "truth": 4}, "Why?", "4"),
        ({"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "How many?"}]}]}, "How many?", ""),
        ({"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}}, "1+1", "2"),
        ({"question": "Capital?", "golden_answers": ["Rome", "Roma"]}, "Capital?", "Rome or Roma"),
        ({"seed": 7, "messages": []}, "", ""),
    ],
)
def test_a_task_is_called_by_its_own_words(task, words, expected):
    assert (words_of_task(task), expected_of_task(task)) == (words, expected)


def test_an_answer_is_what_follows_the_reasoning():
    special = ("<|im_end|>", "<|endoftext|>")
    assert answer_of_text("<think>6+9=15\n</think>\n\nIt is\n145<|im_end|>\n", special) == "It is 145"
    assert answer_of_text("<think>6+9=15", special) == "<think>6+9=15"
    assert answer_of_text("145<|im_end|><|endoftext|>", special) == "145"


def test_long_text_keeps_its_beginning_and_an_answer_its_end_too():
    long = "x" * 500
    assert one_line(long) == "x" * (LONGEST - 1) + "…"
    answer = answer_of_text(f"a{long} so it is 145")
    assert len(answer) == LONGEST
    assert answer.startswith("a")
    assert answer.endswith("so it is 145")


def test_titles_have_the_words_and_else_the_number():
    assert title_of("86+59=", "706") == "86+59="
    assert title_of("86+59=", "eval:5@v4") == "86+59= · held out, v4"
    assert (title_of(None, "706"), title_of(None, "eval:5@v4")) == ("Task 706", "Held-out task 5, v4")
