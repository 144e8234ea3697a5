"""Rates of accelerators that are not available: a roofline from data sheets and the shape of the model.

    a pass of n sequences   fixed + max(weights read / bandwidth, 2 · active parameters · n / compute) + cache read / bandwidth
    a prompt token          2 · active parameters / compute
    a trained token         2 · active parameters · passes / (compute of the pool)        3 passes: forward, and backward, which is two of
                            them (Kaplan et al., 2020); and one each for what is computed again (`gradient_checkpointing`) and for a
                            reference model in the loss; or what travels between ranks for it, if that takes longer (`mesh.py`); and
                            what travels for attention
    an update on its way    bytes of the weights / network (`rates.py`)

Peaks are from the manufacturers; the shares of them that are reached are those of well-tuned stacks, written below with what others
measured. What headrace itself measured takes their place where it can (`own_runs.py`). A short measurement on the machine itself
(`--calibrate`) or a finished run gives better figures.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from headrace.algo.config import AlgoConfig
from headrace.commands.plan.rates.mesh import Heads, RankMemory, Traffic, rank_memory, traffic
from headrace.commands.plan.rates.rates import BFLOAT16, EngineRates, Rates, TrainerRates, Travel, whole
from headrace.commands.plan.rates.shapes import Architecture, Beside
from headrace.core.errors import ConfigError
from headrace.run.rehearsal.memory_needs import shapes_beside
from headrace.trainer.config import TrainConfig
from headrace.trainer.parallel import ParallelConfig, sums_once

READS, COMPUTES, TRAINS = 0.8, 0.5, 0.4
"""Shares of peak bandwidth, of peak compute in forward passes, and of peak compute in training (MFU), that are reached.

With these and FIXED, a pass of an 8B model takes 7.3 ms for 8 sequences on an H200 (vLLM measured 6.5: buildkite.com/vllm/performance-benchmark,
build 9515), and 15 ms for 100 sequences of 1,500 tokens on a GH200 (NVIDIA measured 13: NIM of Llama 3.1 8B, bfloat16). The 8B model of torchtitan
reached an MFU of 39 % on 8 and on 128 H100 with torch.compile, and 33 % without (benchmarks/llama3_h100_202412_torchtitan.md)."""
TRAINS_MIXTURE = 0.15
"""Training share for mixtures of experts, whose products are small: 153 of 989 TFLOP/s for GPT-OSS 120B in bfloat16 on 64 H100; in 8 bits, 121
for Qwen3-30B-A3B on 16 and 233 for Qwen3-235B-A22B on 256 (docs/performance-summary.md of NVIDIA-NeMo/Megatron-Bridge, container 25.11)."""
FIXED = 3e-3
"""Seconds per pass for scheduling, launches and sampling."""
PASSES = 3
"""Forward passes that forward and backward pass of a trained token cost together."""
DOUBLING = 0.95
"""Factor on the speed per GPU for every doubling of a pool beyond eight, or of a tensor-parallel replica."""
NETWORK = 40e9
"""Bytes per second of a weight broadcast: a link of 400 Gbit/s, used to four fifths."""
NODE = 8
"""GPUs of a machine. Each has a link of its own to other machines."""
MICROBATCH = 2048
"""Tokens that a rank forwards at once: the default of `train.microbatch_tokens`."""
WEIGHTS_SHARE, USABLE = 0.65, 0.9
"""Shares of a replica's memory: for weights at most, and for weights and cache together."""
TRAINING_BYTES, TRAINING_USABLE = 16, 0.8
"""Bytes per parameter of weights, gradients and AdamW's state in mixed precision, and the share of memory for them."""
BESIDE_STEP = 0.2
"""Seconds of a step beside its products and the optimizer's: an assumption."""
SHARED = 2.0
"""Factor by which engine and trainer slow each other down on one GPU: their kernels take turns."""


