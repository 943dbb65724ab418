"""The service answers what it does not know in the form of its other errors."""

from fastapi.testclient import TestClient

from rollwright.inference.server.settings import ServiceSettings
from rollwright.trainers.modes.serve import application


def test_a_path_or_method_that_nothing_answers_says_what_there_is():
    key = {"Authorization": "Bearer key"}
    client = TestClient(application(None, ServiceSettings(api_key="key")), "http://127.0.0.1", headers=key)  # type: ignore[arg-type]
    for method, path, status, said in (
        ("POST", "/v1/chat/completions", 400, "/v1/chat/completions is not served: an agent talks to the base_url of its run"),
        ("POST", "/elsewhere", 404, "There is no /elsewhere here; there are /feedback, /runs, /status."),
        ("GET", "/runs", 405, "/runs takes POST, not GET."),
    ):
        answer = client.request(method, path, json={})
        assert answer.status_code == status
        assert answer.json()["error"]["message"].startswith(said)
