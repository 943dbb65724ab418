import functools
import json
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.data.tokenizer import build_word_tokenizer
from rollwright.environments.shop import make_catalogue, parse_shop_action
from rollwright.environments.shop.catalogue import Goal, Product
from rollwright.environments.shop.shop import WebShopPackageSession, purchase_reward, shop, type_score
from rollwright.environments.shop.tasks import tasks, vocabulary, worked_steps
from rollwright.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def place():
    return shop(1, 200, 60, 5)


def product(kind="mug", aisle="kitchen", department="home", title="acorn steel light mug", price=20.0):
    options = {"color": ("red", "blue"), "size": ("small", "large")}
    return Product("b1", title, kind, (department, aisle, kind), ("steel", "light"), options, price, "a mug.", (), ())


def test_a_seed_makes_the_same_catalogue():
    assert make_catalogue(3, 50, 20) == make_catalogue(3, 50, 20)
    assert make_catalogue(3, 50, 20).products != make_catalogue(4, 50, 20).products


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("search[Red Mug]", ("search", "red mug")),
        (" Click[Buy Now] ", ("click", "buy now")),
        ("click[a[b]]", ("click", "a[b]")),
        ("search[]", None),
        ("buy[mug]", None),
        ("search red", None),
        ("", None),
    ],
)
def test_actions(text, parsed):
    assert parse_shop_action(text) == parsed


def test_the_reward_counts_attributes_options_and_price():
    goal = Goal("", product(), ("steel", "light"), {"color": "red", "size": "large"}, 30.0)
    assert purchase_reward(product(), {"color": "red", "size": "large"}, goal) == 1.0
    assert purchase_reward(product(), {"color": "blue"}, goal) == pytest.approx(3 / 5)
    assert purchase_reward(product(price=31), {"color": "red", "size": "large"}, goal) == pytest.approx(4 / 5)
    assert purchase_reward(product(), {"color": "red", "size": "large", "extra": "red"}, goal) == 1.0  # never above 1


def test_the_type_scales_the_reward():
    mug = product()
    assert type_score(product(title="x"), mug) == 1.0
    assert type_score(product("kettle", title="dune steel kettle"), mug) == 0.5
    assert type_score(product("kettle", title="dune wool kettle"), mug) == 0.1
    assert type_score(product("tent", "camping", "outdoors", "dune steel tent"), mug) == 0.1
    assert type_score(product("tent", "camping", "outdoors", "dune wool tent"), mug) == 0.0


def test_from_search_to_purchase(place):
    session = place.session(3)
    assert session.get_available_actions() == {"has_search_bar": True, "clickables": ["search"]}
    assert session.observation() == f"Instruction: {session.goal.instruction} [SEP] Search"
    result = session.step(f"search[{session.goal.product.title}]")
    assert result[1:3] == (0.0, False)
    actions = session.get_available_actions()
    assert not actions["has_search_bar"]
    assert actions["clickables"][:2] == ["back to search", "next >"]
    wanted = session.goal.product
    assert wanted.id in actions["clickables"]
    session.step(f"click[{wanted.id.upper()}]")
    assert set(session.get_available_actions()["clickables"]) == {
        "back to search", "< prev", "description", "features", "reviews", "buy now", *functools.reduce(operator.iadd, map(list, wanted.options.values()), []),
    }  # fmt: skip
    session.step("click[Description]")
    assert wanted.description in session.observation()
    session.step("click[< Prev]")
    for value in session.goal.options.values():
        session.step(f"click[{value}]")
    result = session.step("click[Buy Now]")
    assert (result.reward, result.done) == (1.0, True)
    assert session.step("search[mug]").info == {"valid": False}


def test_an_action_that_is_not_available_changes_nothing(place):
    session = place.session(0)
    for action in ("click[buy now]", "click[search]", "nonsense", "click[b9999]"):
        before = session.observation()
        result = session.step(action)
        assert result == (before, 0.0, False, {"valid": False})
    session.step("search[mug]")
    assert session.step("search[tent]").info == {"valid": False}


