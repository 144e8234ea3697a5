"""A training step as one would write it down, in float64: padded rows, the model's own dense attention, full logits, explicit masks,
a mixture of experts in a dozen lines, LoRA as a product added to a matrix. What the tests of the trainer compare with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.core.batches import Row
from headrace.core.reports import TrainReport
from headrace.core.types import RoutingTrace, SamplingMask, TeacherTrace, TopLogprobs
from support import tiny_models

VOCABULARY = 96


# -- rows -------------------------------------------------------------------------------------------------------------------


def experts_of(model: Any) -> tuple[int, int, int]:
    """(layers with experts, experts, chosen) of a model; zeros of a dense one."""
    config = model.config
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    dense = len(getattr(config, "mlp_only_layers", None) or ())
    return (config.num_hidden_layers - dense, count, config.num_experts_per_tok) if count else (0, 0, 0)


def routes_of(tokens: Sequence[int], experts: tuple[int, int, int]) -> np.ndarray:
    """[T, layers, k] experts in an order of their own: a function of what precedes a position, as an engine's are."""
    layers, count, k = experts
    chosen = []
    for end in range(1, len(tokens) + 1):
        rng = random.Random(str(tokens[:end]))
        chosen.append([rng.sample(range(count), k) for _ in range(layers)])
    return np.array(chosen, dtype=np.uint8).reshape(len(tokens), layers, k)


def trace(routes: np.ndarray) -> RoutingTrace:
    _, layers, k = routes.shape
    return RoutingTrace(layers, k, routes.itemsize, routes.tobytes())


def rows(
    rng: random.Random,
    groups: Sequence[tuple[int, int]] = ((5, 3), (3, 2), (4, 1)),
    masks: bool = False,
    experts: tuple[int, int, int] | None = None,
    top: int = 0,
) -> list[Row]:
    """`groups`: lengths of prompts, and how many ragged completions of each, which may begin alike; some tokens masked. `experts`:
    with routes, of some rows not to the end, of the last group none at all. `top`: so many of a teacher's tokens a position, with
    -inf padding and rows without."""
    made: list[Row] = []
    for length, each in groups:
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(length))
        shared = tuple(rng.randrange(3, VOCABULARY) for _ in range(2))
        for number in range(each):
            tokens = shared[: rng.randrange(3)] + tuple(
                rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(2, 7))
            )
            count = len(tokens)
            routing = None
            if experts is not None and (length, each) != groups[-1]:
                routes = routes_of((prompt + tokens)[:-1], experts)
                routing = trace(routes[: len(routes) - rng.randrange(2)])
            made.append(
                Row(
                    prompt,
                    tokens,
                    tuple(rng.gauss(-4, 0.5) for _ in range(count)),
                    (rng.gauss(0, 1),) * count,
                    (True, *(rng.random() < 0.85 for _ in range(count - 1))),
                    (0,) * count,
                    _mask(rng, tokens) if masks else None,
                    routing,
                    _teacher(rng, count, top, number),
                )
            )
    return made


def _mask(rng: random.Random, tokens: Sequence[int]) -> SamplingMask:
    """Of some positions nothing was cut; one label lies outside what was kept."""
    kept: list[list[int]] = []
    for place, token in enumerate(tokens):
        some = set(rng.sample(range(VOCABULARY), rng.randrange(1, 9)))
        some = some - {token} or {0} if place == 3 else some | {token}
        kept.append([] if rng.random() < 0.2 else sorted(some))
    offsets = np.cumsum([0, *map(len, kept)])
    return SamplingMask(np.array(list(chain(*kept)), dtype=np.int32).tobytes(), offsets.astype(np.int64).tobytes())


def _teacher(rng: random.Random, count: int, top: int, number: int) -> TeacherTrace:
    logprobs = tuple(float("nan") if number == 1 else rng.gauss(-4, 1) for _ in range(count))
    if not top:
        return TeacherTrace("t", (0,) * count, logprobs)
    ids = np.array([rng.sample(range(VOCABULARY), top) for _ in range(count)], dtype=np.int32)
    probs = np.array([sorted((rng.random() for _ in range(top + 1)), reverse=True) for _ in range(count)])
    found = np.log(probs / probs.sum(1, keepdims=True))[:, :top].astype(np.float32)
    if number == 1:
        found[:] = -np.inf
    else:
        found[0, -1] = -np.inf
    return TeacherTrace("t", (0,) * count, logprobs, TopLogprobs(top, ids.tobytes(), found.tobytes()))


# -- the model --------------------------------------------------------------------------------------------------------------


class PlainMixture(torch.nn.Module):
    """`routes` [B, T, k] of this layer, negative where the router chooses."""

    def __init__(self, block: Any, normalised: bool) -> None:
        super().__init__()
        self.gate, self.experts, self._normalised = block.gate, block.experts, normalised
        self.routes: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        probability = (hidden @ self.gate.weight.T).softmax(-1)
        chosen = probability.topk(self.gate.top_k).indices
        if self.routes is not None:
            chosen = torch.where(self.routes[..., :1] >= 0, self.routes, chosen)
        weight = probability.gather(-1, chosen)
        if self._normalised:
            weight = weight / weight.sum(-1, keepdim=True)
        total = torch.zeros_like(hidden)
        for expert, (gate_up, down) in enumerate(zip(self.experts.gate_up_proj, self.experts.down_proj, strict=True)):
            gate, up = (hidden @ gate_up.T).chunk(2, -1)
            share = (weight * (chosen == expert)).sum(-1, keepdim=True)
            total = total + share * ((torch.nn.functional.silu(gate) * up) @ down.T)
        return total


