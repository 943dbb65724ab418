"""What is run under faults."""

from __future__ import annotations

from .both import BothAsync, BothCritic, BothLora, BothSync
from .explore_train import ExploreTrain
from .long_episodes import LongEpisodes
from .ranks import BothRanks
from .ray_cluster import OnRay
from .run import Run
from .search_agent import SearchAgent
from .serve import Serve

#: By the name that ``--topology`` takes.
TOPOLOGIES: dict[str, type[Run]] = {
    "both-sync": BothSync,
    "both-async": BothAsync,
    "both-lora": BothLora,
    "both-critic": BothCritic,
    "both-ranks": BothRanks,
    "ray": OnRay,
    "explore-train": ExploreTrain,
    "serve": Serve,
    "long-episodes": LongEpisodes,
    "search-agent": SearchAgent,
}
