from __future__ import annotations

import dataclasses
import logging
import sys

import pytest

from rollwright import LocalServerConfig, SGLangConfig, VLLMConfig
from rollwright.config.sections import RolloutConfig
from rollwright.config.servers import option_list
from rollwright.errors import ConfigError
from rollwright.inference.backends import ServerLaunch
from rollwright.inference.backends.sglang import BuiltinServersBackend, SGLangBackend
from rollwright.inference.backends.vllm import VLLMBackend
from rollwright.inference.weights.adapter import AdapterRoom


def options_of(command):
    pairs = {}
    for index, word in enumerate(command):
        if word.startswith("--"):
            following = command[index + 1] if index + 1 < len(command) and not command[index + 1].startswith("--") else True
            pairs.setdefault(word, []).append(following)
    return pairs


def test_options():
    assert option_list({"a_b": 1, "flag": True, "off": False, "none": None, "many": ["x", "y"], "zero": 0}) == [
        "--a-b", "1", "--flag", "--many", "x", "--many", "y", "--zero", "0"
    ]  # fmt: skip


def test_sglang_itself():
    config = SGLangConfig(model_path="m", log_level="info", decode_log_interval=10, extra_args={"enable_metrics": True})
    command = SGLangConfig.build_cmd(config, tp_size=2, base_gpu_id=1, host="127.0.0.1", port=11451)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    options = options_of(command)
    assert options["--tp-size"] == ["2"]
    assert options["--base-gpu-id"] == ["1"]
    assert options["--port"] == ["11451"]
    assert options["--decode-log-interval"] == ["10"]
    assert options["--enable-metrics"] == [True]
    assert "--dist-init-addr" not in options
    assert "--skip-tokenizer-init" not in options


def test_the_built_in_engine_in_sglangs_place_is_chosen_and_logged(caplog):
    config = SGLangConfig(implementation="builtin", model_path="m", context_length=64)
    with caplog.at_level(logging.INFO, logger="rollwright"):
        command = SGLangConfig.build_cmd(config, host="127.0.0.1", port=5)
    assert command[1:5] == ["-m", "rollwright", "serve-model", "m"]
    assert options_of(command)["--context-length"] == ["64"]
    assert any("built-in engine" in record.getMessage() for record in caplog.records)
    with pytest.raises(ConfigError, match="tp_size is 2"):
        SGLangConfig.build_cmd(config, tp_size=2)


def test_gpus_are_counted_among_those_that_the_launching_process_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7f, 6")
    command = VLLMConfig.build_cmd(VLLMConfig(model_path="m"), tp_size=2, base_gpu_id=1)
    assert "CUDA_VISIBLE_DEVICES=GPU-7f,6" in command
    with pytest.raises(ConfigError, match=r"GPUs 2 to 3 .*lets this process see 3"):
        VLLMConfig.build_cmd(VLLMConfig(model_path="m"), tp_size=2, base_gpu_id=2)


