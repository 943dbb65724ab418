"""Games of the policy against itself and against frozen models: rows, rewards, what is trained, and the drawing of seats."""

import asyncio
import json
import math
from collections import Counter

import pytest
import torch
from parts import FixedEngine, sampled

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.tokenizer import build_character_tokenizer, load_tokenizer
from rollwright.environments.games import Nim
from rollwright.environments.games.game import moves_not_held_out
from rollwright.environments.games.kuhn import LEGAL_MOVES, exploitability, information_sets, uniform_policy
from rollwright.environments.games.nim import NimPosition
from rollwright.environments.games.tasks import best_move, games
from rollwright.errors import ConfigError, DataError, WeightUpdateError, WorkflowError
from rollwright.experience.contract import check_trajectory
from rollwright.experience.journal.episodes import read_episodes
from rollwright.experience.journal.writing import EpisodeWriter, Journal
from rollwright.experience.normaliser import normalise
from rollwright.inference.request import ModelRequest, ModelResponse
from rollwright.workflows.kuhn_exploitability import KuhnExploitability
from rollwright.workflows.opponents import Opponents
from rollwright.workflows.self_play import SelfPlayWorkflow

TOKENIZER = build_character_tokenizer(
    "0123456789 abJQK", pieces=["10", "11", "12", "13", "14", "15", "check", "bet", "call", "fold"]
)


class Plays(FixedEngine):
    """An engine whose answer is a function of the last message."""

    def __init__(self, answer, version=3):
        self.answer, self.version, self.asked = answer, version, []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        text = TOKENIZER.decode(request.input_ids, skip_special_tokens=False)
        self.asked.append(text)
        said = text.rpartition("<|user|>")[2].partition("<|end|>")[0]
        output = [
            *TOKENIZER.encode(self.answer(said), add_special_tokens=False),
            *TOKENIZER.encode("<|end|>", add_special_tokens=False),
        ]
        return ModelResponse(
            input_tokens=list(request.input_ids),
            output_tokens=output,
            output_logprobs=[-0.5] * len(output),
            output_versions=[self.version] * len(output),
            stop_reason="stop",
        )


def takes_one(said):
    first, second = map(int, said.split())
    return f"a{first - 1}" if first else f"b{second - 1}"


def play(engine, task, episode=None, **arguments):
    arguments = {"game": {"name": "nim"}, "gconfig": {"max_new_tokens": 4}, **arguments}
    workflow = SelfPlayWorkflow(tokenizer=TOKENIZER, **arguments)

    async def run():
        sample = sampled(engine, episode)
        return normalise(await workflow.arun_episode(sample, task), sample.recorder, workflow="self_play"), sample

    rows, sample = asyncio.run(run())
    if rows is not None:
        check_trajectory(rows)
    return rows, sample


def texts(rows):
    return [
        TOKENIZER.decode(ids[mask.bool()].tolist(), skip_special_tokens=False)
        for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)
    ]


def test_each_player_has_its_own_conversation_and_reward():
    rows, _ = play(Plays(takes_one), {"heaps": [3, 0]})
    assert rows["role"] == ["first", "second"]
    assert rows["environment"] == ["nim", "nim"]
    assert rows["rewards"].tolist() == [1.0, -1.0]
    assert rows["sample_ids"].tolist() == [0, 0]
    first, second = texts(rows)
    assert first == "<|user|>3 0<|end|><|assistant|>a2<|end|><|user|>1 0<|end|><|assistant|>a0<|end|>"
    assert second == "<|user|>2 0<|end|><|assistant|>a1<|end|>"
    trained = [
        TOKENIZER.decode(ids[mask.bool()].tolist()) for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True)
    ]
    assert [text.replace("<|end|>", "") for text in trained] == ["a2a0", "a1"]


def test_a_move_that_is_not_allowed_loses_the_game_and_wins_nothing():
    rows, _ = play(Plays(lambda said: "a9"), {"heaps": [1, 2]}, illegal_reward=-2.0)
    assert rows["rewards"].tolist() == [-2.0]  # the second player has not moved, so it has no row
    rows, _ = play(Plays(lambda said: "a0" if said == "1 2" else "b7"), {"heaps": [1, 2]})
    assert rows["rewards"].tolist() == [0.0, -1.0]


def before_a_held_out_position():
    """Return a position that is trained, the move that leads to a held-out one, and that position."""
    game = Nim()
    first, second = next(task["heaps"] for task in game.tasks("test") if task["heaps"][0] < task["heaps"][1])
    return (first + 1, second), f"a{first}", (first, second)


