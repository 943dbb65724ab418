"""Secrets in configs: used in full, and never written or printed."""

import copy
import logging
import pickle

import pytest

from rollwright import GRPOConfig, load_stages, to_yaml
from rollwright.cli.main import main
from rollwright.config.loading import build_config, build_stages, config_to_dict
from rollwright.config.overrides import parse_override
from rollwright.config.secrets import HIDDEN, Secret, command_line, copy_without_secrets, is_secret_name, secrets_of
from rollwright.config.sections import RolloutConfig
from rollwright.config.source import parse_yaml
from rollwright.errors import ConfigError

KEY = "sk-4f9a1c77d2"


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("OUR_KEY", KEY)
    return KEY


def built(text, *overrides, cls=GRPOConfig):
    backend = ["rollout.backend=sglang"] if "rollout:" in text or "rollout." in str(overrides) else []
    tasks = ["tasksets=[{path: d, workflow: w}]"] if text.startswith("auxiliary_models") else []
    return build_config(parse_yaml(text, file="f.yaml"), [*backend, *tasks, *overrides], cls)


#: A key that holds the secret, in YAML; the path to it; what is written in its place.
PLACES = [
    ("rollout: {api_key: '${oc.env:OUR_KEY}'}", ("rollout", "api_key"), "${oc.env:OUR_KEY}"),
    ("rollout: {api_key: sk-4f9a1c77d2}", ("rollout", "api_key"), HIDDEN),
    ("service: {api_key: 'a-${oc.env:OUR_KEY}'}", ("service", "api_key"), "a-${oc.env:OUR_KEY}"),
    ("service: {api_key: '${oc.env:OUR_KEY,none}'}", ("service", "api_key"), "${oc.env:OUR_KEY,none}"),
    ("service: {api_key: '${oc.env:OUR_KEY,null}'}", ("service", "api_key"), "${oc.env:OUR_KEY,null}"),
    ("service: {api_key: \"${oc.env:OUR_KEY,'a, b'}\"}", ("service", "api_key"), "${oc.env:OUR_KEY,'a, b'}"),
    (
        "auxiliary_models: [{base_url: http://h/v1, api_key: '${oc.env:OUR_KEY}'}]",
        ("auxiliary_models", 0, "api_key"),
        "${oc.env:OUR_KEY}",
    ),
    ("auxiliary_models: [{base_url: http://h/v1, api_key: sk-4f9a1c77d2}]", ("auxiliary_models", 0, "api_key"), HIDDEN),
    ("workflow_kwargs: {judge: '${oc.env:OUR_KEY}'}", ("workflow_kwargs", "judge"), "${oc.env:OUR_KEY}"),
    ("workflow_kwargs: {tool: {api_key: sk-4f9a1c77d2}}", ("workflow_kwargs", "tool", "api_key"), HIDDEN),
    ("workflow_kwargs: {many: ['${oc.decode:${oc.env:OUR_KEY}}']}", ("workflow_kwargs", "many", 0), "${oc.decode:${oc.env:OUR_KEY}}"),
    ("vllm: {env: {HF_TOKEN: sk-4f9a1c77d2}}", ("vllm", "env", "HF_TOKEN"), HIDDEN),
    ("sglang: {extra_args: {api-key: '${rollout.api_key}'}}\nrollout: {api_key: '${oc.env:OUR_KEY}'}", ("sglang", "extra_args", "api-key"), "${oc.env:OUR_KEY}"),
    ("store: {url: 'postgresql://me:sk-4f9a1c77d2@host/db'}", ("store", "url"), "postgresql://me:***@host/db"),
    ("store: {url: 'postgresql://me:${oc.env:OUR_KEY}@host/db'}", ("store", "url"), "postgresql://me:${oc.env:OUR_KEY}@host/db"),
]  # fmt: skip


def at(holder, path):
    for part in path:
        holder = holder[part] if isinstance(holder, list | dict) else getattr(holder, part)
    return holder


@pytest.mark.parametrize(("text", "path", "written"), PLACES)
def test_a_secret_is_there_and_is_not_written(key, text, path, written):
    config = built(text + "\nmode: train\n" * text.startswith("store"))
    assert key in str(at(config, path))
    assert at(config_to_dict(config), path) == written
    for shown in (to_yaml(config), repr(config), repr(config_to_dict(config))):
        assert key not in shown or (path == ("store", "url") and shown == repr(config) and "${" not in text)
    assert HIDDEN not in written or path == ("store", "url") or set(secrets_of(config)) == {key}


def test_what_comes_from_the_environment_can_be_run_again_and_a_hidden_secret_is_asked_for(key):
    config = built("rollout: {api_key: '${oc.env:OUR_KEY}'}\nactor: {path: '${oc.env:OUR_KEY}'}")
    assert built(to_yaml(config)) == config
    with pytest.raises(ConfigError, match=r"f\.yaml:1: rollout\.api_key: is \*\*\*, which stands for a secret .* \$\{oc\.env"):
        built("rollout: {api_key: '***'}")
    with pytest.raises(ConfigError, match=r"workflow_kwargs\.api_key: is \*\*\*"):
        built("workflow_kwargs: {api_key: '***'}")


