from __future__ import annotations

from typing import Any

import pytest
from ranks_runs import GRPO, write_parts

_clusters: list[Any] = []  # of Ray, that run


@pytest.fixture
def grpo(tmp_path, tiny_model):
    """Writes the config of a GRPO run; returns its directory."""
    write_parts(tmp_path)
    (tmp_path / "grpo.yaml").write_text(GRPO.format(root=tmp_path / "runs", model=tiny_model))
    return tmp_path


@pytest.fixture(scope="session")
def cluster():
    """A Ray with a head and two nodes, as processes of this machine; its address. It ends with the tests of this directory."""
    from ray.cluster_utils import Cluster

    # Loopback, and not 127.0.0.1, in whose place Ray puts the machine's address where it joins a cluster.
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    )
    _clusters.append(made)
    for number in (3, 4):
        made.add_node(num_cpus=3, node_ip_address=f"127.0.0.{number}")
    return made.address


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if _clusters and (nextitem is None or nextitem.path.parent != item.path.parent):
        _clusters.pop().shutdown()
