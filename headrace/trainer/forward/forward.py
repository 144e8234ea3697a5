"""Log-probs from a model: by packed trees and a chunked head where these are exact, by Hugging Face's own forward otherwise.

The way is not read from a list of model names but tried: the fast way must reproduce the model's own hidden states and logits on
a few tokens, or a slower one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.trainer.forward.carried import UNABLE, carried_hidden, carries, close
from headrace.trainer.forward.context import Context
from headrace.trainer.forward.divergence import AskedLogprobs, HeadOf
from headrace.trainer.forward.head import Head, Scale, dense_logprobs
from headrace.trainer.forward.image_places import image_places, images_ahead
from headrace.trainer.forward.tree_attention import NAME, Tree, register, tree_of
from headrace.trainer.packing import ROOT, Pack, Segment

# --- Runs a computation within the call of the module whose weights it reads.
#
# Hugging Face's own forward makes all logits [T, V], so ours calls the inner model and reads the head's matrix itself. A library
# that shards weights over ranks gathers them by hooks on a module's call, the root's first (torch's FSDP2 refuses an inner
# module that is called before its root). So our computation runs in place of the root's `forward`, and its last part in place of
# the head's: hooks on both see an ordinary call.


T = TypeVar("T")

Values = Callable[[Tensor], Tensor]
"""[M, H] hidden states -> [M] values of a critic, float32 with gradient."""


class LessonNumbers(NamedTuple):
    """The numbers of a pack's M loss tokens that come from a teacher which the trainer holds; None where the algorithm asks for others."""

    teacher: Tensor | None = None
    """[M] the teacher's log-probs, of the distribution that was sampled from."""
    divergence: Tensor | None = None
    """[M] with gradient: the policy's divergence from the teacher."""


Lesson = Callable[[HeadOf, AskedLogprobs], LessonNumbers]
"""Compares a teacher with the policy: the policy's head, and the loss tokens, whose places are those of its hidden states."""

SERVED_TEMPERATURE = 1.0
"""The temperature of the log-probs that engines of teachers return."""


def within(module: Any, function: Callable[[], T]) -> T:
    """Calls `module`, hooks included, with `function` in place of its forward, and returns the function's result.

    The function must not call the module itself.
    """
    own = vars(module).get("forward")
    module.forward = function
    try:
        return module()
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


# --- forward ------------------------------------------------------------


LARGE_LOGIT = 100.0
"""Far above the caps that models set (30 to 50)."""


class TokenScores(NamedTuple):
    """The scores of a pack's M loss tokens, in float32."""

    logprob: Tensor
    """[M] with gradient: log-probs under the distribution that was sampled from, with temperature and sampling mask."""
    entropy: Tensor
    """[M] entropy over the whole vocabulary in nats, with gradient."""
    top: Tensor | None = None
    """[M, k] with gradient: log-probs of `Pack.top_ids` over the whole vocabulary."""
    outside: int = 0
    """Number of loss tokens outside their sampling mask; their log-prob is over the whole vocabulary."""
    value: Tensor | None = None
    """[M] with gradient: the critic's value of what each loss token is predicted from."""
    taught: LessonNumbers = LessonNumbers()


