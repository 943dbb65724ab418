"""What AReaL's files import, and what it does here."""

import asyncio
import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch

import rollwright
from rollwright import (
    AsyncRewardWrapper,
    GenerationHyperparameters,
    ModelRequest,
    apply_chat_template,
    get_custom_dataset,
    get_math_verify_worker,
    get_tracker,
    image2base64,
    import_from_string,
    load_hf_processor_and_tokenizer,
    load_hf_tokenizer,
    perf_tracer,
    stats_tracker,
    workflow_context,
)
from rollwright.compat.replacements import AREAL as REPLACEMENTS
from rollwright.config.tasksets import DatasetConfig
from rollwright.errors import ConfigError, DataError, EngineError, RewardError
from rollwright.tracking.metrics import MetricError, start_timer
from rollwright.workflows.rlvr import RLVRWorkflow

NAMES = [
    "workflow_context",
    "stats_tracker",
    "perf_tracer",
    "apply_chat_template",
    "load_hf_tokenizer",
    "load_hf_processor_and_tokenizer",
    "import_from_string",
    "get_custom_dataset",
    "get_math_verify_worker",
    "image2base64",
    "atrace_scope",
    "atrace_session_phase",
    "session_context",
    "trace_perf",
    "trace_scope",
    "trace_session",
    "trace_session_phase",
    "Category",
    "PPOTrainer",
    "SFTTrainer",
    "DPOTrainer",
    "AsyncRewardWrapper",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "RolloutWorkflow",
    "GenerationHyperparameters",
    "GRPOConfig",
    "PPOConfig",
    "SFTConfig",
    "DPOConfig",
    "SGLangConfig",
    "load_expr_config",
    "AllocationMode",
    "RLVRWorkflow",
    "MultiTurnWorkflow",
    "VisionRLVRWorkflow",
    "RemoteSGLangEngine",
    "logging",
    "ArealOpenAI",
    "InteractionWithTokenLogpReward",
    "InferenceEngineConfig",
    "TrainDatasetConfig",
    "ValidDatasetConfig",
    "vLLMConfig",
    "RemotevLLMEngine",
]


@pytest.fixture(autouse=True)
def nothing_reported():
    get_tracker().export()
    yield
    get_tracker().export()


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert getattr(rollwright, name) is not None


