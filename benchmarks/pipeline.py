"""Does the pipeline overlap generation and training as well as it can?

    python benchmarks/pipeline.py [--rounds 2] [--steps 16] [--lags 0 1 2 4] [--config recipes/demo/demo.toml]

The same work (same task, batch, model, seeds; a reward with contrast in every group, a learning rate close to zero) is
done with `max_lag` 0, 1, 2 and 4, engine and trainer on one core each, interleaved. Let g and t be the seconds that
generation and training of one step take by themselves, both measured in the synchronous runs of the same session. A
synchronous step takes g + t, an asynchronous one at least max(g, t): the bound printed beside each row is max(g, t) /
(g + t), as a share of the synchronous step time. Also measured: publishing against a plain copy of the same bytes, and
the extra time of the engine's step that swaps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.facts.facts import EngineSample, Waited, WeightsLive
from headrace.facts.records import MetricsFact, StepRow, read_metrics

SKIP = 4
"""Number of steps at the start that are not counted, while the pipeline fills."""


@dataclass(frozen=True)
class Measured:
    max_lag: int
    seconds_per_step: float
    tokens_per_second: float
    trainer_seconds: float
    """Seconds of one step: forward, backward, update, publish."""
    engine_idle: float
    trainer_idle: float
    lag_mean: float
    lag_max: int
    publish: list[float]
    swap: list[float]
    nbytes: int


def any_contrast(completions: list[str], **columns: object) -> list[float]:
    """Gives every group contrast, so that every step generates and trains the same number of rollouts."""
    return [zlib.crc32(text.encode()) / 2**32 + i / 1000 for i, text in enumerate(completions)]


def settings(name: str, directory: Path, seed: int, steps: int) -> list[str]:
    """Settings of a timed run: one core per pool, and nothing beside generation and training."""
    return [
        f"name={name}",
        f"out='{directory}'",
        f"seed={seed}",
        f"train.steps={steps}",
        "train.warmup_steps=0",
        "train.learning_rate=1e-9",
        "engine.cores=[0]",
        "train.cores=[1]",
        "eval.prompts=0",
        "eval.every=0",
        "checkpoint.every=0",
        "watch.identity_every=0",
        "observe.terminal=off",
    ]


def measure(config: Path, max_lag: int, steps: int, directory: Path, seed: int) -> Measured:
    depth = [f"staleness.max_lag={max_lag}", "staleness.window=1"]
    sets = settings(f"lag{max_lag}-{seed}", directory, seed, steps) + depth
    result = headrace.train(config, sets=sets, reward=any_contrast)
    return summarise(max_lag, read_metrics(result.directory))


def summarise(max_lag: int, facts: list[MetricsFact]) -> Measured:
    steps = [fact for fact in facts if isinstance(fact, StepRow)][SKIP - 1 :]
    begin, end = steps[0].t, steps[-1].t
    counted = steps[1:]
    lags = [(lag, tokens) for step in counted for lag, tokens in step.lags.items()]
    total = sum(tokens for _, tokens in lags)
    live = [fact for fact in facts if isinstance(fact, WeightsLive) and fact.t > begin]
    waits = [f for f in facts if isinstance(f, Waited) and f.owner == "controller" and begin < f.t <= end]
    busy = sum(wait.seconds for wait in waits)
    samples = [fact for fact in facts if isinstance(fact, EngineSample) and begin <= fact.t <= end]
    engine_busy = samples[-1].stats.busy_seconds - samples[0].stats.busy_seconds
    return Measured(
        max_lag,
        (end - begin) / len(counted),
        sum(step.report.loss_tokens for step in counted) / (end - begin),
        busy / len(counted),
        1 - engine_busy / (samples[-1].t - samples[0].t),
        1 - busy / (end - begin),
        sum(lag * tokens for lag, tokens in lags) / total,
        max(lag for lag, _ in lags),
        [fact.update.seconds for fact in live],
        [fact.load.swap_seconds for fact in live],
        live[-1].update.nbytes,
    )


def copy_seconds(nbytes: int) -> float:
    """Makes a plain copy of as many bytes, in fp32 -> bf16 like the publish: the floor of a publish."""
    import torch

    torch.set_num_threads(1)
    source, target = torch.randn(nbytes // 2), torch.empty(nbytes // 2, dtype=torch.bfloat16)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def table(rows: list[Measured], lags: list[int]) -> list[str]:
    by_lag = {lag: [row for row in rows if row.max_lag == lag] for lag in lags}

    def median(lag: int, field: str) -> float:
        return statistics.median(getattr(row, field) for row in by_lag[lag])

    sync, train = median(0, "seconds_per_step"), median(0, "trainer_seconds")
    generate = sync - train
    bound = max(generate, train) / sync
    lines = [
        f"generate {generate:.2f} s, train {train:.2f} s a step: bound max(g, t) / (g + t) = {bound:.3f}",
        "",
        "| max_lag | trained tokens/s | s a step (min-max) | of the synchronous step | of the bound | engine idle | trainer idle | mean lag | max lag |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for lag in lags:
        seconds = [row.seconds_per_step for row in by_lag[lag]]
        share = median(lag, "seconds_per_step") / sync
        best = bound if lag else 1.0
        lines.append(
            f"| {lag} | {median(lag, 'tokens_per_second'):.0f} | {statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) "
            f"| {share:.3f} | {share / best:.2f} | {median(lag, 'engine_idle'):.0%} | {median(lag, 'trainer_idle'):.0%} "
            f"| {median(lag, 'lag_mean'):.2f} | {max(row.lag_max for row in by_lag[lag])} |"
        )
    publish = statistics.median(second for row in rows for second in row.publish)
    swap = sorted(second for row in rows for second in row.swap)
    copy = copy_seconds(rows[0].nbytes)
    lines += [
        "",
        f"publish {publish * 1e3:.0f} ms for {rows[0].nbytes / 1e6:.0f} MB (cast + fingerprint), a plain cast copy of the same bytes "
        f"{copy * 1e3:.0f} ms: {publish / copy:.2f}x",
        f"swap (generation stands still): median {statistics.median(swap) * 1e3:.2f} ms, max {swap[-1] * 1e3:.2f} ms over {len(swap)} swaps",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--config", type=Path, default=Path("recipes/demo/demo.toml"))
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for round_number in range(arguments.rounds):
            for lag in arguments.lags:
                row = measure(arguments.config, lag, arguments.steps, Path(directory), round_number)
                print(f"round {round_number} max_lag {lag}: {row.seconds_per_step:.2f} s a step", flush=True)
                rows.append(row)
    print("\n".join(["", *table(rows, arguments.lags)]))


if __name__ == "__main__":
    main()
