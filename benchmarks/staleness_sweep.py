"""Staleness 0, 1, 2, 4, 8 with naive and decoupled loss: speed and accuracy, as a table and a plot.

    python benchmarks/staleness_sweep.py [--quick] [--seeds 1,2,3] [--jobs 4] [--plot FILE.png] [--json FILE]

The setting of ``async_rollouts.py``. *Naive* takes the ratio, and its clip, against the policy that sampled; *decoupled* clips
around the policy before the batch and weights by the behaviour policy. All runs train the same number of groups. Ratios are
trained tokens an hour against the synchronous run of the same loss; as many steps as the largest staleness are left out of
the time at the beginning of every run.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from async_training import Outcome, Setting, Size, arguments_of, size_of, train_all, warmed_up_model
from report import Report

from rollwright.tracking.plots import COLOURS

LOSSES = {"naive": False, "decoupled": True}
FULL = Size(steps=56, prompts=64, group=8, concurrency=96, evaluation_tasks=256)
QUICK = Size(steps=16, prompts=8, group=4, concurrency=32, evaluation_tasks=256)


def plot(path: Path, speeds: dict[str, list[tuple[int, float]]], accuracies: dict[str, list[tuple[int, float]]]) -> None:
    """Draw speed and accuracy over staleness, a line for each loss, into a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (("thousand trained tokens an hour", speeds), ("held-out accuracy at the end", accuracies))
    for axes, (label, curves) in zip(figure.subplots(1, 2), panels, strict=True):
        for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=1.8, label=name)
        axes.set_xlabel("max_head_offpolicyness")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Train every combination and report."""
    parser, sizes = arguments_of(__doc__, FULL, QUICK)
    parser.add_argument("--seeds", default=None, help="separated by commas; 1,2,3, and 1 with --quick")
    parser.add_argument("--staleness", default="0,1,2,4,8", help="separated by commas")
    parser.add_argument("--plot", type=Path, default=Path("staleness_sweep.png"), help="where the picture goes")
    arguments = parser.parse_args()
    size = size_of(arguments, sizes)
    seeds = [int(seed) for seed in (arguments.seeds or ("1" if arguments.quick else "1,2,3")).split(",")]
    limits = [int(limit) for limit in arguments.staleness.split(",")]
    skip = max(limits)
    if skip >= size.steps:
        parser.error(f"--steps {size.steps} leaves nothing to time after the first {skip}, in which places are filled")
    model = warmed_up_model(arguments.directory)

    report = Report(f"Staleness: {size}")
    report.machine["size"] = vars(size)
    speeds: dict[str, list[tuple[int, float]]] = {loss: [] for loss in LOSSES}
    accuracies: dict[str, list[tuple[int, float]]] = {loss: [] for loss in LOSSES}
    settings = [Setting(seed, limit, loss) for limit in limits for loss in LOSSES.values() for seed in seeds]
    outcomes = train_all(model, size, settings, skip=skip, jobs=arguments.jobs)
    for limit in limits:
        for loss in LOSSES:
            runs = [next(outcomes) for _ in seeds]
            tokens_an_hour = 3600 * sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
            accuracy = _mean(runs, "accuracy")
            speeds[loss].append((limit, tokens_an_hour / 1000))
            accuracies[loss].append((limit, accuracy))
            report.row(
                limit=limit,
                loss=loss,
                tokens_per_hour=round(tokens_an_hour),
                accuracy=accuracy,
                staleness_mean=_mean(runs, "staleness_mean"),
                staleness_max=max(run.staleness_max for run in runs),
                clipped=_mean(runs, "clipped"),
                weight_capped=_mean(runs, "behaviour_capped"),
                dropped=sum(run.dropped for run in runs),
            )
            print(f"staleness {limit}, {loss}: {tokens_an_hour:,.0f} tokens an hour, accuracy {accuracy:.3f}", flush=True)
    for loss, points in speeds.items():
        synchronous = dict(points).get(0)
        for limit, speed in points:
            if limit and synchronous:
                report.ratio(f"staleness {limit}/{loss}", speed / synchronous)
    plot(arguments.plot, speeds, accuracies)
    report.finish(arguments.json)
    print(f"plot: {arguments.plot}")


def _mean(runs: list[Outcome], name: str) -> float:
    return statistics.fmean(getattr(run, name) for run in runs)


if __name__ == "__main__":
    main()
