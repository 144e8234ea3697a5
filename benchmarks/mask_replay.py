"""What happens to a run that samples with top-p and top-k, if the trainer knows which tokens they kept, and if it does
not?

    python benchmarks/mask_replay.py [--steps 40] [--seeds 0 1] [--top-p 0.95] [--top-k 50] [--picture docs/mask_replay.png]

There are three runs of the demo per seed, equal except for this: `replayed` (rollout.keep_mask, the default: the
trainer's log-probs are of the distribution that was sampled from), `not replayed` (they are over the whole vocabulary,
so that every ratio is off by the mass that was cut, in a direction that is clipped or not by accident), and
`untruncated` (nothing is cut). The learning rate is high and there is no lag, so that problems appear within minutes,
and staleness adds nothing to them.

The picture shows, over the optimizer steps, the mean reward of all rollouts, and the mismatch: the k3 estimate of
KL(sampler || trainer) and the mean ratio. Results are kept in a JSON file and not measured again unless --again is
given.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer_process import ROOT, TRL, Child, Json, Results, child_main, machine

WAYS = ("replayed", "not replayed", "untruncated")
SMOOTH = 5


def run(options: Json) -> Json:
    """Runs one variant, in a process of its own."""
    import headrace
    from headrace.facts.records import StepRow, read_metrics

    shutil.rmtree(options["directory"], ignore_errors=True)  # of an attempt that was interrupted
    result = headrace.train(options["config"], sets=options["sets"])
    steps = [fact for fact in read_metrics(result.directory) if isinstance(fact, StepRow)]
    assert result.before is not None and result.after is not None
    return {
        "reward": [step.reward_drawn for step in steps],
        "kl": [step.report.kl for step in steps],
        "ratio": [step.report.ratio_mean for step in steps],
        "clipped": [step.report.clip_fraction for step in steps],
        "length": [statistics.mean(step.lengths) for step in steps],
        "held_out": [result.before.reward_mean, result.after.reward_mean],
    }


def settings(given: argparse.Namespace, way: str, seed: int, directory: Path) -> list[str]:
    cut = way != "untruncated"
    return [
        f'name="{directory.name}"',
        f'out="{directory.parent}"',
        f"seed={seed}",
        f"train.steps={given.steps}",
        f"train.learning_rate={given.learning_rate}",
        "train.warmup_steps=0",
        f"rollout.top_p={given.top_p if cut else 1.0}",
        f"rollout.top_k={given.top_k if cut else 0}",
        f"rollout.keep_mask={'false' if way == 'not replayed' else 'true'}",
        f"staleness.groups_per_step={given.groups}",
        "staleness.max_lag=0",
        "eval.prompts=64",
        "checkpoint.every=0",
        "observe.terminal=off",
        *given.set,
    ]


def measured(given: argparse.Namespace, results: Results, way: str, seed: int) -> Json | None:
    name = f"{way} seed {seed} steps {given.steps}"
    runs = given.folder / "runs" / f"{way.replace(' ', '-')}-{seed}-{given.steps}"
    options = {"config": str(given.config), "sets": settings(given, way, seed, runs), "directory": str(runs)}
    child = Child(name.replace(" ", "-"), Path(__file__).name, options, limit=given.limit)
    return results.measure(name, lambda: child.run(given.folder))


def table(found: dict[tuple[str, int], Json]) -> Iterator[str]:
    yield (
        "| sampling mask | seed | held-out before | after | reward of the last steps | KL(sampler, trainer): first steps | last | "
        "mean ratio: first | last | clipped, last | mean length, last |"
    )
    yield f"|{'---|' * 11}"
    for (way, seed), one in found.items():
        first, last = slice(0, SMOOTH), slice(-SMOOTH, None)
        mean = {name: (statistics.mean(one[name][first]), statistics.mean(one[name][last])) for name in one}
        yield (
            f"| {way} | {seed} | {one['held_out'][0]:.3f} | {one['held_out'][1]:.3f} | {mean['reward'][1]:.3f} "
            f"| {mean['kl'][0]:.5f} | {mean['kl'][1]:.5f} | {mean['ratio'][0]:.4f} | {mean['ratio'][1]:.4f} "
            f"| {mean['clipped'][1]:.1%} | {mean['length'][1]:.1f} |"
        )


def draw(source: Path, to: Path) -> None:
    """Draws the picture with the Python of .venv-trl, which has matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), dpi=110)
    labelled = set()
    for curve in json.loads(source.read_text()):
        way = curve["way"]
        for panel, name in zip(panels, ("reward", "kl"), strict=True):
            values = [statistics.mean(curve[name][max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(curve[name]))]
            label = None if way in labelled else way
            panel.plot(range(1, len(values) + 1), values, f"C{WAYS.index(way)}", label=label, linewidth=1.2)
        labelled.add(way)
    panels[0].set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1))
    panels[1].set(xlabel="optimizer step", ylabel="KL(sampler, trainer), nats a token", yscale="log")
    panels[0].legend(loc="upper left", title="sampling mask")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(to)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "recipes" / "demo" / "demo.toml")
    parser.add_argument("--only", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=4, help="prompts a step")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that a run may take")
    parser.add_argument("--set", action="append", default=[], help="a setting of headrace, a.b=c")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-mask-replay", help="of results and logs")
    parser.add_argument("--again", action="store_true", help="run anew what was run before")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    results = Results(given.folder / "results.json", given.again)
    found = {
        (way, seed): one
        for seed in given.seeds
        for way in given.only.split(",")
        if (one := measured(given, results, way, seed)) is not None
    }
    lines = [machine(), "", *table(found)]
    print("\n" + "\n".join(lines))
    (given.folder / "table.md").write_text("\n".join(lines) + "\n")
    curves = given.folder / "curves.json"
    curves.write_text(json.dumps([{"way": way, "seed": seed, **one} for (way, seed), one in found.items()]))
    if given.picture:
        subprocess.run([str(TRL), __file__, "--draw", str(curves), str(given.picture)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--draw"]:
        draw(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] and sys.argv[1].startswith("{"):
        child_main(run)
    else:
        main()
