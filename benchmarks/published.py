"""What the planner says of settings whose step times others have published. Nothing of it was used to make the planner.

    python benchmarks/published.py

From data sheets alone (`plan/rates/hardware.py`), seconds per step of NeMo RL 0.4 on DGX H100 (docs/about/performance-summary.md of NVIDIA-NeMo/RL,
its recipes for GPUs and tensor-parallel sizes): 2,048 rollouts a step, on policy on shared GPUs, or one step off policy on two halves. Their
step also computes the log-probs of the batch once more with the trainer, a third of the work of training, which is added to the rates.

From the stages of a synchronous run, seconds per step of the asynchronous one (verl, docs/advance/one_step_off.md; Qwen2.5-Math-7B on 16 H20): the
stages on their own GPUs are published, and what the synchronous step takes beside its stages is taken over.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from headrace.plan.measure import predict
from headrace.plan.rates.hardware import GPUS, rates
from headrace.plan.rates.rates import EngineRates, Rates, TrainerRates
from headrace.plan.rates.shapes import SHAPES
from headrace.plan.scenario import Scenario
from headrace.rollouts.rollout import RolloutConfig
from headrace.rollouts.staleness import StalenessConfig
from headrace.simulate.distributions import fixed

PROMPTS, GROUP, PROMPT = 64, 32, 150
"""Prompts of a step, rollouts of each, and tokens of a prompt (OpenMathInstruct-2; an assumption)."""
LOGPROBS = 4 / 3


class Published(NamedTuple):
    what: str
    model: str
    replica: int
    engines: int
    trainer: int
    max_lag: int
    tokens: float
    """Mean length of a sequence, prompt included."""
    seconds: float


NEMO = (
    Published("8B, 16 GPUs shared, on policy", "8b", 1, 16, 16, 0, 1060, 97.7),
    Published("8B, 8 + 8 GPUs, one step off", "8b", 1, 8, 8, 1, 1129, 74.6),
    Published("32B, 32 GPUs shared, on policy", "32b", 4, 8, 32, 0, 3206, 393.0),
    Published("32B, 32 + 32 GPUs, one step off", "32b", 4, 8, 32, 1, 3207, 215.0),
    Published("30B-A3B, 32 GPUs shared, on policy", "30b-a3b", 4, 8, 32, 0, 3154, 225.0),
    Published("30B-A3B, 16 + 16 GPUs, one step off", "30b-a3b", 2, 8, 16, 1, 3158, 244.0),
)


def of_nemo(one: Published) -> float:
    made = rates(
        GPUS["h100"], SHAPES[one.model], replica=one.replica, trainer=one.trainer, max_running=256, microbatch=4096
    )
    made = replace(made, trainer=replace(made.trainer, token=made.trainer.token * LOGPROBS))
    return predicted(made, one.max_lag, one.tokens - PROMPT, one.engines, PROMPTS, GROUP)


class Stages(NamedTuple):
    """Seconds of a synchronous step, and of the stages of the asynchronous run on GPUs of their own."""

    what: str
    sync: float
    sync_stages: float
    generation: float
    training: float
    seconds: float


VERL = (
    Stages("7B, 4 + 12 H20, FSDP2", 749, 321 + 88 + 286, 458, 108 + 337, 520),
    Stages("7B, 4 + 12 H20, Megatron", 699, 207 + 119 + 344, 501, 120 + 347, 566),
)


def of_verl(one: Stages) -> float:
    """All sequences are equally long: a pass takes so long that a batch takes its published time."""
    tokens = 100
    engine = EngineRates(decode=((1.0, one.generation / tokens),), max_running=256)
    trainer = TrainerRates(token=0.0, step=one.training + one.sync - one.sync_stages)
    return predicted(Rates(engine, trainer), 1, tokens, 1, 8, 16)


def predicted(made: Rates, max_lag: int, tokens: float, engines: int, prompts: int, group: int) -> float:
    scenario = Scenario(
        rates=made,
        completions=fixed(tokens),
        prompts=fixed(PROMPT),
        staleness=StalenessConfig(groups_per_step=prompts, max_lag=max_lag),
        rollout=RolloutConfig(group_size=group, max_tokens=8192),
        replicas=engines,
        steps=12,
    )
    return predict(scenario).seconds_per_step


def main() -> None:
    print("| setting | published, s | planned, s | error |\n|---|---:|---:|---:|")
    for nemo in NEMO:
        found = of_nemo(nemo)
        print(f"| {nemo.what} | {nemo.seconds:g} | {found:.0f} | {found / nemo.seconds - 1:+.0%} |", flush=True)
    for verl in VERL:
        found = of_verl(verl)
        print(f"| {verl.what} | {verl.seconds:g} | {found:.0f} | {found / verl.seconds - 1:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