def enters_when_it_can(said):
    """Make the move that leads to the held-out position, and elsewhere take one object."""
    heaps, move, _ = before_a_held_out_position()
    return move if said == " ".join(map(str, heaps)) else takes_one(said)


@pytest.mark.parametrize("history", [True, False])
def test_a_training_game_does_not_enter_a_held_out_position(history):
    heaps, move, _ = before_a_held_out_position()
    game, position, told = Nim(), NimPosition(heaps), Counter()
    start = game.says(position)

    def answer(said):
        told[said] += 1
        return enters_when_it_can(said)

    gconfig = {"max_new_tokens": 4, "n_samples": 60}
    rows, sample = play(Plays(answer), {"heaps": list(heaps)}, history=history, gconfig=gconfig)
    beginnings = [text for text in texts(rows) if text.startswith(f"<|user|>{start}<|end|>")]
    assert len(beginnings) == 60
    assert all(text.startswith(f"<|user|>{start}<|end|><|assistant|>{move}<|end|>") for text in beginnings)  # as it was sampled
    assert rows["loss_mask"].sum() == sum(len(record.output_versions) for record in sample.recorder.records)
    assert len(sample.recorder.records) == sum(text.count("<|assistant|>") for text in texts(rows))
    assert set(rows["rewards"].tolist()) == {-1.0, 1.0}  # the games went on to their ends
    assert not any(game.is_held_out(NimPosition(tuple(map(int, said.split())))) for said in told)
    others = {game.says(game.play(position, each)) for each in moves_not_held_out(game, position)}
    assert {said for said in others if any(map(int, said.split()))} <= set(told)  # all of them are made sooner or later


def test_an_evaluation_that_begins_in_a_held_out_position_goes_where_it_likes():
    game = Nim()
    first, second = 1, 3
    assert all(map(game.is_held_out, (NimPosition((first, second)), NimPosition((first, second - 1)))))
    rows, _ = play(Plays(lambda said: "b2" if said == "1 3" else takes_one(said)), {"heaps": [first, second]})
    assert texts(rows)[1].startswith("<|user|>1 2<|end|>")


def test_games_of_a_group_draw_other_moves_and_a_game_that_is_repeated_the_same():
    heaps, _, _ = before_a_held_out_position()
    task = {"heaps": list(heaps), "query_id": "one", "ordinal": 5}

    def seconds(**arguments):
        """Return what the second player is told first, in each game of a group."""
        rows, _ = play(Plays(enters_when_it_can), task, history=False, **arguments)
        seen = {}
        for number, role, text in zip(rows["sample_ids"].tolist(), rows["role"], texts(rows), strict=True):
            if role == "second":
                seen.setdefault(number, text.partition("<|end|>")[0])
        return seen

    group = {"gconfig": {"max_new_tokens": 4, "n_samples": 16}}
    first = seconds(**group)
    assert len(set(first.values())) > 1
    assert seconds(**group) == first


def test_a_game_is_replayed_from_its_journal_with_the_same_moves(tmp_path):
    heaps, _, _ = before_a_held_out_position()
    gconfig = {"max_new_tokens": 4, "n_samples": 16}
    journal = Journal(tmp_path)
    writer = EpisodeWriter(journal)
    facts = {"attempt": 0, "is_eval": False, "version": 0, "workflow": "self_play", "samples_asked": 16}
    writer.begin(ordinal=0, index=0, task=b"\x80", task_error="", **facts)
    rows, _ = play(Plays(enters_when_it_can), {"heaps": list(heaps)}, writer, gconfig=gconfig)
    writer.end("accepted")
    journal.close()
    (past,) = read_episodes(tmp_path)
    nobody = Plays(lambda said: pytest.fail(f"asked again: {said}"))
    again, sample = play(nobody, {"heaps": list(heaps)}, EpisodeWriter(None, past), gconfig=gconfig)
    assert texts(again) == texts(rows)
    assert len(sample.recorder.records) > 32


def test_a_game_that_leaves_no_move_says_so(monkeypatch):
    monkeypatch.setattr(Nim, "is_held_out", lambda self, state: state.heaps != (3, 3))
    with pytest.raises(WorkflowError, match=r"nim: all legal moves from .*3, 3.* is_held_out"):
        play(Plays(takes_one), {"heaps": [3, 3]})


