"""Reading task folders: what each key of a task.toml becomes, and the line that a refused key is named with."""

import re

import pytest
from folders import read, write

from rollwright.environments.harbor import images
from rollwright.environments.harbor.folder import HarborOptions
from rollwright.environments.harbor.images import refuse_needs
from rollwright.environments.harbor.tasks import harbor, read_task_folder, task_folders
from rollwright.environments.harbor.toml_lines import TomlFile
from rollwright.errors import DataError

#: A file with every key of Harbor's schema 1.4 that a box can honour.
EVERY_KEY = """
schema_version = "1.4"
source = "made up"
artifacts = ["/app/out", {source = "log.txt", destination = "logs/log.txt", exclude = ["*.tmp"], service = "main"}]
multi_step_reward_strategy = "final"

[task]
name = "tests/every-key"
version = "2"
description = "All keys."
authors = [{name = "A", email = "a@example.org"}]
keywords = ["all"]

[metadata]
difficulty = "easy"
anything = {nested = [1, 2]}

[agent]
timeout_sec = 30
user = "root"
network_mode = "no-network"

[verifier]
timeout_sec = 20
user = 0
network_mode = "no-network"
env = {GRADER = "${MODEL:-none}"}
environment_mode = "separate"

[[verifier.collect]]
command = "date > /logs/artifacts/date"
service = "main"
timeout_sec = 5

[verifier.environment]
workdir = "/app"
memory_mb = 512

[solution]
env = {HINT = "42"}

[environment]
build_timeout_sec = 60
os = "linux"
cpus = 1
memory_mb = 256
storage_mb = 64
gpus = 0
network_mode = "no-network"
workdir = "/app"
env = {NAME = "value"}

[environment.healthcheck]
command = "true"
interval_sec = 1
timeout_sec = 2
start_period_sec = 3
start_interval_sec = 4
retries = 5

[[steps]]
name = "one"
min_reward = 0.5
artifacts = ["/app/one"]
[steps.agent]
timeout_sec = 7
[steps.verifier]
env = {STEP = "1"}
[steps.healthcheck]
command = "test -d /app"

[[steps]]
name = "two"
min_reward = {reward = 0.1, style = 0.2}
"""
STEPS = {
    f"steps/{name}/{file}": text
    for name in ("one", "two")
    for file, text in (("instruction.md", f"Do {name}."), ("tests/test.sh", "#!/bin/sh\n"))
}


def test_every_key_has_its_effect(tmp_path):
    folder = read(tmp_path / "task", STEPS, EVERY_KEY)
    one, two = folder.steps
    assert folder.name == "tests/every-key"
    assert folder.metadata["difficulty"] == "easy"
    assert folder.metadata["task"]["description"] == "All keys."
    assert folder.strategy == "final"
    assert folder.workdir == "/app"
    assert (folder.environment.memory_bytes, folder.environment.storage_bytes) == (256 * 2**20, 64 * 2**20)
    assert not folder.network
    assert not one.verifier_network
    assert (one.instruction, one.seconds, two.seconds) == ("Do one.", 7, 30)
    assert one.verifier.timeout_sec == 20
    assert one.verifier.env == {"GRADER": "${MODEL:-none}", "STEP": "1"}
    assert one.verifier.mode == two.verifier.mode == "separate"
    assert [hook.command for hook in two.verifier.collect] == ["date > /logs/artifacts/date"]
    assert [check.command for check in one.healthchecks] == ["true", "test -d /app"]
    assert two.healthchecks == ()
    assert [each.source for each in one.artifacts] == ["/app/out", "log.txt", "/app/one"]
    assert (dict(one.min_reward), dict(two.min_reward)) == ({"reward": 0.5}, {"reward": 0.1, "style": 0.2})
    assert folder.solution_env == {"HINT": "42"}
    assert folder.needs == ()


