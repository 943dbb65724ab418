"""Images at the front: by the real clients of three dialects to a model that sees, and from there into rows that train."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import threading

import anthropic
import openai
import pytest
import torch
from parts import write_vision_model
from PIL import Image
from test_messages_dialect import client_of
from test_openai_front import Script, plain_client, sample_engine

from rollwright.config.generation import GenerationHyperparameters
from rollwright.config.sections import OptimizerConfig, PPOActorConfig
from rollwright.data.tokenizer import build_character_tokenizer, load_tokenizer
from rollwright.data.vision import IMAGE, VISION_PIECES, load_processor
from rollwright.experience.contract import check_trajectory
from rollwright.experience.normaliser import normalise
from rollwright.inference.backends.builtin.engine import BuiltinEngine
from rollwright.inference.front.openai_front import OpenAIFront
from rollwright.inference.server import images
from rollwright.inference.server.dialects import AnswerStore
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.server.responses import stored_response
from rollwright.training.actor import FSDPPPOActor
from rollwright.training.model import load_model

GCONFIG = GenerationHyperparameters(max_new_tokens=4, temperature=0.7)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision-model"), max_position_embeddings=96)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def front(tokenizer):
    with OpenAIFront(tokenizer, "policy") as front:
        yield front


def base64_of(color: str | int, side: int = 32, kind: str = "PNG", mode: str = "RGB") -> str:
    buffer = io.BytesIO()
    Image.new(mode, (side, side), color).save(buffer, format=kind)
    return base64.b64encode(buffer.getvalue()).decode()


def url_of(color: str, side: int = 32) -> str:
    return f"data:image/png;base64,{base64_of(color, side)}"


def part_of(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def no_image_tokens(tokenizer) -> dict[str, float]:
    return {str(tokenizer.convert_tokens_to_ids(piece)): -100.0 for piece in VISION_PIECES}


async def test_a_conversation_about_images_trains_as_it_was_sampled(directory, tokenizer, front):
    """Two turns by chat, the second with another image, are one row whose log-probabilities are the trainer's."""
    config = PPOActorConfig(path=str(directory), device="cpu", optimizer=OptimizerConfig())
    model = load_model(config)

    def agent(episode, second):
        client = plain_client(episode)
        ask = {"model": "policy", "extra_body": {"logit_bias": no_image_tokens(tokenizer)}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "squares"}, part_of(url_of("red"))]}]
        reply = client.chat.completions.create(messages=messages, **ask).choices[0].message
        more = {"role": "user", "content": [part_of(url_of(second)), {"type": "text", "text": "?"}]}
        client.chat.completions.create(messages=[*messages, reply.to_dict(), more], **ask)

    with BuiltinEngine(model, tokenizer, seed=1) as engine:
        samples = [sample_engine(engine), sample_engine(engine)]
        experiences = []
        for sample, color in zip(samples, ("blue", "white"), strict=True):
            with front.episode(sample, gconfig=GCONFIG) as episode:
                await asyncio.to_thread(agent, episode, color)
            (experience,) = episode.experiences(reward=1.0)
            experiences.append(experience)
    first, second = samples[0].recorder.records
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.output_ids)] == [*first.prompt_ids, *first.output_ids]
    assert second.rid == first.rid
    assert second.prompt_ids.count(tokenizer.convert_tokens_to_ids(IMAGE)) == 8
    batch = normalise([experiences[0]], samples[0].recorder)
    check_trajectory(batch)
    assert batch["multi_modal_inputs"][0]["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
    actor = FSDPPPOActor(config, model=model)
    actor.initialize()
    mask = batch["loss_mask"].bool()
    logp = actor.compute_logp(batch)
    torch.testing.assert_close(logp[mask], batch["logprobs"][mask], atol=1e-4, rtol=0)
    other = actor.compute_logp({**batch, "multi_modal_inputs": [experiences[1].multi_modal_inputs]})
    assert (other - logp)[mask].abs().max() > 1e-3  # the second image matters, too


async def test_every_dialect_shows_the_model_the_same(tokenizer, front, directory):
    engine = Script(tokenizer, "3")

    def agent(episode):
        client, text = plain_client(episode), "how many squares?"
        parts = [{"type": "text", "text": text}, part_of(url_of("red"))]
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": parts}])
        parts = [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url_of("red"), "detail": "auto"}]
        client.responses.create(model="policy", input=[{"role": "user", "content": parts}])
        source = {"type": "base64", "media_type": "image/png", "data": base64_of("red")}
        parts = [{"type": "text", "text": text}, {"type": "image", "source": source}]
        other, ask = client_of(episode), [{"role": "user", "content": parts}]
        other.messages.create(model="policy", max_tokens=9, messages=ask)
        return other.messages.count_tokens(model="policy", messages=ask).input_tokens

    with front.episode(sample_engine(engine)) as episode:
        counted = await asyncio.to_thread(agent, episode)
    chat, response, message = engine.requests
    assert chat.input_ids == response.input_ids == message.input_ids
    assert len(chat.input_ids) == counted
    text = f"how many squares?<|vision_start|>{IMAGE}<|vision_end|>"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    expected = load_processor(str(directory), tokenizer)(images=[Image.new("RGB", (32, 32), "red")], text=rendered)
    assert chat.input_ids == expected["input_ids"][0].tolist()
    for request in engine.requests:
        assert torch.equal(request.multi_modal["pixel_values"], expected["pixel_values"])
        assert request.image_data[0].getpixel((0, 0)) == (255, 0, 0)
        assert tokenizer.convert_tokens_to_ids(IMAGE) in request.gconfig.stop_token_ids


