"""Decoder layers and the head's sums as torch.compile writes them: norms, rotary embeddings, gated activations and residual sums become a few
kernels instead of some sixty calls a layer, and a block of logits is read twice instead of ten times.

What is compiled is each layer's `forward`, and not the call of its module, so that hooks and checkpointing stay where they are.
Layers of one kind share their graphs, because parameters are inputs. Lengths are symbolic (`dynamic=True`): a microbatch of another length
needs no graph of its own. Attention to a tree is a gap between graphs: its calls follow the tree. So is a mixture of experts with its router: which
tokens go to an expert is known only when they are computed. Where FSDP2 has split the layers, its hooks gather them before their `forward`.

Nothing is taken on trust: log-probs and gradients of compiled layers must be those of the eager ones on trees of three lengths, and the third
length must need no new graph. Otherwise the layers stay as they were, and a sentence says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.trainer.forward.forward import Forward
from headrace.trainer.forward.lowered import StepCopies
from headrace.trainer.forward.tree_attention import NAME, tree_attention
from headrace.trainer.model.causal_lm import computed_in, layers_of
from headrace.trainer.model.low_memory import local
from headrace.trainer.packing import Pack, Segment, empty_pack, pack_sequence

BACKEND = "inductor"
MANY = 24
"""Graphs after the trial that are still usual: with and without gradient, with adapters on and off, for each kind of layer."""
LIMIT = 64
"""Graphs of one function, above which torch runs it eagerly without a word. `MANY` is said long before."""
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest difference of log-probs and gradients from the eager ones, relative to their size. In bfloat16 eager layers round between
operations that a compiled one keeps in float32."""


@dataclass
class Compilation:
    """The outcome of `train.compile`."""

    forward: Forward
    why_not: str = ""
    """The reason why layers are eager; empty where they are compiled, or nobody asked."""
    counted: int = 0
    """Graphs that `news` has told."""
    trial: int = 0
    """Graphs that were there after the trial."""
    told: bool = False
    """Whether the one thing that there was to say has been said."""

    def news(self) -> tuple[int, str]:
        """Returns the graphs that were made since the last call, and a sentence the first time that there is something to be said."""
        if not self.forward.backend:
            return 0, self._once(self.why_not)
        new, self.counted = graphs() - self.counted, graphs()
        more = self.counted - self.trial
        if more <= MANY:
            return new, ""
        return new, self._once(
            f"torch.compile has made {more} graphs since the start of the trainer: microbatches differ in more than their length, and each kind "
            "waits for its own; set train.compile = false"
        )

    def _once(self, sentence: str) -> str:
        before, self.told = self.told, self.told or bool(sentence)
        return "" if before else sentence


def compiled(
    forward: Forward,
    dtype: torch.dtype,
    copies: StepCopies,
    backend: str = BACKEND,
    largest: Callable[[Tensor], Tensor] | None = None,
) -> Compilation:
    """Compiles the layers of a model in place, where that is possible and exact. `copies`: as for the steps. `largest`: of the numbers of all ranks that
    hold parts of the model, which compile at the same time; all do, or none. Raises ConfigError if a trial of ranks breaks off between layers."""
    if reason := _unfit(forward):
        return Compilation(forward, reason)
    layers, fast = layers_of(forward.model), replace(forward, backend=backend)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, LIMIT)
    torch._dynamo.config.skip_fsdp_guards = False  # layers that are split would share graphs whatever their windows are
    failures: list[Exception] = []
    reason = ""
    try:
        expected = [_numbers(forward, pack, dtype, copies) for pack in _trees(forward.model)]
        _compile(layers, backend, failures)
        found, made = [], []
        for pack in _trees(forward.model):
            found.append(_numbers(fast, pack, dtype, copies))
            made.append(graphs())
        if largest is not None:
            _passed(fast, _filling(forward.model), dtype, copies)
        reason = "its graphs are for one length each" if made[2] > made[1] else difference(found, expected, NEAR[dtype])
    except Exception as error:  # whatever it was, eager layers compute the same
        if largest is not None:  # others wait for what this rank has not sent, and FSDP2 is in the middle of a pass
            raise ConfigError(
                f"layers could not be compiled in these ranks: {_said(error)}; set train.compile = false"
            ) from error
        failures.append(error)
    reason = _said(failures[0]) if failures else reason
    refused = torch.tensor(float(bool(reason)))
    if float(refused if largest is None else largest(refused)):
        _restore(layers)
        reason = reason or "another rank's could not be"
        return Compilation(forward, f"the layers of {type(forward.model).__name__} are not compiled: {reason}")
    for layer in layers:
        layer.forward = vars(layer.forward)["compiled"]
    return Compilation(fast, counted=graphs(), trial=graphs())


