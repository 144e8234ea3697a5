"""The memory that each process needs, computed from the model's shape and the settings, and whether the machine has it.

Bytes per parameter are those of `trainer/model/low_memory.py`. The transport holds the published weights twice, because one copy is
served while the other is written; with a LoRA adapter it holds them once. The activations of a forward pass are an estimate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from headrace.algo.config import AlgoConfig
from headrace.algo.recipe_parts import Experience
from headrace.algo.recipes import RECIPES
from headrace.engine.config import EngineConfig
from headrace.engine.sizes import STATES_A_ROW
from headrace.models.lora import LoraConfig
from headrace.models.resolve import read_header, resolve_model, weight_files
from headrace.native.resources import GIB, gib
from headrace.run.config import RunConfig
from headrace.run.rehearsal.machine import Machine
from headrace.trainer.config import TrainConfig
from headrace.trainer.parallel import sums_once

# --- The size of a model
# The size of a model, read from its config.json and the headers of its weights: parameters, layers, KV cache per token.


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    parameters: int
    """0 if the files do not say."""
    matrices: tuple[tuple[str, int, int], ...]
    """Linear layers: name, rows, columns; without embeddings and output head."""
    layers: int
    hidden: int
    inner: int
    """Inner width of the MLP of one layer, as one token passes it: with experts, that of the chosen ones together."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    chosen: int = 0
    """Experts of a layer that a token passes."""
    cached: int
    """Elements that one token takes in the KV cache."""
    state: int = 0
    """Bytes of what layers with a recurrence keep of a sequence in the KV cache, however long it is."""
    positions: int
    """Longest context that the model was made for; 0 if its config does not say."""
    steady: int = 0
    """Positions up to which its rotary angles depend on the position alone. Beyond them a whole pass has other angles (`dynamic`, `longrope`), so that
    a short text's log-probs would depend on the longest text beside it. 0: there is no such bound."""
    vocabulary: int = 0

    def adapted(self, config: LoraConfig) -> set[str]:
        """Returns the names of the modules that an adapter adapts, without their path. With "all-linear" they are those of all matrices."""
        targets = [name.removesuffix(".weight") for name, _, _ in self.matrices]
        if config.targets != "all-linear":
            targets = list(config.targets)
        return {target.rpartition(".")[2] for target in targets} | ({"experts"} if config.experts else set())

    def adapter(self, config: LoraConfig) -> int:
        """Returns the parameters of a LoRA adapter, without those of experts."""
        targets = config.targets
        return sum(
            config.rank * (rows + columns)
            for name, rows, columns in self.matrices
            if targets == "all-linear" or name.removesuffix(".weight").endswith(targets)
        )


def _steady(text: Mapping[str, Any]) -> int:
    """Returns `ModelShape.steady`: the least of all kinds of layers (transformers, `modeling_rope_utils.dynamic_rope_update`)."""
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    ropes = [rope for rope in (given, *given.values()) if isinstance(rope, dict)] if isinstance(given, dict) else []
    bounds = [
        _number({**text, **rope}, "original_max_position_embeddings", "max_position_embeddings")
        for rope in ropes
        if (rope.get("rope_type") or rope.get("type")) in ("dynamic", "longrope", "su")
    ]
    return min(bounds, default=0)


