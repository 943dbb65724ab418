"""The charts in a real browser: search, pins, folds, axes, logarithm, and one chart as a file."""

from __future__ import annotations

import csv
import io
import re
from urllib.parse import parse_qs, unquote, urlparse
from xml.etree import ElementTree

import pytest
from written_runs import RUN

COMPARE = "/compare?run=sums%2Ffirst&run=sums%2Fsecond"


@pytest.fixture
def tab(watched):
    tab = watched()
    tab.visit(RUN)
    return tab


def shown(page) -> list[str]:
    """The names of the charts that can be seen, from top to bottom."""
    return page.eval_on_selector_all(
        "figure[data-chart]",
        "all => all.filter((each) => each.querySelector('canvas') && !each.closest('[hidden], details:not([open])')).map((each) => each.dataset.name)",
    )


def query(page) -> dict[str, list[str]]:
    return parse_qs(urlparse(page.url).query)


def test_the_search_leaves_the_charts_whose_names_have_the_words(tab):
    every = shown(tab.page)
    tab.page.get_by_placeholder("Find charts").fill("reward STD")
    assert shown(tab.page) == ["reward/std"]
    assert tab.page.locator("[data-found]").inner_text() == f"1 of {len(every)}"
    assert query(tab.page)["find"] == ["reward STD"]
    tab.page.get_by_placeholder("Find charts").fill("no such chart")
    assert tab.page.locator("[data-no-charts]").is_visible()
    tab.page.get_by_placeholder("Find charts").fill("")
    assert shown(tab.page) == every


def test_pins_come_first_and_stay_for_the_next_run(tab, watched):
    last = shown(tab.page)[-1]
    tab.page.get_by_role("button", name=f"Pin {last}", exact=True).click()
    assert shown(tab.page)[0] == last
    assert query(tab.page)["pin"] == [last]
    tab.visit("/run/sums~second")
    assert shown(tab.page)[0] == last
    linked = watched()
    linked.visit(f"{RUN}?pin={last}")  # a link shows the same to somebody else
    assert shown(linked.page)[0] == last
    tab.page.get_by_role("button", name=f"Pin {last}", exact=True).click()
    assert shown(tab.page)[0] != last


def test_a_group_that_is_folded_stays_folded(tab):
    every = shown(tab.page)
    title = tab.page.locator("details.chart-group:visible summary").first
    title.click()
    left = shown(tab.page)
    assert 0 < len(left) < len(every)
    tab.page.reload()
    tab.page.wait_for_function("document.querySelectorAll('canvas').length > 0")
    assert shown(tab.page) == left
    tab.page.get_by_role("button", name="Fold all").click()
    assert shown(tab.page) == []
    tab.page.get_by_role("button", name="Fold all").click()
    assert shown(tab.page) == every


@pytest.mark.parametrize("axis", ["time", "tokens", "samples"])
def test_other_axes_keep_the_points_and_the_step_behind_them(tab, axis):
    tab.page.locator("[data-axis]").select_option(axis)
    assert query(tab.page)["x"] == [axis]
    found = tab.page.evaluate(
        "axis => { const charts = window.rollwrightCharts; const figure = document.querySelector('figure[data-name=reward]');"
        "const axes = JSON.parse(figure.closest('[data-axes]').dataset.axes)[0];"
        "return [axes[axis]?.map((point) => point[1]), charts.drawn.get(figure)?.data[0], figure.querySelector('.plot').innerText] }",
        axis,
    )
    expected, drawn, said = found
    if expected is None:
        assert said == f"The run did not record {axis} for these steps."
    else:
        assert drawn == pytest.approx(expected)
        assert len(drawn) == 8
    assert tab.faults == []


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show(tab):
    tab.page.get_by_label("log y").check()
    assert query(tab.page)["log"] == ["1"]
    scale = "document.querySelector('figure[data-name=reward]')"
    found = tab.page.evaluate(f"[...window.rollwrightCharts.drawn.get({scale}).data[1]]")
    assert all(value is None or value > 0 for value in found)
    assert tab.page.evaluate(f"window.rollwrightCharts.drawn.get({scale}).scales.y.distr") == 3


def test_one_chart_as_svg_png_and_csv(tab, tmp_path):
    figure = tab.page.locator("figure[data-name='reward']")

    def saved(kind: str) -> bytes:
        figure.get_by_label("Save reward as").click()
        with tab.page.expect_download() as waiting:
            figure.get_by_text(kind, exact=True).click()
        assert waiting.value.suggested_filename.endswith(f".{kind.lower()}")
        waiting.value.save_as(tmp_path / kind)
        return (tmp_path / kind).read_bytes()

    svg = ElementTree.fromstring(saved("SVG"))
    texts = [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "reward"
    assert "step" in texts
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == 8
    assert saved("PNG").startswith(b"\x89PNG")
    rows = list(csv.DictReader(io.StringIO(saved("CSV").decode())))
    assert [int(row["step"]) for row in rows] == list(range(1, 9))
    assert {"time", "reward"} <= set(rows[0])


def test_the_legend_stays_in_sight(watched):
    for width in (1280, 360):
        tab = watched(width)
        tab.visit(COMPARE)
        tab.page.locator("figure[data-chart]").last.scroll_into_view_if_needed()
        legend = tab.page.get_by_role("list", name="Lines")
        box = legend.bounding_box()
        assert 0 <= box["y"] < 400, width
        assert re.findall(r"\d sums/\w+", legend.inner_text()) == ["1 sums/first", "2 sums/second"]


def test_what_is_shown_is_kept_while_the_page_follows_a_run(tab):
    tab.page.get_by_placeholder("Find charts").fill("reward")
    tab.page.locator("[data-axis]").select_option("time")
    before = shown(tab.page)
    tab.page.evaluate(
        "fetch(location.href).then((page) => page.text()).then((html) => window.htmx.swap('#page', html, { swapStyle: 'outerHTML' }, { select: '#page' }))"
    )
    tab.page.wait_for_function("document.querySelector('[data-axis]').value === 'time'")
    assert shown(tab.page) == before
    assert unquote(tab.page.url).endswith("x=time&find=reward")
