"""A model without its weights, and its weights as they lie in files: for processes that hold only a part of it.

An outline is a Hugging Face model whose parameters, and buffers that are weights, lie on torch's meta device: names, shapes and dtypes without
memory. It is adapted, lowered and split like a model; then each process reads what it holds (`placement/filling.py`). What a forward pass of the
model has to show is tried on its first layers, as many as it takes to have one of every kind (`sample`).

transformers names the tensors, joins those that a family fuses (experts, saved one by one) and says what is missing: it loads tensors without memory
in the place of those of the files.
"""

from __future__ import annotations

import mmap
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headrace.core.errors import ConfigError
from headrace.models.resolve import read_header, weight_files
from headrace.trainer.model.causal_lm import check_complete, load_model, switch_noise_off

Runs = Sequence[tuple[int, int]]
"""The places of one dimension that are wanted: start and end of each stretch, in order."""

Region = Sequence[Runs]
"""The part of a tensor that is wanted, by its dimensions."""

BY_EXPERT = {"MergeModulelist", "Concatenate", "Transpose"}
"""Conversions of transformers that may be made of some experts alone, if they join others along the first dimension of none."""


BASE_LAYER = ".base_layer"
"""The part that peft adds to the names of a module that it has wrapped."""

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE (mmap(2)): the memory is not counted before it is written."""


@dataclass
class _Source:
    """The tensors of files that become one tensor of the model, or several."""

    conversion: Any = None
    """transformers' `WeightConverter`; None: the tensor as it is."""
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The names in the files, by the pattern of the conversion that they fit."""


class WeightFiles:
    """The weights of a model in safetensors files, read in parts. Reads nothing but headers until `read` is called."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stored = {
            name: (path, tensor) for path in weight_files(directory) for name, tensor in read_header(path).items()
        }
        self._sources: dict[str, _Source] = {}
        self._shapes: dict[str, torch.Size] = {}
        """Shapes of the model's tensors, by the first name of those that are read together."""
        self._first: dict[str, str] = {}
        """The first of the tensors that are read together, by the name of each."""

    def __deepcopy__(self, memo: Any) -> WeightFiles:
        return self  # a copy of a model has the same files

    def without_memory(self) -> dict[str, Tensor]:
        """The tensors by their names in the files, in float32 and on the meta device."""
        return {name: self._empty(name) for name in self._stored}

    def _empty(self, name: str) -> Tensor:
        return torch.empty(self._stored[name][1].shape, device="meta")

    def find(self, model: Any) -> None:
        """Looks up what becomes of each tensor, as transformers has just loaded the model."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        used, state = model._weight_conversions, model.state_dict()
        renamings = [entry for entry in used if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in used if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for name in sorted(self._stored, key=dot_natural_key):
            prefix = model.base_model_prefix
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, pattern = rename_source_key(name, [], [], prefix, state)
            if target not in state:
                continue
            source = self._sources.setdefault(target, _Source(None if pattern is None else by_pattern[pattern]))
            source.names[pattern or ""].append(name)
            self._shapes[target] = state[target].shape
        for first, source in self._sources.items():
            self._first[first] = first
            if source.conversion is not None and len(source.conversion.target_patterns) > 1:
                empty = {pattern: [self._empty(name) for name in many] for pattern, many in source.names.items()}
                self._first |= dict.fromkeys(_converted(first, source.conversion, model, empty), first)

    def has(self, name: str) -> bool:
        """Whether a tensor of the model is read under this name: tied ones are under one of theirs."""
        return name in self._first

    def first(self, name: str) -> str:
        """The first of the tensors that are read together with this one; empty if it is not read under this name."""
        return self._first.get(name, "")

    def whole(self, model: nn.Module, parameter: Tensor) -> Tensor:
        """All values of a parameter of the outline, in float32."""
        names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
        name = next(name for name in names if self.has(name))
        found = dict(self.read(self._first[name], model, lambda _: None))
        return found[name].to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        """Yields what `read` takes: the name of the first of the tensors that are read together."""
        return iter(self._sources)

    def read(self, first: str, model: Any, region: Callable[[str], Region | None]) -> Iterator[tuple[str, Tensor]]:
        """Yields names and values of the tensors that are read with this one. `region`: returns the part that is wanted of a tensor; None: all of it.
        Values are in the dtype of the files, or in float32 where they are converted. A tensor that has to be converted as a whole is in memory while it is cut.

        Raises ConfigError where a file cannot be read."""
        source, wanted = self._sources[first], region(first)
        with self._opened() as part:
            if source.conversion is None:
                ((name,),) = source.names.values()
                yield first, part(name, wanted)
                return
            if by_expert := wanted is not None and self._by_expert(first, wanted):
                assert wanted is not None
                chosen = [i for start, end in wanted[0] for i in range(start, end)]
                names = {pattern: [many[i] for i in chosen] for pattern, many in source.names.items()}
            else:
                names = source.names
            found = _converted(
                first, source.conversion, model, {p: [part(n, None) for n in many] for p, many in names.items()}
            )
        for name, tensor in found.items():
            value = tensor[0] if isinstance(tensor, list) else tensor
            rest = region(name)
            if rest is not None and by_expert:
                rest = [[(0, value.shape[0])], *rest[1:]]
            yield name, cut(value, rest)

    def _by_expert(self, first: str, wanted: Region) -> bool:
        """Whether what this process holds of stacked experts is made of the files' tensors of some experts alone."""
        source, shape = self._sources[first], self._shapes[first]
        operations, names = source.conversion.operations, list(source.names.values())
        return (
            0 < sum(end - start for start, end in wanted[0]) < shape[0]
            and all(len(many) == shape[0] for many in names)
            and all(len(self._stored[name][1].shape) == len(shape) - 1 for many in names for name in many)
            and {type(operation).__name__ for operation in operations} <= BY_EXPERT
            and type(operations[0]).__name__ == "MergeModulelist"
            and all(getattr(operation, "dim", 1) != 0 for operation in operations[1:])
            and all(0 not in (getattr(operation, "dim0", 1), getattr(operation, "dim1", 1)) for operation in operations)
        )

    @contextmanager
    def _opened(self) -> Iterator[Callable[[str, Region | None], Tensor]]:
        """Within it the returned function reads a tensor, or a part of it. Files are closed afterwards: pages of a mapped file count as this process's."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}

            def part(name: str, wanted: Region | None) -> Tensor:
                path = self._stored[name][0]
                try:
                    if path not in files:
                        files[path] = stack.enter_context(safe_open(path, "pt"))
                    found = files[path].get_slice(name)
                    if wanted is None:
                        return found[...]
                    return _pieces(found, wanted)
                except Exception as error:  # safetensors raises its own kind
                    raise ConfigError(f"{name} in {path} cannot be read: {error}") from error

            yield part


def _pieces(found: Any, wanted: Region) -> Tensor:
    """Reads the stretches of the one dimension that has several, and joins them."""
    several = next((dim for dim, runs in enumerate(wanted) if len(runs) != 1), None)
    if several is None:
        return found[tuple(slice(*runs[0]) for runs in wanted)] if wanted else found[...]
    if not wanted[several]:
        shape = [sum(end - start for start, end in runs) for runs in wanted]
        return torch.empty(shape)
    parts = [_pieces(found, [*wanted[:several], [run], *wanted[several + 1 :]]) for run in wanted[several]]
    return torch.cat(parts, several)


def cut(value: Tensor, wanted: Region | None) -> Tensor:
    """The part of a whole tensor; None: all of it."""
    for dim, runs in enumerate(wanted or ()):
        parts = [value.narrow(dim, start, end - start) for start, end in runs]
        value = parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else value.narrow(dim, 0, 0)
    return value


def _converted(first: str, conversion: Any, model: Any, given: Mapping[str, Sequence[Tensor]]) -> Mapping[str, Any]:
    own = deepcopy(conversion)
    for pattern, tensors in given.items():
        for tensor in tensors:
            own.add_tensor(first, first, pattern, tensor.to(torch.float32))
    return own.convert(first, model=model, config=model.config)


# --- The model


def outline(directory: Path) -> Any:
    """Returns the model of a directory on the meta device, as `causal_lm.load_model` returns it with its values, with its `files` (`WeightFiles`). None where it
    has to be loaded as a whole: its weights are not in safetensors files, or transformers is too old, or it ties weights that the files have twice.
    Raises ConfigError if a weight is missing or does not fit."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.core_model_loading import WeightConverter  # noqa: F401
    except ImportError:
        return None
    if not weight_files(directory):
        return None
    files = WeightFiles(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            return None
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(config))
        config.name_or_path = str(directory)
        model, info = kind.from_pretrained(
            None,
            config=config,
            state_dict=files.without_memory(),
            dtype=torch.float32,
            device_map="meta",
            output_loading_info=True,
        )
    except Exception as error:  # a damaged file, a foreign architecture, ...: every library raises its own kind
        raise ConfigError(f"cannot load a causal language model from {directory}: {error}") from error
    check_complete(directory, info)
    files.find(model)
    if any(files.has(one) and files.has(other) for one, other in getattr(model, "all_tied_weights_keys", {}).items()):
        return None
    if not _computed_buffers(model):
        return None
    switch_noise_off(model)
    model.files = files
    return model.eval()


