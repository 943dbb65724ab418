"""Calls that extend one another are one sequence; every sampled token is trained exactly once."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rollwright.config.generation import GenerationHyperparameters
from rollwright.experience.experience import experiences_of
from rollwright.experience.recorder import Recorder
from rollwright.inference.request import ModelRequest, ModelResponse


def call(recorder, prompt, output, version=0):
    request = ModelRequest(input_ids=prompt, gconfig=GenerationHyperparameters(), rid="r")
    response = ModelResponse(list(prompt), list(output), [-0.5] * len(output), [version] * len(output), "stop")
    return recorder.record(request, response)


def test_turns_become_one_sequence_with_tool_text_masked():
    recorder = Recorder()
    call(recorder, [1, 2], [3, 4])
    call(recorder, [1, 2, 3, 4, 9, 9], [5], version=1)
    (experience,) = experiences_of(recorder.records, reward=1.0)
    assert experience.tokens.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert experience.prompt_length == 2
    assert experience.action_mask.tolist() == [True, True, False, False, True]
    assert experience.versions.tolist() == [0, 0, -1, -1, 1]
    assert experience.reward == 1.0


def test_a_branch_carries_the_shared_part_without_loss():
    recorder = Recorder()
    call(recorder, [1], [2])
    call(recorder, [1, 2, 7], [3])
    call(recorder, [1, 2, 8], [4])
    first, second = experiences_of(recorder.records)
    assert first.tokens.tolist() == [1, 2, 7, 3]
    assert second.tokens.tolist() == [1, 2, 8, 4]
    assert second.prompt_length == 3
    assert second.action_mask.tolist() == [True]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 3), min_size=1, max_size=3)), min_size=1, max_size=12))
def test_every_sampled_token_is_trained_exactly_once(steps):
    recorder = Recorder()
    texts = [[1]]
    for start, output in steps:
        prompt = [*texts[start % len(texts)], 9]
        call(recorder, prompt, output)
        texts.append(prompt + output)
    experiences = experiences_of(recorder.records)
    assert sum(int(e.action_mask.sum()) for e in experiences) == sum(len(output) for _, output in steps)
    sampled = sorted(tuple(output) for _, output in steps)
    trained = []
    for experience in experiences:
        spans = "".join("1" if is_action else " " for is_action in experience.action_mask).split()
        assert sum(map(len, spans)) == int(experience.action_mask.sum())
        ids = iter(experience.response_tokens[experience.action_mask].tolist())
        trained += [tuple(itertools.islice(ids, len(span))) for span in spans]
    assert sorted(trained) == sampled