#: What is refused: the file, its line, and words of the reason.
REFUSED = {
    "unknown key": ("[agent]\ntimeout = 3\n", 2, "no key 'agent.timeout'"),
    "unknown table": ("[agents]\n", 1, "'agent'"),
    "unknown in a step": ('[[steps]]\nname = "one"\n[[steps]]\nname = "two"\nreward = 1\n', 5, "no key 'steps.1.reward'"),
    "wrong type": ('[agent]\n# comment\ntimeout_sec = "soon"\n', 3, "agent.timeout_sec: Input should be a valid number"),
    "windows": ('[environment]\nos = "windows"\n', 2, "boxes run Linux"),
    "gpus": ("[environment]\n\ngpus = 1\n", 3, "no GPUs"),
    "gpu types": ('[environment]\ngpu_types = ["H100"]\n', 2, "GPU"),
    "tpu": ('[environment.tpu]\ntype = "v4"\n', 1, "TPU"),
    "allowlist": ('[environment]\nnetwork_mode = "allowlist"\n', 2, "the whole network or none"),
    "allowed hosts": ('[agent]\nallowed_hosts = [\n  "example.org",\n]\n', 2, "the whole network or none"),
    "network": ('[environment]\nnetwork_mode = "public"\n', 2, "network: true"),
    "internet": ("[environment]\nallow_internet = true\n", 2, "network: true"),
    "agent's user": ('[agent]\nuser = "agent"\n', 2, "one user"),
    "verifier's user": ("[verifier]\nuser = 1000\n", 2, "one user"),
    "hook's user": ('[[verifier.collect]]\ncommand = "x"\nuser = "db"\n', 3, "one user"),
    "hook's service": ('[[verifier.collect]]\ncommand = "x"\nservice = "db"\n', 3, "one service"),
    "artifact's service": ('artifacts = [\n "/a",\n {source = "/b", service = "db"},\n]\n', 1, "one service"),
    "skills": ('[environment]\nskills_dir = "/skills"\n', 2, "environment/"),
    "mcp servers": (
        '[[environment.mcp_servers]]\nname = "a"\ntransport = "stdio"\ncommand = "b"\n',
        1,
        "tools of the workflow",
    ),
    "mcp server without url": ('[[environment.mcp_servers]]\nname = "a"\n', 1, "needs url"),
    "host variable": ('[environment.env]\nKEY = "${SECRET_KEY}"\n', 2, "host_env: [SECRET_KEY]"),
    "shared with an environment": ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n', 1, "own"),
    "workdir of the system": ('[environment]\nworkdir = "/usr/src"\n', 2, "directory of the box's own"),
    "relative workdir": ('[environment]\nworkdir = "src"\n', 2, "absolute"),
    "sizes": ('[environment]\nmemory = "2G"\nmemory_mb = 1\n', 1, "memory_mb is 1"),
    "no size": ('[environment]\nmemory = "much"\n', 2, "512M or 2G"),
    "schema": ('schema_version = "2.0"\n', 1, "1.0 to 1.4"),
    "reward": ("[[steps]]\nname = 'a'\nmin_reward = nan\n", 3, "finite"),
    "a multi-line text before it": ('[metadata]\ntext = """\n[agent]\nuser = 1\n"""\n[agent]\nuser = 2\n', 7, "one user"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_with_its_line(case, tmp_path):
    toml, line, words = REFUSED[case]
    with pytest.raises(DataError) as refusal:
        read(tmp_path / "task", toml=toml)
    assert re.search(rf"task\.toml:{line}: ", str(refusal.value)), refusal.value
    assert words in str(refusal.value)


def test_all_faults_are_told_at_once(tmp_path):
    with pytest.raises(DataError) as refusal:
        read(tmp_path / "task", toml='[environment]\ngpus = 2\nskills_dir = "/s"\n[agent]\nuser = "x"\n')
    assert [line.split(":")[1] for line in str(refusal.value).splitlines()] == ["2", "3", "5"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"instruction.md": None}, "instruction.md cannot be read"),
        ({"instruction.md": " \n"}, "instruction.md is empty"),
        ({"tests/test.sh": None}, "tests/test.sh: there is no such file"),
        ({"tests/test.sh": None, "tests/test.bat": "x"}, "Windows"),
        ({"trajectory.json": "{}"}, "prior conversations"),
        ({"task.toml": "a = "}, "not TOML"),
        ({"tests/Dockerfile": "FROM x", "task.toml": '[verifier]\nenvironment_mode = "separate"'}, "image of its own"),
    ],
)
def test_files_that_are_missing_or_not_read(files, words, tmp_path):
    with pytest.raises(DataError, match=words):
        read(tmp_path / "task", files)


def test_the_network_and_variables_of_this_machine_are_the_tasksets_to_give(tmp_path):
    toml = '[environment]\nallow_internet = true\n[environment.env]\nKEY = "${A_KEY}"\n'
    path = write(tmp_path / "task", {}, toml)
    assert read_task_folder(path, HarborOptions(network=True, host_env=("A_KEY",))).network
    assert not read_task_folder(path, HarborOptions(network=False, host_env=("A_KEY",))).network


# -- Dockerfiles -----------------------------------------------------------------------------------------------------


