import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rollwright.environments.retrieval import RetrievalClient, ToolError
from tests.unit.environments.tiny_encoder import save_tiny_encoder

WIKI_QA = Path(__file__).resolve().parents[3] / "shared" / "data" / "wiki_qa"
SERVE = "import typer; from rollwright.cli.serve import retrieve; typer.run(retrieve)"


def start(*arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    if not line:
        process.wait()
        return process, process.stderr.read()
    return process, line.split(" at ")[1].split()[0]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rows = [
        {"id": "0", "title": "Balo", "contents": "Balo was born in Tufeno.", "url": "http://x/balo"},
        {"id": "1", "title": "Tufeno", "contents": "Tufeno lies on the river Maliku.", "url": "http://x/tufeno"},
        {"id": "2", "contents": "A row without a title or address."},
    ]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process, address = start("--corpus", folder / "corpus.jsonl", "--port", 0)
    yield address
    process.terminate()
    process.wait(60)


def post(address, path, **options):
    return httpx.post(address + path, timeout=120, **options)


def test_retrieve_gives_documents_as_they_are_with_both_titles(service):
    response = post(
        service, "/retrieve", json={"queries": ["where was Balo born", "river Maliku"], "topk": 1, "return_scores": False}
    )
    assert response.json() == {
        "result": [
            [
                {
                    "id": "0",
                    "title": "Balo",
                    "contents": "Balo was born in Tufeno.",
                    "url": "http://x/balo",
                    "wikipedia_title": "Balo",
                }
            ],
            [
                {
                    "id": "1",
                    "title": "Tufeno",
                    "contents": "Tufeno lies on the river Maliku.",
                    "url": "http://x/tufeno",
                    "wikipedia_title": "Tufeno",
                }
            ],
        ]
    }


def test_scores_default_topk_and_no_match(service):
    first, none = post(
        service, "/retrieve", json={"queries": ["Tufeno row", "qqq"], "topk": None, "return_scores": True}
    ).json()["result"]
    assert [set(item) for item in first] == [{"document", "score"}] * 3
    assert first[0]["score"] >= first[1]["score"] >= first[2]["score"] > 0
    assert none == []
    assert post(service, "/retrieve", json={"queries": []}).json() == {"result": []}


@pytest.mark.parametrize("retriever", ["dense", "hybrid"])
def test_the_same_api_with_an_encoder(tmp_path, retriever):
    encoder = save_tiny_encoder(tmp_path / "encoder")
    rows = [{"title": "Mug", "contents": "a cup with a handle"}, {"title": "King", "contents": "of the old town"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--encoder", encoder, "--encoder-style", "e5", "--max-tokens", 32, "--retriever", retriever]
    process, address = start("--corpus", tmp_path / "c.jsonl", "--port", 0, *options)
    try:
        body = {"queries": ["king of the old town", "zzz"], "topk": 1, "return_scores": True}
        [[king], unknown] = post(address, "/retrieve", json=body).json()["result"]
        assert king["document"] == {**rows[1], "wikipedia_title": "King"}
        assert 0 < king["score"] <= 1
        assert len(unknown) == 1  # every document matches, even if no word does
        assert retriever in httpx.get(address + "/health", timeout=120).json()["retriever"]
    finally:
        process.terminate()
        process.wait(60)


def test_an_encoder_that_is_not_there_stops_the_start(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"contents": "a"}\n')
    process, error = start("--corpus", tmp_path / "c.jsonl", "--encoder", tmp_path / "none", "--encoder-style", "e5")
    assert process.returncode != 0
    assert "There is no encoder in" in error
    assert "hf download" in error


def test_access(service):
    response = post(service, "/access", json={"urls": ["http://x/balo", "http://nowhere"]})
    assert response.json() == {"result": [{"url": "http://x/balo", "contents": "Balo was born in Tufeno."}, None]}


def test_the_name_localhost_reaches_it(service):
    assert httpx.get(service.replace("127.0.0.1", "localhost") + "/health", timeout=120).json()["documents"] == 3


@pytest.mark.parametrize(
    ("path", "content", "status", "message"),
    [
        ("/retrieve", b"{oops", 400, "not JSON"),
        ("/retrieve", b'{"queries": ["a"], "top_k": 3}', 400, "Unknown parameter 'top_k'; known are queries"),
        ("/retrieve", b'{"queries": ["a"], "topk": 100000}', 400, "between 1 and 100"),
        ("/retrieve", b'{"queries": ["a"], "topk": 0}', 400, "between 1 and 100"),
        ("/retrieve", b'{"queries": "a"}', 400, "queries='a'; it has to be a list"),
        ("/retrieve", b"{}", 400, "queries is missing"),
        ("/access", b'{"urls": [1]}', 400, "urls=[1]"),
        ("/retrieve", b'{"queries": ["' + b"a" * 5000 + b'"]}', 400, "4096"),
        ("/retrieve", b" " * (9 << 20), 413, "send less"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(service, path, content, status, message):
    response = post(service, path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_unknown_paths_and_methods_are_told_in_the_same_form(service):
    unknown = post(service, "/search", json={})
    assert unknown.status_code == 404
    assert "there are /access, /health, /retrieve" in unknown.json()["error"]["message"]
    wrong = httpx.get(service + "/retrieve", timeout=120)
    assert wrong.status_code == 405
    assert "/retrieve takes POST, not GET" in wrong.json()["error"]["message"]


async def test_a_search_that_fails_is_a_500_that_says_so():
    from rollwright.environments.corpus import Corpus
    from rollwright.environments.retrieval_service import create_app
    from rollwright.inference.server.settings import ServiceSettings

    class Broken:
        name = "broken"

        def search(self, queries, topk):
            raise MemoryError("index is gone")

    app = create_app(Corpus.from_rows([{"contents": "a"}]), Broken(), ServiceSettings())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        response = await client.post("/retrieve", json={"queries": ["a"]})
    assert response.status_code == 500
    assert "MemoryError: index is gone" in response.json()["error"]["message"]


async def test_many_clients_at_once_get_their_own_answers(service):
    async with httpx.AsyncClient(base_url=service, timeout=120) as client:
        queries = ["Balo", "Tufeno", "Maliku", "title"] * 50
        answers = await asyncio.gather(*[client.post("/retrieve", json={"queries": [query], "topk": 1}) for query in queries])
    ids = [answer.json()["result"][0][0]["id"] for answer in answers]
    assert ids[4:8] == ids[:4]
    assert ids[0] == "0" or ids[0] == "1"
    assert ids[2:4] == ["1", "2"]


async def test_the_client_turns_refusals_into_tool_errors(service):
    client = RetrievalClient(service)
    assert (await client.search("Maliku", 1))[0]["wikipedia_title"] == "Tufeno"
    assert (await client.access("http://x/tufeno"))["contents"].startswith("Tufeno lies")
    with pytest.raises(ToolError, match="between 1 and 100"):
        await client.search("Maliku", 1000)
    with pytest.raises(ToolError, match="did not answer"):
        await RetrievalClient("127.0.0.1:9").search("x", 1)


def test_an_unreadable_corpus_stops_the_start_and_names_file_and_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"contents": "a"}\n{"contents": }\n')
    process, output = start("--corpus", tmp_path / "bad.jsonl", "--port", 0)
    assert process.returncode != 0
    assert "bad.jsonl, line 2" in output.replace("\n", "").replace("│", "")


def test_a_key_is_needed_beyond_this_machine(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"contents": "a"}\n')
    process, output = start("--corpus", tmp_path / "c.jsonl", "--port", 0, "--host", "0.0.0.0")
    assert process.returncode != 0
    assert "--api-key" in output
    process, address = start("--corpus", tmp_path / "c.jsonl", "--port", 0, "--api-key", "secret")
    try:
        assert post(address, "/retrieve", json={"queries": ["a"]}).status_code == 401
        accepted = post(address, "/retrieve", json={"queries": ["a"]}, headers={"Authorization": "Bearer secret"})
        assert accepted.status_code == 200
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.skipif(not WIKI_QA.exists(), reason="needs ../shared/data/wiki_qa")
def test_recall_of_the_answers_passage_on_real_questions(tmp_path, record_property):
    process, address = start("--corpus", WIKI_QA / "corpus.jsonl", "--port", 0, "--index-dir", tmp_path)
    try:
        rows = [json.loads(line) for name in ("train", "valid") for line in (WIKI_QA / f"{name}.jsonl").open()]
        result = []
        for start_row in range(0, len(rows), 200):
            queries = [row["question"] for row in rows[start_row : start_row + 200]]
            result += post(address, "/retrieve", json={"queries": queries, "topk": 3}).json()["result"]
    finally:
        process.terminate()
        process.wait(60)
    found = [
        any(document["id"] == row["passage_id"] for document in documents) for row, documents in zip(rows, result, strict=True)
    ]
    recall = sum(found) / len(found)
    record_property("recall_at_3", recall)
    print(f"recall@3 of the answer's passage: {recall:.3f} on {len(rows)} questions")
    assert recall > 0.92