def test_result_pages(place):
    session = place.session(0)
    session.step("search[steel]")
    seen, pages = [], 0
    while True:
        pages += 1
        clickables = session.get_available_actions()["clickables"]
        seen += [name for name in clickables if place.catalogue.product(name)]
        if "next >" not in clickables:
            break
        session.step("click[next >]")
    assert len(seen) == len(set(seen)) <= 50
    assert pages == -(-len(seen) // 5)
    session.step("click[< prev]")
    assert f"Page {pages - 1} of {pages}" in session.observation()
    assert session.step("search[zzz]").info == {"valid": False}
    session.step("click[back to search]")
    session.step("search[zzz]")
    assert "Page 1 of 1, 0 results" in session.observation()


def test_the_rich_form_marks_buttons(place):
    session = place.session(1, rich=True)
    session.step(f"search[{session.goal.product.title}]")
    assert f"[button] {session.goal.product.id} [button_]" in session.observation()
    session.step(f"click[{session.goal.product.id}]")
    [color] = [value for name, value in session.goal.options.items() if name == "color"]
    session.step(f"click[{color}]")
    assert f"[clicked button] {color} [clicked button_]" in session.observation()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 59),
    st.lists(st.integers(0, 30), min_size=1, max_size=25),
    st.sampled_from(["mug", "steel", "qqq", "red hat"]),
)
def test_any_walk_stays_within_the_rules(goal_id, choices, query):
    place = shop(1, 200, 60, 5)
    session = place.session(goal_id)
    for choice in choices:
        actions = session.get_available_actions()
        targets = [f"click[{name}]" for name in actions["clickables"] if name != "search"]
        if actions["has_search_bar"]:
            targets.append(f"search[{query}]")
        result = session.step(targets[choice % len(targets)])
        assert result.info["valid"]
        assert 0.0 <= result.reward <= 1.0
        assert result.reward == 0.0 or result.done
        if result.done:
            return


def test_the_clerk_earns_nearly_everything_in_few_tokens(place):
    rewards = []
    for session_id in range(40):
        session = place.session(session_id)
        for observation, action in worked_steps(place, session_id):
            assert observation == session.observation()
            result = session.step(action)
        rewards.append(result.reward)
    assert sum(rewards) / len(rewards) > 0.9
    tokenizer = build_word_tokenizer(vocabulary())
    lengths = []
    for row in tasks("train", 20, 1, 200, 60, 5, worked=True):
        text = "".join(part["text"] for part in row["segments"])
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        lengths.append(len(ids))
    assert max(lengths) < 400


def test_a_careless_clerk_acts_as_the_shop_allows_and_earns_little(place):
    rewards = []
    for session_id in range(40):
        session = place.session(session_id)
        steps = worked_steps(place, session_id, careless=0.75)
        assert steps == worked_steps(place, session_id, careless=0.75)
        for observation, action in steps:
            assert observation == session.observation()
            result = session.step(action)
            assert result.info["valid"]
        assert result.done
        rewards.append(result.reward)
    assert 0.0 < sum(rewards) / len(rewards) < 0.4
    assert worked_steps(place, 0, careless=0.0) == worked_steps(place, 0)


def test_worked_visits_train_on_actions_and_where_asked_on_pages():
    actions, everything = (tasks("train", 1, 1, 200, 60, 5, worked=True, pages=pages)[0]["segments"] for pages in (False, True))
    assert [part["text"] for part in actions] == [part["text"] for part in everything]
    assert [part["train"] for part in actions] == [False, True] * (len(actions) // 2)
    assert all(part["train"] for part in everything)


def test_splits_share_no_session():
    split = {name: {row["session_id"] for row in tasks(name, None, 1, 200, 60, 5)} for name in ("train", "valid", "test")}
    assert [len(ids) for ids in split.values()] == [48, 6, 6]
    assert len(set.union(*split.values())) == 60
    with pytest.raises(DataError, match="it has 6"):
        tasks("valid", 7, 1, 200, 60, 5)
    with pytest.raises(DataError, match="goals 0 to 59"):
        shop(1, 200, 60, 5).session(60)


def test_the_adapter_speaks_the_same_interface_and_says_what_is_missing():
    class Environment:
        observation = "page"

        def reset(self, session):
            self.session = session

        def get_available_actions(self):
            return {"has_search_bar": True, "clickables": ["search"]}

        def step(self, action):
            return f"after {action}", 1, True, None

    session = WebShopPackageSession(7, environment=Environment())
    assert session.environment.session == 7
    assert session.step("search[a]") == ("after search[a]", 1.0, True, {})
    with pytest.raises(ConfigError, match="cannot be imported"):
        WebShopPackageSession(7)


def test_a_restored_visit_goes_on_identically(place):
    session_id = 3
    actions = [action for _, action in worked_steps(place, session_id)]
    actions[1:1] = ["click[Next >]", "click[back to search]", actions[0], "nonsense"]
    for moment in range(len(actions)):
        session = place.session(session_id)
        for action in actions[:moment]:
            session.step(action)
        there = json.loads(json.dumps(session.snapshot()))
        first = [session.step(action) for action in actions[moment:]]
        for again in (session, place.session(session_id)):
            again.restore(there)
            assert again.snapshot() == there
            assert [again.step(action) for action in actions[moment:]] == first
    assert first[-1].done
