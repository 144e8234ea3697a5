"""Does `headrace plan` predict what a run does?

    python benchmarks/plan.py [--steps 10] [--rates FILE] [--settings 0x1x4 1x1x4 ...] [--config recipes/demo/demo.toml] [--keep DIRECTORY]

Measures the machine's rates once (or reads them from FILE), then runs every setting (max_lag x window x groups a step) for real,
engine and trainer on one core each, and simulates the same number of steps: with these rates, and with those of the stages that the run
itself recorded (`headrace plan RUN`). Nothing is fitted to the runs: the first prediction knows neither depth nor window nor batch, the
second knows how long the stages of the run took, and not how long its steps did. Counted are the same steps in all.

The second table has the stages of a step, in the run and in both predictions, so that an error can be found where it is made. `--keep` keeps
the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import SKIP, Measured, any_contrast, settings, summarise

import headrace
from headrace.commands.plan.measure import Gauge, Prediction, Scenario, planned_world, predict
from headrace.commands.plan.rates.calibrate import calibrate
from headrace.commands.plan.rates.from_run import rates_of_facts
from headrace.commands.plan.rates.rates import Rates, load_rates, save_rates
from headrace.facts.facts import GroupEnded, StepTrained, Waited, WeightsLive
from headrace.facts.records import StepRow, read_metrics
from headrace.loop.world import virtual_time
from headrace.run.config import RunConfig, load_config

SETTINGS = ("0x1x4", "1x1x4", "2x1x4", "4x1x4", "1x3x4", "2x5x4", "0x1x2", "2x2x2")
"""max_lag x window x groups per step"""


def settings_of(setting: str, seed: int, steps: int, directory: Path) -> list[str]:
    lag, window, groups = map(int, setting.split("x"))
    depth = [f"staleness.max_lag={lag}", f"staleness.window={window}", f"staleness.groups_per_step={groups}"]
    return settings(f"plan-{setting}-{seed}", directory, seed, steps) + depth


def scenario_of(config: RunConfig, rates: Rates) -> Scenario:
    assert rates.completions and rates.prompts
    return Scenario(
        rates=rates,
        completions=rates.completions,
        staleness=config.staleness,
        rollout=config.rollout,
        algo=config.algo,
        steps=config.train.steps,
        prompts=rates.prompts,
        workers=config.reward.workers,
        seed=config.seed,
    )


class Compared(NamedTuple):
    run: Measured
    plan: Prediction
    own: Prediction
    """From the stages of the run itself."""
    stages: dict[str, tuple[float, float, float]]
    """Seconds of a step, in the run and in the two plans."""


def compare(config: Path, setting: str, sets: list[str], rates: Rates) -> Compared:
    asked = load_config(config, sets)
    directory = headrace.train(config, sets=sets, reward=any_contrast).directory
    facts = read_metrics(directory)
    scenario = scenario_of(asked, rates)
    own, _ = rates_of_facts(counted(facts), asked, setting)
    of_own = scenario_of(asked, own)
    three = stages(facts), stages(facts_of(scenario)), stages(facts_of(of_own))
    return Compared(
        summarise(int(setting.split("x")[0]), facts),
        predict(scenario, skip=SKIP, tail=0),
        predict(of_own, skip=SKIP, tail=0),
        {name: (three[0][name], three[1][name], three[2][name]) for name in three[0]},
    )


class Kept(Gauge):
    """Keeps all facts of a simulation."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[Any] = []

    def record(self, fact: Any) -> None:
        super().record(fact)
        self.facts.append(fact)


def facts_of(scenario: Scenario) -> list[Any]:
    kept = Kept()
    world = planned_world(scenario, kept)
    kept.pool = world.pool
    virtual_time.run(world.run())
    return kept.facts


WAITS = {
    "waits for groups": ("trainer", "scored groups"),
    "step": ("controller", "(step)"),
    "copy": ("controller", "(publish)"),
    "waits for the swap": ("trainer", "the swap"),
    "send": ("delivery", "(the published weights)"),
    "load": ("delivery", "the swap"),
}
"""Stages by owner and part of the name of their waits. The first four follow each other; the others are beside them."""