def _said(error: Exception) -> str:
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else 'no message'}"


def graphs() -> int:
    """The graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _unfit(forward: Forward) -> str:
    kind = type(forward.model).__name__
    if not (forward.packed and forward.chunked_head):
        return f"the layers of {kind} are not compiled: it is run {forward.path}"
    return ""


def _compile(layers: Sequence[torch.nn.Module], backend: str, failures: list[Exception]) -> None:
    """Compiles the layers for their trial: as soon as there are `failures`, all are eager, so that a pass that has begun comes to its end. Ranks wait
    for each other within it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(tree_attention))
    for layer in layers:
        for mixture in _mixtures(layer):
            mixture.forward = torch.compiler.disable(mixture.forward)
        layer.forward = _tried(layer.forward, torch.compile(layer.forward, dynamic=True, backend=backend), failures)


def _tried(eager: Callable[..., Any], fast: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    @wraps(eager)
    def forward(*given: Any, **named: Any) -> Any:
        if not failures:
            try:
                return fast(*given, **named)
            except Exception as error:
                failures.append(error)
        return eager(*given, **named)

    forward.compiled = fast  # type: ignore[attr-defined]
    return forward


def _mixtures(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a layer that hold experts, and choose among them."""
    return [module for module in layer.modules() if any(name == "experts" for name, _ in module.named_children())]


def _restore(layers: Sequence[torch.nn.Module]) -> None:
    for layer in layers:
        for module in (layer, *_mixtures(layer)):
            vars(module).pop("forward", None)


# -- the trial --------------------------------------------------------------------------------------------------------------


def _trees(model: Any) -> Iterator[Pack]:
    """A prompt with two completions, in three lengths: on a GPU those of real microbatches, because inductor chooses kernels by the first
    lengths that it sees."""
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.device
    places = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048
    times = max(1, min(80, places // 29)) if device.type == "cuda" else 1
    prompt, second = 5 * times, 4 * times
    for length in (13 * times, 29 * times, 21 * times):
        pack = pack_sequence([7919 * place % vocabulary for place in range(1, length + 2)])
        first = length - prompt - second
        segments = (Segment(0, prompt), Segment(prompt, first, 0), Segment(prompt + first, second, 0))
        positions = pack.positions.clone()
        positions[-second:] = torch.arange(prompt, prompt + second)
        yield replace(pack, segments=segments, positions=positions).to(device)


def _filling(model: Any) -> Pack:
    """Returns what fills up a rank's microbatches: one token, for which torch makes graphs of its own, and none of them should be made in a step."""
    return empty_pack(None).to(model.device)


def _numbers(forward: Forward, pack: Pack, dtype: torch.dtype, copies: StepCopies) -> Tensor:
    """Log-probs [M], then of each trained parameter the norm of its gradient, and its product with the parameter, relative to the norm
    of the whole gradient; of the parts that this rank holds. Leaves no gradient."""
    logprob, pairs = _passed(forward, pack, dtype, copies)
    norms = torch.stack([gradient.norm() for gradient, _ in pairs])
    along = torch.stack([(g * p).sum() / p.norm().clamp(min=1e-20) for g, p in pairs])
    return torch.cat([logprob, torch.cat([norms, along]) / norms.norm()]).double().cpu()


def _passed(
    forward: Forward, pack: Pack, dtype: torch.dtype, copies: StepCopies
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Log-probs [M] of a forward and a backward pass, and of each trained parameter the gradient and the values, as this rank holds them."""
    model: torch.nn.Module = forward.model
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
    try:
        with copies.used(), computed_in(dtype, pack.tokens.device):
            logprob = forward.logprobs(pack, 1.0, dtype).logprob
            (logprob * torch.linspace(-1, 1, len(logprob), device=logprob.device)).sum().backward()
        pairs = [(local(p.grad).float(), local(p).detach().float()) for p in trained if p.grad is not None]
    finally:  # a pass that breaks off has gone through some layers
        for parameter in trained:
            parameter.grad = None
    return logprob.detach(), pairs


def difference(found: Sequence[Tensor], expected: Sequence[Tensor], near: float) -> str:
    """Returns a sentence if the numbers differ by more than `near` of their size, or are not finite."""
    differences = torch.stack(
        [
            (actual - wanted).abs().max() / wanted.abs().max().clamp(min=1)
            for actual, wanted in zip(found, expected, strict=True)
        ]
    )
    most = float(differences.max())  # not a number if one of them is none: Python's `max` would leave it out
    return "" if most <= near else f"log-probs or gradients differ from the eager ones by {most:.2g}"
