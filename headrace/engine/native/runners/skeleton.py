"""A model without its weights: parameters on the meta device, buffers real. Its attention is found by a dry run.

The dry run is one forward pass on the meta device with an attention function that only takes notes. It shows which shapes the
cache needs, and whether the model can be served at all, by its actual calls and not by its config.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from headrace.core.errors import ConfigError
from headrace.engine.native.runners.attention import Geometry
from headrace.engine.own_families import FAMILIES, TEXT_PARTS
from headrace.models.image_embedding import show_images
from headrace.models.images import ALWAYS_APART
from headrace.models.saved_buffers import saved_buffers

Value = TypeVar("Value")
ATTENTION = "headrace"
"""Its name is in no mask table of transformers, so models pass it no mask: our runner decides which tokens attend to which."""

Attend = Callable[..., torch.Tensor]
_current: ContextVar[Attend] = ContextVar("attention of the forward pass under way")


def _attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """q [1, Hq, N, D], k and v [1, Hkv, N, D] -> [1, N, Hq, D], as transformers wants it."""
    return _current.get()(module, q, k, v, mask, **options), None


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def attention(attend: Attend) -> Iterator[None]:
    """Every attention layer inside calls `attend(module, q, k, v, mask, **options)`."""
    token = _current.set(attend)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """The attention of all layers, as a cache of blocks must know it."""

    geometry: Geometry
    layers: tuple[int, ...]
    """Numbers of the layers that have attention."""
    heads: tuple[tuple[int, int], ...]
    """Heads of keys and values of each of all layers, and the width of one; (0, 0) where it has no attention."""
    windows: tuple[int | None, ...]
    """Sliding window of each of all layers."""
    scales: tuple[float, ...]
    """The factor of each layer's attention scores."""
    caps: tuple[float, ...]
    """The bound of each layer's scores (`pages.Softmax`); 0: none."""
    sinks: tuple[bool, ...]
    """Whether each layer has a score for every head beside those of its keys."""


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    model: Any
    """A transformers model in eval mode."""
    config: Any
    """The config of the model's text part."""
    shapes: dict[str, tuple[int, ...]]
    """Every parameter in canonical order, tied ones once, then the buffers that the model saves."""
    kept: frozenset[str]
    """The names of those buffers, which are served in the dtype in which they are published."""
    attention: PagedAttention | None
    """The attention of the layers which have some; None if it cannot be computed over our blocks of keys and values."""
    objection: str
    """The reason why the model cannot be computed by attention over our blocks alone, half a sentence; empty otherwise."""
    vocabulary: int
    context_length: int | None
    """Positions the model was made for, or those that an engine serves of it."""
    language: Skeleton | None = None
    """The language part as a model of its own, where it is a part of the model whose family is served alone without images."""
    placeholders: tuple[int, ...] = ()
    """Tokens of the language part that are read as padding: those in whose place images, videos or sounds would be."""
    images: int = 0
    """Rows of features of images, whose numbers in prompts follow those of the vocabulary."""

    @property
    def model_type(self) -> str:
        return self.config.model_type

    @property
    def paged(self) -> PagedAttention | None:
        """None if attention over our blocks is not all that the model keeps of a sequence: transformers' layers serve it over its own cache alone."""
        return None if self.objection else self.attention

    @property
    def geometry(self) -> Geometry:
        return self._paged.geometry

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self._paged.windows

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        return self._paged.heads

    @property
    def scales(self) -> tuple[float, ...]:
        return self._paged.scales

    @property
    def caps(self) -> tuple[float, ...]:
        return self._paged.caps

    @property
    def sinks(self) -> tuple[bool, ...]:
        return self._paged.sinks

    @property
    def _paged(self) -> PagedAttention:
        assert self.attention is not None, self.objection
        return self.attention


