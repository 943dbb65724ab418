"""Every service says in OpenAPI what it takes, and answers whatever schemathesis makes of that without a fault of its own.

A few cases of each operation; ``pytest --fuzz 1000`` tries many.
"""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from server_parts import tiny_engine
from services import service

#: It waits for a trainer to form a group with.
LEFT_OUT = "/init_weights_update_group"


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(context_length=24) as engine:
        yield engine


@pytest.mark.parametrize("kind", ["server", "retrieval", "front", "serve"])
def test_nothing_that_a_schema_allows_or_forbids_is_a_fault_of_the_server(kind, engine, pytestconfig):
    examples = pytestconfig.getoption("--fuzz")
    tried = set()
    with service(kind, engine) as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        schema.config.update(base_url=str(client.base_url))
        for found in schema.exclude(path=LEFT_OUT).get_all_operations():
            operation = found.ok()
            for mode in schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE:
                tried.add(operation.label)

                @settings(
                    max_examples=examples,
                    deadline=None,
                    database=None,
                    phases=[Phase.explicit, Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def ask(case):
                    if kind == "server":  # which a case before may have paused
                        for path in "/continue_generation", "/end_weight_update":
                            client.post(path)
                    response = case.call(headers=dict(client.headers), timeout=60)
                    case.validate_response(response, checks=[not_a_server_error])

                try:
                    ask()
                except Unsatisfiable:
                    assert mode is schemathesis.GenerationMode.NEGATIVE  # there is nothing to get wrong
        if kind == "server":
            client.post("/end_weight_update")
            client.post("/continue_generation")
            assert client.get("/health_generate").status_code == 200
    assert len(tried) > 2


@pytest.mark.parametrize("kind", ["server", "retrieval", "front", "serve"])
def test_a_schema_describes_every_body(kind, engine):
    with service(kind, engine) as client:
        document = client.get("/openapi.json").json()
        assert document["openapi"].startswith("3.")
        posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
        assert posts
        for path, operation in posts.items():
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            assert body["type"] == "object", path
            assert "4XX" in operation["responses"]
        assert httpx.get(client.base_url.join("/docs"), headers=client.headers, timeout=60).status_code == 404
