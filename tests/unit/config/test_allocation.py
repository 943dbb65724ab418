"""The allocation expression."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.allocation import AllocationMode
from rollwright.errors import ConfigError


def test_both_sides():
    mode = AllocationMode.from_str("sglang:d2p1t4+d8p1t1")
    assert (mode.gen_backend, mode.gen_dp_size, mode.gen_pp_size, mode.gen_tp_size) == ("sglang", 2, 1, 4)
    assert (mode.gen_world_size, mode.gen_instance_size) == (8, 4)
    assert (mode.train_backend, mode.train_dp_size, mode.train_world_size) == ("fsdp", 8, 8)


def test_one_side():
    mode = AllocationMode.from_str("sglang:d1p1t1")
    assert (mode.gen_world_size, mode.training, mode.train_world_size) == (1, None, 0)
    mode = AllocationMode.from_str("fsdp:d2")
    assert (mode.generation, mode.gen_backend, mode.train_dp_size) == (None, None, 2)


@given(
    st.sampled_from(["sglang", "vllm", "builtin"]),
    st.tuples(*[st.integers(1, 99)] * 3),
    st.none() | st.tuples(*[st.integers(1, 99)] * 3),
)
def test_text_and_meaning_agree(backend, generation, training):
    text = f"{backend}:d{generation[0]}p{generation[1]}t{generation[2]}"
    if training:
        text += f"+d{training[0]}p{training[1]}t{training[2]}"
    mode = AllocationMode.from_str(text)
    assert str(mode) == text
    assert AllocationMode.from_str(str(mode)) == mode
    assert mode.gen_world_size == generation[0] * generation[1] * generation[2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sgl:d1",
        "sglang:",
        "sglang:d1d1",
        "sglang:d0",
        "sglang:x2",
        "d1+sglang:d1",
        "d1+d2",
        "sglang:d1+vllm:d1",
        "a+b+c",
        "sglang:d1+",
    ],
)
def test_errors_show_the_grammar(text):
    with pytest.raises(ConfigError, match=r"sglang:d1p1t1\+d1p1t1"):
        AllocationMode.from_str(text)