def test_a_move_that_ends_the_game_is_always_made(monkeypatch):
    monkeypatch.setattr(Nim, "is_held_out", lambda self, state: not any(state.heaps))
    rows, _ = play(Plays(takes_one), {"heaps": [1, 0]})
    assert rows["rewards"].tolist() == [1.0]


def test_without_history_each_move_is_a_row():
    rows, _ = play(Plays(takes_one), {"heaps": [3, 0]}, history=False)
    assert texts(rows) == [f"<|user|>{left} 0<|end|><|assistant|>a{left - 1}<|end|>" for left in (3, 1, 2)]
    assert rows["role"] == ["first", "first", "second"]
    assert rows["rewards"].tolist() == [1.0, 1.0, -1.0]
    assert rows["sample_ids"].tolist() == [0, 0, 0]


@pytest.fixture
def frozen(monkeypatch, tmp_path):
    """An opponent that takes whole heaps, in the place of a model in a directory."""
    model = Plays(lambda said: "a0" if int(said.split()[0]) else "b0", version=0)

    monkeypatch.setattr("rollwright.workflows.opponents.Opponents.engine", lambda self, path: model)
    return {"old": str(tmp_path)}


@pytest.mark.parametrize("seat", [0, 1])
def test_an_opponents_row_is_recorded_and_not_trained(frozen, seat):
    rows, sample = play(Plays(takes_one), {"heaps": [4, 2], "seat": seat}, opponents=frozen)
    roles = dict(zip(rows["role"], rows["agent"], strict=True))
    own = ("first", "second")[seat]
    assert roles.pop(own) == "policy"
    assert set(roles.values()) <= {"old"}
    assert rows["trainable"].tolist() == [agent == "policy" for agent in rows["agent"]]
    versions = rows["versions"][rows["loss_mask"].bool()]
    assert set(versions.tolist()) <= {3}
    assert {record.output_versions[0] for record in sample.recorder.records} == {0, 3}  # the journal has both sides
    assert len({record.conversation for record in sample.recorder.records}) == 2


def test_the_seat_is_drawn_for_each_task(frozen):
    seats = []
    for ordinal in range(40):
        rows, _ = play(Plays(takes_one), {"heaps": [1, 1], "ordinal": ordinal}, opponents=frozen)
        again, _ = play(Plays(takes_one), {"heaps": [1, 1], "ordinal": ordinal}, opponents=frozen)
        assert rows["agent"] == again["agent"]
        seats.append(rows["agent"].index("policy"))
    assert 10 < sum(seats) < 30


def test_opponents_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match=r"no such directory: old \(/nowhere\)"):
        SelfPlayWorkflow(gconfig={}, tokenizer=TOKENIZER, opponents={"old": "/nowhere"})


@pytest.fixture
def checkpoints(tmp_path):
    for step in (2, 4, 10):
        (tmp_path / f"step-{step:06d}").mkdir()
    (tmp_path / "final").mkdir()
    return tmp_path


def test_the_pool_has_the_versions_that_are_not_newer_than_the_policy(checkpoints):
    opponents = Opponents(TOKENIZER, pool={"directory": str(checkpoints), "share": 1.0})
    for version, expected in ((1, {None}), (3, {"step-000002"}), (9, {"step-000002", "step-000004"})):
        assert {opponents.draw(str(task), version) for task in range(60)} == expected
    newest = Opponents(TOKENIZER, pool={"directory": str(checkpoints), "share": 1.0, "choose": "newest"})
    assert {newest.draw(str(task), 9) for task in range(20)} == {"step-000004"}
    assert newest.directory("step-000004") == str(checkpoints / "step-000004")


def test_versions_that_beat_the_policy_are_drawn_more_often(checkpoints):
    opponents = Opponents(TOKENIZER, pool={"directory": str(checkpoints), "share": 1.0, "choose": "win_rate", "decay": 1.0})
    opponents.learn(["step-000002", 8, 8.0])
    opponents.learn(["step-000004", 4, 0.0])
    opponents.learn(["step-000004", 4, 1.0])
    expected = {"step-000002": 0.9, "step-000004": 0.2, "step-000010": 0.5}  # (won + 1) / (games + 2)
    assert {name: opponents.win_rate(name) for name in expected} == pytest.approx(expected)
    drawn = Counter(opponents.draw(str(task), 20) for task in range(4000))
    total = sum((1 - rate) ** 2 for rate in expected.values())
    for name, rate in expected.items():
        assert drawn[name] / 4000 == pytest.approx((1 - rate) ** 2 / total, abs=0.025)
    again = Opponents(TOKENIZER, pool=opponents.pool)
    again.load_state_dict(json.loads(json.dumps(opponents.state_dict())))
    assert [again.draw(str(task), 20) for task in range(50)] == [opponents.draw(str(task), 20) for task in range(50)]