@dataclass(frozen=True)
class Forward:
    """A model, and the way that was chosen for it."""

    model: Any
    packed: bool
    """Whether whole trees are forwarded at once; otherwise row after row through the model's own attention."""
    chunked_head: bool
    """Whether logits are made in chunks; otherwise by the model itself, [T, V] for one row at a time."""
    context: Context | None = None
    """The ranks that compute each pack together; all of them call with the same one. None: every rank has packs of its own."""
    backend: str = ""
    """The backend of torch.compile that layers and head were compiled by (`compiled.py`); empty: they are eager."""
    carried: bool = field(default=False, kw_only=True)
    """Whether trees are forwarded segment after segment, each from the state that its ancestors leave (`carried.py`)."""

    @property
    def shares(self) -> bool:
        """Whether rows that begin alike share tokens."""
        return self.packed or self.carried

    @property
    def path(self) -> str:
        """The way in words."""
        kind = "packed trees" if self.packed else "carried states" if self.carried else "row by row"
        way = f"{kind}, {'chunked' if self.chunked_head else 'own'} head"
        return way + (", compiled" if self.backend else "")

    def logprobs(
        self,
        pack: Pack,
        temperature: float,
        dtype: torch.dtype,
        critic: Values | None = None,
        *,
        lesson: Lesson | None = None,
    ) -> TokenScores:
        """The log-probs of the pack's targets, the values of a critic, and what a lesson finds. For the last two the head must be a chunked one."""
        if not self.chunked_head:
            assert critic is None and lesson is None, "the model shows its logits only"
            return self._own_logprobs(pack, temperature)
        return within(self.model, lambda: self._chunked_logprobs(pack, temperature, dtype, critic, lesson))

    def hidden(self, pack: Pack) -> Tensor:
        """[N, H] hidden states of a pack."""
        return within(self.model, lambda: self._hidden(pack).clone())  # FSDP2 warns of a view

    def values(self, pack: Pack, critic: Values) -> Tensor:
        """[M] a critic's values of what the pack's loss tokens are predicted from, with gradient. The model's own head is not called."""
        hidden, context = self.hidden(pack), self.context
        if context is None:
            return _values(hidden, pack.predictor, critic)
        places = context.places(pack.predictor)
        found = _values(hidden, pack.predictor[places] // context.size, critic)
        return context.collected(found, places, len(pack.predictor))

    def _chunked_logprobs(
        self, pack: Pack, temperature: float, dtype: torch.dtype, critic: Values | None, lesson: Lesson | None
    ) -> TokenScores:
        hidden = self._hidden(pack)
        head = self.model.get_output_embeddings()
        if head.weight.is_meta:  # another rank has it (placement/staged.py)
            return _unknown(pack)
        scale = Scale(softcap=softcap_of(self.model))
        questions, context = _questions(pack, pack.predictor, temperature), self.context
        here = questions if context is None else [_asked_here(context, question) for question in questions]

        def of_head() -> tuple[list[Head], LessonNumbers]:
            more: dict[str, Any] = {"packed": getattr(head, "packed", None), "backend": self.backend}
            policy = HeadOf(hidden, head.weight, getattr(head, "bias", None), scale, dtype, **more)
            return [policy.logprobs(asked) for asked in here], lesson(policy, here[0]) if lesson else LessonNumbers()

        found, taught = within(head, of_head)
        if critic is not None:
            found[0] = found[0]._replace(value=_values(hidden, here[0].predictor, critic))
        if context is not None:
            found = [_of_all(context, one, asked) for one, asked in zip(found, questions, strict=True)]
            taught = _taught_of_all(context, taught, questions[0].predictor)
        return _scores(pack, found)._replace(taught=taught)

    def _hidden(self, pack: Pack) -> Tensor:
        """[N, H] hidden states, of this rank's tokens where they are spread over several."""
        if self.carried:
            return carried_hidden(inner_of(self.model), pack.tokens, pack.segments)
        if not self.packed:
            return torch.cat([_own_hidden(self.model, pack.tokens[s.start : s.end]) for s in pack.segments])
        context, device = self.context, pack.tokens.device
        if context is None:
            ahead = images_ahead(self.model, pack.tokens)
            tree = tree_of(pack.segments, device, flex=bool(self.backend), ahead=ahead)
            return _packed_hidden(self.model, pack.tokens, pack.positions, tree)
        tree = tree_of(context.segments(pack), device, context=context, flex=bool(self.backend))
        return _packed_hidden(self.model, context.part(pack.tokens), context.part(pack.positions), tree)

    def _own_logprobs(self, pack: Pack, temperature: float) -> TokenScores:
        """Forwards row after row: every row is one segment, and loss tokens have the order of their rows."""
        scores = []
        start = 0
        for segment in pack.segments:
            logits = own_logits(self.model, pack.tokens[segment.start : segment.end])
            end = start + int(((pack.predictor >= segment.start) & (pack.predictor < segment.end)).sum())
            mine = _loss_tokens(pack, start, end)
            questions = _questions(mine, mine.predictor - segment.start, temperature)
            scores.append(_scores(mine, [dense_logprobs(logits, *question) for question in questions]))
            start = end
        return _joined(scores)


def _values(hidden: Tensor, predictor: Tensor, critic: Values) -> Tensor:
    places, which = torch.unique(predictor, return_inverse=True)  # sums of gradients have an order then (C8)
    return critic(hidden.index_select(0, places))[which]


def _questions(pack: Pack, predictor: Tensor, temperature: float) -> list[AskedLogprobs]:
    """The loss tokens, then the teacher's top tokens, to which no mask applies: one question where both are of one temperature, which costs less."""
    own = AskedLogprobs(predictor, pack.target, pack.kept, temperature)
    if pack.top_ids is None:
        return [own]
    more, ids = predictor.repeat_interleave(pack.top_ids.shape[1]), pack.top_ids.flatten()
    if temperature != SERVED_TEMPERATURE:
        return [own, AskedLogprobs(more, ids, None, SERVED_TEMPERATURE)]
    kept = None if pack.kept is None else pack.kept.padded(len(more))
    return [AskedLogprobs(torch.cat([predictor, more]), torch.cat([pack.target, ids]), kept, temperature)]


def _asked_here(context: Context, asked: AskedLogprobs) -> AskedLogprobs:
    """Returns what is asked of the tokens of this rank: their predictors are places among these."""
    mine, kept = context.places(asked.predictor), asked.kept
    return asked._replace(
        predictor=asked.predictor[mine] // context.size,
        target=asked.target[mine],
        kept=None if kept is None else kept.chosen(mine),
    )


def _of_all(context: Context, found: Head, asked: AskedLogprobs) -> Head:
    """The numbers of all loss tokens, from those of this rank's. `asked`: of all."""
    given = [found.logprob, found.entropy, *([] if found.value is None else [found.value])]
    predictor = asked.predictor
    logprob, entropy, *value = context.collected(torch.stack(given), context.places(predictor), len(predictor))
    outside = found.outside if asked.kept is None else context.added(found.outside)
    return Head(logprob, entropy, outside, value[0] if value else None)


def _taught_of_all(context: Context, found: LessonNumbers, predictor: Tensor) -> LessonNumbers:
    places, count = context.places(predictor), len(predictor)
    return LessonNumbers(*(None if column is None else context.collected(column, places, count) for column in found))


def _scores(pack: Pack, heads: Sequence[Head]) -> TokenScores:
    """`heads`: the answers to `_questions`."""
    count, first = len(pack.target), heads[0]
    logprob = first.logprob if len(heads) == 1 else torch.cat([head.logprob for head in heads])
    top = None if pack.top_ids is None else logprob[count:].view(pack.top_ids.shape)
    value = None if first.value is None else first.value[:count]
    return TokenScores(logprob[:count], first.entropy[:count], top, first.outside, value)


def _unknown(pack: Pack) -> TokenScores:
    """NaN, so that a number that another rank should have given shows."""
    nothing = torch.full(pack.target.shape, torch.nan, device=pack.target.device)
    return TokenScores(nothing, nothing)


def _loss_tokens(pack: Pack, start: int, end: int) -> Pack:
    """The pack with the columns that a head reads cut to the loss tokens start:end."""
    kept = None if pack.kept is None else pack.kept.rows(start, end)
    top = None if pack.top_ids is None else pack.top_ids[start:end]
    return replace(pack, predictor=pack.predictor[start:end], target=pack.target[start:end], kept=kept, top_ids=top)


def _joined(scores: Sequence[TokenScores]) -> TokenScores:
    tops = [score.top for score in scores if score.top is not None]
    return TokenScores(
        torch.cat([score.logprob for score in scores]),
        torch.cat([score.entropy for score in scores]),
        torch.cat(tops) if tops else None,
        sum(score.outside for score in scores),
    )


def softcap_of(model: Any) -> float:
    """The cap of a model that replaces its logits by cap · tanh(logits / cap); 0 for one that does not."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0


def packed_hidden(model: Any, tokens: Tensor, positions: Tensor, tree: Tree) -> Tensor:
    """[N, H] hidden states of a pack."""
    return within(model, lambda: _packed_hidden(model, tokens, positions, tree))


def own_hidden(model: Any, tokens: Tensor) -> Tensor:
    """[T, H] hidden states of one sequence."""
    return within(model, lambda: _own_hidden(model, tokens))


def _packed_hidden(model: Any, tokens: Tensor, positions: Tensor, tree: Tree) -> Tensor:
    if tree.context is None and (places := image_places(model, tokens, tree.segments)) is not None:
        positions = places
    output = inner_of(model)(input_ids=tokens[None], position_ids=positions[None], use_cache=False, tree=tree)
    return output.last_hidden_state[0]


def _own_hidden(model: Any, tokens: Tensor) -> Tensor:
    return inner_of(model)(input_ids=tokens[None], use_cache=False).last_hidden_state[0]


def inner_of(model: Any) -> Any:
    """The model without its head, to be called within the root's call only."""
    inner = model.base_model
    if inner is model:  # it is not where the prefix of its checkpoints says, as in Llama 4
        inner = getattr(model, "model", None)
    if inner is None:
        raise AttributeError(f"{type(model).__name__} has no inner model")
    return inner


def own_logits(model: Any, tokens: Tensor) -> Tensor:
    """[T, V] logits of one sequence."""
    return model(input_ids=tokens[None], use_cache=False).logits[0]


def together(forward: Forward, context: Context | None) -> Forward:
    """The forward pass of packs that the ranks of `context` compute together. Raises ConfigError if it cannot be spread over them."""
    if context is None:
        return forward
    kind, asked = type(forward.model).__name__, f"train.parallel.context = {context.size}"
    if not (forward.packed and forward.chunked_head):
        raise ConfigError(
            f"{asked} spreads packed trees over ranks, and {kind} is run {forward.path}; set train.parallel.shard = {context.size} and remove "
            "train.parallel.context"
        )
    if kinds := _kinds_of_rope(forward.model) & {"dynamic", "longrope"}:
        raise ConfigError(
            f"{asked}, and the rotary embedding of {kind} ({kinds.pop()}) depends on the longest position among the tokens of a rank, which "
            f"differs from rank to rank; set train.parallel.shard = {context.size} and remove train.parallel.context"
        )
    return replace(forward, context=context)


def _kinds_of_rope(model: Any) -> set[str]:
    """The kinds of rotary embedding, which may differ between kinds of layers."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return {settings.get("rope_type", "") for settings in (rope, *rope.values()) if isinstance(settings, dict)}


# -- the choice -------------------------------------------------------------------------------------------------------------


class ForwardWay(NamedTuple):
    """How a model can be run."""

    packed: bool
    chunked_head: bool
    carried: bool = False


def choose_forward(model: Any, may_carry: bool = True) -> Forward:
    """Returns the fastest way that gives the model's own numbers, and sets the model's attention accordingly.

    The model must be in float32 and evaluation mode. Costs a few forward passes of a dozen tokens.
    """
    return forward_of(model, way_of(model, may_carry))


def forward_of(model: Any, way: ForwardWay) -> Forward:
    """The forward pass of a model that is run in this way; sets its attention accordingly."""
    if way.packed:
        register()
        model.set_attn_implementation(NAME)
    return Forward(model, way.packed, way.chunked_head, carried=way.carried)


@torch.no_grad()
def way_of(model: Any, may_carry: bool = False) -> ForwardWay:
    """Tries the ways, as `choose_forward`, and leaves the model as it was. `may_carry`: whether states may be carried: not in a model that
    will be checkpointed, for then transformers keeps no cache."""
    shared, one, two, other = trial = _probe(model)
    tokens = torch.cat([shared, one])
    if not _head_agrees(model, tokens, own_logits(model, tokens)):
        return ForwardWay(packed=False, chunked_head=False)
    previous = model.config._attn_implementation
    try:
        packed = _packs(model, shared, one, two, other)
    finally:
        model.set_attn_implementation(previous)
    carried = may_carry and not packed and within(model, lambda: carries(model, inner_of(model), torch.cat(trial)))
    return ForwardWay(packed, chunked_head=True, carried=carried)


def _probe(model: Any) -> list[Tensor]:
    """A shared prompt, two completions of it, and another sequence; fixed tokens from all over the vocabulary."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, 18, device=model.device) * 7919 % vocabulary
    return list(tokens.split([5, 3, 4, 5]))


def _head_agrees(model: Any, tokens: Tensor, expected: Tensor) -> bool:
    """Whether logits are just a matrix (and a bias) times the hidden states, capped as the config says.

    This is tried with the hidden states and with larger ones, because small logits would not show a cap.
    """
    larger = float(LARGE_LOGIT / expected.abs().max())
    try:
        head = model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * larger,))
        try:
            expected_large = own_logits(model, tokens)
        finally:
            hook.remove()

        def products() -> tuple[Tensor, Tensor]:
            hidden, bias = _own_hidden(model, tokens), getattr(head, "bias", None)

            def of_head() -> list[Tensor]:
                return [torch.nn.functional.linear(states, head.weight, bias) for states in (hidden, hidden * larger)]

            one, other = within(head, of_head)
            return one, other

        return all(
            close(_capped(product, model), logits)
            for product, logits in zip(within(model, products), (expected, expected_large), strict=True)
        )
    except (AttributeError, TypeError, RuntimeError):
        return False