@dataclass(frozen=True)
class Gpu:
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second."""
    compute: float
    """Dense bfloat16 operations per second."""
    link: float
    """Bytes per second that it receives from other GPUs of its machine."""
    name: str


GPUS = {
    "h100": Gpu(80e9, 3.35e12, 989e12, 450e9, "H100 SXM"),  # NVIDIA H100 Tensor Core GPU data sheet (without sparsity)
    "h200": Gpu(141e9, 4.8e12, 989e12, 450e9, "H200 SXM"),  # NVIDIA H200 Tensor Core GPU data sheet
    "a100": Gpu(80e9, 2.039e12, 312e12, 300e9, "A100 SXM 80 GB"),  # NVIDIA A100 Tensor Core GPU data sheet
}


def gpu(name: str) -> Gpu:
    if name not in GPUS:
        raise ConfigError(
            f"--hardware {name} is not known; choose one of {', '.join(GPUS)}, or cpu:FILE for measured rates"
        )
    return GPUS[name]


def replica_gpus(chip: Gpu, model: Architecture) -> int:
    """Returns the fewest GPUs, a power of two, that hold the weights and a useful cache."""
    return _power_of_two(model.parameters * BFLOAT16 / (WEIGHTS_SHARE * chip.memory))


def trainer_gpus(chip: Gpu, model: Architecture) -> int:
    """Returns the fewest GPUs, a power of two, that hold the sharded training state, and what is beside it."""
    room = TRAINING_USABLE * chip.memory - model.beside.whole
    return _power_of_two((model.parameters * TRAINING_BYTES + model.beside.split) / room)


def trainer_mesh(
    chip: Gpu, model: Architecture, gpus: int, microbatch: int = MICROBATCH, *, context: int = 1
) -> ParallelConfig:
    """Returns the mesh on which a token takes the least time, with as few ranks in a tensor group as possible: few tokens a microbatch do
    not make up for the gathering of all weights. Mixtures are split by experts instead, and long rows by `context`, which divides `gpus`."""
    groups = [1 << k for k in range(NODE.bit_length()) if gpus % (1 << k) == 0 and model.kv_heads % (1 << k) == 0]
    alone = bool(model.experts) or context > 1
    meshes = [_narrowest(chip, model, gpus, context)] + [
        ParallelConfig(shard=gpus // tensor, tensor=tensor, gather="bfloat16" if gpus > tensor else "float32")
        for tensor in ([] if alone else groups[1:])
    ]
    meshes = [
        dataclasses.replace(mesh, reduce="step" if sums_once(mesh, model.parameters, chip.memory) else "microbatch")
        for mesh in meshes
    ]
    return min(meshes, key=lambda mesh: token_seconds(chip, model, mesh, microbatch))


def _narrowest(chip: Gpu, model: Architecture, gpus: int, context: int) -> ParallelConfig:
    """Returns the narrowest split that leaves room for activations: within a machine, with copies on the others, if a machine holds it.
    Experts are split whole where tokens need not leave the machine."""
    for split in range(min(gpus, NODE), gpus):
        if gpus % split or split % context:
            continue
        mesh = ParallelConfig(shard=split // context, context=context, replicate=gpus // split, gather="bfloat16")
        memory = trainer_memory(model, mesh)
        if memory.held + memory.gathered <= TRAINING_USABLE * chip.memory:
            return mesh
    expert = gpus if model.experts and 1 < gpus <= NODE else 1
    gather: Literal["bfloat16", "float32"] = "bfloat16" if gpus > 1 else "float32"
    return ParallelConfig(shard=gpus // context, context=context, expert=expert, gather=gather)


def trains(model: Architecture) -> float:
    """Returns the share of peak compute that the training of a model reaches."""
    return TRAINS_MIXTURE if model.experts else TRAINS


def passes_of(train: TrainConfig, algo: AlgoConfig, model: Architecture | None = None) -> float:
    """Returns the forward passes of the policy that a trained token costs under these settings, those of a critic's own model and of a teacher that the
    trainer holds by their sizes. `model`: the policy's; None where its size is not known, and has no part in a rate that was measured."""
    passes = PASSES + train.gradient_checkpointing
    beside = _beside(passes, algo) / model.active if model else 0
    return passes + beside + algo.reference_in_loss