async def test_another_image_of_the_same_size_is_another_row(tokenizer, front):
    def agent(client):
        for color in ("red", "blue"):
            messages = [{"role": "user", "content": [part_of(url_of(color))]}]
            for _ in range(2):
                reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
                messages += [reply.to_dict(), {"role": "user", "content": "?"}]

    with front.episode(sample_engine(Script(tokenizer, "3"))) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    red, blue = episode.experiences(reward=1.0)
    assert torch.equal(red.tokens, blue.tokens)
    assert not torch.equal(red.multi_modal_inputs["pixel_values"], blue.multi_modal_inputs["pixel_values"])
    assert [record.multi_modal is episode.records[0].multi_modal for record in episode.records] == [True, True, False, False]


async def test_a_sampled_image_token_stands_for_no_image(tokenizer, front):
    """Nothing is computed from it: the next call is encoded anew, without it."""

    def agent(client):
        messages = [{"role": "user", "content": [part_of(url_of("red"))]}]
        reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        client.chat.completions.create(model="policy", messages=[*messages, reply.to_dict(), {"role": "user", "content": "?"}])

    with front.episode(sample_engine(Script(tokenizer, f"3{IMAGE}", "4"))) as episode:
        await asyncio.to_thread(agent, plain_client(episode))
    assert len(episode.experiences(reward=1.0)) == 2
    assert episode.records[1].prompt_ids.count(tokenizer.convert_tokens_to_ids(IMAGE)) == 4


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a.png", "does not fetch"),
        ("file:///etc/passwd", "does not fetch"),
        ("/etc/passwd", "does not fetch"),
        ("data:text/plain;base64,aGk=", "it has to be data:image/png"),
        ("data:image/png;base64,@@@", "no base64"),
        ("data:image/png;base64,aGk=", "no image that can be read"),
        (f"data:image/png;base64,{base64_of('red')[:100]}", "no image that can be read"),
        (f"data:image/png;base64,{base64_of('red', kind='BMP')}", "no image that can be read"),
        ("data:image/png;base64," + base64_of(0, side=6000, mode="1"), "pixels"),
        (None, "no image_url"),
    ],
)
async def test_what_cannot_be_shown_is_a_4xx(tokenizer, front, url, said):
    def agent(episode):
        ask = [{"role": "user", "content": [part_of(url)]}]
        with pytest.raises(openai.BadRequestError, match=said):
            plain_client(episode).chat.completions.create(model="policy", messages=ask)
        if url is not None and url.startswith("http"):
            ask = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]
            with pytest.raises(anthropic.BadRequestError, match=said):
                client_of(episode).messages.create(model="policy", max_tokens=9, messages=ask)

    with front.episode(sample_engine(Script(tokenizer, "3"))) as episode:
        await asyncio.to_thread(agent, episode)
    assert not episode.calls


