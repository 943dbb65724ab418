"""axe-core finds no serious violation in any view, light or dark."""

from __future__ import annotations

import pytest
from written_runs import VIEWS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_a_serious_violation(watched, scheme):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-core is in the package axe-playwright-python"
    )
    tab = watched(1280, scheme)
    options = {"resultTypes": ["violations"]} | ({} if scheme == "light" else {"runOnly": ["color-contrast"]})
    found = {}
    for name, address in VIEWS.items():
        tab.visit(address)
        violations = axe.Axe().run(tab.page, options=options).response["violations"]
        serious = [each for each in violations if each["impact"] in ("serious", "critical")]
        if serious:
            found[name] = [
                (each["id"], each["nodes"][0]["html"][:160], each["nodes"][0].get("failureSummary")) for each in serious
            ]
    assert found == {}
