"""A workflow that makes its own group and is repeated besides is not refused, but its owner is told."""

import pytest

from rollwright.rollout import task_group
from rollwright.rollout.task_group import GroupFactory


class Grouped:
    group_size = 4

    async def arun_episode(self, engine, data): ...


@pytest.mark.parametrize(("repeated", "is_eval", "told"), [(1, False, 0), (8, True, 0), (8, False, 1)])
def test_groups_of_groups_are_told_once(monkeypatch, repeated, is_eval, told):
    messages = []
    monkeypatch.setattr(task_group.logger, "warning", lambda text, *arguments: messages.append(text % arguments))
    factory = GroupFactory()
    for _ in range(3):
        assert factory.make({}, Grouped(), None, None, repeated, is_eval).size == repeated
    assert len(messages) == told
    assert all("each task is repeated 8 times besides: 32 episodes a task" in message for message in messages)