def read_shape(directory: Path) -> ModelShape:
    """Reads the shape of a model from a directory that passed `check_model_dir`."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head")
    kinds = _kinds(text)
    layers = _number(text, "num_hidden_layers", "n_layer", "num_layers") or len(kinds)
    kv_heads = _number(text, "num_key_value_heads") or heads
    head = _number(text, "head_dim") or (hidden // heads if heads else 0)
    convolving, recurrent = kinds.count("conv"), kinds.count("linear_attention") + kinds.count("mamba")
    if text.get("model_type") == "bamba":
        recurrent = layers - len(text.get("attn_layer_indices") or ())
    attending = layers - convolving - recurrent - kinds.count("mlp") - kinds.count("moe")
    if text.get("model_type") == "falcon_h1":  # each layer has both
        recurrent = attending = layers
    stored = {name: tensor for path in weight_files(directory) for name, tensor in read_header(path).items()}
    parameters = sum(tensor.elements for tensor in stored.values()) or _from_pickles(directory)
    inner = _number(text, "moe_intermediate_size") * _number(text, "num_experts_per_tok")
    return ModelShape(
        parameters=parameters,
        matrices=tuple(_matrices({name: tensor.shape for name, tensor in stored.items()})),
        layers=layers,
        hidden=hidden,
        inner=inner or _number(text, "intermediate_size", "n_inner") or 4 * hidden,
        experts=_number(text, "num_experts", "num_local_experts", "n_routed_experts"),
        chosen=_number(text, "num_experts_per_tok"),
        cached=_keys_and_values(text, attending, kv_heads * head) + convolving * hidden,
        state=4 * recurrent * _recurrent_state(text),
        positions=_number(text, "max_position_embeddings", "n_positions"),
        steady=_steady(text),
        vocabulary=_number(text, "vocab_size"),
    )


def _kinds(text: Mapping[str, Any]) -> list[str]:
    """Returns the kinds of layers. Nemotron-H lists them by a name of its own, or as a letter each."""
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = [letters.get(letter, letter) for letter in text.get("hybrid_override_pattern") or ""]
    return list(text.get("layer_types") or text.get("layers_block_type") or pattern)


def _keys_and_values(text: Mapping[str, Any], layers: int, usual: int) -> int:
    """Returns the numbers of a token's keys and values in `layers` that attend. `usual`: those of the keys in one. Layers of Gemma 4 have others by their kind, or
    read those of layers before."""
    if text.get("model_type") not in ("gemma4_text", "gemma4_unified_text"):
        return 2 * layers * usual
    heads, width = _number(text, "num_key_value_heads"), _number(text, "head_dim")
    wide = {"head_dim": _number(text, "global_head_dim") or width}
    if text.get("attention_k_eq_v"):
        wide["num_key_value_heads"] = _number(text, "num_global_key_value_heads") or heads
    by_kind = {layer: wide for layer, kind in enumerate(text.get("layer_types") or ()) if kind == "full_attention"}
    given = text.get("per_layer_config")  # how transformers writes the same
    own = by_kind if given is None else {int(layer): more for layer, more in given.items()}
    each = [{"num_key_value_heads": heads, "head_dim": width, **own.get(layer, {})} for layer in range(layers)]
    return 2 * sum(
        one["num_key_value_heads"] * one["head_dim"] for one in each[: layers - _number(text, "num_kv_shared_layers")]
    )


def _recurrent_state(text: Mapping[str, Any]) -> int:
    """Returns the numbers of a recurrence's state in one layer, of a delta rule or of Mamba 2: inputs of its convolution, and a matrix for each head of
    values."""
    keys = _number(text, "linear_num_key_heads") * (width := _number(text, "linear_key_head_dim"))
    values = _number(text, "linear_num_value_heads") * _number(text, "linear_value_head_dim")
    if heads := _number(text, "mamba_n_heads", "mamba_num_heads"):
        keys = _number(text, "mamba_n_groups", "n_groups") * (width := _number(text, "mamba_d_state", "ssm_state_size"))
        values = _number(text, "mamba_d_ssm") or heads * _number(text, "mamba_head_dim")
        values = values or _number(text, "mamba_expand") * _number(text, "hidden_size")
    return (
        max(0, _number(text, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel") - 1) * (2 * keys + values)
        + width * values
    )


def _from_pickles(directory: Path) -> int:
    """Estimates the parameters of `pytorch_model*.bin` from the file sizes, as if all were in the dtype of the config."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    size = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
    return sum(path.stat().st_size for path in directory.glob("pytorch_model*.bin")) // size


def _matrices(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, int, int]]:
    for name, shape in shapes.items():
        if len(shape) == 2 and min(shape) > 1 and not any(word in name for word in ("embed", "lm_head", "wte", "wpe")):
            yield name, *shape


def _number(config: Mapping[str, Any], *names: str) -> int:
    found = [config[name] for name in names if isinstance(config.get(name), int | float)]
    return int(found[0]) if found and math.isfinite(found[0]) else 0


