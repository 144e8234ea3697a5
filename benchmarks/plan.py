"""Does `headrace plan` predict what a run does?

    python benchmarks/plan.py [--steps 10] [--rates FILE] [--settings 0x1x4 1x1x4 ...] [--config recipes/demo/demo.toml]

Measures the machine's rates once (or reads them from FILE), then runs every setting (max_lag x window x groups a step) for real,
engine and trainer on one core each, and simulates the same number of steps with these rates. Nothing is fitted to the runs: the
prediction is made from the rates alone, which know neither depth nor window nor batch. Counted are the same steps in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from pipeline import SKIP, Measured, any_contrast, settings, summarise

import headrace
from headrace.config import RunConfig, load_config
from headrace.observe.records import read_metrics
from headrace.plan.measure import Prediction, predict
from headrace.plan.rates.calibrate import calibrate
from headrace.plan.rates.rates import Rates, load_rates, save_rates
from headrace.plan.scenario import Scenario

SETTINGS = ("0x1x4", "1x1x4", "2x1x4", "4x1x4", "1x3x4", "2x5x4", "0x1x2", "2x2x2")
"""max_lag x window x groups per step"""


def settings_of(setting: str, seed: int, steps: int, directory: Path) -> list[str]:
    lag, window, groups = map(int, setting.split("x"))
    depth = [f"staleness.max_lag={lag}", f"staleness.window={window}", f"staleness.groups_per_step={groups}"]
    return settings(f"plan-{setting}-{seed}", directory, seed, steps) + depth


def real(config: Path, sets: list[str], lag: int) -> Measured:
    result = headrace.train(config, sets=sets, reward=any_contrast)
    return summarise(lag, read_metrics(result.directory))


def simulated(config: RunConfig, rates: Rates) -> Prediction:
    assert rates.completions and rates.prompts
    scenario = Scenario(
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
    return predict(scenario, skip=SKIP, tail=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rates", type=Path, help="read them where the file is there, else measure and write them")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--config", type=Path, default=Path("recipes/demo/demo.toml"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rates = rates_of(arguments.config, arguments.rates, directory)
        print_rates(rates)
        for setting in arguments.settings:
            sets = settings_of(setting, arguments.seed, arguments.steps, directory)
            foreseen = simulated(load_config(arguments.config, sets), rates)
            print(row(setting, foreseen, real(arguments.config, sets, int(setting.split("x")[0]))), flush=True)


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
    print(f"a step {trainer.step:.2f} s + {1e3 * trainer.token:.2f} ms a token; publish {1e3 * trainer.publish:.0f} ms")
    print(f"both at once: a pass x {rates.engine_slowed:.2f}, a step x {rates.trainer_slowed:.2f}")
    print(
        "\n| max_lag x window x groups | s a step, run | planned | error | tokens/s, run | planned | error "
        "| mean lag, run | planned | engine idle, run | planned | trainer idle, run | planned |\n|" + "---|" * 13
    )


def row(setting: str, plan: Prediction, run: Measured) -> str:
    return (
        f"| {setting} | {run.seconds_per_step:.2f} | {plan.seconds_per_step:.2f} | {plan.seconds_per_step / run.seconds_per_step - 1:+.1%} "
        f"| {run.tokens_per_second:.0f} | {plan.tokens_per_second:.0f} | {plan.tokens_per_second / run.tokens_per_second - 1:+.1%} "
        f"| {run.lag_mean:.2f} | {plan.lag_mean:.2f} | {run.engine_idle:.0%} | {plan.engine_idle:.0%} "
        f"| {run.trainer_idle:.0%} | {plan.trainer_idle:.0%} |"
    )


if __name__ == "__main__":
    main()
