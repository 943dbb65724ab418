"""Every view of a recorded run, in a real browser."""

from __future__ import annotations

import json
import re
import time

import pytest
from starlette.testclient import TestClient
from viewed_runs import click_to_the_worst_sample, serve
from written_runs import RUN, VIEWS, WrittenRun

from rollwright.experience.journal.records import Resumed
from rollwright.experience.journal.writing import Journal
from rollwright.viewer.server import make_app


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1920, "light")])
def test_each_view_is_shown_without_a_fault_in_every_width(watched, width, scheme):
    tab = watched(width, scheme)
    for name, address in VIEWS.items():
        assert tab.visit(address).status == 200, name
        assert tab.page.locator("h1").count() == 1, name
        assert tab.fits(), f"{name} is wider than {width} pixels"
        assert tab.faults == [], name


def test_from_the_list_to_a_token_of_the_worst_sample_in_five_clicks(watched, viewer):
    tab = watched()
    run = viewer.pages.runs.get("sums/first")
    sample = run.sample(click_to_the_worst_sample(tab, run, "sums/first", 4)["key"])
    assert tab.page.locator(".tokens .t").count() == sum(len(row["ids"]) for row in sample["rows"]) > 50
    parts = sample["parts"]  # where it went wrong is pointed at
    assert tab.page.locator(".tokens .t").nth(parts["token"]).get_attribute("class") == "t trained parts chosen"
    assert tab.page.locator(".token-facts").inner_text().replace("\n", "").startswith(f"token{parts['token']}")
    assert f"the same as {parts['key']}, which has reward {parts['reward']:g}" in tab.page.locator("#main").inner_text()


def test_the_run_says_what_stands_out_and_which_setting_changes_it(watched):
    tab = watched()
    tab.visit(RUN)
    assert "gconfig.n_samples" in tab.page.locator(".signs").inner_text()
    assert tab.page.locator(".signs li b").first.inner_text() != ""  # said in words, not by colour


def test_a_bar_filters_the_groups_and_the_address_says_so(watched, viewer):
    tab = watched()
    tab.visit(f"{RUN}/step/4")
    groups = viewer.pages.runs.get("sums/first").step(4)["groups"]
    zero = sum(any(sample["reward"] == 0 for sample in group["samples"]) for group in groups)
    tab.follow(tab.page.locator("svg[aria-label='Histogram of reward'] a").first, r"reward=0\.0\.\.0")
    assert tab.page.locator(".group").count() == zero < len(groups) + 1
    fresh = watched()
    fresh.page.goto(tab.page.url)
    assert fresh.page.locator(".group").count() == zero


def test_counts_of_a_step_add_up_and_the_dropped_say_why(watched):
    tab = watched()
    tab.visit(f"{RUN}/step/2")
    counts = [int(text) for text in tab.page.locator("section:has(h2:text('What became of the groups')) td").all_inner_texts()]
    assert sum(counts[:-1]) == counts[-1] == 3
    assert "filter: all rewards are below 0.1" in tab.page.locator("#main").inner_text()


def test_the_prefix_tree_draws_a_shared_prompt_once(watched):
    tab = watched()
    tab.visit(f"{RUN}/group/10")
    labels = [
        each.get_attribute("aria-label")
        for each in tab.page.locator("svg[aria-label='Prefix tree of the samples'] [aria-label]").all()
    ]
    assert sum("shared by 4 samples" in label for label in labels) >= 1
    assert any("advantage" in label for label in labels)


def test_tokens_are_the_recorded_ones_with_values_by_keyboard(watched, viewer):
    tab = watched()
    tab.visit(VIEWS["tokens"])
    row = viewer.pages.runs.get("sums/first").sample("10/1")["rows"][0]
    tokens = tab.page.locator(".tokens .t")
    assert tokens.count() == len(row["ids"])
    assert tokens.first.inner_text() == "<|im_start|>"
    tab.page.locator(".tokens").focus()
    first = row["mask"].index(True)
    tab.page.keyboard.press("Home")
    for _ in range(first):
        tab.page.keyboard.press("ArrowRight")
    facts = tab.page.locator(".token-facts").inner_text().replace("\n", " ")
    assert f"id {row['ids'][first]}" in facts.replace("id", "id ").replace("  ", " ")
    for name in ("engine log-prob", "trainer log-prob", "difference", "entropy", "advantage", "version"):
        assert name in facts
    tab.page.get_by_label("values below the tokens").check()
    assert tokens.nth(first).evaluate("each => getComputedStyle(each, '::after').content") != "none"