# --- memory needs ------------------------------------------------------------


PROCESS = 0.4 * GIB
"""Bytes of a process with Python and torch: engine and trainer of a tiny model took 0.38 GiB each."""
CONTROLLER = 0.15 * GIB
"""Bytes of the controller, which does not import torch."""
KEPT_TOKEN = 75
"""Bytes of the controller for a token of a rollout with its log-prob and text: 72 were measured, at four characters a token."""
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1, "nf4": 0.5}

KV = "KV cache, at most (engine.kv_gib)"
ACTIVATIONS = "activations, about"
LENT = "lent engine"
COPY = "a copy of a checkpoint, written beside training"
"""The trainer does without it where it has no room (`trainer/step/host_memory.py`)."""

Device = Literal["cpu", "cuda"]


class MemoryNeed(NamedTuple):
    who: str
    what: str
    bytes: float
    where: Device
    certain: bool = False
    """Whether the number is exact and taken from the start of the run; otherwise it is an upper bound or an estimate."""


class Widths(Protocol):
    """The sizes of a model's layers (`ModelShape`)."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def inner(self) -> int: ...


class MemoryPlan(NamedTuple):
    """The settings of a run that determine its memory."""

    engine: EngineConfig
    engine_device: Device
    train: TrainConfig
    train_device: Device
    train_dtype: str
    lora: LoraConfig
    adapters: int
    """Number of adapters that are trained; 0 trains all weights."""
    reference_in_loss: bool
    reference_moves: bool = False
    """Whether the reference is a part of each checkpoint (`algo.kl.every`)."""
    critic: ModelShape | None = None
    """The critic's own model (`algo.critic.model`)."""
    teacher: ModelShape | None = None
    """The teacher that the trainer holds (`algo.distill.model`)."""
    rewards: bool = False
    """Whether a second adapter is trained that gives the rewards of tokens (`algo.name = prime`)."""
    fetches: bool = False
    """Whether the engines of this machine fetch weights into memory of their own."""
    published: Device = "cpu"
    """The memory that holds published weights."""
    trains: bool = True
    """Whether the trainer is on this machine."""
    shared: bool = False
    """Whether engine and trainer take turns on the same devices (`orchestration.placement`)."""
    lent: bool = False
    """Whether an engine more takes turns with the trainer (`orchestration.lend`)."""
    demonstrated: bool = False
    """Whether given answers have a gradient of their own."""
    warm_reference: bool = False
    """Whether a warm start compares with the model before it, which its trainer holds meanwhile."""
    kept_tokens: int = 0
    """The most tokens of good rollouts of earlier groups that the controller keeps (`algo.experience`)."""


def memory_plan(config: RunConfig, machine: Machine) -> MemoryPlan:
    engine = machine.device("engine.device", config.engine.device)
    here = config.orchestration.trains_here
    trainer = machine.device("train.device", config.train.device if here else "cpu")
    runs, way, beside = config.runs, config.way, shapes_beside(config.algo)
    first = runs[0]
    return MemoryPlan(
        engine=config.engine,
        engine_device=engine,
        train=config.train,
        train_device=trainer,
        train_dtype=machine.dtype(config.train.dtype, trainer),
        lora=first.lora,
        adapters=len(runs) if first.lora.rank else 0,
        reference_in_loss=any(run.algo.reference_in_loss for run in runs),
        reference_moves=config.algo.recipe.kl.every > 0,
        critic=beside.critic,
        teacher=beside.teacher,
        rewards=any(run.algo.trains_rewards for run in runs),
        fetches=not config.engine.is_server and way.transport.sends_bytes,
        published=way.transport.device_of_buffers,
        trains=here,
        shared=config.orchestration.placement == "shared",
        lent=config.orchestration.lend,
        demonstrated=bool(config.demonstrations.path),
        warm_reference=bool(config.warm_start.path) and RECIPES[config.warm_start.loss].loss.needs_reference,
        kept_tokens=sum(_kept_tokens(run.algo.recipe.experience, run.longest_rollout) for run in runs),
    )


class ShapesBeside(NamedTuple):
    """The shapes of the critic's own model and of the teacher that the trainer holds, if there are any."""

    critic: ModelShape | None
    teacher: ModelShape | None