def test_vllm_is_started_with_what_the_client_needs(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = VLLMConfig(model_path="m", python="/env/bin/python", enforce_eager=True, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    command = VLLMConfig.build_cmd(config, tp_size=2, base_gpu_id=2, port=7)
    assert command[0] == "env"
    assert "VLLM_SERVER_DEV_MODE=1" in command
    assert "CUDA_VISIBLE_DEVICES=2,3" in command
    assert "VLLM_CPU_KVCACHE_SPACE=1" in command
    assert "/env/bin/python" in command
    options = options_of(command)
    assert options["--logprobs-mode"] == ["processed_logprobs"]
    assert "--enable-scale-out" in options
    assert options["--tensor-parallel-size"] == ["2"]
    assert "--enforce-eager" in options


def test_vllms_cpu_build_computes_prompts_whole():
    options = options_of(VLLMConfig.build_cmd(VLLMConfig(model_path="m", device="cpu", max_model_len=9000)))
    assert "--no-enable-chunked-prefill" in options
    assert "--enforce-eager" in options
    assert options["--max-num-batched-tokens"] == ["9000"]


def test_the_local_server():
    config = LocalServerConfig(model_path="m", threads=1, weights_roots=["/a", "/b"], extra_args={"no-prefix-cache": True})
    options = options_of(LocalServerConfig.build_cmd(config, port=9))
    assert options["--weights-root"] == ["/a", "/b"]
    assert options["--threads"] == ["1"]
    assert "--no-prefix-cache" in options


@pytest.mark.parametrize("section", [SGLangConfig(), SGLangConfig(implementation="builtin"), VLLMConfig(), LocalServerConfig()])
def test_a_server_runs_in_its_own_environment(section):
    config = dataclasses.replace(section, model_path="m", python="/other/python", env={"A": "b c"})
    command = config.build_cmd(config, port=9)
    begin = command.index("-m") - 1
    assert command[begin] == "/other/python"
    assert command[0] == "env"
    assert "A=b c" in command[1:begin]
    assert not {"--python", "--env"} & set(command)


@pytest.mark.parametrize("build", [SGLangConfig.build_cmd, VLLMConfig.build_cmd, LocalServerConfig.build_cmd])
def test_a_server_without_a_model_is_refused(build):
    config = {SGLangConfig.build_cmd: SGLangConfig, VLLMConfig.build_cmd: VLLMConfig}.get(build, LocalServerConfig)()
    with pytest.raises(ConfigError, match="model_path"):
        build(config)


def test_sglang_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="stop strings"):
        SGLangConfig.build_cmd(SGLangConfig(model_path="m", extra_args={"skip_tokenizer_init": True}))


def test_binding_other_interfaces_needs_a_key():
    from rollwright.inference.server.settings import ServerSettings

    with pytest.raises(ConfigError, match="api_key"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", api_key="k").api_key == "k"


def test_sglang_is_given_its_key_by_a_file(tmp_path):
    file = tmp_path / "key.yaml"
    launch = ServerLaunch("127.0.0.1", 5, RolloutConfig(), "model", key_file=file)
    command = SGLangBackend.command(launch)
    assert command[command.index("--config") + 1] == str(file)
    section = SGLangConfig(extra_args={"config": "mine.yaml"})
    with pytest.raises(ConfigError, match="takes the place of the file that gives SGLang its key"):
        SGLangBackend.command(dataclasses.replace(launch, sections={"sglang": section}))
    section = SGLangConfig(implementation="builtin")  # which reads it from the environment
    assert "--config" not in SGLangBackend.command(dataclasses.replace(launch, sections={"sglang": section}))


def test_servers_of_a_run_that_trains_an_adapter_have_room_for_its_versions():
    launch = ServerLaunch("127.0.0.1", 5, RolloutConfig(), "model", adapters=AdapterRoom(count=2, rank=12))
    options = options_of(SGLangBackend.command(launch))
    assert options["--enable-lora"] == [True]
    assert options["--lora-target-modules"] == ["all"]
    assert (options["--max-lora-rank"], options["--max-loras-per-batch"]) == (["12"], ["3"])
    command = VLLMBackend.command(launch)
    options = options_of(command)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in command
    assert options["--enable-lora"] == [True]
    assert (options["--max-lora-rank"], options["--max-loras"]) == (["16"], ["3"])  # vLLM has steps of ranks
    plain = dataclasses.replace(launch, adapters=None)
    for backend in (SGLangBackend, BuiltinServersBackend, VLLMBackend):
        assert not any("lora" in word.lower() or "adapter" in word for word in backend.command(plain))
    section = VLLMConfig(extra_args={"max-loras": 2})  # the file has the last word
    assert options_of(VLLMBackend.command(dataclasses.replace(launch, sections={"vllm": section})))["--max-loras"] == ["2"]
    with pytest.raises(ConfigError, match=r"actor.lora.rank is 600, and vLLM .* at most 512"):
        VLLMBackend.command(dataclasses.replace(launch, adapters=AdapterRoom(rank=600)))


def test_a_deterministic_run_starts_servers_in_their_batch_invariant_modes():
    launch = ServerLaunch("127.0.0.1", 5, RolloutConfig(), "model", deterministic=True)
    ours = dataclasses.replace(launch, sections={"sglang": SGLangConfig(implementation="builtin")})
    assert "--enable-deterministic-inference" in SGLangBackend.command(launch)
    assert "--batch-invariant" in SGLangBackend.command(ours)
    assert "--batch-invariant" in BuiltinServersBackend.command(launch)
    assert "VLLM_BATCH_INVARIANT=1" in VLLMBackend.command(launch)
    plain = ServerLaunch("127.0.0.1", 5, RolloutConfig(), "model")
    for client in (SGLangBackend, BuiltinServersBackend, VLLMBackend):
        assert not any("invariant" in word.lower() or "deterministic" in word for word in client.command(plain))