def test_a_weight_update_in_the_middle_of_a_sample_is_marked(watched):
    tab = watched()
    tab.visit(f"{RUN}/sample/10/1?view=tokens&overlay=version")
    assert tab.page.locator(".tokens .from").all_inner_texts() == ["v3", "v2", "v3"]


def test_the_failed_attempt_shows_its_traceback_beside_the_chat(watched):
    tab = watched()
    tab.visit(f"{RUN}/sample/6/3%230")
    assert "ValueError" in tab.page.locator("section.error").inner_text()
    assert 'File "sums.py", line 12' in tab.page.locator("section.error").inner_text()
    assert tab.page.locator("section.error b").count() == 1  # the name; what the model's text says is text


def test_the_search_by_address_text_and_filters(watched, viewer):
    run = viewer.pages.runs.get("sums/first")
    tab = watched()
    tab.visit(f"{RUN}/search?step=3-4&reward=0.5..1&eval=0&order=reward")
    expected = run.search(step=(3, 4), reward=(0.5, 1), is_eval=False, order="reward")
    assert tab.page.locator(".listed tbody tr").count() == min(50, expected["total"])
    row, first = tab.page.locator(".listed tbody tr").first, expected["samples"][0]
    left = first["ordinal"] % 10
    assert row.locator("[data-open]").inner_text() == f"What is {left} + 3?"
    assert row.locator(".note").inner_text().startswith(f"{first['key']} · ")
    assert row.locator(".answer").all_inner_texts()[:2] == [first["answer"], str(left + 3)]
    assert first["answer"].startswith("The sum is ")
    tab.follow(row.locator("[data-open]"), "/sample/")
    assert tab.page.locator("h1").inner_text() == f"What is {left} + 3?, sample {first['index']}"
    tab.follow(tab.page.get_by_role("link", name="Group"), "/group/")
    assert tab.page.locator("h1").inner_text() == f"What is {left} + 3?"
    assert f"expected {left + 3}" in tab.page.locator(".head").first.inner_text()
    tab.visit(f"{RUN}/search")
    tab.page.get_by_label("Text or regular expression").fill("sum is (1")
    tab.page.get_by_label("regular expression", exact=True).check()
    tab.page.wait_for_url(re.compile("regex=1"))
    assert "is no regular expression" in tab.page.locator(".signs").inner_text()
    tab.page.get_by_label("Text or regular expression").fill("sum is 1[0-2]")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("mark")
    assert re.fullmatch("sum is 1[0-2]", tab.page.locator("mark").first.inner_text())


def test_the_keys_go_through_samples_groups_search_and_help(watched):
    tab = watched()
    tab.visit(f"{RUN}/search?step=4&eval=0&order=reward")
    keys = [note.partition(" · ")[0] for note in tab.page.locator(".listed .note").all_inner_texts()]
    tab.page.locator("h1").click()
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("Enter")
    tab.arrive(f"/sample/{keys[1]}\\?")
    for key, leads_to in (("j", f"/sample/{keys[2]}\\?"), ("k", f"/sample/{keys[1]}\\?"), ("g", "/group/"), ("/", "/search$")):
        tab.page.keyboard.press(key)
        tab.arrive(leads_to)
    tab.page.locator("h1").click()
    tab.page.keyboard.press("?")
    assert tab.page.get_by_role("dialog").is_visible()


def test_a_click_on_a_curve_opens_the_step(watched):
    tab = watched()
    tab.visit(RUN)
    plot = tab.page.locator("figure:has-text('reward') .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 30)
    tab.page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 30)
    tab.page.wait_for_url(re.compile("/step/8$"))


