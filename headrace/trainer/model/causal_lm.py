"""A Hugging Face causal LM: loaded completely or not at all, and written back so that `transformers` loads it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headrace.core.errors import ConfigError
from headrace.models.image_embedding import show_images
from headrace.models.images import source_of
from headrace.models.tokenizer import name_all
from headrace.native.memory import own_pages

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def resolve_device(device: str) -> torch.device:
    """Returns the device; `auto` is cuda if there is a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = cuda, but torch sees no CUDA device; set it to auto or cpu")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype; `auto` is bfloat16 where the hardware has it. Elsewhere it would be emulated, slower than float32."""
    if dtype != "auto":
        return getattr(torch, dtype)
    native = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def computed_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Returns an autocast context, which does nothing in float32. Open one for each microbatch (`placement/port.py` says why)."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def load_model(directory: Path, device: torch.device) -> Any:
    """Returns the model in float32, in evaluation mode, without dropout. Raises ConfigError if a weight is missing or does not fit."""
    from transformers import AutoModelForCausalLM

    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json; model.path must be a directory that transformers can load")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # a damaged file, a foreign architecture, ...: every library raises its own kind
        raise ConfigError(f"cannot load a causal language model from {directory}: {error}") from error
    check_complete(directory, info)
    show_images(model, directory)
    switch_noise_off(model)
    model = model.to(device).eval()
    own_pages(model.parameters())  # frozen ones are never written: whoever saves a model there again would change them
    return model


def check_complete(directory: Path, info: Mapping[str, Any]) -> None:
    """`info`: transformers' report on a model that it has loaded. Raises ConfigError if a weight is missing or does not fit: transformers
    would continue with random numbers in its place."""
    wrong = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if wrong:
        raise ConfigError(
            f"the weights in {directory} lack or do not fit {len(wrong)} parameters of its config.json, the first: {wrong[0]}; "
            "save the model again with `save_pretrained`"
        )


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model: the list of modules that holds most of its parameters. None, if it has no list."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    size = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    return list(max(lists, key=size, default=()))


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """The other names of tied parameters -> their canonical name, under which they are published."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = ((name, first[id(parameter)]) for name, parameter in model.named_parameters(remove_duplicate=False))
    return {name: canonical for name, canonical in names if name != canonical}


NOISE = ("dropout", "layerdrop", "jitter_noise")
"""Endings of the names of attributes that make a module random in training mode."""
KEPT = ("router_jitter_noise",)
"""Kept: PhiMoE uses it in its routing in evaluation mode too."""


def switch_noise_off(model: torch.nn.Module) -> None:
    """Sets dropout to 0: the ratio to the sampler's log-probs means nothing under it, and checkpointing needs training mode."""
    module: Any
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and name.endswith(NOISE) and name not in KEPT:
                setattr(module, name, 0.0)


def enable_checkpointing(model: Any, contexts: Callable[[], Any] | None = None) -> None:
    """Recomputes activations in the backward pass. `contexts`: `context_fn` of torch.utils.checkpoint, which returns a context for a
    layer's forward pass and one for its recomputation."""
    if not model.supports_gradient_checkpointing:
        kind = type(model).__name__
        raise ConfigError(f"{kind} cannot be checkpointed; set train.gradient_checkpointing = false")
    # transformers 5.23 renamed it, and warns when the old name is used
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False, **({"context_fn": contexts} if contexts else {})})
    model.train()  # transformers checkpoints in training mode only


SHARD = 4_000_000_000
"""Bytes of a file of exported weights, about."""


def export_model(
    model: Any,
    source: Path,
    directory: Path,
    *,
    dtype: Literal["bfloat16", "float32"],
    whole: Callable[[str], torch.Tensor],
    leads: bool = True,
    most: int = SHARD,
) -> None:
    """Writes a directory that `transformers` loads: weights in `dtype`, config, and all other files of `source`. No more than a file's worth of weights
    is in memory at a time, and a layer. `most`: bytes of a file, about.

    `whole`: gives a tensor of the model's `state_dict` by its name. It is called for every one, in one order, on every rank; only the rank that leads
    writes.
    """
    if leads:
        directory.mkdir(exist_ok=True)  # not its parents: a run that the user deleted must not reappear
    shards, left_out = (
        _Shards(model, directory, most),
        tied_names(model).keys() | set(model._keys_to_ignore_on_save or ()),
    )
    for names in _by_layer([name for name in model.state_dict() if name not in left_out]):
        given = {}
        for name in names:
            tensor = whole(name)
            if leads:
                given[name] = _to(tensor, getattr(torch, dtype))
        if leads:
            shards.add(given)
    if not leads:
        return
    shards.keep(prediction_heads(source))
    shards.finish()
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 gives a model a class of its own
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")
    for path in source.iterdir():  # tokenizer, chat template, generation config, licence
        is_weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    if (seeing := source_of(source)) is not None:
        from headrace.models.vision import join

        join(directory, seeing, getattr(torch, dtype), prediction_heads(seeing))
    name_all(directory)


def prediction_heads(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of heads that predict further tokens (multi-token prediction), as a model's files have them. transformers leaves them out: they are
    not trained, and exported as they were, for engines that draft with them."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    first = text.get("num_hidden_layers", 0)
    further = range(first, first + (text.get("num_nextn_predict_layers") or 0))  # as DeepSeek and GLM count them
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dictionary)
                layer = re.match(r"model\.layers\.(\d+)\.", name)
                if re.match(r"(model\.)?mtp[._]", name) or (layer and int(layer[1]) in further):
                    yield name, file.get_tensor(name)


def _by_layer(names: Sequence[str]) -> Iterator[list[str]]:
    """Yields the names of each layer together: a family's own files may join or cut tensors of one."""
    layer = lambda name: match.group() if (match := re.match(r".*?\.\d+\.", name)) else ""  # noqa: E731
    for _, together in itertools.groupby(names, layer):
        yield list(together)


class _Shards:
    """The files of exported weights, with the names and shapes that the family's own files have."""

    def __init__(self, model: Any, directory: Path, most: int) -> None:
        self._model, self._directory, self._most = model, directory, most
        self._waiting: dict[str, torch.Tensor] = {}
        self._written: list[list[str]] = []
        """The names in each file."""
        self._bytes = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes all tensors of a layer, in the host's memory. Raises OSError where a file cannot be written."""
        from transformers.core_model_loading import revert_weight_conversion

        self._take(revert_weight_conversion(self._model, tensors).items())

    def keep(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes tensors that the model does not have, by the names of the family's files. Those that it has been given under these names stay."""
        written = {name for names in (*self._written, list(self._waiting)) for name in names}
        self._take((name, tensor) for name, tensor in tensors if name not in written)

    def _take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if self._waiting and sum(t.nbytes for t in self._waiting.values()) + tensor.nbytes > self._most:
                self._write()
            self._waiting[name] = tensor.contiguous().clone()  # parts of a tensor that was cut share its memory

    def finish(self) -> None:
        """Writes the rest, names the files by their number, and lists them."""
        self._write()
        for path in self._directory.glob("model*.safetensors*"):  # of an earlier export
            if not path.name.startswith("model-part"):
                path.unlink()
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            self._path(number).replace(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        try:
            save_file(self._waiting, self._path(len(self._written)), metadata={"format": "pt"})
        except SafetensorError as error:  # its only report of a full disk
            raise OSError(str(error)) from error
        self._bytes += sum(tensor.nbytes for tensor in self._waiting.values())
        self._written.append(list(self._waiting))
        self._waiting = {}

    def _path(self, number: int) -> Path:
        return self._directory / f"model-part-{number}.safetensors"


def _to(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
