"""The SGLang client against a server that answers in SGLang's shapes and misbehaves on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time

import pytest
import torch
from fake_sglang import FakeSGLang, ask, connected
from safetensors.torch import save_file
from server_parts import served

from rollwright.config.sections import RolloutConfig
from rollwright.errors import EngineError, PromptTooLongError, RequestAborted, WeightUpdateError
from rollwright.inference.backends.sglang import SGLangClient
from rollwright.inference.request import ModelRequest, version_spans, versions_of_spans
from rollwright.inference.weights.transfer import WeightUpdateMeta

#: What SGLang 0.5.23 accepts, from its definitions of a generation request and of sampling parameters.
SGLANG_REQUEST_FIELDS = set(
    [
        "rid",
        "session_id",
        "text",
        "input_ids",
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "return_text_in_logprobs",
        "stream",
        "log_metrics",
        "modalities",
        "session_params",
        "lora_path",
    ]
)
SGLANG_SAMPLING_FIELDS = set(
    [
        "max_new_tokens",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_new_tokens",
        "n",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        "logit_bias",
        "sampling_seed",
        "custom_params",
    ]
)
SGLANG_DISK_FIELDS = set(
    [
        "model_path",
        "load_format",
        "abort_all_requests",
        "weight_version",
        "is_async",
        "torch_empty_cache",
        "keep_pause",
        "recapture_cuda_graph",
        "token_step",
        "flush_cache",
        "manifest",
    ]
)
SGLANG_DISTRIBUTED_FIELDS = set(
    [
        "names",
        "dtypes",
        "shapes",
        "group_name",
        "flush_cache",
        "abort_all_requests",
        "weight_version",
        "load_format",
        "selector",
        "torch_empty_cache",
    ]
)
SGLANG_GROUP_FIELDS = set(["master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"])


def test_spans_become_one_version_for_each_token():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 9}]
    assert versions_of_spans(spans, 4, int) == [3, 3, 4, 4]
    assert versions_of_spans([], 0, int) == []
    for versions in ([3, 3, 4, 4, 4], [7], []):
        assert versions_of_spans(version_spans(versions), len(versions), int) == versions
    for wrong in ([{"version": "3", "start": 1, "end": 4}], [{"version": "3", "start": 0, "end": 2}], []):
        with pytest.raises(EngineError, match="weight_versions"):
            versions_of_spans(wrong, 4, int)


def test_requests_have_sglangs_shape_and_answers_are_read():
    fake = FakeSGLang()
    with connected(fake) as client:
        response = ask(client, temperature=0.7, stop=["</a>"], max_new_tokens=9, request={"rid": "talk", "seed": 5})
        body = fake.bodies["generate"][0]
        assert set(body) <= SGLANG_REQUEST_FIELDS
        assert set(body["sampling_params"]) <= SGLANG_SAMPLING_FIELDS
        assert body["rid"].startswith("talk/")
        assert body["input_ids"] == [1, 2]
        assert body["return_logprob"] is True
        assert body["sampling_params"]["no_stop_trim"] is True
        assert body["sampling_params"]["sampling_seed"] == 5
        assert response.output_tokens == [7, 8, 9]
        assert response.output_logprobs == [-0.5] * 3
        assert response.output_versions == [0, 0, 0]
        assert response.temperature == 0.7
        assert (response.stop_reason, response.stop_match, response.seed) == ("stop", 9, 5)
        assert fake.bodies["update_weight_version"] == [{"new_version": "0", "abort_all_requests": False}]


def test_updates_and_control_have_sglangs_shape(tmp_path):
    fake = FakeSGLang()
    with connected(fake) as client:
        assert client.publication.update_from_disk(str(tmp_path), 1, "digest") == client.addresses
        assert client.get_version() == 1
        (body,) = fake.bodies["update_weights_from_disk"]
        assert set(body) <= SGLANG_DISK_FIELDS
        assert body["weight_version"] == "1"
        assert body["flush_cache"] is True
        assert fake.calls[-3:] == ["pause_generation", "update_weights_from_disk", "continue_generation"]
        assert fake.bodies["pause_generation"] == [{"mode": "retract"}]
        client.set_version(1)
        with pytest.raises(WeightUpdateError, match="set_version"):
            client.set_version(2)
        fake.version = "2"  # another client published
        client.set_version(2)
        assert client.get_version() == 2


@pytest.mark.parametrize(
    ("policy", "mode", "flush"), [("recompute", "retract", True), ("keep", "in_place", False), ("wait", "retract", True)]
)
def test_what_running_requests_do_is_said_in_the_pause(policy, mode, flush, tmp_path):
    fake = FakeSGLang()
    with connected(fake, on_weight_update=policy) as client:
        client.publication.update_from_disk(str(tmp_path), 1)
        assert fake.bodies["pause_generation"] == [{"mode": mode}]
        assert fake.bodies["update_weights_from_disk"][0]["flush_cache"] is flush  # old prefixes serve no later request


def test_no_more_tokens_are_asked_for_than_there_is_room_for():
    """Other engines end at the context's end; SGLang refuses such a request as a whole."""
    fake = FakeSGLang()
    fake.context_length = 10
    with connected(fake) as client:
        assert ask(client, max_new_tokens=100).output_tokens == [7, 8, 9]
        assert fake.bodies["generate"][0]["sampling_params"]["max_new_tokens"] == 8  # the prompt has 2
        with pytest.raises(PromptTooLongError):
            ask(client, request={"input_ids": [1] * 10}, max_new_tokens=1)