async def test_a_text_may_not_pose_as_an_image(tokenizer, front):
    def agent(episode):
        ask = [{"role": "user", "content": f"see {IMAGE}"}]
        with pytest.raises(openai.BadRequestError, match="stands for an image"):
            plain_client(episode).chat.completions.create(model="policy", messages=ask)

    with front.episode(sample_engine(Script(tokenizer, "3"))) as episode:
        await asyncio.to_thread(agent, episode)


async def test_a_model_that_reads_text_refuses_images_in_every_dialect(tmp_path):
    text_only = build_character_tokenizer()

    def agent(episode):
        client, source = plain_client(episode), {"type": "base64", "media_type": "image/png", "data": base64_of("red")}
        with pytest.raises(openai.BadRequestError, match="reads text only"):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [part_of(url_of("red"))]}])
        parts = [{"type": "input_image", "image_url": url_of("red"), "detail": "auto"}]
        with pytest.raises(openai.BadRequestError, match="reads text only"):
            client.responses.create(model="policy", input=[{"role": "user", "content": parts}])
        ask = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            client_of(episode).messages.create(model="policy", max_tokens=9, messages=ask)

    with OpenAIFront(text_only, "policy") as front, front.episode(sample_engine(Script(text_only, "3"))) as episode:
        await asyncio.to_thread(agent, episode)


async def test_images_are_fetched_from_allowed_hosts_alone(directory, tokenizer):
    class Pictures(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/red.png" else 404)
            self.end_headers()
            self.wfile.write(base64.b64decode(base64_of("red")))

        def log_message(self, *arguments): ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"

        def agent(episode):
            client = plain_client(episode)

            def ask(url):
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [part_of(url)]}])

            ask(f"{address}/red.png")
            with pytest.raises(openai.BadRequestError, match="answered 404"):
                ask(f"{address}/blue.png")
            with pytest.raises(openai.BadRequestError, match="does not fetch"):
                ask(f"http://localhost:{server.server_port}/red.png")

        engine = Script(tokenizer, "3")
        settings = {"processor": str(directory), "image_hosts": ["127.0.0.1"]}
        with OpenAIFront(tokenizer, "policy", **settings) as front, front.episode(sample_engine(engine)) as episode:
            await asyncio.to_thread(agent, episode)
        server.shutdown()
    assert len(engine.requests) == 1
    assert engine.requests[0].multi_modal["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_an_image_is_processed_once_and_memory_is_bounded(tokenizer, monkeypatch):
    reader = images.ImageReader(tokenizer)
    part = part_of(url_of("red"))
    assert reader.see(part, "x") is reader.see(part, "x")
    monkeypatch.setattr(images, "_CACHED_BYTES", 3 * reader.see(part, "x").size)
    for color in ("blue", "white", "green", "black"):
        reader.see(part_of(url_of(color)), "x")
    assert len(reader._cache) == 3
    low = {"type": "image_url", "image_url": {"url": url_of("red", side=1024), "detail": "low"}}
    assert reader.see(low, "x").image.size == (512, 512)


def test_stored_responses_are_bounded_by_bytes(monkeypatch):
    monkeypatch.setattr(AnswerStore, "BYTES", 1000)
    answers = AnswerStore()
    for number in range(5):
        answers.add([], {"id": f"r{number}", "output": []}, 300)
    assert [number for number in range(5) if f"r{number}" in answers._stored] == [2, 3, 4]
    answers.delete("r3")
    answers.add([], {"id": "r5", "output": []}, 300)
    assert [*answers._stored] == ["r2", "r4", "r5"]
    answers.add([], {"id": "large", "output": ["x" * 2000]})
    assert not answers._stored
    with pytest.raises(RequestError, match="are kept, up to"):
        stored_response(answers, "large")
