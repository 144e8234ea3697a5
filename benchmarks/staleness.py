"""Which prompts are trained? The effect of pacing and discarding on throughput, on lag, and on the choice of prompts.

    python benchmarks/staleness.py [--seeds 0 1 2] [--steps 60] [--real 14] [--json FILE]

**Simulated.** The real pipeline, buffer and staleness code runs in virtual time (`headrace.loop.world`): a 7B model on
eight H100s, half of them to generate and half to train, 32 prompts x 8 rollouts per step, log-normal completions with a
heavy tail, longer for harder prompts. The simulation knows the final length of every completion and the solve rate of
every prompt, even of those that were never finished: the groups drawn are compared with those trained, on prompts whose
tickets all ended.

**Real** (--real STEPS): the demo's model and task, with completions of up to 160 tokens, the task's verifier as reward
(and a little noise, so that every group has contrast), a learning rate close to zero, and the same policies. Generation
is the bottleneck, as it is with large models: the engine's plain PyTorch path on one core, 48 sequences at once. The
same ticket has the same prompt in every run: for groups that one policy ended early, the completions of another one are
used.

Means are over groups with contrast, each group being one observation. Shares of tokens are of all tokens that were
sampled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shutil
import statistics
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from trainer_process import ROOT, Child, Json, Results, child_main, machine

from headrace.episodes.scoring.extract import last_number

NEVER = 1 << 20
"""A `max_lag` that means no bound."""


def policies(max_lag: int, groups: int) -> dict[str, Json]:
    """Settings of `staleness`, by the name of the table's row."""
    away = {"in_flight": (max_lag + 1) * groups}
    return {
        "wait": {"max_lag": max_lag},
        "wait, bound 3 times as high": {"max_lag": 3 * max_lag},
        "wait, window": {"max_lag": max_lag, "window": max_lag * groups // 2},
        "trim": {"max_lag": max_lag, "overdue": "trim", **away},
        "drop": {"max_lag": max_lag, "overdue": "drop", **away},
        "cancel": {"max_lag": max_lag, "overdue": "cancel", **away},
        "unbounded": {"max_lag": NEVER, "overdue": "drop", "in_flight": (3 * max_lag + 1) * groups},
    }


REAL_GROUPS = 6
"""Prompts per step of a real run."""


class Prompted(NamedTuple):
    """The work that a ticket stands for, whatever its fate."""

    lengths: tuple[int, ...]
    solved: float
    contrast: bool = True


# --- simulated ---------------------------------------------------------------------------------------------------------


def simulated(given: argparse.Namespace, policy: Json, seed: int) -> Json:
    from headrace.commands.plan.measure import planned_world
    from headrace.core.reports import EngineStats
    from headrace.facts.facts import GroupEnded, StepTrained, WeightsLive
    from headrace.facts.records import summarise
    from headrace.facts.run_state import RunState
    from headrace.loop.world import virtual_time

    class Watcher:
        """An observer that keeps metrics, not tokens."""

        def __init__(self) -> None:
            self.state, self.ended, self.trained, self.kept = RunState(), {}, [], {}

        def record(self, fact: Any) -> None:
            if isinstance(fact, GroupEnded):
                self.ended[fact.ticket] = fact
            if isinstance(fact, StepTrained):
                self.kept |= {group.ticket: kept_share(group) for group in fact.groups}
                fact = summarise(fact)
                self.trained += fact.tickets
            if not isinstance(fact, WeightsLive):
                self.state.fold(fact)

    scenario, watcher = scenario_of(given, policy, seed), Watcher()
    world = planned_world(scenario, watcher)

    async def go() -> EngineStats:
        await world.run()
        return world.pool.snapshot()

    stats = virtual_time.run(go())
    truth = asked(scenario, max(watcher.ended) + 1)
    rows = watcher.state.rows[len(watcher.state.rows) // 10 :]
    seconds = rows[-1].t - rows[0].t
    return {
        **lags_of(rows),
        "trained_rate": sum(row.report.loss_tokens for row in rows[1:]) / seconds,
        "seconds": seconds / (len(rows) - 1),
        "running": stats.sampled_tokens / stats.steps,
        **thrown(watcher.state, policy["max_lag"]),
        **chosen(truth, watcher.ended, watcher.trained),
        "by_token": by_token(truth, watcher.ended, watcher.kept),
    }


def kept_share(group: Any) -> float:
    """Its tokens that are in the loss."""
    masks = [kept for row in group.rows for kept in row.mask]
    return sum(masks) / len(masks)


def by_token(truth: Sequence[Prompted], ended: Mapping[int, Any], kept: Mapping[int, float]) -> list[float]:
    """Returns the mean solve rate of the groups drawn and of those trained, each token counted once."""
    known = {ticket: one for ticket in cohort(ended, truth) if (one := truth[ticket]).contrast}
    tokens = {ticket: sum(one.lengths) for ticket, one in known.items()}
    loss = {ticket: count * kept.get(ticket, 0.0) for ticket, count in tokens.items()}
    return [
        sum(known[ticket].solved * count for ticket, count in each.items()) / sum(each.values())
        for each in (tokens, loss)
    ]


def scenario_of(given: argparse.Namespace, policy: Json, seed: int) -> Any:
    from headrace.commands.plan.measure import Scenario
    from headrace.commands.plan.rates import hardware
    from headrace.commands.plan.rates.shapes import shape_of
    from headrace.episodes.rollout import RolloutConfig
    from headrace.loop.staleness import StalenessConfig
    from headrace.loop.world.surroundings import Distribution, fixed

    chip, shape = hardware.gpu("h100"), shape_of("7b")
    return Scenario(
        rates=hardware.rates(chip, shape, replica=1, trainer=4, max_running=256, name="7b"),
        completions=Distribution("lognormal", mean=2000, sigma=1.0, correlation=0.6),
        staleness=StalenessConfig(groups_per_step=given.groups, **policy),
        rollout=RolloutConfig(group_size=8, max_tokens=16384, patience=10**9),
        steps=given.steps,
        replicas=4,
        prompts=fixed(300),
        solved=0.5,
        seed=seed,
    )


def asked(scenario: Any, tickets: int) -> list[Prompted]:
    """Returns the lengths and solve rates of the first tickets, as the simulated engine and scorer decide them."""
    from headrace.episodes.rollout import seed_of
    from headrace.loop.world.surroundings import (
        CompletionLengths,
        SimulatedScorer,
        SimulatedTask,
        difficulty,
        solve_shift,
    )

    task = SimulatedTask(scenario.prompts, scenario.seed)
    length = CompletionLengths(scenario.completions, scenario.rollout.max_tokens)
    scorer = SimulatedScorer(latency=scenario.latency, workers=1, seed=scenario.seed, solved=scenario.solved)
    found = []
    for ticket in range(tickets):
        prompt, size = task.draw(), scenario.rollout.group_size
        seeds = [seed_of(scenario.seed, "rollout", ticket, i) for i in range(size)]
        requests = [scenario.rollout.request("", prompt.tokens, seed, ticket) for seed in seeds]
        reward = scorer._rewards(prompt)
        chance = NormalDist().cdf(solve_shift(scenario.solved) - difficulty(prompt.tokens))
        contrast = len({reward(i) for i in range(size)}) > 1
        found.append(Prompted(tuple(length(request)[0] for request in requests), chance, contrast))
    return found


# --- what both count -----------------------------------------------------------------------------------------------------


def lags_of(rows: Sequence[Any]) -> Json:
    lags: Counter[int] = Counter()
    for row in rows:
        lags.update(row.lags)
    mean = sum(lag * count for lag, count in lags.items()) / lags.total()
    return {"lag_mean": mean, "lag_max": max(lags)}


def thrown(state: Any, bound: int) -> Json:
    """Returns shares of the sampled tokens of all groups that ended."""
    from headrace.facts.group_numbers import DISCARDED
    from headrace.facts.run_totals import trimmed

    fates = state.fates.of
    sampled = sum(fate.tokens for fate in fates.values()) or 1
    lost = sum(fates[reason].tokens for reason in DISCARDED if reason in fates)
    groups = sum(fates[reason].groups for reason in DISCARDED if reason in fates)
    trained = fates["trained"].groups
    return {
        "lost": lost / sampled,
        "trimmed": sum(trimmed(row, bound) for row in state.rows) / sampled,
        "discarded": groups / (groups + trained),
        "contrastless": fates["no_contrast"].groups if "no_contrast" in fates else 0,
    }


def cohort(ended: Mapping[int, Any], truth: Sequence[object]) -> list[int]:
    """Returns the first tickets, up to the first one whose end is not known."""
    return list(itertools.takewhile(lambda ticket: ticket in ended, range(len(truth))))


def chosen(truth: Sequence[Prompted | None], ended: Mapping[int, Any], trained: Sequence[int]) -> Json:
    """Returns, of the first tickets that all ended, those with contrast, and those of them that were trained."""
    known = {ticket: one for ticket in cohort(ended, truth) if (one := truth[ticket]) and one.contrast}
    taken = set(trained)
    kept = [one for ticket, one in known.items() if ticket in taken]
    away = [one for ticket, one in known.items() if ticket not in taken and ended[ticket].outcome != "ready"]
    return {"drawn": told(kept + away), "trained": told(kept), "groups": len(known), "errors": errors(kept, away)}


def told(groups: Sequence[Prompted]) -> Json:
    lengths = sorted(length for group in groups for length in group.lengths)
    return {
        "length": statistics.mean(lengths),
        "p95": lengths[int(0.95 * len(lengths))],
        "solved": statistics.mean(group.solved for group in groups),
        "groups": len(groups),
    }


def errors(kept: Sequence[Prompted], away: Sequence[Prompted]) -> Json:
    """Returns Welch's t of the trained against the discarded, in standard errors."""
    if len(away) < 2 or len(kept) < 2:
        return {}
    found = {}
    for name, value in (("length", lambda one: statistics.mean(one.lengths)), ("solved", lambda one: one.solved)):
        a, b = [value(one) for one in kept], [value(one) for one in away]
        error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
        found[name] = (statistics.mean(a) - statistics.mean(b)) / error if error else 0.0
    return found


# --- real ------------------------------------------------------------------------------------------------------------------


def verified(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Gives 1 if the last number is the answer, and at most a hundredth more, so that no two rollouts of a group are
    equal."""
    return [
        float(last_number(text) == answer[i]) + zlib.crc32(f"{i}{text}".encode()) / 2**32 / 100
        for i, text in enumerate(completions)
    ]


def run(options: Json) -> Json:
    """Runs one policy, in a process of its own."""
    import headrace
    from headrace.facts.facts import EngineSample, GroupEnded
    from headrace.facts.records import StepRow, read_metrics
    from headrace.facts.run_state import RunState

    shutil.rmtree(options["directory"], ignore_errors=True)  # of an attempt that was interrupted
    facts = read_metrics(headrace.train(options["config"], sets=options["sets"], reward=verified).directory)
    state = RunState()
    for fact in facts:
        state.fold(fact)
    rows = [fact for fact in facts if isinstance(fact, StepRow)][3:]
    seconds = rows[-1].t - rows[0].t
    samples = [fact for fact in facts if isinstance(fact, EngineSample) and rows[0].t <= fact.t <= rows[-1].t]
    first, last = samples[0].stats, samples[-1].stats
    ended = [fact for fact in facts if isinstance(fact, GroupEnded)]
    return {
        **lags_of(rows),
        "trained_rate": sum(row.report.loss_tokens for row in rows[1:]) / seconds,
        "seconds": seconds / (len(rows) - 1),
        "running": (last.sampled_tokens - first.sampled_tokens) / (last.steps - first.steps),
        **thrown(state, options["max_lag"]),
        "ended": {
            one.ticket: [one.outcome, one.lengths, one.rewards] for one in ended if one.lengths or one.lost_tokens
        },
        "taken": [ticket for fact in facts if isinstance(fact, StepRow) for ticket in fact.tickets],
    }


def settings(given: argparse.Namespace, policy: Json, seed: int, directory: Path) -> list[str]:
    return [
        f'name="{directory.name}"',
        f'out="{directory.parent}"',
        f"seed={seed}",
        f"train.steps={given.real}",
        "train.learning_rate=1e-9",
        "train.warmup_steps=0",
        "rollout.max_tokens=160",
        "rollout.group_size=4",
        f"staleness.groups_per_step={REAL_GROUPS}",
        *(f"staleness.{name}={value}" for name, value in policy.items()),
        "engine.path=fused",
        "engine.max_running=48",
        "engine.context_length=256",
        "engine.cores=[0]",
        "train.cores=[1]",
        "eval.prompts=0",
        "checkpoint.every=0",
        "watch.identity_every=0",
        "observe.terminal=off",
        *given.set,
    ]


def real(given: argparse.Namespace, results: Results, name: str, policy: Json, seed: int) -> Json | None:
    title = f"real {name} seed {seed} steps {given.real}"
    directory = given.folder / "runs" / re.sub(r"\W+", "-", title)
    sets = settings(given, policy, seed, directory)
    options = {"config": str(given.config), "sets": sets, "directory": str(directory), "max_lag": policy["max_lag"]}
    child = Child(directory.name, Path(__file__).name, options, limit=given.limit)
    return results.measure(title, lambda: child.run(given.folder))


class _Ended(NamedTuple):
    outcome: str


def with_truth(runs: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the completions of another run of the seed for the prompt of a ticket that a run did not finish. They are
    shorter than the ended ones would have become, since those were ended for their age."""
    known = {name: finished(one["ended"]) for name, one in runs.items()}
    found = {}
    for name, one in runs.items():
        ended = {int(ticket): _Ended(told[0]) for ticket, told in one["ended"].items()}
        others = [known[other] for other in runs if other != name]
        truth = [
            next((each[ticket] for each in (known[name], *others) if ticket in each), None)
            for ticket in range(max(ended) + 1)
        ]
        found[name] = {**one, **chosen(truth, ended, one["taken"])}
    return found


def finished(ended: Mapping[str, Any]) -> dict[int, Prompted]:
    return {
        int(ticket): Prompted(tuple(lengths), statistics.mean(rewards))
        for ticket, (_, lengths, rewards) in ended.items()
        if lengths
    }


# --- tables ------------------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Sequence[Json]]) -> Iterator[str]:
    yield (
        "| policy | trained tokens/s | s a step | sequences decoding | lag mean | max | groups discarded | tokens thrown away "
        "| tokens trimmed |"
    )
    yield f"|{'---|' * 9}"
    for name, runs in found.items():
        mean = {key: statistics.mean(one[key] for one in runs) for key in runs[0] if isinstance(runs[0][key], float)}
        yield (
            f"| {name} | {mean['trained_rate']:,.0f} | {mean['seconds']:.1f} | {mean['running']:.0f} | {mean['lag_mean']:.2f} "
            f"| {max(one['lag_max'] for one in runs)} | {mean['discarded']:.1%} | {mean['lost']:.1%} | {mean['trimmed']:.1%} |"
        )


def choices(found: Mapping[str, Sequence[Json]]) -> Iterator[str]:
    yield (
        "| policy | mean tokens: drawn | trained | standard errors | p95: drawn | trained | solve rate: drawn | trained "
        "| standard errors | of a token: drawn | trained |"
    )
    yield f"|{'---|' * 11}"
    for name, runs in found.items():
        drawn, trained = ({key: _mean(runs, side, key) for key in runs[0][side]} for side in ("drawn", "trained"))
        yield (
            f"| {name} | {drawn['length']:,.0f} | {trained['length']:,.0f} ({trained['length'] / drawn['length'] - 1:+.1%}) "
            f"| {_errors(runs, 'length')} | {drawn['p95']:,.0f} | {trained['p95']:,.0f} "
            f"| {drawn['solved']:.3f} | {trained['solved']:.3f} | {_errors(runs, 'solved')} | {_by_token(runs)} |"
        )


def _mean(runs: Sequence[Json], side: str, key: str) -> float:
    return statistics.mean(one[side][key] for one in runs)


def _by_token(runs: Sequence[Json]) -> str:
    if "by_token" not in runs[0]:
        return "– | –"
    return " | ".join(f"{statistics.mean(one['by_token'][side] for one in runs):.3f}" for side in (0, 1))


def _errors(runs: Sequence[Json], name: str) -> str:
    """Combines all seeds (Stouffer's sum of independent statistics)."""
    values = [one["errors"][name] for one in runs if one["errors"]]
    return f"{sum(values) / math.sqrt(len(values)):+.1f}" if values else "0"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="of a simulated run; 0 simulates none")
    parser.add_argument("--groups", type=int, default=32, help="prompts a simulated step")
    parser.add_argument("--max-lag", type=int, default=4, help="of a simulated run")
    parser.add_argument("--real", type=int, default=0, help="steps of a real run; 0 makes none")
    parser.add_argument("--real-seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--real-policies", default="wait,trim,drop,cancel,unbounded")
    parser.add_argument("--config", type=Path, default=ROOT / "recipes" / "demo" / "demo.toml")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that a real run may take")
    parser.add_argument("--set", action="append", default=[], help="a setting of headrace for the real runs, a.b=c")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-staleness", help="of results and logs")
    parser.add_argument("--again", action="store_true", help="run anew what was run before")
    parser.add_argument("--json", type=Path, help="where all that was measured is written too")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    given.folder.mkdir(parents=True, exist_ok=True)
    results = Results(given.folder / "results.json", given.again)
    found: dict[str, dict[str, list[Json]]] = {"simulated": {}, "real": {}}
    for name, policy in policies(given.max_lag, given.groups).items() if given.steps else ():
        for seed in given.seeds:
            title = f"simulated {name} seed {seed} steps {given.steps} groups {given.groups} lag {given.max_lag}"
            one = results.measure(title, lambda policy=policy, seed=seed: simulated(given, policy, seed))
            if one:
                found["simulated"].setdefault(name, []).append(one)
    for seed in given.real_seeds if given.real else ():
        chosen_ones = given.real_policies.split(",")
        runs = {name: real(given, results, name, policies(1, REAL_GROUPS)[name], seed) for name in chosen_ones}
        for name, one in with_truth({name: one for name, one in runs.items() if one}).items():
            found["real"].setdefault(name, []).append(one)
    lines = [machine()]
    for title, rows in found.items():
        lines += ["", title, "", *table(rows), "", *choices(rows)] if rows else []
    print("\n" + "\n".join(lines))
    (given.folder / "table.md").write_text("\n".join(lines) + "\n")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        child_main(run)
    else:
        main()
