"""What the planner says of settings whose step times others have published. Nothing of it was used to make the planner.

    python benchmarks/published.py

From data sheets alone (`commands/plan/rates/hardware.py`), seconds per step of NeMo RL 0.4 on DGX H100 (docs/about/performance-summary.md of NVIDIA-NeMo/RL,
and the recipes it names, examples/configs/recipes/llm/performance): 2,048 rollouts a step, on policy on shared GPUs, or one step off policy on
two halves. What their step does, from their recipes:

    4 updates a step (train_global_batch_size = 512); log-probs of the batch under the policy and under a reference (reference_policy_kl_penalty
    = 0.01), a forward pass each; activations are computed again for the 8B model (activation_checkpointing); 60 % of the memory for the
    engine where it shares it, 80 % else; at most 4,096 tokens a sequence, prompt included

Published are mean lengths. Their spread is not, so completions are log-normal with sigma = 0.8, the planner's assumption for a user who says nothing,
cut at the limit, with the published mean. `fixed` in the table is the same with completions of equal length. What the library does between
its stages is 6 % of a step in the one breakdown they show (pull request 1052: 4.0 of 66.55 s), and is not added.

From the stages of a synchronous run, seconds per step of the asynchronous one (verl, docs/advance/one_step_off.md; Qwen2.5-Math-7B on 16 H20): the
stages on their own GPUs are published, and what the synchronous step takes beside its stages is taken over.

Passes of engines, milliseconds: vLLM's own benchmark on one H200 (buildkite.com/vllm/performance-benchmark, build 9515: llama-3.1 8B, 8 sequences of 32 +
128 tokens, 833 ms), and NVIDIA's on a GH200 480GB (NIM of Llama 3.1 Nemotron Safety Guard 8B 1.14.0, bfloat16, 1,000 + 1,000 tokens: 165.8 and
7,591 tokens/s at 1 and 100 sequences).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from headrace.commands.plan.alternation import HOST_LINK, MOVED
from headrace.commands.plan.measure import Scenario, predict
from headrace.commands.plan.rates.hardware import GPUS, PASSES, Gpu, engine_rates, rates
from headrace.commands.plan.rates.rates import BFLOAT16, EngineRates, Rates, TrainerRates
from headrace.commands.plan.rates.shapes import SHAPES
from headrace.episodes.rollout import RolloutConfig
from headrace.loop.staleness import StalenessConfig
from headrace.loop.world.surroundings import Distribution, fixed

PROMPTS, GROUP, PROMPT, LIMIT = 64, 32, 150, 4096
"""Prompts of a step, rollouts of each, tokens of a prompt (OpenMathInstruct-2; an assumption), and of a sequence at most."""
UPDATES, LOGPROBS = 4, 2
"""Optimizer steps for a batch, and forward passes for log-probs."""
SIGMA = 0.8
OWN, SHARED = 0.8, 0.6
"""Shares of the memory that are the engine's."""


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
    again: int = 0
    """Forward passes for activations that are computed again."""


NEMO = (
    Published("8B, 16 GPUs shared, on policy", "8b", 1, 16, 16, 0, 1060, 97.7, 1),
    Published("8B, 8 + 8 GPUs, one step off", "8b", 1, 8, 8, 1, 1129, 74.6, 1),
    Published("32B, 32 GPUs shared, on policy", "32b", 4, 8, 32, 0, 3206, 393.0),
    Published("32B, 32 + 32 GPUs, one step off", "32b", 4, 8, 32, 1, 3207, 215.0),
    Published("30B-A3B, 32 GPUs shared, on policy", "30b-a3b", 4, 8, 32, 0, 3154, 225.0),
    Published("30B-A3B, 16 + 16 GPUs, one step off", "30b-a3b", 2, 8, 16, 1, 3158, 244.0),
)