def test_wait_holds_new_requests_until_those_in_flight_have_ended():
    fake = FakeSGLang()
    fake.is_held = True
    with connected(fake, on_weight_update="wait") as client:
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(2)]
        threads[0].start()
        deadline = time.monotonic() + 60
        while not fake.bodies.get("generate"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pausing = threading.Thread(target=client.pause)
        pausing.start()
        pausing.join(0.2)
        assert pausing.is_alive()
        fake.is_held = False
        pausing.join(60)
        assert fake.answered == 1  # it was waited for
        threads[1].start()
        time.sleep(0.2)
        assert len(fake.bodies["generate"]) == 1
        client.resume()
        for thread in threads:
            thread.join(60)
        assert len(fake.bodies["generate"]) == 2


def test_a_server_without_spans_is_believed_only_where_the_version_stood_still():
    fake = FakeSGLang(version="4")
    plain = fake.default_answer

    def without_spans(body):
        answer = plain(body)
        del answer["meta_info"]["weight_versions"]
        return answer

    fake.answer = without_spans
    with connected(fake) as client:
        assert client.get_version() == 4
        assert ask(client).output_versions == [4, 4, 4]

        def during_an_update(body):
            fake.version = "5"
            return without_spans(body)

        fake.answer = during_an_update
        with pytest.raises(EngineError, match=r"0\.5\.23"):
            ask(client)


def test_answers_that_contradict_themselves_are_errors():
    fake = FakeSGLang()
    with connected(fake) as client:
        for change, said in [
            (lambda a: a.update(output_ids=[7, 8]), "other tokens"),
            (
                lambda a: a["meta_info"].update(output_token_logprobs=[[None, 7, None], [-1.0, 8, None], [-1.0, 9, None]]),
                "finite",
            ),
            (lambda a: a["meta_info"]["weight_versions"][0].update(end=2), "cover"),
            (lambda a: a["meta_info"]["weight_versions"][0].update(version="mine"), "mine"),
            (lambda a: a["meta_info"].update(finish_reason={"type": "abort", "status_code": 400, "message": "bad"}), "refused"),
        ]:

            def answer(body, change=change):
                value = fake.default_answer(body)
                change(value)
                return value

            fake.answer = answer
            with pytest.raises(EngineError, match=said):
                ask(client)


def test_refusals_keep_their_words_and_long_prompts_their_type():
    fake = FakeSGLang()
    with connected(fake) as client:
        fake.answer = lambda body: (400, {"error": {"message": "top_p must be in (0, 1]"}})
        with pytest.raises(EngineError, match="top_p must be"):
            ask(client)
        fake.answer = lambda body: (400, {"error": {"message": "The input is longer than the model's context length"}})
        with pytest.raises(PromptTooLongError):
            ask(client)


def test_what_sglang_cannot_do_is_refused_before_it_is_asked():
    fake = FakeSGLang()
    with connected(fake) as client:
        for request, said in [({"position_ids": [0, 1]}, "position_ids"), ({"branch_ids": [0, 1]}, "branch_ids")]:
            with pytest.raises(EngineError, match=said):
                ask(client, request=request)
        with pytest.raises(EngineError, match=r"gconfig\.seed=3"):
            ask(client, seed=3)
        with pytest.raises(EngineError, match="frequency_penalty"):
            ask(client, frequency_penalty=0.5)
        assert "generate" not in fake.bodies
    fake = FakeSGLang()
    fake.info = {"enable_deterministic_inference": True}
    with connected(fake) as client:
        assert ask(client, seed=3).seed == 3


def test_requests_of_a_conversation_go_to_one_server_and_others_are_spread():
    fakes = FakeSGLang(), FakeSGLang()
    with connected(*fakes) as client:
        for _ in range(4):
            ask(client, request={"rid": "one"})
        assert sorted(len(fake.bodies.get("generate", [])) for fake in fakes) == [0, 4]

        async def burst():
            await asyncio.gather(*(client.agenerate(ModelRequest(input_ids=[1])) for _ in range(20)))

        for fake in fakes:
            fake.delay = 0.2
        asyncio.run(burst())
        assert all(len(fake.bodies["generate"]) >= 8 for fake in fakes)


def test_a_busy_server_is_asked_again():
    fake = FakeSGLang()
    left = [1] * 4  # more often than a lost connection would be tried again

    def busy_twice(body):
        return (503, {"error": "busy"}) if left and left.pop() else fake.default_answer(body)

    fake.answer = busy_twice
    with connected(fake, request_retries=0) as client:
        assert ask(client).output_tokens == [7, 8, 9]
        assert len(fake.bodies["generate"]) == 5
    fake.answer = lambda body: (429, {"error": "busy"})
    with connected(fake) as client:
        client.config.setup_timeout = 0.5
        with pytest.raises(EngineError, match=r"too busy for 0\.5 s"):
            ask(client)


def test_a_dead_server_is_taken_out_and_comes_back_with_the_current_weights(tmp_path):
    fake = FakeSGLang()
    other = FakeSGLang()
    with contextlib.ExitStack() as stack:
        lasting = stack.enter_context(served(other.app))
        dying = served(fake.app)
        address = dying.__enter__()
        client = SGLangClient(RolloutConfig(setup_timeout=60), addresses=[address, lasting])
        client.initialize()
        stack.callback(client.destroy)
        client.publication.update_from_disk(str(tmp_path), 1)
        dying.__exit__(None, None, None)
        for number in range(6):
            assert ask(client, request={"rid": f"talk {number}"}).output_versions == [1, 1, 1]
        assert [server.address for server in client.servers.router.in_service()] == [lasting]
        assert "out of service" in client.servers.router.describe()
        restarted = FakeSGLang()  # as a fresh process: it holds the weights it was started with
        stack.enter_context(served(restarted.app, port=int(address.rpartition(":")[2])))
        deadline = time.monotonic() + 60
        while len(client.servers.router.in_service()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert restarted.version == "1"
        assert restarted.bodies["update_weights_from_disk"][0]["weight_version"] == "1"


def test_no_server_left_is_an_error_with_the_reason_and_a_closed_client_aborts():
    fake = FakeSGLang()
    with served(fake.app) as address:
        client = SGLangClient(RolloutConfig(setup_timeout=2, request_retries=1), addresses=[address])
        client.initialize()
    with pytest.raises(EngineError, match="out of service"):
        ask(client)
    client.destroy()
    with pytest.raises(EngineError, match="initialize"):
        ask(client)
    assert issubclass(RequestAborted, EngineError)


def test_initialize_waits_for_health_and_gives_up_with_the_address():
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:19 was not healthy"):
        SGLangClient(RolloutConfig(setup_timeout=0.5), addresses=["127.0.0.1:19"]).initialize()


def test_servers_with_different_weights_are_refused():
    fakes = FakeSGLang("1"), FakeSGLang("2")
    with pytest.raises(WeightUpdateError, match="different weights"), connected(*fakes):
        pass


def test_synchronous_calls_work_while_a_loop_runs_and_several_loops_share_a_client():
    fake = FakeSGLang()
    with connected(fake) as client:

        async def inside():
            client.pause()
            client.resume()
            client.set_version(0)
            return await client.agenerate(ModelRequest(input_ids=[1]))

        for _ in range(2):
            assert asyncio.run(inside()).output_tokens == [7, 8, 9]


def test_a_connection_that_is_reset_before_a_response_is_used_again():
    """A server that closes every second connection as soon as a request has come."""
    fake = FakeSGLang()
    with served(fake.app) as address, _Resetting(address) as front:
        client = SGLangClient(RolloutConfig(setup_timeout=60, request_retries=3), addresses=[front.address])
        client.initialize()
        front.resets = 2
        assert ask(client).output_tokens == [7, 8, 9]
        assert front.resets == 0
        assert len(client.servers.router.in_service()) == 1  # it answered its health check
        client.destroy()


class _Resetting:
    """Passes bytes on, and resets the first ``resets`` connections that ask for ``/generate``."""

    def __init__(self, address):
        self._target, self.resets = address.rpartition(":"), 0

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _serve(self, reader, writer):
        try:
            up_reader, up_writer = await asyncio.open_connection(self._target[0], int(self._target[2]))
            back = asyncio.ensure_future(self._pump(up_reader, writer))
            while data := await reader.read(65536):
                if b"/generate" in data and self.resets:
                    self.resets -= 1
                    break
                up_writer.write(data)
            back.cancel()
            up_writer.close()
            writer.transport.abort()
        except OSError:
            writer.close()

    @staticmethod
    async def _pump(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


class _SilentGroup:
    """Stands for the sending half of a group: the bodies alone are looked at."""

    def __init__(self, *arguments):
        self.name, self.sent = arguments[4], []

    def close(self):
        pass

    def send(self, bucket):
        self.sent.append([name for name, _ in bucket])


def test_servers_say_how_many_ranks_of_the_group_are_theirs(monkeypatch):
    monkeypatch.setattr("rollwright.inference.backends.sglang.WeightGroup", _SilentGroup)
    fakes = FakeSGLang(), FakeSGLang()
    for fake, ranks in zip(fakes, (4, 2), strict=True):
        fake.info = {"tp_size": ranks}
    with connected(*fakes, weight_update="xccl") as client:
        client.update_weights(client.publication.default_meta(), version=1, weights={"a": torch.zeros(1)})
        joined = [fake.bodies["init_weights_update_group"][0] for fake in fakes]
        assert [(body["rank_offset"], body["world_size"]) for body in joined] == [(1, 7), (5, 7)]
        client.publication.broadcast.leave()
        with pytest.raises(WeightUpdateError, match=r"sglang:d2p1t2 gives a server 2 GPUs.*tp_size=4"):
            client.update_weights(WeightUpdateMeta.from_fsdp_xccl("sglang:d2p1t2"), version=2, weights={"a": torch.zeros(1)})


def test_bodies_of_a_distributed_update_have_sglangs_shape(monkeypatch):
    monkeypatch.setattr("rollwright.inference.backends.sglang.WeightGroup", _SilentGroup)
    fakes = FakeSGLang(), FakeSGLang()
    weights = {"a": torch.zeros(4, 2), "b": torch.zeros(3, dtype=torch.bfloat16), "tied": None}
    weights["tied"] = weights["a"]
    meta = dataclasses.replace(WeightUpdateMeta.from_fsdp_xccl("sglang:d2p1t2+d1p1t1"), bucket_bytes=32)
    with connected(*fakes) as client:
        for version in (1, 2):
            client.update_weights(meta, version=version, weights=weights)
            assert len(client.servers.router.in_service()) == len(client.addresses)
            assert client.get_version() == version
        for index, fake in enumerate(fakes):
            (joined,) = fake.bodies["init_weights_update_group"]  # once for both publications
            assert set(joined) == SGLANG_GROUP_FIELDS
            assert joined["rank_offset"] == 1 + 2 * index
            assert joined["world_size"] == 5
            assert joined["backend"] == "gloo"
            assert joined["group_name"].startswith(f"{meta.group}-")  # SGLang forms no second group of one name
            buckets = fake.bodies["update_weights_from_distributed"]
            assert all(set(body) <= SGLANG_DISTRIBUTED_FIELDS for body in buckets)
            assert [(body["names"], body.get("weight_version")) for body in buckets[:2]] == [(["a"], None), (["b"], "1")]
            assert (buckets[0]["dtypes"], buckets[1]["dtypes"]) == (["float32"], ["bfloat16"])
            assert buckets[0]["shapes"] == [[4, 2]]
            assert buckets[1]["flush_cache"] is True


def test_success_is_not_believed_where_names_are_unknown(tmp_path):
    """SGLang leaves out weights that it does not know, and answers success."""
    torch.manual_seed(0)
    save_file({"model.experts.0.up.weight": torch.zeros(2), "norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    fake = FakeSGLang()
    fake.info["model_path"] = str(tmp_path)
    with connected(fake) as client:
        meta = WeightUpdateMeta.from_disk(tmp_path / "published")
        with pytest.raises(WeightUpdateError, match=r"would ignore 1 of 2 weights, such as model\.experts\.up"):
            client.update_weights(
                meta, version=1, weights={"model.experts.up": torch.zeros(2), "model.norm.weight": torch.zeros(2)}
            )
        assert "update_weights_from_disk" not in fake.calls
        known = {"model.experts.0.up.weight": torch.zeros(2), "model.norm.weight": torch.zeros(2)}
        client.update_weights(meta, version=1, weights=known)
        assert fake.calls.count("update_weights_from_disk") == 1
        # what a trainer published before says nothing about the server's model
        fake.info["model_path"] = str(tmp_path / "published" / "v1")
    with connected(fake) as client:
        client.update_weights(meta, version=2, weights={"other": torch.zeros(2)})