def read(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Skeleton:
    """Reads config.json alone. Raises ConfigError for models that cannot be served."""
    config = _read_config(model_dir)
    what = f"{model_dir.name} ({config.model_type})"
    if reason := unservable(config):
        raise ConfigError(f"{what} cannot be served by the native engine: {reason}; choose another model")
    whole = _without_images(config, dtype, device, what)
    return replace(whole, images=show_images(whole.model, model_dir), language=_language_part(whole, dtype, device))


def _without_images(config: Any, dtype: torch.dtype, device: torch.device, what: str) -> Skeleton:
    model, attention, objection = _over_blocks(config, dtype)
    if model is None:
        model = _build(config, dtype, None, what)
    try:
        _make_buffers(model, device)
    except NotImplementedError as error:  # of numbers that are not there without weights
        raise ConfigError(
            f"{what} cannot be served by the native engine: it computes buffers from numbers that it has only with its weights ({error}); "
            "choose another model"
        ) from error
    kept = saved_buffers(model)
    text = model.config.get_text_config(decoder=True)
    return Skeleton(
        model=model,
        config=text,
        shapes={name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *kept.items())},
        kept=frozenset(kept),
        attention=attention,
        objection=objection,
        vocabulary=_vocabulary(model, text),
        context_length=getattr(text, "max_position_embeddings", None),
    )


def _over_blocks(config: Any, dtype: torch.dtype) -> tuple[Any, PagedAttention | None, str]:
    """The model with our attention inside, what that is, and nothing; or no model, the attention of its layers that have some, and the reason why it
    cannot have ours."""
    what = config.model_type
    try:
        model = _build(config, dtype, ATTENTION, what)
        # There is no padding in a flat batch: without this, some models search every batch for it and warn.
        model.config.pad_token_id = model.config.get_text_config(decoder=True).pad_token_id = None
        architecture = architecture_of(model, model.config)
    except Exception as error:  # whatever it is, its own cache may serve it
        return None, None, str(error)
    if architecture not in _found:
        _found[architecture] = _paged_attention(model)
    found, objection = _found[architecture]
    return (None if objection else model), found, objection


Architecture = tuple[type, str]
"""A model's class and config, from which all follows that a pass without values shows."""

_found: dict[Architecture, tuple[PagedAttention | None, str]] = {}
"""Results of dry runs by model: a process that compares engines reads one model several times, and each dry run takes 10 ms a layer."""


def architecture_of(model: Any, config: Any) -> Architecture:
    return type(model), config.to_json_string(use_diff=False)


def _paged_attention(model: Any) -> tuple[PagedAttention | None, str]:
    try:
        notes = dry_run(model)
    except Exception as error:
        return None, str(error)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    objection, of = _objection(notes, layers, model), {note.layer: note for note in notes}
    if not of or len(of) < len(notes) or (reason := _objection_of_calls(notes)):
        return None, objection or reason
    paged = PagedAttention(
        geometry=Geometry(
            len(notes),
            heads=notes[0].q[1],
            kv_heads=notes[0].k[1],
            head_dim=notes[0].k[3],
            plain=all(note.options.get(name) is None for note in notes for name in ("softcap", "s_aux")),
        ),
        layers=tuple(of),
        heads=tuple((of[layer].k[1], of[layer].k[3]) if layer in of else (0, 0) for layer in range(layers)),
        windows=tuple(of[layer].options.get("sliding_window") if layer in of else None for layer in range(layers)),
        scales=tuple(of[layer].scale if layer in of else 0.0 for layer in range(layers)),
        caps=tuple(of[layer].options.get("softcap") or 0.0 if layer in of else 0.0 for layer in range(layers)),
        sinks=tuple(layer in of and of[layer].options.get("s_aux") is not None for layer in range(layers)),
    )
    return paged, objection


