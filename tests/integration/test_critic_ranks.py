"""A critic on two ranks trains as one in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_scripts import RankScript

UNIT = Path(__file__).resolve().parents[1] / "unit" / "training"

WORKER = """
import sys
sys.path.insert(0, {unit!r})
import torch
from test_critic import trained_on_share
start, out = sys.argv[1:]
result = {{kind: trained_on_share(start, kind == "shared") for kind in ("own", "shared")}}
torch.save(result, f"{{out}}/rank{{torch.distributed.get_rank()}}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_two_ranks_train_the_critic_of_one_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(UNIT))
    from test_critic import trained_on_share
    from tiny_policy import tiny_model

    from rollwright.training.hf_checkpoint import save_model

    save_model(tiny_model(dtype=torch.float32), tmp_path / "start")
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(unit=str(UNIT)))
    ranks = RankScript(script, tmp_path / "start", tmp_path, count=2)
    one = {kind: trained_on_share(str(tmp_path / "start"), kind == "shared") for kind in ("own", "shared")}
    ranks.wait()
    two = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for kind, expected in one.items():
        for name, value in expected.items():
            torch.testing.assert_close(two[0][kind][name], two[1][kind][name], atol=0, rtol=0)
            torch.testing.assert_close(two[0][kind][name], value, atol=2e-5, rtol=1e-4, msg=f"{kind} {name}")
