"""Every key in a table of rules exists; a misspelt one would never be looked at."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from rollwright.config import experiment, generation, modes, sections, servers, tasksets, teachers
from rollwright.config.faults import Rule
from rollwright.config.rules import RULES
from rollwright.config.validation import annotations_of, choices_of, is_section
from rollwright.trainers.checks.missing_inputs import FILES, INPUTS
from rollwright.trainers.checks.unknown_names import NAMES

CLASSES = {
    each
    for module in (experiment, generation, modes, sections, servers, tasksets, teachers)
    for each in vars(module).values()
    if isinstance(each, type) and dataclasses.is_dataclass(each)
}


def has(kind: object, key: list[str]) -> bool:
    """Whether values of a type have a key."""
    if not key:
        return True
    for choice in choices_of(kind):
        if typing.get_origin(choice) is list and key[0] == "*" and has(typing.get_args(choice)[0], key[1:]):
            return True
        if is_section(choice) and key[0] in annotations_of(choice) and has(annotations_of(choice)[key[0]], key[1:]):
            return True
    return False


@pytest.mark.parametrize("rule", [*RULES, *NAMES, *FILES, *INPUTS], ids=lambda rule: rule.keys[0] or "section")
def test_the_keys_of_a_rule_exist(rule: Rule):
    looked_at = [cls for cls in CLASSES if issubclass(cls, rule.of)]
    assert looked_at
    for key in filter(None, rule.keys):
        assert any(has(cls, key.split(".")) for cls in looked_at), key