def _first_line(error: Exception) -> str:
    """Behind it transformers may list all of its classes."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _build(config: Any, dtype: torch.dtype, attention_name: str | None, what: str) -> Any:
    """The model on the meta device, in eval mode. Raises ConfigError if transformers cannot make it from its config."""
    chosen = {"attn_implementation": attention_name} if attention_name else {}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, **chosen)
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be served by the native engine: transformers does not build it from its config.json "
            f"({type(error).__name__}: {_first_line(error)}); choose another model"
        ) from error
    if left := [name for name, module in model.named_modules() if any(map(_is_tensor, vars(module).values()))]:
        raise ConfigError(
            f"{what} cannot be served by the native engine: {left[0] or type(model).__name__} keeps a tensor that is neither a parameter nor a "
            "buffer; choose another model"
        )
    return model.eval()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_NOT_CAUSAL = {
    "xlm": "it sees later tokens",
    "xlnet": "it predicts in an order of its own, and sees later tokens",
    "cpmant": "its prompt sees later tokens",
    "prophetnet": "it predicts several tokens at once",
    "dory": "transformers' own pass over its cache fails where a window has moved on",
    "deepseek_v4": "its compressed keys are other ones in a pass over a text than token by token",
    "minimax": "its linear attention is summed over blocks that its cache does not keep",
}
"""Types that transformers calls causal and whose pass over a whole text is not what they sample token by token."""


def unservable(config: Any) -> str:
    """Empty, or the feature of a model that the native engine cannot serve."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and decoder-only models are served"
    if hasattr(config, "add_cross_attention") and getattr(config, "is_decoder", None) is False:
        return "it is an encoder, which sees later tokens (is_decoder is not true in its config.json)"
    if config.model_type in ALWAYS_APART:
        return "it sees, and only a run takes its language part apart, with the images of task.images (docs/vision.md)"
    return _NOT_CAUSAL.get(config.model_type, "")


def _vocabulary(model: Any, text: Any) -> int:
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return len(weight) if weight is not None else text.vocab_size


def _read_config(model_dir: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{model_dir} has no config that transformers can read: {error}; name a model it knows"
        ) from None


@dataclass(frozen=True, kw_only=True)
class _Note:
    """The arguments of one call of attention."""

    layer: Any
    q: torch.Size
    k: torch.Size
    v: torch.Size
    masked: bool
    causal: bool
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        scaling = self.options.get("scaling")
        return self.q[3] ** -0.5 if scaling is None else scaling


class NotPaged(Exception):
    """A dry run failed, or gave no logits of chosen positions."""


@contextmanager
def without_values(model: Any) -> Iterator[None]:
    """A model whose parameters are on the meta device can be run there while it is open: its buffers are there too, and its experts multiplied in
    the one way that reads no values."""
    places = [(held, name, buffer) for held in (m._buffers for m in model.modules()) for name, buffer in held.items()]
    experts = model.get_experts_implementation() if model._can_set_experts_implementation() else None
    try:
        for held, name, buffer in places:
            held[name] = None if buffer is None else buffer.to("meta")
        if experts is not None:
            model.set_experts_implementation("batched_mm")
        with torch.no_grad():
            yield
    finally:
        for held, name, buffer in places:
            held[name] = buffer
        for module in model.modules():  # frequencies that longrope remembers, without values too
            for name in [name for name, value in vars(module).items() if _is_tensor(value)]:
                delattr(module, name)
        if experts is not None:
            model.set_experts_implementation(experts)


def dry_run(model: Any, count: int = 3) -> list[_Note]:
    """One pass over `count` tokens of a model whose parameters are on the meta device. Raises NotPaged."""
    notes: list[_Note] = []

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        causal = bool(options.get("is_causal", getattr(module, "is_causal", True)) is not False)
        notes.append(
            _Note(layer=layer, q=q.shape, k=k.shape, v=v.shape, masked=mask is not None, causal=causal, options=options)
        )
        return q.new_empty((*q.shape[:1], q.shape[2], q.shape[1], v.shape[3]))

    tokens = torch.zeros(1, count, dtype=torch.long, device="meta")
    try:
        with without_values(model), attention(attend):
            logits = model(input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=tokens[0, :1]).logits
    except Exception as error:
        raise NotPaged(
            f"a dry run of its forward pass over our blocks failed with {type(error).__name__}: {error}"
        ) from error
    if logits.shape[:2] != (1, 1):
        raise NotPaged("it does not return logits of chosen positions")
    return notes


