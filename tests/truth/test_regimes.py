"""What the other tests of this directory go past matters: without it the untouched forward says something else."""

from __future__ import annotations

import pytest

from . import families

#: What the cases of CI have to come to, so that none of them is lost by a change of transformers.
REGIMES = {
    "window",
    "chunk",
    "sinks",
    "attn cap",
    "final cap",
    "attention temperature",
    "longrope positions",
    "dynamic positions",
}


def test_the_cases_of_ci_come_to_every_kind_of_regime() -> None:
    assert {regime.name for name in families.QUICK for regime in families.case(name).regimes} >= REGIMES


def test_without_a_regime_the_untouched_forward_says_something_else(made: families.Made) -> None:
    assert made.noise <= 2e-5
    assert all(effect >= families.MATTERS for effect in made.effects.values()), made.effects


def test_every_family_is_a_case_or_says_why_not(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--all-families"):
        pytest.skip("with --all-families")
    assert len({case.model_type for case in families.cases().values()}) > 60
    assert all(families.not_built().values())