def shapes_beside(algo: AlgoConfig) -> ShapesBeside:
    """Returns the shapes of the models that the trainer holds beside the policy. Raises ConfigError for one that cannot be found."""
    given = {
        "algo.critic.model": algo.recipe.critic.model if algo.has_critic else "",
        "algo.distill.model": algo.recipe.distill.model,
    }
    found = (read_shape(resolve_model(path, setting=name)) if path else None for name, path in given.items())
    return ShapesBeside(*found)


def _kept_tokens(experience: Experience, longest: int) -> int:
    return experience.prompts * experience.rollouts * longest


def needs(shape: ModelShape, plan: MemoryPlan) -> list[MemoryNeed]:
    """Returns the memory of the run's own processes. `engine_needs` gives that of each teacher."""
    serving = shape.parameters * BYTES[plan.engine.serving_dtype]
    copies = 1 if plan.adapters and not plan.lora.merged else 2
    between = MemoryNeed("between", f"published weights ({copies} ×)", copies * serving, plan.published, certain=True)
    return [
        MemoryNeed("controller", "Python, tokenizer, groups that wait", CONTROLLER, "cpu"),
        *_kept(plan),
        *((*_trainer(shape, plan), between) if plan.trains else ()),
        *_engines(shape, plan),
    ]


def _kept(plan: MemoryPlan) -> Iterator[MemoryNeed]:
    if plan.kept_tokens:
        yield MemoryNeed(
            "controller", "good earlier rollouts, at most (algo.experience)", plan.kept_tokens * KEPT_TOKEN, "cpu"
        )


def warm_needs(shape: ModelShape, plan: MemoryPlan) -> list[MemoryNeed]:
    """Returns the memory of a warm start that has a reference: of its trainer alone, which ends before those of the run begin. Without one it needs less than
    they do."""
    alone = plan._replace(reference_in_loss=True, demonstrated=False, shared=False, lent=False)
    return [need for need in _trainer(shape, alone) if need.what != COPY] if plan.warm_reference else []


def warm_lines(shape: ModelShape, plan: MemoryPlan) -> list[tuple[str, str]]:
    total = sum(need.bytes for need in warm_needs(shape, plan))
    return [("warm start", f"{gib(total)}, its reference included, before all of these")] if total else []


def _engines(shape: ModelShape, plan: MemoryPlan) -> Iterator[MemoryNeed]:
    """Yields the memory of the engines on this machine."""
    for number in range(0 if plan.engine.urls else plan.engine.replicas):
        who = f"engine {number + 1}" if plan.engine.replicas > 1 else "engine"
        yield from engine_needs(who, shape, plan.engine, plan.engine_device)
        whole = not plan.adapters or plan.lora.merged
        if plan.engine_device == "cuda" and whole and not plan.engine.is_server:
            arriving = shape.parameters * BYTES[plan.engine.serving_dtype]
            if plan.engine.weights != "published":  # codes are made of what arrived, beside those that are served
                arriving += _linear(shape) * BYTES[plan.engine.weights]
            yield MemoryNeed(who, "new weights, until they are swapped in", arriving, "cuda")
        if plan.shared and plan.engine.is_server and not whole:
            base = shape.parameters * BYTES[plan.engine.serving_dtype]
            yield MemoryNeed(who, "the base while the trainer has the GPU", base, "cpu", certain=True)
        if plan.fetches:
            serving = 2 * shape.parameters * BYTES[plan.engine.serving_dtype]
            yield MemoryNeed(who, "weights as they arrive (2 ×)", serving, "cpu", certain=True)
    if plan.lent:
        yield from engine_needs(LENT, shape, plan.engine, plan.train_device)