def outline_or_model(directory: Path, *, values: bool) -> Any:
    """Returns the outline, or the model in the host's memory where its `values` are needed, or it has none."""
    found = None if values else outline(directory)
    return load_model(directory, torch.device("cpu")) if found is None else found


@torch.no_grad()
def _computed_buffers(model: Any) -> bool:
    """Gives buffers that are no weights, such as rotary frequencies, their values. False where the model cannot."""
    owners = []
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name not in saved:
            parent, _, own = name.rpartition(".")
            owner = model.get_submodule(parent)
            owner._buffers[own] = torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device="cpu")
            owners.append(owner)
    for owner in dict.fromkeys(owners):
        model._init_weights(owner)
    computed = [
        buffer for owner in owners for buffer in owner._buffers.values() if buffer is not None and not buffer.is_meta
    ]
    return not any(bool(buffer.isnan().any()) for buffer in computed if buffer.is_floating_point())


def is_outline(model: Any) -> bool:
    return isinstance(getattr(model, "files", None), WeightFiles)


def hollow(model: Any) -> None:
    """Gives parameters and buffers of an outline memory that is all zeros and was never written, of which the system has no pages: a library that splits or
    adapts the model copies from it, or takes its device. Tied ones stay one. All their names are in `model.unread`. Does nothing with a model that
    has values."""
    made: dict[int, Tensor] = {}
    if is_outline(model):
        model.unread = {name for name, tensor in named_tensors(model).items() if tensor.is_meta} | getattr(
            model, "unread", set()
        )
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    zeros = _unwritten(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(zeros, tensor.requires_grad) if is_parameter else zeros
                kind[name] = made[id(tensor)]


def _unwritten(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names in the model without adapters."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name.replace(BASE_LAYER, ""): tensor for name, tensor in tensors}


# --- Its first layers


@contextmanager
def sample(model: Any, least: int = 1) -> Iterator[None]:
    """Within it an outline has values, and few layers (`shortened`)."""
    assert not hasattr(model, "unread"), "zeros are no values: what is tried comes before `hollow`"
    with ExitStack() as stack:
        stack.enter_context(shortened(model, least))
        for module, kind, own, empty in _fill_whole(model):
            stack.callback(getattr(module, kind).__setitem__, own, empty)
        yield


@contextmanager
def shortened(model: Any, least: int = 1) -> Iterator[None]:
    """Within it a model has no more layers than it takes to have one of every kind, and `least` if it has as many: layers of one kind have modules of the
    same classes, with parameters of the same shapes and the same settings."""
    parent, name, layers = _layers(model)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    count = max(_first_of_every_kind(layers, kinds), min(least, len(layers)))
    key = getattr(config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    before = {key: vars(config).get(key, len(layers)), **({"layer_types": kinds} if kinds else {})}
    after = {key: count, **({"layer_types": list(kinds)[:count]} if kinds else {})}
    with ExitStack() as stack:
        parent._modules[name] = nn.ModuleList(list(layers)[:count])
        stack.callback(parent._modules.__setitem__, name, layers)
        vars(config).update(after)
        stack.callback(vars(config).update, before)
        yield


def _layers(model: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """Parent, name and list of the layers: the list of modules that holds most of the parameters."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no list of layers, so that ranks cannot split it; train it on one"
        )
    return max(found, key=lambda entry: sum(p.numel() for p in entry[2].parameters()))


def _first_of_every_kind(layers: nn.ModuleList, kinds: Sequence[str] | None) -> int:
    """Returns how many of the first layers have one of every kind among them."""
    seen: dict[Any, int] = {}
    for number, layer in enumerate(layers):
        seen.setdefault((kinds[number] if kinds else "", *_looks(layer)), number)
    return 1 + max(seen.values(), default=0)


def _looks(layer: nn.Module) -> Iterator[Any]:
    for module in layer.modules():
        settings = (
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, str | int | float) and not name.startswith("_") and not name.endswith(("idx", "index"))
        )
        yield type(module), tuple(settings), tuple(p.shape for p in module.parameters(recurse=False))


def _fill_whole(model: Any) -> list[tuple[nn.Module, str, str, Any]]:
    """Gives the modules that are there whole values. Returns what they had: (module, dictionary, name, tensor)."""
    names: dict[str, list[tuple[nn.Module, str, str]]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for kind in ("_parameters", "_buffers"):
            for own, tensor in getattr(module, kind).items():
                if tensor is not None and tensor.is_meta:
                    names[f"{path}.{own}".lstrip(".")].append((module, kind, own))
    had, made = [], dict[int, Tensor]()
    files: WeightFiles = model.files
    wanted = [first for first in files if first in names]
    for first in wanted:
        for name, value in files.read(first, model, lambda _: None):
            for module, kind, own in names.get(name, ()):
                empty = getattr(module, kind)[own]
                own_value = value.to(empty.dtype, copy=True)
                made[id(empty)] = nn.Parameter(own_value, empty.requires_grad) if kind == "_parameters" else own_value
    for places in names.values():  # tied ones, under whichever name the files have
        for module, kind, own in places:
            empty = getattr(module, kind)[own]
            if id(empty) in made:
                had.append((module, kind, own, empty))
    for module, kind, own, empty in had:
        getattr(module, kind)[own] = made[id(empty)]
    return had