def _objection(notes: list[_Note], layers: int, model: Any) -> str:
    """Empty, or why this attention cannot be computed over our cache. Each would otherwise be wrong in silence."""
    if model._is_stateful:
        return "it keeps a state beside keys and values (_is_stateful)"
    if not model._supports_attention_backend:
        return "its class does not support attention functions of others (_supports_attention_backend)"
    if [note.layer for note in notes] != list(range(layers)):
        return f"{len(notes)} attention calls in {layers} layers (recurrent, linear or shared layers are not supported)"
    if any(note.k != notes[0].k for note in notes):
        return "its layers differ in key and value heads"
    return _objection_of_calls(notes)


def _objection_of_calls(notes: list[_Note]) -> str:
    for note in notes:
        if note.v != note.k or note.q[3] != note.k[3]:
            return "its keys and values differ in size"
        if note.masked or not note.causal:
            return "its attention is not causal, or brings a mask of its own"
        if note.options.get("position_bias") is not None or note.options.get("alibi") is not None:
            return "it adds a bias to attention scores"
    return ""


def _make_buffers(model: Any, device: torch.device) -> None:
    """Rotary frequencies and the like, computed as `from_pretrained` does: empty buffers, then the model's own init, which leaves parameters alone."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # there is nothing to fill, and on the meta device each costs milliseconds
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
    model.initialize_weights()


# --- The language part of a model of text and images


INSIDE = "model.language_model."
"""How names of the language part begin in a model that sees, where it is not the model itself."""


def _language_part(whole: Skeleton, dtype: torch.dtype, device: torch.device) -> Skeleton | None:
    """The language part as a model of its own, where it is a part, and of a family of which that is served alone (`TEXT_PARTS`)."""
    inside = {
        name: shape for name, shape in whole.shapes.items() if name.startswith(INSIDE) or name == "lm_head.weight"
    }
    if whole.model.config.model_type not in TEXT_PARTS or len(inside) < 2:
        return None
    part = _without_images(whole.config, dtype, device, whole.config.model_type)
    if part.shapes != named_as_part(inside):
        return None
    given = (getattr(whole.model.config, name, None) for name in FAMILIES[part.model_type].placeholders)
    return replace(part, placeholders=tuple(sorted({token for token in given if token is not None})))


def named_as_part(values: Mapping[str, Value], before: str = "") -> dict[str, Value]:
    """Values by their names in the language part alone. `before`: what stands before the names."""
    inside = before + INSIDE
    return {
        f"{before}model.{name.removeprefix(inside)}" if name.startswith(inside) else name: value
        for name, value in values.items()
    }


# --- New weights
# Checked by name, shape and dtype; moved to the device; neighbours fused without a copy where they touch.


Shapes = Mapping[str, tuple[int, ...]]


def check(
    expected: Shapes, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, kept: Collection[str] = ()
) -> None:
    """Raises ValueError naming the first parameter that is missing, unknown, or of another shape or dtype. `kept`: names that may have a dtype of
    their own."""
    for name, shape in expected.items():
        if name not in tensors:
            raise ValueError(
                f"the update lacks the parameter {name}; publish every parameter of the model that is served"
            )
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} came with shape {tuple(tensor.shape)}, the engine's model has {shape}; serve the same model"
            )
        if tensor.dtype != dtype and name not in kept:
            raise ValueError(f"{name} came as {tensor.dtype}, the engine serves {dtype}; publish in the engine's dtype")
    for name in tensors:
        if name not in expected:
            raise ValueError(f"the update holds {name}, which the engine's model does not have; serve the same model")


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the views themselves on a CPU, and copies elsewhere, made in the preparing thread while generation continues."""
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    if device.type == "cuda":  # the stream and not the device, which nobody may wait for while a graph is captured
        torch.cuda.current_stream(device).synchronize()
    return moved


def fuse(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of all rows: a view when the parts touch in memory (they do in a packed update), else a copy."""
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return torch.cat(list(parts))
        end += part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def parameters_from_dir(model_dir: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters of a saved model in canonical order, as a trainer would publish them. For models that are not trained.
    Raises ValueError if the files lack some, for which transformers would use random numbers.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    if wrong := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        raise ValueError(
            f"the weights in {model_dir} lack or do not fit {len(wrong)} parameters of its config.json, the first: {wrong[0]}; "
            "save the model again with `save_pretrained`"
        )
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *saved_buffers(model).items())}