def engine_needs(who: str, shape: ModelShape, config: EngineConfig, device: Device) -> list[MemoryNeed]:
    """Returns the memory of an engine. On a CPU the weights are stored packed for the kernels, if these serve the model."""
    what, weights = "weights, in the dtype of the computation", shape.parameters * BYTES[config.serving_dtype]
    if config.weights != "published":
        others = shape.parameters - _linear(shape)
        # In int8 a head that is tied to the embedding, which stays as it is published, is a second matrix. In FP8 it stays too.
        coded = _linear(shape) if config.weights == "fp8" else shape.parameters
        what = f"weights in {config.weights}, embeddings in {config.serving_dtype}"
        weights = BYTES[config.weights] * coded + BYTES[config.serving_dtype] * others
    return [
        MemoryNeed(who, "Python and torch", PROCESS, "cpu"),
        MemoryNeed(who, what, weights, device),
        MemoryNeed(who, KV, config.sizes.kv_gib * GIB, device),
    ]


def _linear(shape: ModelShape) -> int:
    """Returns the parameters of linear layers, without embeddings and head."""
    return sum(rows * columns for _, rows, columns in shape.matrices)


def _trainer(shape: ModelShape, plan: MemoryPlan) -> Iterator[MemoryNeed]:
    """Yields the memory of all ranks together. A GPU has one rank: its part is compared with the GPU."""
    train, device, ranks = plan.train, plan.train_device, plan.train.parallel.ranks
    yield MemoryNeed("trainer", "Python and torch", PROCESS * ranks, "cpu")
    computing = BYTES[plan.train_dtype]
    if ranks > 1 and plan.lora.dora:  # others read what they hold (placement/filling.py)
        loaded = 4 * shape.parameters * ranks
        yield MemoryNeed("trainer", "the whole model in each rank while it loads", loaded, "cpu")
    everyone = ranks if device == "cpu" else 1
    parts = everyone / (train.parallel.split * train.parallel.pipeline)
    split = shape.parameters * parts
    if plan.adapters:
        kept = BYTES[plan.lora.quantise or plan.train_dtype]
        yield MemoryNeed("trainer", "frozen weights", split * kept, device, certain=True)
        extra = plan.adapters * shape.adapter(plan.lora) * everyone
        yield MemoryNeed("trainer", "adapter, gradients, AdamW", 16 * extra, device, certain=True)
        if plan.rewards:  # and a copy of weights and AdamW, until the policy's step is made
            yield MemoryNeed(
                "trainer", "adapter of process rewards, gradients, AdamW", 28 * extra, device, certain=True
            )
    else:
        size, host = BYTES[train.weights], "cpu" if train.offload_optimizer else device
        yield MemoryNeed("trainer", f"weights ({train.weights})", split * size, device, certain=True)
        yield MemoryNeed("trainer", "gradients", split * size, device, certain=True)
        if plan.demonstrated:
            yield MemoryNeed("trainer", "gradients of given answers", split * size, device, certain=True)
        if device == "cuda" and computing < size and ranks == 1:  # on a CPU the kernels pack theirs
            lowered = shape.parameters * computing
            yield MemoryNeed("trainer", f"weights as a step computes with them ({plan.train_dtype})", lowered, device)
        optimizer = 12 if train.offload_optimizer else 8
        yield MemoryNeed("trainer", "AdamW", split * optimizer, host, certain=True)
        if (plan.shared or plan.lent) and device == "cuda":
            away = split * (size + (0 if train.offload_optimizer else optimizer))
            yield MemoryNeed("trainer", "weights and AdamW while the engine has the GPU", away, "cpu", certain=True)
        if plan.reference_in_loss:
            reference = reference_bytes(shape, plan) * parts
            yield MemoryNeed("trainer", "reference model", reference, device, certain=True)
    yield from _critic(plan)
    yield from _teacher(plan)
    trained = (0 if plan.adapters else shape.parameters) + (plan.critic.parameters if plan.critic else 0)
    if trained and sums_once(train.parallel, trained, 0):  # auto takes half of a GPU at most
        whole = 4 * trained / train.parallel.tensor * everyone
        yield MemoryNeed("trainer", "gradients of the whole model in each rank, until they are summed", whole, device)
    yield MemoryNeed("trainer", COPY, checkpoint_bytes(shape, plan), "cpu")
    kept = train.microbatch * step_activations(shape, plan.critic, train.gradient_checkpointing) * computing
    yield MemoryNeed("trainer", ACTIVATIONS, kept * everyone, device)


