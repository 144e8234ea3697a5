"""How log-probs are had from a model: packed trees and a chunked head where these are exact, Hugging Face's own ways otherwise.

Which way is not read off a list of model names but tried: the fast way must reproduce the model's own hidden states and
logits on a few tokens, or a slower one is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.packing import ROOT, Pack, Segment
from headrace.trainer.torch_attention import NAME, Tree, register, tree_of
from headrace.trainer.torch_head import token_logprobs

TOLERANCE = 1e-3
"""Largest difference from the model's own numbers, relative to their root mean square. Rounding gives 1e-6, a wrong mask 1."""


class Scores(NamedTuple):
    """Of the M loss tokens of a pack; all float32."""

    logprob: Tensor
    """[M] with gradient, of the distribution that was sampled from: temperature and sampling mask applied."""
    entropy: Tensor
    """[M] in nats, of the whole vocabulary; without gradient"""
    top: Tensor | None = None
    """[M, k] with gradient: log-probs of `Pack.top_ids`, of the whole vocabulary."""
    outside: int = 0
    """Loss tokens that lie outside their sampling mask; their log-prob is that of the whole vocabulary."""


@dataclass(frozen=True)
class Forward:
    """The way that was chosen for a model."""

    model: Any
    packed: bool
    """Whole trees at once; otherwise row after row through the model's own attention."""
    chunked_head: bool
    """Logits are made in chunks; otherwise by the model itself, [T, V] for one row at a time."""

    @property
    def path(self) -> str:
        """For people."""
        return f"{'packed trees' if self.packed else 'row by row'}, {'chunked' if self.chunked_head else 'own'} head"

    def logprobs(self, pack: Pack, temperature: float, dtype: torch.dtype) -> Scores:
        """Of the pack's targets."""
        if not self.chunked_head:
            return self._own_logprobs(pack, temperature)
        if self.packed:
            hidden = packed_hidden(self.model, pack.tokens, pack.positions, tree_of(pack.segments, pack.tokens.device))
        else:
            hidden = torch.cat([own_hidden(self.model, pack.tokens[s.start : s.end]) for s in pack.segments])
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        found = token_logprobs(hidden, head.weight, bias, pack.predictor, pack.target, temperature, dtype, pack.kept)
        return Scores(found.logprob, found.entropy, None, found.outside)

    def _own_logprobs(self, pack: Pack, temperature: float) -> Scores:
        logprobs, entropies = [], []
        for segment in pack.segments:  # every row is one segment, and loss tokens lie in the order of their rows
            mine = (pack.predictor >= segment.start) & (pack.predictor < segment.end)
            logits = own_logits(self.model, pack.tokens[segment.start : segment.end])
            log_p = (logits[pack.predictor[mine] - segment.start].float() / temperature).log_softmax(-1)
            logprobs.append(log_p.gather(1, pack.target[mine][:, None])[:, 0])
            finite = log_p.detach().clamp(min=-1e30)  # 0 · -inf is NaN
            entropies.append(-(finite.exp() * finite).sum(-1))
        return Scores(torch.cat(logprobs), torch.cat(entropies))


def packed_hidden(model: Any, tokens: Tensor, positions: Tensor, tree: Tree) -> Tensor:
    """[N, H] of a pack."""
    output = model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, tree=tree)
    return output.last_hidden_state[0]


def own_hidden(model: Any, tokens: Tensor) -> Tensor:
    """[T, H] of one sequence."""
    return model.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]


def own_logits(model: Any, tokens: Tensor) -> Tensor:
    """[T, V] of one sequence."""
    return model(input_ids=tokens[None], use_cache=False).logits[0]


# -- the choice -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def choose_forward(model: Any) -> Forward:
    """The fastest way that gives the model's own numbers. Leaves the model's attention set accordingly.

    The model is in float32, evaluation mode. Costs a few forward passes of a dozen tokens.
    """
    shared, one, two, other = _probe(model)
    expected = [own_logits(model, tokens) for tokens in (torch.cat([shared, one]), torch.cat([shared, two]), other)]
    if not _head_agrees(model, torch.cat([shared, one]), expected[0]):
        return Forward(model, packed=False, chunked_head=False)
    previous = model.config._attn_implementation
    if _packs(model, shared, one, two, other):
        return Forward(model, packed=True, chunked_head=True)
    model.set_attn_implementation(previous)
    return Forward(model, packed=False, chunked_head=True)


def _probe(model: Any) -> list[Tensor]:
    """A shared prompt, two completions of it, and another sequence; fixed tokens from all over the vocabulary."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, 18, device=model.device) * 7919 % vocabulary
    return list(tokens.split([5, 3, 4, 5]))


def _head_agrees(model: Any, tokens: Tensor, expected: Tensor) -> bool:
    """Whether logits are nothing but a matrix (and a bias) times the hidden states: no cap, no scale."""
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):  # small logits of the probe would not show it
        return False
    try:
        hidden, head = own_hidden(model, tokens), model.get_output_embeddings()
        return _close(torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None)), expected)
    except (AttributeError, TypeError, RuntimeError):
        return False


def _packs(model: Any, shared: Tensor, one: Tensor, two: Tensor, other: Tensor) -> bool:
    if not getattr(model, "_supports_attention_backend", False):
        return False
    a, b, c, d = len(shared), len(one), len(two), len(other)
    segments = (Segment(0, a), Segment(a, b, 0), Segment(a + b, c, 0), Segment(a + b + c, d, ROOT))
    lengths = (range(a), range(a, a + b), range(a, a + c), range(d))
    positions = torch.tensor([i for places in lengths for i in places], device=shared.device)
    first, second = own_hidden(model, torch.cat([shared, one])), own_hidden(model, torch.cat([shared, two]))
    expected = torch.cat([first, second[a:], own_hidden(model, other)])
    tree = tree_of(segments, shared.device)
    register()
    try:
        model.set_attn_implementation(NAME)
        hidden = packed_hidden(model, torch.cat([shared, one, two, other]), positions, tree)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    ):  # whatever it was, the model cannot go this way
        return False
    return _close(hidden, expected) and _windows_are_told(model, tree)


def _windows_are_told(model: Any, tree: Tree) -> bool:
    """Whether the attention function is told of every window. A window longer than the probe shows in no number."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if layers is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        layers = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    if getattr(config, "attention_chunk_size", None) or set(layers) - {"full_attention", "sliding_attention"}:
        return False
    return [window is not None for window in tree.windows] == [kind == "sliding_attention" for kind in layers]


def _close(actual: Tensor, expected: Tensor) -> bool:
    scale = expected.square().mean().sqrt()
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= TOLERANCE * scale)
