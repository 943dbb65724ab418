"""Questions that people have of runs, answered in at most three clicks from the list of runs."""

from __future__ import annotations

import pytest
from viewed_runs import serve
from written_runs import WrittenRun


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """A viewer of three runs: of two seeds, whose held-out tasks flip, and of another experiment."""
    root = tmp_path_factory.mktemp("seeds")
    for name, lr, steps in (("sums/one", 1e-3, 8), ("sums/two", 3e-4, 4), ("others/one", 1e-3, 8)):
        run = WrittenRun(root / name, lr=lr)
        for _ in range(steps):
            run.write_step()
        run.close()
    served = serve([root])
    yield served
    served.stop()


def test_which_held_out_task_flipped_and_what_it_answered_before(watched, seeds):
    tab = watched(1280, "light", seeds.url)
    run = seeds.pages.runs.get("sums/one")
    rewards = {}
    for sample in run.search(is_eval=True, limit=-1)["samples"]:
        rewards.setdefault(sample["ordinal"], {})[sample["version"][1]] = sample["reward"]
    flipped = {task for task, own in rewards.items() if own[min(own)] != own[max(own)]}
    assert flipped
    tab.visit("/")
    tab.follow(tab.page.get_by_role("link", name="sums/one", exact=True), "/run/sums~one$")
    tab.follow(tab.page.get_by_role("link", name="Evaluations", exact=True), "/evaluations$")
    assert f"{len(flipped)} flipped" in tab.page.locator("h1 + p").inner_text()
    tab.page.locator("tbody td.cell").first.click()  # the first row, which flipped; any of its cells leads where its link leads
    tab.arrive("/task/")
    cards = tab.page.locator("article.card")
    answers = [cards.nth(place).locator("pre").first.inner_text() for place in range(cards.count())]
    versions = [cards.nth(place).locator("h2").inner_text() for place in range(cards.count())]
    assert [version for version in versions if version.startswith("v")] == ["v2", "v4", "v6", "v8"]
    before, after = answers[versions.index("v2")], answers[versions.index("v8")]
    assert "The sum is" in before
    assert before != after
    cards.nth(versions.index("v2")).locator("input").first.check()
    cards.nth(versions.index("v8")).locator("input").first.check()
    tab.follow(tab.page.get_by_role("button", name="Two chosen answers side by side"), r"/pair\?")
    assert tab.page.locator(".tokens").count() == 2
    assert tab.page.locator(".tokens .differs").count() > 0


def test_what_two_seeds_differ_in(watched, seeds):
    tab = watched(1280, "light", seeds.url)
    tab.visit("/")
    tab.page.get_by_role("checkbox", name="Choose sums/one").check()
    tab.page.get_by_role("checkbox", name="Choose sums/two").check()
    tab.follow(tab.page.get_by_role("button", name="Compare the chosen runs"), r"/compare\?")
    config = tab.page.get_by_role("region", name="Config")
    assert "actor.optimizer.lr" in config.inner_text()
    assert "Tasks in both" in tab.page.get_by_role("region", name="Held out").inner_text()
    one, two = (seeds.pages.runs.get(f"sums/{name}") for name in ("one", "two"))
    differ = {task for task, reward in one.last_evaluation().items() if reward != two.last_evaluation()[task]}
    rows = tab.page.get_by_role("region", name="Tasks that differ").locator("tbody tr")
    assert rows.count() == len(differ) > 0
    task, change, *rewards = (cell.inner_text() for cell in rows.first.locator("td").all())
    assert task.startswith("What is ")
    assert rewards[0] != rewards[1]
    assert ("gained" in change) == (rewards[:2] == ["0", "1"])
    assert all(answer.startswith("The sum is") for answer in rewards[2:])
    rows.first.locator("td.cell").first.click()  # the third click
    tab.arrive(r"/pair\?")
    assert tab.page.locator(".tokens .differs").count() > 0
    assert [side.inner_text().startswith("eval:") for side in tab.page.locator(".pair h2 a").all()] == [True, True]
