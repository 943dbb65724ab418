"""Synchronous against asynchronous training where samples wait for a slow tool: trained tokens an hour, and accuracy.

    python benchmarks/async_rollouts.py [--quick] [--seeds 1,2,3] [--jobs 3] [--json FILE]

The arithmetic task with a tool whose time is log-normal, median 0.3 s, 99th percentile 6 s. Both sides train the same number of
groups of the same size from the same checkpoint, with the same limit of samples at once and the same waits for each task's
samples; the asynchronous side may be two versions stale (``max_head_offpolicyness: 2``, ``on_stale: wait``: nothing is
dropped) and takes the decoupled loss. The ratio is that of all timed tokens over all timed seconds; the first three steps, in
which the asynchronous side fills its places, are trained and not timed, on both sides. ``--jobs 3`` runs the three seeds of a
side together, for accuracies only: an asynchronous run uses a core for most of the time, so that its speed suffers.
"""

from __future__ import annotations

import statistics

from async_training import Outcome, Setting, Size, arguments_of, size_of, train_all, warmed_up_model
from report import Report

STALENESS = 2
FULL = Size(steps=56, prompts=64, group=8, concurrency=96, evaluation_tasks=256)
QUICK = Size(steps=12, prompts=16, group=4, concurrency=32, evaluation_tasks=256)


def main() -> None:
    """Train both sides for every seed and report."""
    parser, sizes = arguments_of(__doc__, FULL, QUICK)
    parser.add_argument("--seeds", default=None, help="separated by commas; 1,2,3, and 1 with --quick")
    arguments = parser.parse_args()
    size = size_of(arguments, sizes)
    seeds = [int(seed) for seed in (arguments.seeds or ("1" if arguments.quick else "1,2,3")).split(",")]
    model = warmed_up_model(arguments.directory)

    report = Report(f"Asynchronous rollouts: {size}")
    report.machine["size"] = vars(size)
    sides: dict[str, list[Outcome]] = {"sync": [], "async": []}
    for side, staleness in (("sync", 0), ("async", STALENESS)):
        settings = [Setting(seed, staleness, is_decoupled=staleness > 0) for seed in seeds]
        runs = train_all(model, size, settings, skip=STALENESS + 1, jobs=arguments.jobs)
        for setting, run in zip(settings, runs, strict=True):
            sides[side].append(run)
            report.row(
                side=side,
                seed=setting.seed,
                tokens_per_hour=round(run.tokens_an_hour),
                seconds_per_step=run.seconds_a_step,
                accuracy=run.accuracy,
                staleness_mean=run.staleness_mean,
                staleness_max=run.staleness_max,
                dropped=run.dropped,
            )
            print(
                f"{side}, seed {setting.seed}: {run.tokens_an_hour:,.0f} tokens an hour, accuracy {run.accuracy:.3f}",
                flush=True,
            )
    rates = {side: sum(run.tokens for run in runs) / sum(run.seconds for run in runs) for side, runs in sides.items()}
    report.ratio("async/sync", rates["async"] / rates["sync"])
    means = {side: statistics.fmean(run.accuracy for run in runs) for side, runs in sides.items()}
    report.machine["accuracy_difference"] = means["async"] - means["sync"]
    report.finish(arguments.json)
    print(f"accuracy, mean of {len(seeds)} seeds: async {means['async']:.3f}, sync {means['sync']:.3f}")


if __name__ == "__main__":
    main()