def test_any_curve_can_be_drawn(watched):
    """Where a scale has no room between its values, uPlot makes ticks without end: "Invalid array length"."""
    tab = watched()
    tab.visit(RUN)
    curves = [[5.0], [0.3, 0.30000000000000004], [1e300, -1e300], [5e-324] * 3, [0.0, 0.0], [None, None], [1e16, 1e16 + 2], []]
    for values in curves:
        points = [[step, value] for step, value in enumerate(values, 1)]
        chart = json.dumps({"last": "", "series": [{"label": "curve", "points": points}]})
        tab.page.evaluate(
            """chart => {
                for (const figure of document.querySelectorAll("figure[data-chart]")) figure.dataset.chart = chart;
                document.dispatchEvent(new Event("theme"));
            }""",
            chart,
        )
        tab.page.wait_for_timeout(50)  # drawn behind a turn of the browser's loop
        assert tab.faults == [], values


def test_each_view_as_a_file_and_as_a_picture(watched, viewer, tmp_path):
    tab = watched()
    for name in ("run", "steps", "step", "group", "sample", "timeline", "weights", "search", "runs", "config"):
        address = VIEWS[name] + ("&" if "?" in VIEWS[name] else "?")
        lines = tab.page.request.get(viewer.url + address + "format=jsonl").text().splitlines()
        assert lines, name
        assert all(json.loads(line) for line in lines)
        assert "," in tab.page.request.get(viewer.url + address + "format=csv").text().splitlines()[0]
    for name in ("run", "group"):
        tab.visit(VIEWS[name])
        tab.page.locator("summary:text('Save as')").click()
        with tab.page.expect_download() as download:
            tab.page.get_by_text("PNG of this view").click()
        picture = tmp_path / "view.png"
        download.value.save_as(picture)
        from PIL import Image

        with Image.open(picture) as image:
            assert image.width > 1000
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 30  # it shows something


def test_the_page_follows_a_run_that_writes(watched, tmp_path):
    run = WrittenRun(tmp_path / "runs" / "live" / "now")
    run.write_step()
    served = serve([tmp_path / "runs"])
    try:
        tab = watched(origin=served.url)
        tab.visit("/run/live~now/steps")
        assert tab.page.locator("tbody tr").count() == 1
        run.write_step()
        deadline = time.monotonic() + 20
        while tab.page.locator("tbody tr").count() < 2 and time.monotonic() < deadline:
            tab.page.wait_for_timeout(100)
        assert tab.page.locator("tbody tr").count() == 2
    finally:
        served.stop()
        run.close()


def test_steps_that_are_made_again_are_told_apart(tmp_path):
    run = WrittenRun(tmp_path / "live" / "now")
    for _ in range(3):
        run.write_step()
    run.close()
    journal = Journal(tmp_path / "live" / "now" / "journal")
    journal.write(Resumed(1, 1, 2, 1, 3, 5.0))
    journal.close()
    client, page = TestClient(make_app([tmp_path]), base_url="http://localhost"), ""
    deadline, head = (
        time.monotonic() + 20,
        "1 step, each with the samples that it trained on; 2 more were lost with a process, and are made again",
    )
    while head not in page:  # the journal is read in the background
        assert time.monotonic() < deadline, page
        page = client.get("/run/live~now/steps").text
    assert "made again</td>" not in page
    page = client.get("/run/live~now/steps?undone=1").text
    assert page.count('<td class="muted">made again</td>') == 2


def test_a_link_in_a_drawing_keeps_the_page(watched):
    tab = watched()
    for view, pattern in ((f"{RUN}/step/4", "reward="), (f"{RUN}/group/10", "/sample/"), (f"{RUN}/timeline", "/sample/")):
        tab.visit(view)
        tab.page.evaluate("window.kept = true")
        tab.page.locator("svg a[href]").last.evaluate(
            "link => link.querySelector('rect').dispatchEvent(new MouseEvent('click', {bubbles: true, cancelable: true}))"
        )
        tab.arrive(pattern)
        assert tab.page.evaluate("window.kept"), view


def test_the_keys_go_on_to_the_next_group_of_the_step(watched, viewer):
    groups = viewer.pages.runs.get("sums/first").step(4)["groups"]
    last, following = groups[0]["samples"][-1]["key"], groups[1]["samples"][0]["key"]
    tab = watched()
    tab.visit(f"{RUN}/sample/{last}?view=tokens")
    for key, leads_to in (("j", following), ("k", last)):
        tab.page.keyboard.press(key)
        tab.arrive(f"/sample/{leads_to}\\?view=tokens")