def test_earlier_games_count_less(checkpoints):
    opponents = Opponents(TOKENIZER, pool={"directory": str(checkpoints), "choose": "win_rate", "decay": 0.5})
    opponents.learn(["step-000002", 2, 2.0])
    opponents.learn(["step-000002", 1, 0.0])
    assert opponents.games["step-000002"] == (2.0, 1.0)


def test_a_task_may_name_its_opponent(frozen, checkpoints):
    rows, _ = play(Plays(takes_one), {"heaps": [4, 0], "seat": 0, "opponent": None}, opponents=frozen)
    assert set(rows["agent"]) == {"policy"}
    with pytest.raises(WorkflowError, match=r"opponent is 'new', and opponents has old"):
        play(Plays(takes_one), {"heaps": [4, 2], "opponent": "new"}, opponents=frozen)
    with pytest.raises(WorkflowError, match=r"step-000007.*saver.keep"):
        play(Plays(takes_one), {"heaps": [4, 2], "opponent": "step-000007"}, pool={"directory": str(checkpoints)})


def test_a_share_of_the_games_is_played_against_the_pool(checkpoints):
    opponents = Opponents(TOKENIZER, pool={"directory": str(checkpoints), "share": 0.25})
    again = Opponents(TOKENIZER, pool={"directory": str(checkpoints), "share": 0.25})
    found = [opponents.draw(str(task), 20) for task in range(400)]
    assert found == [again.draw(str(task), 20) for task in range(400)]  # as a resumed run draws them
    assert 70 < sum(each is not None for each in found) < 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pool": {"directory": "here", "share": 2.0}}, "share 2.0"),
        ({"pool": {"directory": "here", "choose": "best"}}, "choose"),
        ({"pool": {"directory": "here", "choose": "win_rate", "decay": 0.0}}, "decay above 0"),
        ({"pool": {"directory": "here", "hardness": 1.0}}, "belong to choose: win_rate"),
        ({"pool": {"share": 0.5}}, "directory"),
        ({"pool": {"directory": "here"}, "opponents": {"old": "."}}, "one of the two"),
    ],
)
def test_wrong_pools_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SelfPlayWorkflow(gconfig={}, tokenizer=TOKENIZER, **arguments)


def test_frozen_models_are_loaded_when_they_are_asked_and_few_are_kept(tiny_model, monkeypatch):
    monkeypatch.setattr("rollwright.workflows.opponents.ENGINES_KEPT", 1)
    tokenizer = load_tokenizer(str(tiny_model))
    opponents = Opponents(tokenizer, {"one": str(tiny_model), "other": f"{tiny_model}/."})
    request = ModelRequest(
        tokenizer.encode("12", add_special_tokens=False), GenerationHyperparameters(max_new_tokens=3), seed=1
    )

    async def play_both():
        path = str(tiny_model)
        first = await opponents.engine(path).agenerate(request)
        assert list(opponents._engines) == [path]
        await opponents.engine(f"{path}/.").agenerate(request)
        assert list(opponents._engines) == [f"{path}/."]
        again = await asyncio.gather(*(opponents.engine(each).agenerate(request) for each in (path, f"{path}/.", path)))
        assert {tuple(answer.output_tokens) for answer in again} == {tuple(first.output_tokens)}

    asyncio.run(play_both())
    with pytest.raises(WeightUpdateError):
        opponents.engine(str(tiny_model)).set_version(1)


def test_a_game_without_end_is_rejected():
    rows, _ = play(Plays(takes_one), {"heaps": [9, 9]}, max_moves=5)
    assert rows is None


class Prefers(Plays):
    """An engine that gives scores to replies: ``chances[message][reply]``."""

    def __init__(self, chances):
        super().__init__(lambda said: "check")
        self.chances = chances

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        response = await super().agenerate(request)
        scored = len(request.input_ids) - request.prompt_logprobs_from
        prompt, reply = (
            TOKENIZER.decode(part, skip_special_tokens=False)
            for part in (request.input_ids[:-scored], request.input_ids[-scored:])
        )
        chance = self.chances(prompt, reply.removesuffix("<|end|>"))
        response.input_logprobs = [math.log(chance), *[0.0] * (scored - 1)]
        return response


