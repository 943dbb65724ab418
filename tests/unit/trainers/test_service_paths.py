"""The service answers what it does not know in the form of its other errors."""

from fastapi.testclient import TestClient

from rollwright.trainers.serve import application


def test_a_path_or_method_that_nothing_answers_says_what_there_is():
    client = TestClient(application(None, "key"))  # type: ignore[arg-type]
    for method, path, status in (("POST", "/v1/chat/completions", 404), ("GET", "/runs", 405)):
        answer = client.request(method, path)
        assert answer.status_code == status
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{method} {path}: ")
        assert "POST /runs, POST /feedback and GET /status" in message
        assert "base_url of its run" in message