def _beside(passes: float, algo: AlgoConfig) -> float:
    """Returns the parameters that a trained token passes beside the policy's own, each as often as it does. A comparison over the vocabulary walks both heads
    twice more for its value and once for its gradient (`trainer/forward/divergence.py`), which takes the place of that of log-probs."""
    critic, teacher = shapes_beside(algo)
    found = passes * critic.parameters if critic else 0.0
    if teacher:
        found += teacher.parameters
        found += 6 * teacher.vocabulary * teacher.hidden if algo.recipe.distill.over == "vocabulary" else 0
    return found


def with_beside(model: Architecture, algo: AlgoConfig, *, adapted: bool) -> Architecture:
    """Returns the policy's shape with what its trainer holds beside it, whose sizes are those of `run/rehearsal/memory_needs.py`. `adapted`: whether an
    adapter is trained, whose base is the reference. Raises ConfigError for a model that cannot be found."""
    critic, teacher = shapes_beside(algo)
    split = whole = 0.0
    if critic:
        split += TRAINING_BYTES * critic.parameters
    if teacher:
        split += BFLOAT16 * teacher.parameters
        whole += BFLOAT16 * teacher.vocabulary * teacher.hidden
    if algo.reference_in_loss and not adapted:  # embeddings of one that moves stay in float32
        split += BFLOAT16 * (model.parameters + (model.outer if algo.recipe.kl.every else 0.0))
    return dataclasses.replace(model, beside=Beside(split, whole, critic))


def token_seconds(
    chip: Gpu, model: Architecture, mesh: ParallelConfig, microbatch: int, passes: float = PASSES
) -> float:
    """Returns the seconds per token of the whole pool: those of its products, or of the weights that travel meanwhile if these take longer;
    and those for which ranks wait that compute a microbatch together. `microbatch`: tokens that a rank forwards at once; `passes`: that a
    token costs."""
    moved, joint = trainer_traffic(model, mesh), mesh.ranks * DOUBLING ** max(0.0, math.log2(mesh.ranks / 8))
    computed = 2 * passes * model.active / (trains(model) * chip.compute * joint)
    at_once = microbatch * mesh.ranks / mesh.tensor
    waits = (moved.together(microbatch) + moved.attended * microbatch) / neighbours_link(chip, mesh)
    return max(computed, moved.microbatch(microbatch) / link(chip, mesh) / at_once) + waits / at_once


def trainer_memory(model: Architecture, mesh: ParallelConfig) -> RankMemory:
    experts = model.experts if mesh.expert > 1 else 0.0
    inner = model.parameters - model.outer - experts
    memory = rank_memory(mesh, layers=model.layers, inner=inner, outer=model.outer, experts=experts)
    whole = model.beside.whole if mesh.split > 1 else 0.0
    return dataclasses.replace(memory, held=memory.held + model.beside.split / mesh.split + whole)


def trainer_traffic(model: Architecture, mesh: ParallelConfig) -> Traffic:
    inner = model.parameters - model.outer - (model.experts if mesh.expert > 1 else 0.0)
    heads = Heads(model.heads, model.kv_heads, model.head)
    return traffic(
        mesh,
        layers=model.layers,
        inner=inner,
        outer=model.outer,
        hidden=model.hidden,
        width=model.width,
        heads=heads,
    )


def link(chip: Gpu, mesh: ParallelConfig) -> float:
    """Returns the bytes per second that a rank receives from those among which the model is split. Between machines, each GPU of a
    machine has a part of the ring pass through its own link."""
    within = READS * chip.link
    return within if mesh.split <= NODE else min(within, NODE * NETWORK)


def neighbours_link(chip: Gpu, mesh: ParallelConfig) -> float:
    """Returns the bytes per second that a rank receives from those with which it computes a microbatch: its neighbours."""
    return READS * chip.link if mesh.context * mesh.tensor <= NODE else NETWORK


def fits_one(chip: Gpu, model: Architecture) -> bool:
    """Returns whether one GPU holds both pools: training with what is beside it, two versions of the served weights, and a useful cache."""
    return (TRAINING_BYTES + 2 * BFLOAT16) * model.parameters + model.beside.split <= TRAINING_USABLE * chip.memory


def _power_of_two(least: float) -> int:
    return 1 << max(0, math.ceil(math.log2(least))) if least > 1 else 1