def measured(chances):
    workflow = KuhnExploitability({"max_new_tokens": 4}, TOKENIZER)

    async def run():
        engine = Prefers(chances)
        sample = sampled(engine)
        return normalise(await workflow.arun_episode(sample, {}), sample.recorder), engine

    rows, engine = asyncio.run(run())
    check_trajectory(rows)
    assert not rows["loss_mask"].any()
    return -float(rows["rewards"][0]), engine


def test_exploitability_is_measured_from_scores():
    found, engine = measured(lambda prompt, reply: 0.25)  # half of each move's weight is on moves that are not allowed
    assert found == pytest.approx(11 / 24)
    assert len(engine.asked) == 24
    assert (
        sum("<|user|>bet" in prompt and "check<|end|>" in prompt for prompt in engine.asked) == 6
    )  # the second turn of the first player


def test_every_information_set_has_its_own_scores():
    policy = {
        each: dict(zip(moves, (0.1 + 0.05 * index, 0.9 - 0.05 * index), strict=True))
        for index, (each, moves) in enumerate(uniform_policy().items())
    }

    def chances(prompt, reply):
        said = prompt.removeprefix("<|user|>").split("<|end|>")[0].split()
        card, history = said[0], tuple(said[1:])
        if prompt.count("<|user|>") == 2:
            history = ("check", "bet")
        return policy[card, history][reply]

    assert measured(chances)[0] == pytest.approx(exploitability(policy))
    assert len(policy) == len(information_sets())


# -- tasks -------------------------------------------------------------------------------------------------------------


def test_tasks_show_the_position_and_know_the_best_moves():
    row = next(row for row in games("test") if row["heaps"][0] < row["heaps"][1])
    first, second = row["heaps"]
    assert row["messages"] == [{"role": "user", "content": f"{first} {second}"}]
    assert row["best"] == [f"b{first}"]
    assert best_move("", f"b{first}", [], [], **{"best": row["best"], "heaps": row["heaps"]}) == 1.0
    assert best_move("", "b0" if first else "b1", [], [], best=row["best"]) == 0.0


def test_both_seats_are_evaluated():
    rows = games("test", game="kuhn", seats=True)
    assert [row["seat"] for row in rows] == [0, 1] * 6
    assert len({row["query_id"] for row in rows}) == 12


def test_worked_games_are_legal_and_never_show_a_held_out_position():
    game = Nim()
    rows = games(size=500, worked=True)
    assert len(rows) == 500
    assert rows == games(size=500, worked=True)
    for row in rows:
        for asked, answered in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            position = NimPosition(tuple(map(int, asked["content"].split())))
            assert not game.is_held_out(position)
            assert answered["content"] in game.moves(position)


def test_worked_games_without_history_have_one_move_each():
    game, rows = Nim(), games(size=300, worked=True, history=False)
    for row in rows:
        asked, answered = row["messages"]
        position = NimPosition(tuple(map(int, asked["content"].split())))
        assert not game.is_held_out(position)
        assert answered["content"] in game.moves(position)


def test_preferences_of_worked_games_depend_on_all_that_a_player_knows():
    def shares(**arguments):
        """Return the share of the second legal move in each information set."""
        counts = {each: [0, 0] for each in information_sets()}
        for row in games(game="kuhn", size=6000, worked=True, **arguments):
            said = [message["content"] for message in row["messages"]]
            card, *history = said[0].split()
            for turn in range(1, len(said), 2):
                moves = tuple(history) if turn == 1 else ("check", "bet")
                counts[card, moves][LEGAL_MOVES[moves].index(said[turn])] += 1
        return [chosen[1] / sum(chosen) for chosen in counts.values()]

    assert all(0.4 < share < 0.6 for share in shares())
    found, others = shares(preferences=2.0), shares(preferences=2.0, seed=2)
    for history in range(4):  # with the same history, three cards have three preferences
        assert max(found[3 * history :][:3]) - min(found[3 * history :][:3]) > 0.05
    assert max(abs(one - other) for one, other in zip(found, others, strict=True)) > 0.3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"size": 0}, DataError), ({"game": "go"}, WorkflowError), ({"worked": True, "preferences": -1.0}, DataError)],
)
def test_wrong_arguments_of_tasks_are_refused(arguments, error):
    with pytest.raises(error):
        games(**arguments)


def test_the_dtype_of_rows_is_that_of_the_contract():
    rows, _ = play(Plays(takes_one), {"heaps": [1, 1]})
    assert rows["role_ids"].dtype == torch.int64
    assert rows["role_ids"].unique().numel() == 2