def test_paths_names_and_choices_are_written_as_they_are(monkeypatch):
    monkeypatch.setenv("PLACE", "/data")
    monkeypatch.setenv("SHARED", "disk")
    config = built(
        "actor: {path: '${oc.env:PLACE}/m'}\ntrain_dataset: {path: '${oc.env:PLACE}/t.jsonl'}\n"
        "cluster: {fileroot: '${oc.env:PLACE}'}\nsaver: {}\nrollout: {weight_update: '${oc.env:SHARED}'}"
    )
    written = config_to_dict(config)
    assert written["actor"]["path"] == "/data/m"
    assert written["train_dataset"]["path"] == "/data/t.jsonl"
    assert written["cluster"]["fileroot"] == "/data"
    assert written["rollout"]["weight_update"] == "disk"
    assert not list(secrets_of(config))


def test_a_config_made_in_python_hides_its_secrets():
    written = config_to_dict(GRPOConfig(rollout=RolloutConfig(api_key=KEY)))
    assert written["rollout"]["api_key"] == HIDDEN
    assert config_to_dict(GRPOConfig())["rollout"]["api_key"] is None


def test_a_secret_stays_one_when_it_is_copied_or_sent_to_a_process():
    secret = Secret(KEY, "${oc.env:OUR_KEY}")
    for each in (copy.deepcopy(secret), pickle.loads(pickle.dumps(secret))):  # noqa: S301 - of our own making
        assert (each, each.written, repr(each), f"Bearer {each}") == (
            KEY,
            secret.written,
            "'${oc.env:OUR_KEY}'",
            f"Bearer {KEY}",
        )


def test_messages_name_the_variable_and_not_its_value(key):
    with pytest.raises(ConfigError, match=r"seed: expected a whole number, got '\$\{oc\.env:OUR_KEY\}' \(text\)") as told:
        built("seed: ${oc.env:OUR_KEY}")
    assert key not in str(told.value)
    with pytest.raises(ConfigError, match=r"override 'rollout\.api_key=\*\*\*'") as told:
        built("seed: 1", "rollout.backend=builtin", f"rollout.api_key={key}")
    assert key not in str(told.value)


def test_commands_show_no_secret(key, capsys, tmp_path, tiny_model):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"actor: {{path: {tiny_model}}}\ntasksets: [{{path: arithmetic, workflow: math_workflow}}]\n"
        "rollout: {backend: sglang, api_key: '${oc.env:OUR_KEY}'}\n"
        f"auxiliary_models: [{{base_url: 'http://h/v1', api_key: {key}}}]\n"
    )
    assert main(["config", "show", str(file)]) == 0
    assert main(["run", "--dry-run", str(file), f"service.api_key={key}"]) == 0
    out, err = capsys.readouterr()
    assert key not in out + err
    assert out.count("${oc.env:OUR_KEY}") == 2


def test_notes_on_files_of_another_shape_show_no_secret(key, caplog):
    text = (
        "model: {model_path: m}\nbuffer:\n  explorer_input: {taskset: {path: t, default_workflow_type: math_workflow}}\n"
        "  trainer_input: {experience_buffer: {path: 'postgresql://me:${oc.env:OUR_KEY}@host/db'}}\nmode: train\n"
        f"explorer: {{auxiliary_models: [{{base_url: 'http://h/v1', api_key: {key}}}]}}\n"
    )
    with caplog.at_level(logging.INFO, logger="rollwright"):
        from rollwright.config.loading import _translated

        document, _ = _translated(parse_yaml(text, file="t.yaml"), [])
    (stage,) = build_stages(document, [])
    assert stage.config.store.url == f"postgresql://me:{key}@host/db"
    assert stage.config.auxiliary_models[0].api_key == key
    assert key not in caplog.text
    assert key not in repr(stage.to_dict())


def test_the_copy_of_a_file_has_stars_in_place_of_secrets(tmp_path, key):
    file = tmp_path / "run.yaml"
    file.write_text(
        f'# a remark stays\nactor: {{path: m}}  # here, too\nrollout:\n  backend: sglang\n  api_key: "{key}"\n'
        f"store: {{url: 'postgresql://me:{key}@host/db'}}\nmode: train\nservice: {{api_key: '${{oc.env:OUR_KEY}}'}}\n"
    )
    (stage,) = load_stages(file)
    copy_without_secrets(file, tmp_path / "copy.yaml", set(secrets_of(stage.config)))
    text = (tmp_path / "copy.yaml").read_text()
    assert key not in text
    assert text.startswith("# a remark stays\nactor: {path: m}  # here, too\n")
    assert '  api_key: "***"\n' in text
    assert "postgresql://me:***@host/db" in text
    assert "${oc.env:OUR_KEY}" in text


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("api_key", "api-key", "OPENAI_API_KEY", "HF_TOKEN", "password", "client_secret")),
        *((name, False) for name in ("stop_token", "tokenizer", "key", "prompt_key", "max_tokens")),
    ],
)
def test_names_of_secrets(name, secret):
    assert is_secret_name(name) is secret


def test_a_command_line_is_kept_without_its_secrets():
    words = ["rollwright", "run", "a.yaml", f"rollout.api_key={KEY}", "--api-key", KEY, "seed=1"]
    assert command_line(words) == "rollwright run a.yaml rollout.api_key=*** --api-key *** seed=1"
    assert parse_override(f"service.api_key={KEY}").value == KEY