def _critic(plan: MemoryPlan) -> Iterator[MemoryNeed]:
    """Yields the memory of the critic's own model, which lies on the ranks as the policy's weights do, in float32."""
    if plan.critic is None:
        return
    train, device = plan.train, plan.train_device
    own = plan.critic.parameters / train.parallel.split * (train.parallel.ranks if device == "cpu" else 1)
    if train.offload_optimizer:
        yield MemoryNeed("trainer", "critic, gradients (algo.critic.model)", 8 * own, device, certain=True)
        yield MemoryNeed("trainer", "critic's AdamW and masters (algo.critic.model)", 12 * own, "cpu", certain=True)
    else:
        yield MemoryNeed("trainer", "critic, gradients, AdamW (algo.critic.model)", 16 * own, device, certain=True)
    if (plan.shared or plan.lent) and device == "cuda":
        away, what = (4, "critic") if train.offload_optimizer else (12, "critic and AdamW")
        yield MemoryNeed("trainer", f"{what} while the engine has the GPU", away * own, "cpu", certain=True)


def _teacher(plan: MemoryPlan) -> Iterator[MemoryNeed]:
    """Yields the memory of a teacher that the trainer holds: its layers lie on the ranks as the policy's do, its head whole on each."""
    if plan.teacher is None:
        return
    parallel, size = plan.train.parallel, BYTES[plan.train_dtype]
    ranks = parallel.ranks if plan.train_device == "cpu" else 1
    head = plan.teacher.vocabulary * plan.teacher.hidden if parallel.split > 1 else 0
    held = size * (plan.teacher.parameters / parallel.split + head) * ranks
    yield MemoryNeed("trainer", "teacher (algo.distill.model)", held, plan.train_device, certain=True)
    if parallel.ranks == 1:
        loaded = 4 * plan.teacher.parameters
        yield MemoryNeed("trainer", "teacher in float32, while it loads", loaded, "cpu")
    if (plan.shared or plan.lent) and plan.train_device == "cuda":
        yield MemoryNeed("trainer", "teacher while the engine has the GPU", held, "cpu", certain=True)


def step_activations(policy: Widths, critic: Widths | None, checkpointing: bool) -> int:
    """Returns the elements that are kept of a token by the policy, and by the critic's own model, whose backward passes are one."""
    return sum(token_activations(model, checkpointing) for model in (policy, critic) if model)


def token_activations(shape: Widths, checkpointing: bool) -> int:
    """Returns the elements that are kept of a token for the backward pass. A layer keeps its inputs, queries, keys, values and norms, and
    three times the inner width of the MLP. With gradient checkpointing it keeps its input alone, and one layer at a time is recomputed
    in full."""
    whole = 10 * shape.hidden + 3 * shape.inner
    return shape.layers * shape.hidden + whole if checkpointing else shape.layers * whole


def reference_bytes(shape: ModelShape, plan: MemoryPlan) -> int:
    """Returns the bytes of a reference of its own, in the dtype of the computation. Embeddings of one that moves stay in float32: no later weights are known to
    lose nothing."""
    low = int(BYTES[plan.train_dtype])
    embeddings = shape.vocabulary * shape.hidden if plan.reference_moves else 0
    return low * shape.parameters + (4 - low) * embeddings


def checkpoint_bytes(shape: ModelShape, plan: MemoryPlan) -> int:
    """Returns the bytes of a checkpoint: the trained weights and their AdamW state."""
    adapters = plan.adapters + plan.rewards
    trained = adapters * shape.adapter(plan.lora) if plan.adapters else shape.parameters
    beside = 12 * plan.critic.parameters if plan.critic else 0
    beside += reference_bytes(shape, plan) if plan.reference_moves else 0
    return beside + trained * (12 if plan.train.weights == "float32" or plan.train.offload_optimizer else 10)


# --- verdicts ----------------------------------------------------------------------------------------------------------