def plain(model: Any) -> Any:
    """A float64 copy with its mixtures written out. Parameters keep their names."""
    copied = deepcopy(model).double()
    copied.set_attn_implementation("eager")
    normalised = model.config.model_type == "mixtral" or getattr(model.config, "norm_topk_prob", False)
    for layer in copied.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = PlainMixture(layer.mlp, normalised)
    return copied


def logits(model: Any, weights: Mapping[str, Tensor], given: Sequence[Row]) -> Tensor:
    """[B, T, V] of padded rows under these weights (those that are left out are the model's own)."""
    ids = [row.prompt + row.tokens for row in given]
    longest = max(map(len, ids))
    padded = torch.tensor([row + (0,) * (longest - len(row)) for row in ids])
    attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    mixtures = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, PlainMixture)]
    for number, mixture in enumerate(mixtures):
        mixture.routes = _routes(given, number, mixture.gate.top_k, longest)
    arguments = {"input_ids": padded, "attention_mask": attention, "use_cache": False}
    return torch.func.functional_call(model, dict(weights), (), arguments).logits


def _routes(given: Sequence[Row], layer: int, k: int, longest: int) -> Tensor:
    routes = torch.full((len(given), longest, k), -1)
    for number, row in enumerate(given):
        if row.routing is not None:
            found = np.frombuffer(row.routing.experts, np.uint8).reshape(-1, row.routing.layers, row.routing.k)
            routes[number, : len(found)] = torch.from_numpy(found[:, layer].astype(np.int64))
    return routes


# -- the loss ---------------------------------------------------------------------------------------------------------------


def places(given: Sequence[Row]) -> tuple[list[tuple[int, int]], list[int]]:
    """(row, place in its tokens) of every loss token, and the token."""
    found = [(b, t) for b, row in enumerate(given) for t in range(len(row.tokens)) if row.mask[t]]
    return found, [given[b].tokens[t] for b, t in found]


def logprobs(scaled: Tensor, given: Sequence[Row]) -> Tensor:
    """[M] under the sampling masks; `scaled` [B, T, V] are logits over the temperature."""
    values = []
    for b, row in enumerate(given):
        kept = _kept(row)
        for t, token in enumerate(row.tokens):
            if not row.mask[t]:
                continue
            here = scaled[b, len(row.prompt) + t - 1]
            cut = torch.full_like(here, -torch.inf)
            cut[kept[t] if token in kept[t] else slice(None)] = 0.0
            values.append((here + cut).log_softmax(-1)[token])
    return torch.stack(values)


def _kept(row: Row) -> list[list[int]]:
    if row.sampling_mask is None:
        return [[] for _ in row.tokens]
    ids = np.frombuffer(row.sampling_mask.token_ids, np.int32)
    offsets = np.frombuffer(row.sampling_mask.offsets, np.int64)
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


def column(given: Sequence[Row], of: Any) -> Tensor:
    """[M] float64: `of(row)[t]` of every loss token."""
    return torch.tensor([of(given[b])[t] for b, t in places(given)[0]], dtype=torch.float64)


def forward_kl(scaled: Tensor, given: Sequence[Row]) -> Tensor:
    """[M] KL(teacher || student) over the teacher's tokens and one bucket for all others; 0 without a teacher."""
    log_p = scaled.log_softmax(-1)
    values = []
    for b, t in places(given)[0]:
        top = given[b].teacher.top
        ids = np.frombuffer(top.tokens, np.int32).reshape(-1, top.k)[t]
        teacher = np.frombuffer(top.logprobs, np.float32).reshape(-1, top.k)[t].astype(np.float64)
        there = np.isfinite(teacher)
        p = torch.from_numpy(np.exp(teacher[there]))
        q = log_p[b, len(given[b].prompt) + t - 1, torch.from_numpy(ids[there].astype(np.int64))].exp()
        tail_p, tail_q = 1 - p.sum(), 1 - q.sum()
        value = (p * (p / q).log()).sum() + tail_p * (tail_p / tail_q).log()
        values.append(value if there.any() else value * 0)
    return torch.stack(values)


def model_of(name: str) -> Any:
    """Hugging Face's, float32."""
    return tiny_models.reference(name)


def same_numbers(report: TrainReport, other: TrainReport) -> None:
    """Checks that both recorded numbers of the same rows, and nearly the same ones."""
    assert report.token_numbers and other.token_numbers
    for mine, theirs in zip(report.token_numbers, other.token_numbers, strict=True):
        assert (mine.ticket, mine.row) == (theirs.ticket, theirs.row)
        for a, b in ((mine.logprobs, theirs.logprobs), (mine.entropies, theirs.entropies)):
            np.testing.assert_allclose(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), rtol=1e-3, atol=1e-4)