def lengths(mean: float, limit: float) -> Distribution:
    """Log-normal completions whose mean is `mean` once they are cut at `limit`."""
    low, high = mean, 100 * mean
    for _ in range(60):
        middle = (low * high) ** 0.5
        below = Distribution("lognormal", mean=middle, sigma=SIGMA).mean_below(limit)
        low, high = (middle, high) if below < mean else (low, middle)
    return Distribution("lognormal", mean=low, sigma=SIGMA)


def of_nemo(one: Published, spread: bool = True) -> float:
    chip, shape, shared = GPUS["h100"], SHAPES[one.model], not one.max_lag
    made = rates(
        chip,
        shape,
        replica=one.replica,
        trainer=one.trainer,
        max_running=256,
        microbatch=LIMIT,
        passes=PASSES + LOGPROBS + one.again,
    )
    weights = shape.parameters * BFLOAT16
    room = ((SHARED if shared else OWN) * chip.memory * one.replica - weights) / shape.cache_bytes
    change = (2 * MOVED + BFLOAT16) * shape.parameters / (one.trainer * HOST_LINK) if shared else 0.0
    made = replace(
        made,
        engine=replace(made.engine, kv_tokens=float(int(room))),
        trainer=replace(made.trainer, step=UPDATES * made.trainer.step + change),
    )
    completions = lengths(one.tokens - PROMPT, LIMIT - PROMPT) if spread else fixed(one.tokens - PROMPT)
    return predicted(made, one.max_lag, completions, one.engines, PROMPTS, GROUP)


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
    return predicted(Rates(engine, trainer), 1, fixed(tokens), 1, 8, 16)


def predicted(made: Rates, max_lag: int, completions: Distribution, engines: int, prompts: int, group: int) -> float:
    scenario = Scenario(
        rates=made,
        completions=completions,
        prompts=fixed(PROMPT),
        staleness=StalenessConfig(groups_per_step=prompts, max_lag=max_lag),
        rollout=RolloutConfig(group_size=group, max_tokens=LIMIT - PROMPT),
        replicas=engines,
        steps=12,
    )
    return predict(scenario).seconds_per_step


class Pass(NamedTuple):
    what: str
    chip: Gpu
    running: int
    context: int
    seconds: float


PASSES_OF_ENGINES = (
    Pass("vLLM, 8B on one H200, 8 sequences", GPUS["h200"], 8, 96, 0.833 / 128),
    Pass("NIM, 8B on a GH200, 1 sequence", Gpu(96e9, 4.0e12, 989e12, 450e9, "GH200"), 1, 1500, 1 / 165.8),
    Pass("NIM, 8B on a GH200, 100 sequences", Gpu(96e9, 4.0e12, 989e12, 450e9, "GH200"), 100, 1500, 100 / 7591),
)


def of_pass(one: Pass) -> float:
    engine = engine_rates(one.chip, SHAPES["8b"], 1, 256)
    return one.running / engine.tokens_per_second(one.running, one.context)


def main() -> None:
    print("| setting | published, s | planned, s | error | `fixed` | error |\n|---|---:|---:|---:|---:|---:|")
    for nemo in NEMO:
        found, equal = of_nemo(nemo), of_nemo(nemo, spread=False)
        errors = [f"{one:.0f} | {one / nemo.seconds - 1:+.0%}" for one in (found, equal)]
        print(f"| {nemo.what} | {nemo.seconds:g} | {' | '.join(errors)} |", flush=True)
    for verl in VERL:
        found = of_verl(verl)
        print(f"| {verl.what} | {verl.seconds:g} | {found:.0f} | {found / verl.seconds - 1:+.1%} | | |", flush=True)
    print("\n| a pass | measured, ms | planned, ms | error |\n|---|---:|---:|---:|")
    for forward_pass in PASSES_OF_ENGINES:
        found = of_pass(forward_pass)
        print(
            f"| {forward_pass.what} | {1e3 * forward_pass.seconds:.1f} | {1e3 * found:.1f} | {found / forward_pass.seconds - 1:+.0%} |"
        )


if __name__ == "__main__":
    main()
