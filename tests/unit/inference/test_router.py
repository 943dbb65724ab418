from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.errors import EngineError
from rollwright.inference.router import Router


def test_no_server_is_an_error_that_says_where_to_name_one():
    with pytest.raises(EngineError, match="ROLLWRIGHT_LLM_SERVER_ADDRS"):
        Router([])


def test_a_conversation_stays_and_new_ones_go_to_the_least_loaded():
    router = Router(["a:1", "b:1"])
    first = router.choose("one")
    second = router.choose("two")
    assert first is not second
    assert router.choose("one") is first
    assert first.load == 2
    assert router.choose("three") is second


def test_a_conversation_moves_when_its_server_is_taken_out_and_nobody_is_left_in_the_end():
    router = Router(["a:1", "b:1"])
    server = router.choose("one")
    router.take_out(server, "gone")
    router.take_out(server, "again")
    assert router.changes == 1
    other = router.choose("one")
    assert other is not server
    assert server.reason == "gone"
    router.take_out(other, "gone too")
    assert router.choose("one") is None
    assert "gone too" in router.describe()
    router.put_back(server)
    assert router.choose("new") is server


def test_the_longest_unused_conversation_is_forgotten():
    router = Router(["a:1"], max_conversations=2)
    for name in ("one", "two", "one", "three"):
        router.choose(name)
    assert list(router._server_of) == ["one", "three"]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["ask", "end", "out", "back"])), max_size=60))
def test_loads_count_leases_and_servers_that_are_out_get_none(events):
    router = Router([f"host:{port}" for port in range(1, 4)])
    leases: dict[str, list] = {}
    for number, event in events:
        server = router.servers[number % 3]
        if event == "ask":
            chosen = router.choose(str(number))
            if chosen is None:
                assert not router.in_service()
            else:
                assert chosen.in_service
                leases.setdefault(chosen.address, []).append(chosen)
        elif event == "end" and leases.get(server.address):
            router.give_back(leases[server.address].pop())
        elif event == "out":
            router.take_out(server, "test")
        elif event == "back":
            router.put_back(server)
        for each in router.servers:
            assert each.load == len(leases.get(each.address, []))
