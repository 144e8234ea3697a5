"""What does each way of bringing new weights into a generating engine cost, and what does it gain?

    python benchmarks/interrupts.py [--modes inflight,drain] [--rounds 2] [--steps 14] [--learn 30] [--json FILE]

The load is the same for every `partial.mode` (and for `inflight` with `engine.swap = "recompute"`): the demo's model
and task with longer completions, one core each for engine and trainer. Generation is the bottleneck, as it is with
large models (the engine's plain PyTorch path, many sequences at once), so that every swap meets rollouts. Rewards have
contrast in every group and the learning rate is close to zero: every step trains the same number of rollouts, with
completions of the same distribution. Modes are interleaved; the first steps, while the pipeline fills, are not counted.

--learn N: in addition N steps of every mode on the task itself, with a high learning rate. Its rows show how far engine
and trainer are apart when the weights really change, and what was learned.

Each run is a process of its own. Results are kept and not measured again unless --again is given.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_process import ROOT, Child, Json, Results, child_main, machine

if TYPE_CHECKING:
    from headrace.core.reports import EngineStats

SKIP = 4
"""Number of steps at the start that are not counted."""

MODES = ("inflight", "recompute", "stream", "abort_resume", "save_resume", "drain", "barrier", "cancel_group")


def any_contrast(completions: list[str], **columns: object) -> list[float]:
    """Gives every group contrast: no two of its rollouts have the same reward."""
    return [zlib.crc32(text.encode()) / 2**32 + i / 1000 for i, text in enumerate(completions)]


def settings(given: argparse.Namespace, mode: str, seed: int, directory: Path, learn: bool) -> list[str]:
    if mode == "recompute":
        chosen = ["partial.mode=inflight", "engine.swap=recompute"]
    else:
        chosen = [f"partial.mode={mode}"]
    rate = given.learning_rate if learn else 1e-9
    return [
        f'name="{directory.name}"',
        f'out="{directory.parent}"',
        f"seed={seed}",
        f"train.steps={given.learn if learn else given.steps}",
        f"train.learning_rate={rate}",
        "train.warmup_steps=0",
        f"rollout.max_tokens={given.max_tokens}",
        f"staleness.groups_per_step={given.groups}",
        f"staleness.max_lag={given.max_lag}",
        f"engine.max_running={given.running}",
        "engine.path=fused",
        "engine.context_length=256",
        "engine.cores=[0]",
        "train.cores=[1]",
        f"eval.prompts={64 if learn else 0}",
        "eval.samples=2",
        "checkpoint.every=0",
        "observe.terminal=off",
        *([] if learn else ["watch.identity_every=0"]),
        *chosen,
        *given.set,
    ]


def run(options: Json) -> Json:
    """Runs one mode, in a process of its own."""
    import headrace
    from headrace.facts.records import read_metrics

    shutil.rmtree(options["directory"], ignore_errors=True)  # of an attempt that was interrupted
    reward = None if options["learn"] else any_contrast
    result = headrace.train(options["config"], sets=options["sets"], reward=reward)
    found = counted(read_metrics(result.directory))
    if result.before and result.after:
        one, other = result.before, result.after
        found["held_out"] = [one.reward_mean, one.reward_sem, other.reward_mean, other.reward_sem]
    return found


def counted(facts: Sequence[object]) -> Json:
    """Measures from the end of step SKIP to the end of the last one, except for values per swap or per token."""
    from headrace.facts.facts import EngineSample, GroupEnded, Waited, WeightsLive
    from headrace.facts.group_numbers import DISCARDED
    from headrace.facts.records import StepRow

    rows = [fact for fact in facts if isinstance(fact, StepRow)]
    begin, end, steps = rows[SKIP - 1].t, rows[-1].t, rows[SKIP:]
    inside = [fact for fact in facts if begin < getattr(fact, "t", 0.0) <= end]
    live = [fact for fact in inside if isinstance(fact, WeightsLive)]
    gone = [fact for fact in inside if isinstance(fact, GroupEnded) and fact.reason in DISCARDED]
    samples = [fact for fact in inside if isinstance(fact, EngineSample)]
    first, last = samples[0], samples[-1]
    sampled = last.stats.sampled_tokens - first.stats.sampled_tokens
    busy = sum(fact.seconds for fact in inside if isinstance(fact, Waited) and fact.owner == "controller")
    return {
        "seconds": (end - begin) / len(steps),
        "trained_rate": sum(step.report.loss_tokens for step in steps) / (end - begin),
        "sampled_rate": sampled / (last.t - first.t),
        "lost": sum(sum(one.lengths) + one.lost_tokens for one in gone) / sampled,
        "prefilled": (prefilled(last.stats) - prefilled(first.stats)) / sampled,
        "interrupted": sum(one.interrupted for one in live) / len(live),
        "pause": [max(one.pause, one.load.swap_seconds) for one in live],
        "engine_idle": 1 - (last.stats.busy_seconds - first.stats.busy_seconds) / (last.t - first.t),
        "trainer_idle": 1 - busy / (end - begin),
        "swapped": sum(step.swapped for step in steps) / sum(len(step.lengths) for step in steps),
        "mixed": sum(step.mixed_tokens for step in steps) / sum(sum(step.lengths) for step in steps),
        "old_cache": sum(step.old_cache_tokens for step in steps) / sum(sum(step.lengths) for step in steps),
        "lags": lags_of(steps),
        "length": statistics.mean(length for step in steps for length in step.lengths),
        "reward": [row.reward_drawn for row in rows],
        "gaps": gaps_of(rows),
        "dropped": len(gone),
    }


def prefilled(stats: EngineStats) -> int:
    """Tokens of prompts and prefixes that were forwarded, for the first time or again."""
    return stats.prompt_tokens + stats.recomputed_tokens


def lags_of(steps: Iterable[object]) -> Json:
    """Lag -> trained tokens."""
    total: dict[str, int] = {}
    for step in steps:
        for lag, count in step.lags.items():  # type: ignore[attr-defined]
            total[str(lag)] = total.get(str(lag), 0) + count
    return total


def gaps_of(rows: Iterable[object]) -> Json:
    """Compares engine and trainer, over all loss tokens and over those of rollouts that met a swap."""
    from headrace.facts.run_totals import over_steps

    stats = over_steps(rows)  # type: ignore[arg-type]
    found = {}
    for name, chosen in (("all", stats), ("swapped", [one for one in stats if one.name == "swapped"])):
        tokens = sum(one.tokens for one in chosen)
        if tokens:
            mean = {key: sum(one.gaps[key] * one.tokens for one in chosen) / tokens for key in ("p50", "p99")}
            found[name] = {**mean, "kl": sum(one.kl * one.tokens for one in chosen) / tokens, "tokens": tokens}
    return found


def measured(given: argparse.Namespace, results: Results, mode: str, seed: int, learn: bool) -> Json | None:
    steps = given.learn if learn else given.steps
    name = f"{'learn ' if learn else ''}{mode} seed {seed} steps {steps}"
    directory = given.folder / "runs" / name.replace(" ", "-")
    sets = settings(given, mode, seed, directory, learn)
    options = {"config": str(given.config), "sets": sets, "directory": str(directory), "learn": learn}
    child = Child(name.replace(" ", "-"), Path(__file__).name, options, limit=given.limit)
    return results.measure(name, lambda: child.run(given.folder))


def cost_table(found: dict[str, list[Json]]) -> list[str]:
    lines = [
        "| mode | trained tokens/s | of `inflight` | engine idle | trainer idle | held back by a swap | rollouts interrupted by a swap "
        "| tokens lost | prefilled, per sampled token | met a swap | old cache | mixed | lag mean | max |",
        f"|{'---|' * 14}",
    ]
    base = found.get("inflight")
    for mode, runs in found.items():
        rates = [one["trained_rate"] for one in runs]
        ratio = statistics.median(
            one["trained_rate"] / other["trained_rate"] for one, other in zip(runs, base or runs, strict=False)
        )
        lags = {int(lag): count for one in runs for lag, count in one["lags"].items()}
        mean, most = lag_of(runs), max(lags)
        pauses = sorted(pause for one in runs for pause in one["pause"])
        lines.append(
            f"| `{mode}` | {statistics.median(rates):.0f} | {ratio:.2f} | {middle(runs, 'engine_idle'):.0%} "
            f"| {middle(runs, 'trainer_idle'):.0%} | {seconds(statistics.median(pauses))} (max {seconds(pauses[-1])}) "
            f"| {middle(runs, 'interrupted'):.1f} | {middle(runs, 'lost'):.1%} | {middle(runs, 'prefilled'):.2f} "
            f"| {middle(runs, 'swapped'):.0%} | {middle(runs, 'old_cache'):.0%} | {middle(runs, 'mixed'):.1%} | {mean:.2f} | {most} |"
        )
    return lines


def learn_table(found: dict[str, list[Json]]) -> list[str]:
    lines = [
        "| mode | held-out before | held-out after | reward drawn, last 5 steps | s a step | mean lag | \\|Δ log-prob\\| p50 | p99 "
        "| KL(engine, trainer) | KL of rollouts that met a swap | groups discarded |",
        f"|{'---|' * 11}",
    ]
    for mode, runs in found.items():
        for one in runs:
            before, error, after, other = one["held_out"]
            every, swapped = one["gaps"]["all"], one["gaps"].get("swapped")
            lines.append(
                f"| `{mode}` | {before:.3f} ± {error:.3f} | {after:.3f} ± {other:.3f} | {statistics.mean(one['reward'][-5:]):.3f} "
                f"| {one['seconds']:.2f} | {lag_of([one]):.2f} | {every['p50']:.4f} | {every['p99']:.3f} | {every['kl']:.5f} "
                f"| {format(swapped['kl'], '.5f') if swapped else '–'} | {one['dropped']} |"
            )
    return lines


def middle(runs: list[Json], field: str) -> float:
    return statistics.median(one[field] for one in runs)


def lag_of(runs: list[Json]) -> float:
    pairs = [(int(lag), count) for one in runs for lag, count in one["lags"].items()]
    return sum(lag * count for lag, count in pairs) / sum(count for _, count in pairs)


def seconds(value: float) -> str:
    return f"{1e3 * value:.1f} ms" if value < 0.1 else f"{value:.2f} s"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "recipes" / "demo" / "demo.toml")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--learn", type=int, default=0, help="steps of a run that learns; 0 makes none")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="of --learn")
    parser.add_argument("--groups", type=int, default=3, help="prompts a step")
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--running", type=int, default=48, help="sequences that are decoded at once")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that a run may take")
    parser.add_argument("--set", action="append", default=[], help="a setting of headrace, a.b=c")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-interrupts", help="of results and logs")
    parser.add_argument("--again", action="store_true", help="run anew what was run before")
    parser.add_argument("--json", type=Path, help="where all that was measured is written too")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    results = Results(given.folder / "results.json", given.again)
    costs: dict[str, list[Json]] = {}
    learned: dict[str, list[Json]] = {}
    for learn, steps, found in ((False, given.steps, costs), (True, given.learn, learned)):
        for seed in range(given.rounds if steps else 0):
            for mode in given.modes.split(","):
                if one := measured(given, results, mode, seed, learn):
                    found.setdefault(mode, []).append(one)
    lines = [machine(), "", *cost_table(costs), *(["", *learn_table(learned)] if learned else [])]
    print("\n" + "\n".join(lines))
    (given.folder / "table.md").write_text("\n".join(lines) + "\n")
    if given.json:
        given.json.write_text(json.dumps({"costs": costs, "learned": learned}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        child_main(run)
    else:
        main()