def _capped(logits: Tensor, model: Any) -> Tensor:
    return Scale(softcap=softcap_of(model)).of(logits)


def _packs(model: Any, shared: Tensor, tensor: Tensor, two: Tensor, other: Tensor) -> bool:
    if not getattr(model, "_supports_attention_backend", False):
        return False
    a, b, c, d = len(shared), len(tensor), len(two), len(other)
    segments = (Segment(0, a), Segment(a, b, 0), Segment(a + b, c, 0), Segment(a + b + c, d, ROOT))
    lengths = (range(a), range(a, a + b), range(a, a + c), range(d))
    positions = torch.tensor([i for places in lengths for i in places], device=shared.device)
    first, second = own_hidden(model, torch.cat([shared, tensor])), own_hidden(model, torch.cat([shared, two]))
    expected = torch.cat([first, second[a:], own_hidden(model, other)])
    tree = tree_of(segments, shared.device)
    register()
    try:
        model.set_attn_implementation(NAME)
        hidden = packed_hidden(model, torch.cat([shared, tensor, two, other]), positions, tree)
    except UNABLE:
        return False
    return close(hidden, expected) and _windows_are_passed(model, tree)


def _windows_are_passed(model: Any, tree: Tree) -> bool:
    """Whether the attention function is passed every window. A window longer than the probe changes none of its numbers."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if layers is None:
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        layers = ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers
    if getattr(config, "attention_chunk_size", None) or set(layers) - {"full_attention", "sliding_attention"}:
        return False
    return [window is not None for window in tree.windows] == [kind == "sliding_attention" for kind in layers]