@pytest.mark.parametrize("name", sorted(REPLACEMENTS))
def test_a_name_that_is_missing_is_told_with_what_to_write(name):
    with pytest.raises(ImportError, match=re.escape(REPLACEMENTS[name])):
        exec(f"from rollwright import {name}")
    assert name not in rollwright.__all__
    for public in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+(?=\(|\.from_str|$)", REPLACEMENTS[name]):
        assert public in (*rollwright.__all__, "OpenAICompatibleModel"), public


# -- reward functions of any signature ---------------------------------------------------------------------------------


def equal(completions: str, answer: str) -> float:
    return float(completions == answer)


async def scaled(text, *, by=1.0):
    return len(text) * by


async def test_a_reward_function_takes_what_it_is_given():
    assert await AsyncRewardWrapper(equal)(completions="a", answer="a") == 1.0
    assert await AsyncRewardWrapper(equal)("a", "b") == 0.0
    assert await AsyncRewardWrapper(equal)("a", answer="a") == 1.0
    assert await AsyncRewardWrapper(scaled)("abc", by=0.5) == 1.5
    named = AsyncRewardWrapper(lambda prompt, completions, prompt_ids, completion_ids, answer: float(completions == answer))
    assert await named(prompt="p", completions="a", prompt_ids=[1], completion_ids=[2], answer="a") == 1.0


async def test_a_call_that_does_not_fit_is_told_with_the_signature():
    with pytest.raises(
        RewardError, match=r"equal\(completions: str, answer: str\).*not called as it is defined: missing .*'answer'"
    ):
        await AsyncRewardWrapper(equal)("a")
    with pytest.raises(RewardError, match="unexpected keyword argument 'anwser'"):
        await AsyncRewardWrapper(equal)("a", "b", anwser="b")


def test_a_built_in_workflow_refuses_at_once_what_cannot_score_a_task():
    with pytest.raises(RewardError, match="takes 2 positional arguments"):
        RLVRWorkflow(equal, GenerationHyperparameters(), SimpleNamespace(eos_token_id=1, pad_token_id=0))


def test_math_verify():
    worker = get_math_verify_worker()
    assert worker.verify(r"so \boxed{\$18}", "18") == 1.0
    assert worker.verify("so 17", "18") == 0.0


# -- metrics and times -------------------------------------------------------------------------------------------------


def test_stats_are_the_metrics_of_the_process():
    stats_tracker.get("rollout").scalar(reward=1.0)
    get_tracker("rollout").scalar(reward=0.0)
    with stats_tracker.scope("actor"):
        stats_tracker.scalar(lr=0.5)
    stats_tracker.scope_func_wrapper("critic")(lambda: stats_tracker.scalar(lr=0.25))()
    assert get_tracker().export() == {"rollout/reward": 0.5, "actor/lr": 0.5, "critic/lr": 0.25}
    stats_tracker.scalar(last=1.0)
    assert stats_tracker.export_all() == {"last": 1.0}
    assert stats_tracker.export_all() == {}


def test_tensors_are_meant_over_their_masks():
    tracker = stats_tracker.get("actor")
    for values in ([1.0, 9.0, 3.0], [5.0, 9.0, 9.0]):
        mask = torch.tensor(values) != 9.0
        tracker.denominator(tokens=mask)
        tracker.stat(denominator="tokens", loss=torch.tensor(values))
        tracker.stat(denominator="tokens", reduce_type=stats_tracker.ReduceType.SUM, total=torch.tensor(values))
    assert stats_tracker.export_all() == {
        "actor/tokens": 3.0, "actor/loss/avg": 3.0, "actor/loss/min": 1.0, "actor/loss/max": 5.0, "actor/total": 9.0,
    }  # fmt: skip
    with pytest.raises(MetricError, match="no such denominator"):
        tracker.stat(denominator="tokens", loss=torch.ones(3))
    with pytest.raises(MetricError, match="no bool tensor"):
        tracker.denominator(tokens=torch.ones(3))


async def test_spans_are_metrics_and_events_of_the_trace(tmp_path):
    timer = start_timer()

    @perf_tracer.session_context()
    async def sample():
        async with perf_tracer.atrace_session_phase("generate", start_payload={"turn": 1}):
            await asyncio.sleep(0.01)

    @perf_tracer.trace_perf("plain", category=perf_tracer.Category.IO)
    def plain():
        return 3

    await asyncio.gather(sample(), sample())
    assert plain() == 3
    with stats_tracker.record_timing("mine"):
        pass
    metrics = get_tracker().export()
    assert set(metrics) == {"timeperf/generate", "timeperf/session", "timeperf/plain", "timeperf/mine"}
    assert 0.005 < metrics["timeperf/generate"] <= metrics["timeperf/session"]
    timer.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    generating = [event for event in events if event["name"] == "generate"]
    assert [event["args"] for event in generating] == [{"turn": 1}] * 2
    assert len({event["tid"] for event in generating}) == 2
    assert [event["cat"] for event in events if event["name"] == "plain"] == ["io"]
    assert timer.export() == {}  # spans of concurrent samples are no phases of the step


async def test_the_context_outside_of_a_run():
    assert workflow_context.get() == workflow_context.WorkflowContext(is_eval=False, task_id=None)
    assert workflow_context.stat_scope() == "rollout"


def test_clients_are_shared_by_a_loop_and_closed_with_it():
    async def episodes():
        clients = await asyncio.gather(*(workflow_context.get_httpx_client() for _ in range(3)))
        sessions = await asyncio.gather(*(workflow_context.get_aiohttp_session() for _ in range(3)))
        assert len(set(map(id, clients))) == len(set(map(id, sessions))) == 1
        assert not clients[0].is_closed
        return clients[0], sessions[0]

    client, session = asyncio.run(episodes())
    assert client.is_closed
    assert session.closed
    assert asyncio.run(episodes())[0] is not client


# -- tokenizers, datasets, imports -------------------------------------------------------------------------------------


def test_a_plain_tokenizer_is_adapted_in_place(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    messages = [{"role": "user", "content": "1+1="}]
    as_it_was = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    with pytest.raises(EngineError, match=r"tokenizer = rollwright\.load_tokenizer\(tokenizer\)"):
        ModelRequest(input_ids=list(as_it_was))
    with pytest.raises(EngineError, match="return_dict=False"):
        ModelRequest(input_ids=as_it_was)
    wanted = apply_chat_template(tokenizer, messages, tokenize=True, add_generation_prompt=True)
    gconfig = GenerationHyperparameters().new_with_stop_and_pad_token_ids(tokenizer)
    assert tokenizer.eos_token_id in gconfig.stop_token_ids
    for own in (tokenizer, copy.deepcopy(tokenizer)):
        ids = list(own.apply_chat_template(messages, tokenize=True, add_generation_prompt=True))
        assert ids == wanted
        assert ModelRequest(input_ids=ids).input_ids == wanted
    plain = SimpleNamespace(eos_token_id=1, pad_token_id=None)
    assert GenerationHyperparameters().new_with_stop_and_pad_token_ids(plain).stop_token_ids == [1]
    assert type(plain) is SimpleNamespace


def test_tokenizers_and_processors(tiny_model):
    tokenizer = load_hf_tokenizer(str(tiny_model), padding_side="left")
    assert tokenizer.padding_side == "left"
    assert isinstance(apply_chat_template(tokenizer, [{"role": "user", "content": "a"}], tokenize=False), str)
    processor, other = load_hf_processor_and_tokenizer(str(tiny_model))
    assert processor is None
    assert other.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ConfigError, match="only fast tokenizers"):
        load_hf_tokenizer(str(tiny_model), fast_tokenizer=False)


def test_datasets(tmp_path, tiny_model):
    for split, size in (("train", 5), ("test", 2)):
        rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(size)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(path=str(tmp_path), batch_size=2)
    assert len(get_custom_dataset(split="train", dataset_config=config)) == 5
    assert len(get_custom_dataset("test", config)) == 2
    share = get_custom_dataset(
        path=str(tmp_path), rank=1, world_size=2, split="train", type="rl", max_length=None, tokenizer=None
    )
    assert [row["answer"] for row in share] == ["2", "4"]
    with pytest.raises(DataError, match="more than max_length=3 tokens"):
        get_custom_dataset("train", config, load_hf_tokenizer(str(tiny_model)), max_length=3)
    with pytest.raises(DataError, match=r"get_custom_dataset\(max_lenght=…\): did you mean 'max_length'"):
        get_custom_dataset("train", config, max_lenght=3)


def test_an_import_from_a_string():
    assert import_from_string("json.dumps") is json.dumps
    assert import_from_string("rollwright.workflows.rlvr.RLVRWorkflow") is RLVRWorkflow
    with pytest.raises(ConfigError, match=r"did you mean|no module"):
        import_from_string("rollwright.workflows.rlvrr.RLVRWorkflow")


def test_images_in_base64():
    from PIL import Image

    from rollwright.data.vision import as_images

    image = Image.new("RGB", (4, 4), "red")
    (text,) = image2base64([image])
    for form in (text, f"data:image/png;base64,{text}"):
        assert as_images(form)[0].tobytes() == image.tobytes()
    with pytest.raises(DataError, match="image 0 cannot be read"):
        as_images("data:image/png;base64,%%%")
