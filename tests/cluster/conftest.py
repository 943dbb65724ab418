from __future__ import annotations

import pytest
from ranks_runs import GRPO, write_parts


@pytest.fixture
def grpo(tmp_path, tiny_model):
    """Writes the config of a GRPO run; returns its directory."""
    write_parts(tmp_path)
    (tmp_path / "grpo.yaml").write_text(GRPO.format(root=tmp_path / "runs", model=tiny_model))
    return tmp_path
