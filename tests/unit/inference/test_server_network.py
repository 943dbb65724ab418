from __future__ import annotations

import socket

import pytest

from rollwright.errors import ConfigError
from rollwright.inference.network import find_free_ports, find_server_addresses, is_loopback, own_address, server_url


def test_free_ports_differ_and_can_be_bound():
    ports = find_free_ports(20)
    assert len(set(ports)) == 20
    for port in ports[:3]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_free_ports_leave_out_those_excluded_and_those_taken():
    with socket.socket() as listener:
        listener.bind(("", 0))
        taken = listener.getsockname()[1]
        free = find_free_ports(1, (taken, taken + 50), exclude=[taken + 1])
        assert free[0] not in (taken, taken + 1)
        with pytest.raises(ConfigError, match="wider port_range"):
            find_free_ports(1, (taken, taken))


def test_addresses_come_from_the_config_before_the_environment(monkeypatch):
    monkeypatch.delenv("ROLLWRIGHT_LLM_SERVER_ADDRS", raising=False)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "127.0.0.1:1, 127.0.0.1:2,127.0.0.1:1")
    assert find_server_addresses(["host:9"]) == ["host:9"]
    assert find_server_addresses() == ["127.0.0.1:1", "127.0.0.1:2"]
    monkeypatch.setenv("ROLLWRIGHT_LLM_SERVER_ADDRS", "other:3")
    assert find_server_addresses() == ["other:3"]


@pytest.mark.parametrize("wrong", ["host", "host:port", ":80"])
def test_a_malformed_address_is_refused_by_name(monkeypatch, wrong):
    monkeypatch.setenv("ROLLWRIGHT_LLM_SERVER_ADDRS", wrong)
    with pytest.raises(ConfigError, match="host:port"):
        find_server_addresses()


def test_urls_and_loopback():
    assert server_url("localhost:80") == "http://localhost:80"
    assert server_url("https://engine.example/v/") == "https://engine.example/v"
    assert is_loopback("http://127.0.0.1:1")
    assert is_loopback("http://[::1]:1")
    assert not is_loopback("http://10.0.0.1:1")
    assert own_address(["http://127.0.0.1:5", "http://localhost:6"]) == "127.0.0.1"
