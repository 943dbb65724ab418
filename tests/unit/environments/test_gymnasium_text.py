"""Gymnasium's own environments in text."""

import pytest

from rollwright.data.datasets import DATASET_REGISTRY
from rollwright.environments.gymnasium_text import GymnasiumText, plain_rendering
from rollwright.errors import ConfigError, DataError, WorkflowError

gymnasium = pytest.importorskip("gymnasium")
MOVES = ["left", "down", "right", "up"]


def lake(seed=1, **arguments):
    kwargs = {"is_slippery": False, "render_mode": "ansi", "desc": ["SFF", "FHF", "FFG"], **arguments.pop("kwargs", {})}
    return GymnasiumText(seed, "FrozenLake-v1", kwargs, **{"action_names": MOVES, **arguments})


def test_a_rendering_and_named_moves():
    environment = lake()
    assert environment.observation() == "[S]FF\nFHF\nFFG"
    assert environment.instructions == "Answer with one of: left, down, right, up."
    result = environment.step("I go right, not left: Down.")  # the last one counts
    assert result.observation.endswith("SFF\n[F]HF\nFFG")
    assert (result.reward, result.done, result.info["valid"]) == (0.0, False, True)
    for move in ("down", "right"):
        environment.step(move)
    result = environment.step("right")
    assert (result.reward, result.done) == (1.0, True)
    assert environment.step("right").info == {"valid": False, "reason": "The episode is over."}


@pytest.mark.parametrize("reply", ["", "north", "upright", "download", "leftright"])
def test_a_reply_without_a_move_changes_nothing(reply):
    environment = lake()
    before = environment.observation()
    result = environment.step(reply)
    assert result == (before, 0.0, False, {"valid": False, "reason": "Answer with one of: left, down, right, up."})


def test_numbers_and_their_range():
    environment = lake(action_names=None)
    assert environment.instructions == "Answer with a number from 0 to 3."
    assert environment.step("The 4 ways, so 1").info["valid"]
    for reply in ("4", "-1", "1.5", "none", "9" * 5000):
        assert not environment.step(reply).info["valid"]


def test_the_time_limit_is_told_apart_from_the_end():
    environment = lake(kwargs={"max_episode_steps": 1})
    result = environment.step("left")
    assert result.done
    assert result.info["truncated"]


def test_a_seed_deals_the_same_cards():
    hands = [GymnasiumText(seed, "Blackjack-v1").observation() for seed in (3, 3, *range(20))]
    assert hands[0] == hands[1]
    assert len(set(hands)) > 5
    assert len(hands[0].split(", ")) == 3


def test_masked_actions_are_not_possible():
    environment = GymnasiumText(3, "Taxi-v4", {"render_mode": "ansi"})
    possible = environment._info["action_mask"]
    forbidden = possible.tolist().index(0)
    assert environment.step(str(forbidden)).info == {"valid": False, "reason": "This action is not possible now."}
    assert environment.step(str(possible.tolist().index(1))).info["valid"]
    assert "\x1b" not in environment.observation()


def test_own_functions_and_text_spaces():
    class Echo(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,))
        action_space = gymnasium.spaces.Text(4, charset="ab")

        def reset(self, *, seed=None, options=None):
            return [0.0, 0.5], {}

        def step(self, action):
            return [1.0, len(action)], 0.5, action == "ab", False, {}

    gymnasium.register("Echo-v0", entry_point=Echo, disable_env_checker=True)
    with pytest.raises(ConfigError, match="no default text"):
        GymnasiumText(1, "Echo-v0")
    environment = GymnasiumText(1, "Echo-v0", observation=lambda seen, _: f"{seen[0]:.0f}")
    assert environment.observation() == "0"
    assert environment.instructions == "Answer with 1 to 4 characters of 'ab'."
    assert not environment.step("abc").info["valid"]
    assert environment.step(" ab\n")[:3] == ("1", 0.5, True)
    shouted = GymnasiumText(1, "Echo-v0", observation=lambda seen, _: "", action=lambda reply, _: reply.lower())
    assert shouted.step("AB").done
    with pytest.raises(WorkflowError, match="became False, a bool"):
        GymnasiumText(1, "Echo-v0", observation="operator.is_").observation()


def test_what_cannot_be_made_is_named():
    with pytest.raises(ConfigError, match=r"gymnasium.make\('NoLake-v1', …\) failed"):
        GymnasiumText(1, "NoLake-v1")
    with pytest.raises(ConfigError, match="slipery"):
        GymnasiumText(1, "FrozenLake-v1", {"slipery": False})
    with pytest.raises(ConfigError, match="has 2 names"):
        lake(action_names=["left", "right"])
    with pytest.raises(ConfigError, match="takes actions of Box"):
        GymnasiumText(1, "Pendulum-v1", observation=lambda seen, _: str(seen))


def test_a_restored_environment_goes_on_identically():
    environment = GymnasiumText(5, "FrozenLake-v1", {"render_mode": "ansi", "is_slippery": True}, action_names=MOVES)
    environment.step("right")
    there = environment.snapshot()
    moves = ["right", "down", "left", "down", "right", "up"] * 2
    first = [environment.step(move) for move in moves]
    other = GymnasiumText(6, "FrozenLake-v1", {"render_mode": "ansi", "is_slippery": True}, action_names=MOVES)
    for one in (environment, other):  # the same snapshot twice, into another one, too
        one.restore(there)
        assert [one.step(move) for move in moves] == first


def test_what_cannot_be_copied_has_no_snapshot():
    environment = lake()
    environment.environment.unwrapped.handle = (number for number in range(3))
    with pytest.raises(WorkflowError, match="cannot be copied"):
        environment.snapshot()


def test_colours_become_marks():
    assert plain_rendering("\n\x1b[41mS\x1b[0mF \x1b[34;1mB\x1b[0m\n") == "[S]F (B)"


def test_splits_never_share_a_seed():
    drawn = {split: DATASET_REGISTRY.rows("seeds", split, size=300) for split in ("train", "valid", "test")}
    numbers = [row["seed"] for rows in drawn.values() for row in rows]
    assert len(set(numbers)) == 900
    assert drawn["test"] == DATASET_REGISTRY.rows("seeds", "test", size=300)
    assert drawn["test"] != DATASET_REGISTRY.rows("seeds", "test", size=300, seed=2)
    with pytest.raises(DataError, match="no split 'dev'"):
        DATASET_REGISTRY.rows("seeds", "dev")