def test_a_dockerfile_is_followed_as_far_as_it_only_places_files(tmp_path):
    dockerfile = """# syntax=docker/dockerfile:1
FROM debian:12-slim
LABEL a=b
ARG WHERE=/data
ENV A=1 B="two words"
ENV OLD form of it
WORKDIR /srv/app
COPY one.txt two.txt ./
COPY folder $WHERE
ADD one.txt renamed.txt
CMD ["bash"]
"""
    files = {"environment/Dockerfile": dockerfile, "environment/one.txt": "1", "environment/two.txt": "2"}
    folder = read(tmp_path / "t", files | {"environment/folder/three.txt": "3"}, host_images=["debian:*"])
    context = folder.path / "environment"
    assert folder.workdir == "/srv/app"
    assert folder.files.copies == [
        (context / "one.txt", "/srv/app/one.txt"),
        (context / "two.txt", "/srv/app/two.txt"),
        (context / "folder", "/data"),
        (context / "one.txt", "/srv/app/renamed.txt"),
    ]
    assert folder.files.environment == {"A": "1", "B": "two words", "OLD": "form of it"}
    assert folder.needs == ()


NEEDS = {
    "FROM python:3.12": "FROM python:3.12",
    "FROM scratch\nFROM scratch AS second": "FROM scratch AS second",
    "FROM scratch\nRUN apt-get update && \\\n  apt-get install git": "RUN apt-get update && apt-get install git",
    "FROM scratch\nUSER agent": "USER agent",
    "FROM scratch\nCOPY --from=other /a /b": "COPY --from=other /a /b",
    "FROM scratch\nCOPY Dockerfile /etc/": "which changes the system of the box",
    "FROM scratch\nADD https://example.org/a.tar.gz /app": "ADD https://example.org/a.tar.gz /app",
    "FROM scratch\nENTRYPOINT serve": "ENTRYPOINT serve",
    "FROM scratch\nHEALTHCHECK CMD true": "HEALTHCHECK CMD true",
}


@pytest.mark.parametrize("dockerfile", NEEDS)
def test_what_a_dockerfile_needs_a_container_for_is_refused_with_its_line(dockerfile, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "working_container", lambda: "")
    folder = read(tmp_path / "task", {"environment/Dockerfile": dockerfile})
    line = 1 if "\n" not in dockerfile else 2
    with pytest.raises(DataError) as refusal:
        refuse_needs(folder)
    assert f"environment/Dockerfile:{line}: {NEEDS[dockerfile]}" in str(refusal.value) or (
        f"environment/Dockerfile:{line}: " in str(refusal.value) and NEEDS[dockerfile] in str(refusal.value)
    )
    assert "install docker or podman" in str(refusal.value)
    monkeypatch.setattr(images, "why_unusable", lambda kind: f"{kind} is not installed.")
    with pytest.raises(DataError, match=r"environment/Dockerfile:.*: podman is not installed"):
        refuse_needs(folder, "podman")
    monkeypatch.setattr(images, "why_unusable", lambda kind: "")
    refuse_needs(folder, "podman")


def test_an_image_goes_to_a_container_where_there_is_one(tmp_path, monkeypatch):
    folder = read(tmp_path / "task", toml='[environment]\ndocker_image = "python:3.12-slim"\n')
    monkeypatch.setattr(images, "working_container", lambda: "")
    with pytest.raises(DataError, match=r"task\.toml:2: the image python:3\.12-slim"):
        refuse_needs(folder)
    monkeypatch.setattr(images, "working_container", lambda: "docker")
    refuse_needs(folder)
    refuse_needs(folder, "bubblewrap")
    with pytest.raises(DataError, match="in an unsafe box are those of this machine"):
        refuse_needs(folder, "unsafe")


def test_compose_is_refused_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "working_container", lambda: "docker")
    folder = read(tmp_path / "task", {"environment/docker-compose.yaml": "services: {}"})
    with pytest.raises(DataError, match=r"docker-compose\.yaml: docker compose"):
        refuse_needs(folder, "docker")


def test_more_processors_than_there_are_is_refused(tmp_path):
    with pytest.raises(DataError, match="asks for 4096"):
        refuse_needs(read(tmp_path / "task", toml="[environment]\ncpus = 4096\n"))


# -- rows ------------------------------------------------------------------------------------------------------------


