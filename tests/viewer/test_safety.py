"""What a run holds is hostile; other pages, other hosts and other machines get nothing."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from viewed_runs import serve
from written_runs import RUN, VIEWS, WrittenRun

ESCAPE = "\x1b[31mred\x1b]0;title\x07"
HOSTILE = [
    "<script>window.hacked = 1; alert(1)</script><img src=x onerror='window.hacked = 1'>",
    ESCAPE + "‮evil‬ zero​width",
    "x" * 1_000_000,
    b"\xff\xfe\xed\xa0\x80 broken \xc3 \x00 bytes",
    "</pre></section><style>*{display:none}</style><a href='javascript:alert(1)'>",
    '<tool_call>\n{"name": "</script><script>alert(2)</script>", "arguments": {"a": "<img src=https://example.com/x>"}}\n</tool_call>',
    "'\"><svg onload=alert(1)> {{ 7 * 7 }} {% raw %} =cmd()",
]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A viewer of a run whose model says what harms, and whose journal has a torn tail."""
    root = tmp_path_factory.mktemp("hostile")
    run = WrittenRun(root / "hostile" / "run", said=lambda ordinal, index: HOSTILE[(ordinal * 4 + index) % len(HOSTILE)])
    run.write_step(2)
    run.close()
    (journal,) = (run.path / "journal").glob("*.journal")
    with journal.open("ab") as file:
        file.write(b"\x40\x00\x00\x00torn")
    served = serve([root])
    yield served
    served.stop()


def test_a_hostile_run_is_shown_and_does_nothing(watched, hostile):
    tab = watched(origin=hostile.url)
    run = "/run/hostile~run"
    views = [(number, view) for number in range(len(HOSTILE)) for view in ("chat", "tokens")]
    for number, view in [*views, (2, "table"), (3, "table"), (2, "requests")]:
        assert tab.visit(f"{run}/sample/{number // 4}/{number % 4}?view={view}").status == 200
        assert tab.page.evaluate("window.hacked") is None
        assert tab.page.locator("#main script, #main style, [onerror], [onload], a[href^='javascript']").count() == 0
        text = tab.page.locator("#main").inner_text()
        assert not any(character in text for character in "\x1b\x07\u202e\u200b\x00")
    assert tab.visit(f"{run}/group/0").status == 200
    tab.visit(f"{run}/search?text=script")
    assert tab.page.locator("mark").count() > 0
    for address in (
        run,
        f"{run}/steps",
        f"{run}/step/1",
        f"{run}/search?regex=1&text=<s.*>",
        f"{run}/timeline",
        f"{run}/weights",
    ):
        assert tab.visit(address).status == 200
    assert tab.page.evaluate("window.hacked") is None


def test_a_table_program_takes_no_text_for_a_formula(hostile):
    text = httpx.get(f"{hostile.url}/run/hostile~run/search?format=csv").text
    assert "\n=" not in text
    assert ",=" not in text


def test_nothing_inline_and_nothing_foreign_is_allowed(viewer):
    for address in VIEWS.values():
        answer = httpx.get(viewer.url + address)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        for forbidden in (" style=", " onclick=", "<style", "javascript:", "<script>", "http://", "https://"):
            assert forbidden not in answer.text, (address, forbidden)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "localhost"}, 200),
    ],
)
def test_other_names_and_other_pages_are_refused(viewer, headers, status):
    assert httpx.get(viewer.url + "/", headers=headers).status_code == status


def test_it_only_shows(viewer):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert httpx.request(method, viewer.url + RUN).status_code == 405


@pytest.mark.parametrize(
    "address",
    [
        "/run/..~..~etc",
        "/run/%2Fetc",
        "/run/~etc~passwd",
        "/static/../server.py",
        "/static/%2e%2e%2fserver.py",
        f"{RUN}/sample/..%2f..%2frun.json",
        f"{RUN}/group/../../../etc/passwd",
        f"{RUN}/step/99",
        f"{RUN}/sample/999/9",
    ],
)
def test_no_address_leads_out_of_a_run(viewer, address):
    answer = httpx.get(viewer.url + address)
    assert answer.status_code in (404, 422)
    assert "root:" not in answer.text


def test_elsewhere_than_on_this_machine_a_token_is_asked_for(runs):
    from rollwright.inference.server.service import ServerThread
    from rollwright.viewer.server import first_page, make_app, settings_of

    settings = settings_of("0.0.0.0", 0)
    app = make_app([runs], settings)
    server = ServerThread(app, settings)
    address = f"http://127.0.0.1:{settings.port}"
    try:
        assert httpx.get(address + "/").status_code == 401
        assert httpx.get(address + "/?token=wrong").status_code == 401
        with httpx.Client(follow_redirects=True) as client:
            answer = client.get(address + first_page(app, settings))
            assert answer.status_code == 200
            assert "token" not in str(answer.url)  # it is in no history
            assert client.get(address + RUN).status_code == 200  # the cookie has it
        assert len(settings.api_key or "") >= 32
    finally:
        server.stop()