def engine_rates(
    chip: Gpu, model: Architecture, gpus: int, max_running: int, travel: Travel | None = None
) -> EngineRates:
    """Returns the rates of one replica, tensor-parallel over `gpus`. With n sequences a mixture of experts reads at most n times the
    parameters that one token passes. `travel`: the way of new weights; whole over NETWORK by default."""
    travel = travel or whole(model.parameters, NETWORK)
    joint = gpus * DOUBLING ** math.log2(gpus)
    bandwidth, compute = READS * chip.bandwidth * joint, COMPUTES * chip.compute * joint
    room = (USABLE * chip.memory * gpus - model.parameters * BFLOAT16) / model.cache_bytes
    sizes = [1 << k for k in range(13)]

    def pass_seconds(n: int) -> float:
        read = min(model.parameters, model.active * n) * BFLOAT16 / bandwidth
        return FIXED + max(read, 2 * model.active * n / compute)

    return EngineRates(
        decode=tuple((float(n), pass_seconds(n)) for n in sizes),
        prefill=2 * model.active / compute,
        context=model.cache_bytes / bandwidth,
        max_running=max_running,
        kv_tokens=float(max(0, int(room))),
        verify=travel.fetch + travel.apply,
        swap=0.02,
        gpus=gpus,
    )


def trainer_rates(
    chip: Gpu,
    model: Architecture,
    gpus: int,
    microbatch: int = MICROBATCH,
    travel: Travel | None = None,
    *,
    context: int = 1,
    passes: float = PASSES,
) -> TrainerRates:
    """Returns the rates of the whole pool. The optimizer reads and writes its state once per step; publishing casts the weights once, and
    compares them with the version before if `travel` says so, beside the next step. `microbatch` and `context`: as for `trainer_mesh`;
    `passes`: as for `token_seconds`."""
    mesh = trainer_mesh(chip, model, gpus, microbatch, context=context)
    moved = trainer_traffic(model, mesh)
    joint = gpus * DOUBLING ** max(0.0, math.log2(gpus / 8))
    memory = READS * chip.bandwidth * joint
    return TrainerRates(
        token=token_seconds(chip, model, mesh, microbatch, passes),
        step=BESIDE_STEP
        + 2 * TRAINING_BYTES * model.parameters / memory
        + moved.copied / NETWORK
        + moved.summed / link(chip, mesh),
        publish=0.05 + 3 * BFLOAT16 * model.parameters / memory,
        send=travel.compare if travel else 0.0,
        gpus=gpus,
    )


def rates(
    chip: Gpu,
    model: Architecture,
    *,
    replica: int,
    trainer: int,
    max_running: int,
    name: str = "",
    microbatch: int = MICROBATCH,
    travel: Travel | None = None,
    context: int = 1,
    passes: float = PASSES,
) -> Rates:
    """Returns the rates of pools that have their own GPUs."""
    return Rates(
        engine_rates(chip, model, replica, max_running, travel),
        trainer_rates(chip, model, trainer, microbatch, travel, context=context, passes=passes),
        source=f"roofline of {chip.name} ({READS:.0%} of bandwidth, {COMPUTES:.0%} of compute, training at {trains(model):.0%})",
        model=name,
    )


def shared_rates(chip: Gpu, model: Architecture, max_running: int, name: str = "", passes: float = PASSES) -> Rates:
    """Returns the rates of engine and trainer on one GPU, as headrace runs today. The GPU is counted for the engine."""
    engine, trainer = engine_rates(chip, model, 1, max_running), trainer_rates(chip, model, 1, passes=passes)
    held = (TRAINING_BYTES + 2 * BFLOAT16) * model.parameters + model.beside.split
    room = (USABLE * chip.memory - held) / model.cache_bytes
    return Rates(
        replace(engine, kv_tokens=float(max(0, int(room)))),
        replace(trainer, gpus=0),
        engine_slowed=SHARED,
        trainer_slowed=SHARED,
        source=f"roofline of one {chip.name} that both pools share ({READS:.0%} of bandwidth, {COMPUTES:.0%} of compute, training at "
        f"{trains(model):.0%}; each takes {SHARED:g} times as long while the other works)",
        model=name,
    )