def refusals(found: Sequence[MemoryNeed], shape: ModelShape, plan: MemoryPlan, machine: Machine) -> Iterator[str]:
    """Yields what cannot fit, even if nothing else ran on this machine, each with its remedy."""
    has = _has(machine, plan.engine_device)
    kv_gib, most_running, _ = plan.engine.sizes
    cache, token = kv_gib * GIB, shape.cached * BYTES[plan.engine.serving_dtype]
    context = min(plan.engine.context_length, shape.positions or plan.engine.context_length)
    if cache > has:
        most = most_running * context * token
        enough = (
            f", and {gib(most)} hold all that engine.max_running = {most_running} sequences can fill" if most else ""
        )
        yield (
            f"engine.kv_gib = {kv_gib:g} is more than the {gib(has)} of memory that {_name(plan.engine_device)} has; lower it (2 is "
            f"usual{enough if most < has else ''})"
        )
    elif (one := token * context + STATES_A_ROW * shape.state) > cache:
        yield (
            f"engine.kv_gib = {kv_gib:g} does not hold one sequence of engine.context_length = {context}, which takes "
            f"{one / GIB:.3g} GiB for this model; raise engine.kv_gib or lower engine.context_length"
        )
    for device in ("cpu", "cuda"):
        least = sum(need.bytes for need in found if need.certain and need.where == device)
        if (machine.gpu is None and device == "cuda") or least <= (present := _has(machine, device)):
            continue
        yield (
            f"training {_count(shape.parameters)} parameters takes {gib(least)} on {_name(device)}, which has {gib(present)}, for weights and "
            f"optimizer state alone; {_smaller(plan)}"
        )
    for device in ("cpu", "cuda"):
        least = sum(need.bytes for need in warm_needs(shape, plan) if need.certain and need.where == device)
        if (machine.gpu is not None or device == "cpu") and least > (present := _has(machine, device)):
            yield (
                f"the warm start takes {gib(least)} on {_name(device)}, which has {gib(present)}, because its loss compares with the model before it; set "
                'warm_start.loss = "cpo", "simpo" or "orpo", which compare with none, or train an adapter (lora.rank = 16)'
            )


def notes(found: Sequence[MemoryNeed], machine: Machine, shared: bool = False) -> Iterator[str]:
    """Yields what may not fit. `shared`: trainer and engine, or an engine more, take turns, so that only one of them needs all its memory."""
    copy = sum(entry.bytes for entry in found if entry.what == COPY)
    need = sum(entry.bytes for entry in found if entry.where == "cpu") - copy
    if shared:
        engine = LENT if any(entry.who == LENT for entry in found) else "engine"
        need -= min(sum(entry.bytes for entry in found if _given_back(entry, who)) for who in (engine, "trainer"))
    if need > machine.available:
        yield (
            f"the processes may take {gib(need)} of memory, and {gib(machine.available)} are free now. If memory runs out, the system kills "
            "one of them: lower engine.kv_gib or train.microbatch_tokens, or train an adapter (lora.rank = 16)"
        )
    elif need + copy > machine.available:
        yield (
            f"the processes may take {gib(need)} of memory, and {gib(machine.available)} are free now, which may be too little for a copy of a "
            f"checkpoint ({gib(copy)}): training then stands still while one is written. Lower engine.kv_gib, or train an adapter "
            "(lora.rank = 16)"
        )


def _given_back(need: MemoryNeed, who: str) -> bool:
    """Whether the need is memory of the machine that a worker gives back while it sleeps."""
    kept = (
        ("Python and torch", "weights", "AdamW", "frozen", "adapter", "reference", "critic", "teacher", COPY)
        if who == "trainer"
        else ("Python",)
    )
    return need.who == who and need.where == "cpu" and not need.what.startswith(kept)


def _smaller(plan: MemoryPlan) -> str:
    if not plan.adapters:
        return "train an adapter (lora.rank = 16), set train.weights = bfloat16, or take a smaller model"
    return "take a smaller model" if plan.lora.quantise else 'set lora.quantise = "nf4", or take a smaller model'


def _has(machine: Machine, device: str) -> int:
    return machine.gpu[1] if device == "cuda" and machine.gpu else machine.memory


def _name(device: str) -> str:
    return "the GPU" if device == "cuda" else "this machine"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.3g} billion" if parameters >= 1e9 else f"{parameters / 1e6:.3g} million"
