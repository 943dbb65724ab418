"""Experiences of a sample's history can be read: they have the texts that those of ``chat`` have."""

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer
from rollwright.experience.experience import experiences_of
from rollwright.experience.recorder import Recorder
from rollwright.inference.request import ModelRequest, ModelResponse

TOKENIZER = build_character_tokenizer()


def call(recorder, prompt, output, tokenizer=TOKENIZER):
    ids = TOKENIZER.encode(prompt, add_special_tokens=False)
    said = [*TOKENIZER.encode(output, add_special_tokens=False), TOKENIZER.eos_token_id]
    request = ModelRequest(input_ids=ids, gconfig=GenerationHyperparameters(), rid="r", tokenizer=tokenizer)
    recorder.record(request, ModelResponse(ids, said, [-0.5] * len(said), [0] * len(said), "stop"))
    return TOKENIZER.decode([*ids, *said])


def test_a_call_has_its_prompt_and_its_reply_without_special_tokens():
    recorder = Recorder()
    call(recorder, "1+1=", "2")
    (experience,) = experiences_of(recorder.records)
    assert (experience.prompt_text, experience.response_text) == ("1+1=", "2")


def test_of_calls_that_extend_one_another_the_response_is_all_after_the_first_prompt():
    recorder = Recorder()
    call(recorder, call(recorder, "1+1=", "2") + "and 2+2=", "4")
    (experience,) = experiences_of(recorder.records)
    assert (experience.prompt_text, experience.response_text) == ("1+1=", "2and 2+2=4")


def test_requests_that_brought_no_tokenizer_have_no_text():
    recorder = Recorder()
    call(recorder, "1+1=", "2", tokenizer=None)
    (experience,) = experiences_of(recorder.records)
    assert (experience.prompt_text, experience.response_text) == (None, None)
