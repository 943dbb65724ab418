"""A rank of a weight group as SGLang's processes join it: torch's own helpers, and nothing of Rollwright.

Run as a program it does what each line of its input says (JSON), and answers with a line:

* ``{"do": "start"}``: nothing; the answer says that torch is loaded;
* ``{"do": "join", "address", "rank", "world_size", "name"}``
* ``{"do": "receive", "names", "dtypes", "shapes", "flat"}``: keeps the tensors;
* ``{"do": "send", "path", "flat"}``: broadcasts the tensors that ``torch.load`` finds there;
* ``{"do": "save", "path"}``: writes what was received.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

LIMIT = timedelta(seconds=60)


def join(address: str, rank: int, world_size: int, name: str) -> dist.ProcessGroup:
    """A group beside the default one: rendezvous, a prefix, and torch's helper, which adds its own."""
    store, rank, world_size = next(rendezvous(f"tcp://{address}", rank, world_size, timeout=LIMIT))
    store.set_timeout(LIMIT)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend("gloo"), PrefixStore(name, store), group_name=name, timeout=LIMIT
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def main() -> None:
    """Follow the lines of the input to its end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # SGLang's own world
    group, received = None, {}
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "start":
                pass
            case "join":
                group = join(**order)
            case "receive":
                shapes, kinds = order["shapes"], [getattr(torch, dtype) for dtype in order["dtypes"]]
                tensors = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
                if order["flat"]:
                    together = torch.cat([tensor.flatten() for tensor in tensors])
                    dist.broadcast(together, src=0, group=group)
                    parts = together.split([tensor.numel() for tensor in tensors])
                    tensors = [part.view(shape).to(kind) for part, shape, kind in zip(parts, shapes, kinds, strict=True)]
                else:
                    for tensor in tensors:
                        dist.broadcast(tensor, src=0, group=group)
                received |= dict(zip(order["names"], tensors, strict=True))
            case "send":
                tensors = torch.load(order["path"]).values()
                together = [torch.cat([tensor.flatten() for tensor in tensors])] if order["flat"] else tensors
                for tensor in together:
                    dist.broadcast(tensor.contiguous(), src=0, group=group)
            case "save":
                torch.save(received, order["path"])
        print(json.dumps("done"), flush=True)


if __name__ == "__main__":
    main()