def stages(facts: Sequence[Any]) -> dict[str, float]:
    """Mean seconds of a counted step in each stage; `group` is from the draw of a ticket to its scored group, `idle after` from new weights
    to the first group drawn after them."""
    steps = [fact for fact in facts if isinstance(fact, (StepRow, StepTrained))][SKIP - 1 :]
    begin, end, count = steps[0].t, steps[-1].t, len(steps) - 1
    of = [fact for fact in facts if begin < fact.t <= end]
    waits = [one for one in of if isinstance(one, Waited)]
    found = {
        name: sum(wait.seconds for wait in waits if wait.owner == owner and part in wait.what) / count
        for name, (owner, part) in WAITS.items()
    }
    found["between"] = (end - begin) / count - sum(list(found.values())[:4])
    found["group"] = mean(one.seconds for one in of if isinstance(one, GroupEnded))
    found["verify"] = mean(one.load.verify_seconds for one in of if isinstance(one, WeightsLive))
    found["tokens"] = mean(step.report.loss_tokens for step in steps[1:])
    return found


def counted(facts: Sequence[Any]) -> list[Any]:
    """The facts of the steps that are counted, and of the one before them."""
    steps = [fact for fact in facts if isinstance(fact, StepRow)]
    return [fact for fact in facts if fact.t >= steps[SKIP - 1].t]


def mean(values: Iterable[float]) -> float:
    return statistics.mean([*values] or [0.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rates", type=Path, help="read them where the file is there, else measure and write them")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--config", type=Path, default=Path("recipes/demo/demo.toml"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    kept = contextlib.nullcontext(str(arguments.keep)) if arguments.keep else tempfile.TemporaryDirectory()
    with kept as name:
        directory = Path(name)
        rates = rates_of(arguments.config, arguments.rates, directory)
        print_rates(rates)
        found = {}
        for setting in arguments.settings:
            sets = settings_of(setting, arguments.seed, arguments.steps, directory)
            found[setting] = compare(arguments.config, setting, sets, rates)
            print(row(setting, found[setting]), flush=True)
        print_stages(found)


def rates_of(config: Path, file: Path | None, directory: Path) -> Rates:
    if file and file.exists():
        return load_rates(file)
    sets = settings_of(SETTINGS[0], 0, 10, directory)
    whole = load_config(config, sets)
    rates = calibrate(dataclasses.replace(whole, seed=whole.seed + 1000), print, any_contrast)
    if file:
        save_rates(rates, file)
    return rates


def print_rates(rates: Rates) -> None:
    engine, trainer = rates.engine, rates.trainer
    curve = ", ".join(f"{n:.0f}: {1e3 * seconds:.1f}" for n, seconds in engine.decode)
    print(f"ms a pass by sequences: {curve}; {1e6 * engine.prefill:.0f} µs a prompt token")
    print(
        f"a step {trainer.step:.2f} s + {1e3 * trainer.token:.2f} ms a token; new weights: copy {1e3 * trainer.publish:.0f} ms"
    )
    print(f"the rest of a publish {1e3 * trainer.send:.0f} ms, and x {trainer.send_slows:.2f} beside a step")
    print(
        f"verified in {1e3 * engine.verify:.0f} ms, x {engine.verify_slows:.2f} beside passes; swap {1e3 * engine.swap:.1f} ms"
    )
    print(f"from the last token to the buffer {1e3 * rates.overhead:.0f} ms")
    print(f"both at once: a pass x {rates.engine_slowed:.2f}, a step x {rates.trainer_slowed:.2f}")
    print(
        "\n| max_lag x window x groups | tokens/s, run | planned | error | from its stages | error | s a step, run | planned | error | from its stages | error "
        "| mean lag, run | planned | engine idle, run | planned | trainer idle, run | planned |\n|" + "---|" * 17
    )


def row(setting: str, found: Compared) -> str:
    run, plan, own = found.run, found.plan, found.own
    cells = [setting, f"{run.tokens_per_second:.0f}"]
    for one in (plan, own):
        cells += [f"{one.tokens_per_second:.0f}", f"{one.tokens_per_second / run.tokens_per_second - 1:+.1%}"]
    cells.append(f"{run.seconds_per_step:.2f}")
    for one in (plan, own):
        cells += [f"{one.seconds_per_step:.2f}", f"{one.seconds_per_step / run.seconds_per_step - 1:+.1%}"]
    cells += [f"{run.lag_mean:.2f}", f"{plan.lag_mean:.2f}", f"{run.engine_idle:.0%}", f"{plan.engine_idle:.0%}"]
    return f"| {' | '.join([*cells, f'{run.trainer_idle:.0%}', f'{plan.trainer_idle:.0%}'])} |"


def print_stages(found: dict[str, Compared]) -> None:
    names = list(next(iter(found.values())).stages)
    print(
        f"\nSeconds of a step, run / planned / planned from its stages:\n\n| setting | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}"
    )
    for setting, one in found.items():
        cells = (
            " / ".join(f"{x:.0f}" if three[0] > 100 else f"{x:.3f}" for x in three) for three in one.stages.values()
        )
        print(f"| {setting} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
