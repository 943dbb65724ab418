"""``rollwright export`` says what it needs before it computes anything."""

import json
import sys

import pytest

from rollwright.cli import export as exporting
from rollwright.cli.export import ExportType, export
from rollwright.cli.main import main
from rollwright.errors import CheckpointError, ConfigError


@pytest.fixture
def adapter(tiny_model, tmp_path):
    """An adapter of the tiny model, as a run writes it."""
    pytest.importorskip("peft")
    from rollwright.config.sections import LoraConfig, OptimizerConfig, TrainEngineConfig
    from rollwright.data.tokenizer import load_tokenizer
    from rollwright.training.engine import TrainEngine

    lora = LoraConfig(rank=2)
    engine = TrainEngine(TrainEngineConfig(path=str(tiny_model), device="cpu", lora=lora, optimizer=OptimizerConfig()))
    engine.initialize()
    engine.save(tmp_path / "adapter", load_tokenizer(tiny_model))
    return tmp_path / "adapter"


def test_an_adapter_is_merged_with_its_tokenizer_and_the_change_is_printed(adapter, tmp_path, capsys):
    assert main(["export", str(adapter), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "the adapter merged into its base, in bfloat16" in said
    assert "changes the log-probabilities of 512 sampled tokens by" in said
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert main(["export", str(adapter), str(tmp_path / "out")]) == 1
    assert "not an empty directory" in capsys.readouterr().err


def test_without_llama_cpp_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    with pytest.raises(ConfigError, match=r"convert_hf_to_gguf.py, which is not on PATH: git clone .*, and set LLAMA_CPP_DIR"):
        export(tmp_path / "adapter", tmp_path / "out", gguf=tmp_path / "file.gguf")
    assert not (tmp_path / "out").exists()


def test_the_converter_of_llama_cpp_gets_the_merged_model(tmp_path, monkeypatch, capsys):
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import sys\nopen(sys.argv[3], 'w').write(' '.join(sys.argv[1:]))\nassert 'bad' not in sys.argv[1]\n")
    monkeypatch.setenv("LLAMA_CPP_DIR", str(tmp_path))
    monkeypatch.setattr("rollwright.training.export.merge", lambda *arguments, **options: None)
    export(tmp_path / "adapter", tmp_path / "out", ExportType.bfloat16, gguf=tmp_path / "file.gguf")
    wanted = f"{tmp_path / 'out'} --outfile {tmp_path / 'file.gguf'} --outtype bf16"
    assert (tmp_path / "file.gguf").read_text() == wanted
    with pytest.raises(CheckpointError, match=r"llama.cpp could not convert .* \(AssertionError\)"):
        export(tmp_path / "adapter", tmp_path / "bad", gguf=tmp_path / "file.gguf")
    assert exporting._converter() == str(converter)
    assert sys.executable