def test_a_directory_of_folders_becomes_rows(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / "train" / name, {"instruction.md": f"Do {name}."})
    write(tmp_path / "valid" / "c", {}, '[metadata]\ndifficulty = "easy"\n')
    rows = harbor("train", str(tmp_path))
    assert [row["query_id"] for row in rows] == ["a", "b"]
    assert rows[0]["messages"] == [{"role": "user", "content": "Do a."}]
    assert rows[0]["task_folder"] == {"path": str(tmp_path / "train/a")}
    (held_out,) = harbor("valid", str(tmp_path), reward_key="score")
    assert held_out["task_folder"]["reward_key"] == "score"
    assert held_out["metadata"] == {"difficulty": "easy"}
    assert task_folders(tmp_path / "valid/c") == [tmp_path / "valid/c"]


def test_faults_of_all_folders_are_told(tmp_path):
    write(tmp_path / "good", {})
    write(tmp_path / "bad", {}, "[environment]\ngpus = 1\n")
    write(tmp_path / "worse", {"instruction.md": None})
    with pytest.raises(DataError, match="2 of 3 tasks") as refusal:
        harbor(path=str(tmp_path))
    assert "bad/task.toml:2" in str(refusal.value)
    assert "worse/instruction.md" in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward": "x"}, "reward: Extra inputs"),
        ({"agent_timeout": 0}, "agent_timeout"),
        ({"path": "/nowhere"}, "no such directory"),
    ],
)
def test_wrong_arguments_of_a_taskset(options, words, tmp_path):
    write(tmp_path / "task", {})
    with pytest.raises(DataError, match=words):
        harbor(**{"path": str(tmp_path), **options})


def test_an_empty_directory_or_a_list_of_tasks_elsewhere(tmp_path):
    with pytest.raises(DataError, match="no task folder"):
        harbor(path=str(tmp_path))
    (tmp_path / "dataset.toml").write_text("")
    with pytest.raises(DataError, match="download their folders"):
        harbor(path=str(tmp_path))


# -- Terminal-Bench --------------------------------------------------------------------------------------------------

COMPOSE = """services:
  client:
    build: {dockerfile: Dockerfile}
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: [sh, -c, sleep infinity]
    environment: ["TEST_DIR=${T_BENCH_TEST_DIR}", "MODE=fast"]
    volumes: ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"]
"""


def terminal_bench(path, compose=COMPOSE, **files):
    path.mkdir(parents=True)
    content = {
        "task.yaml": "instruction: |-\n  Write done to answer.txt.\ndifficulty: easy\nparser_name: pytest\n"
        "max_agent_timeout_sec: 12\nmax_test_timeout_sec: 5\ntags: [a]\n",
        "run-tests.sh": '#!/bin/sh\n[ "$(cat answer.txt)" = done ] && [ -d "$TEST_DIR" ]\n',
        "solution.sh": "#!/bin/sh\necho done > answer.txt\n",
        "Dockerfile": "FROM scratch\nWORKDIR /work\n",
        "docker-compose.yaml": compose,
        **files,
    }
    for name, text in content.items():
        (path / name).write_text(text)
    return path


def test_a_terminal_bench_folder_is_read(tmp_path):
    folder = read_task_folder(terminal_bench(tmp_path / "task"))
    (step,) = folder.steps
    assert (step.instruction, step.seconds, step.verifier.timeout_sec) == ("Write done to answer.txt.", 12, 5)
    assert (step.script, step.solve, folder.workdir) == ("run-tests.sh", "solution.sh", "/work")
    assert folder.exit_code_is_reward
    assert folder.files.environment == {"MODE": "fast"}
    assert folder.needs == ()


@pytest.mark.parametrize(
    ("compose", "words"),
    [(COMPOSE + "  db: {image: postgres}\n", "several services"), (COMPOSE + "    privileged: true\n", "privileged")],
)
def test_a_compose_file_that_asks_for_more_is_refused(compose, words, tmp_path):
    folder = read_task_folder(terminal_bench(tmp_path / "task", compose))
    with pytest.raises(DataError, match=rf"docker-compose\.yaml:1: docker compose \({words}\)"):
        refuse_needs(folder, "docker")


def test_lines_of_toml_keys(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("a.b = 1\n\n[x.'y z']\nc = [ # [\n  {d = 1},\n]\ne = '''\nf = 2\n'''\n[[t]]\n[t.u]\ng = 1\n[[t]]\ng = 2\n")
    found = TomlFile(file)
    lines = {key: found.where(key).rpartition(":")[2] for key in [("a", "b"), ("x", "y z", "c"), ("x", "y z", "e")]}
    assert list(lines.values()) == ["1", "4", "7"]
    assert found.where(("t", 0, "u", "g")).endswith(":12")
    assert found.where(("t", 1, "g")).endswith(":14")
    assert found.where(("x", "y z", "c", 0, "d")).endswith(":4")
    assert found.where(("nowhere",)) == str(file)