def test_the_first_page_loads_no_torch(runs):
    program = (
        "import sys\n"
        "from starlette.testclient import TestClient\n"
        "from rollwright.viewer.server import make_app\n"
        f"client = TestClient(make_app([{str(runs)!r}]), base_url='http://localhost')\n"
        f"for address in ('/', {RUN!r}, {VIEWS['tokens']!r}): assert client.get(address).status_code == 200, address\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch is loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_report_is_one_file_that_needs_nothing_else(watched, viewer, runs, tmp_path):
    from rollwright.viewer.report import write_report

    file = write_report([runs / "sums" / "first"], tmp_path / "report.html", 6)
    tab = watched(origin="file:")
    tab.page.goto(file.as_uri())
    tab.page.wait_for_selector("canvas")
    assert tab.page.locator("details.card:not([data-group])").count() == 7  # the samples, and the config
    tab.page.locator("details.card:has(.tokens) > summary").first.click()
    assert tab.page.locator(".tokens .t").first.is_visible()


def test_a_report_of_several_runs_is_refused(runs, tmp_path):
    from rollwright.errors import ConfigError
    from rollwright.viewer.report import write_report

    with pytest.raises(ConfigError, match="there are 2"):
        write_report([runs], tmp_path / "report.html")


def test_a_link_with_a_token_leads_nowhere_else_and_takes_no_cookie(runs):
    from starlette.testclient import TestClient

    from rollwright.viewer.server import make_app, settings_of

    settings = settings_of("0.0.0.0", 0)
    client = TestClient(make_app([runs], settings), base_url="http://localhost", follow_redirects=False)
    key = settings.api_key
    assert client.get(f"http://localhost//evil.example/x?token={key}").headers["location"] == "/evil.example/x"
    assert client.get(f"{RUN}/sample/6/3%230?view=chat&token={key}").headers["location"] == f"{RUN}/sample/6/3%230?view=chat"
    answer = client.get("/?token=of-somebody-else")  # the cookie of before is good, and stays
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers


def test_other_accounts_of_this_machine_are_asked_for_a_token_where_it_is_wanted(runs):
    from starlette.testclient import TestClient

    from rollwright.viewer.server import first_page, make_app, settings_of

    settings = settings_of("127.0.0.1", 0, with_token=True)
    app = make_app([runs], settings)
    client = TestClient(app, base_url="http://localhost")
    assert client.get("/").status_code == 401
    assert client.get(first_page(app, settings)).status_code == 200


@pytest.mark.parametrize(
    ("address", "status"),
    [
        (f"{RUN}/step/99999999999999999999", 404),
        (f"{RUN}/group/99999999999999999999", 404),
        (f"{RUN}/sample/1/99999999999999999999", 404),
        (f"{RUN}/timeline?start=1e308&end=-1e308", 404),
        (f"{RUN}/search?text=%00a", 200),
        (f"{RUN}/sample/1/1?at=1&list=order%3Dcolour", 200),
    ],
)
def test_what_an_address_asks_is_bounded(viewer, address, status):
    answer = httpx.get(viewer.url + address)
    assert answer.status_code == status
    assert "<h1>" in answer.text


def test_a_pattern_without_end_keeps_nobody_waiting(viewer):
    asked = {"regex": "1", "text": r"(?s:.|..|...)+[\x06\x07]"}
    answer = httpx.get(f"{viewer.url}{RUN}/search", params=asked, timeout=60)
    assert "the pattern takes long" in answer.text
    assert "None so far" in answer.text


def test_a_long_hit_is_shown_by_its_beginning(hostile):
    answer = httpx.get(f"{hostile.url}/run/hostile~run/search", params={"regex": "1", "text": "(?s).+"}, timeout=60)
    assert answer.text.count("<mark>") > 1
    assert len(answer.text) < 200_000


def test_a_run_with_a_broken_config_hides_no_other(tmp_path):
    for name in ("good", "bad"):
        run = WrittenRun(tmp_path / "runs" / name)
        run.write_step(1)
        run.close()
    (tmp_path / "runs" / "bad" / "config.yaml").write_text("actor: [1, 2\n: }")
    served = serve([tmp_path / "runs"])
    try:
        listed = httpx.get(served.url + "/")
        assert listed.status_code == 200
        assert "good" in listed.text
        assert httpx.get(f"{served.url}/run/bad/config").status_code == 200
    finally:
        served.stop()
