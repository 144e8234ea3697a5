"""LoRA in the trainer: peft's adapters inside a frozen model. One adapter is active at a time.

The frozen matrices have the dtype of the computation (half the memory under bfloat16, and nothing for autocast to lower at every
use), or 8 or 4 bits (`adapters.py`). Embeddings, norms, adapted experts and the adapters themselves stay float32.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.core.errors import ConfigError, IdentityError
from headrace.models.lora import LoraConfig
from headrace.settings.extras import absent
from headrace.trainer.model.outline import hollow, is_outline

# --- A frozen base in 8 or 4 bits (QLoRA
# Dettmers et al., arXiv:2305.14314), in blocks that share a scale.
#
# Only weights are quantised: a layer's matrix is expanded where it is used, once in the forward and once in the backward pass, and the
# result is never kept. The expanded matrices are the model that adapters are trained on, and that the engine is given.
#
# This replaces bitsandbytes (0.50): on a CPU its NF4 mixes up the scales of rows whose length is no multiple of a block, and it compiles its
# kernels again for every shape.


Kind = Literal["int8", "nf4"]

BLOCK = 64
"""Number of weights that share a float32 scale, the largest magnitude among them: 0.06 bytes per weight."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to [-1, 1] with a zero among them (appendix E of the paper)."""

LEVELS = {"nf4": torch.tensor(NF4), "int8": torch.arange(-127, 128) / 127}


class QuantisedLinear(torch.nn.Linear):
    """A linear layer whose `weight` is packed bytes; `full` expands them."""

    def __init__(self, linear: torch.nn.Linear, kind: Kind, dtype: torch.dtype) -> None:
        """`dtype`: the dtype of the computation."""
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self._dtype = dtype
        packed, scale = pack(linear.weight.detach(), kind)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self._scale, self._table = scale, table_of(kind).to(packed.device)

    def full(self) -> Tensor:
        """[out, in] float32"""
        values = torch.nn.functional.embedding(self.weight.int(), self._table).view(-1, BLOCK) * self._scale
        return values.view(-1)[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        out = _Product.apply(x.to(self._dtype), self)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def pack(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Returns (bytes, scales [blocks, 1] float32): the nearest level of every weight; nf4 has two per byte, the first in the high half."""
    levels = LEVELS[kind].to(weight.device)
    padded = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % BLOCK))
    blocks = padded.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    middles = (levels[1:] + levels[:-1]) / 2
    found = torch.bucketize(blocks / scale.clamp(min=torch.finfo(torch.float32).tiny), middles).view(-1)
    if kind == "nf4":
        found = found[::2] * 16 + found[1::2]
    return found.to(torch.uint8), scale


def table_of(kind: Kind) -> Tensor:
    """[256, weights per byte]: the values of a byte before they are scaled."""
    levels = LEVELS[kind]
    if kind == "nf4":
        return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    return torch.cat([levels, levels.new_zeros(1)])[:, None]


class _Product(torch.autograd.Function):
    """x -> x Wᵀ. Only the packed W is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.full().to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.full().to(grad.dtype), None


def quantise(model: Any, kind: Kind, dtype: torch.dtype) -> dict[str, QuantisedLinear]:
    """Replaces every linear layer except the output head, in place. Returns the new layers by the names of their weights."""
    head = model.get_output_embeddings()
    quantised: dict[str, QuantisedLinear] = {}
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module is not head
    ]
    for name, linear in linears:
        parent, _, last = name.rpartition(".")
        quantised[f"{name}.weight"] = layer = QuantisedLinear(linear, kind, dtype)
        setattr(model.get_submodule(parent), last, layer)
    return quantised


# --- adapters ------------------------------------------------------------


ADAPTER_MODEL = "adapter_model.safetensors"
"""The file's name in peft."""


class Adapters:
    """The adapters of a model, added in place: every forward pass of the model goes through the active one."""

    def __init__(
        self,
        model: Any,
        configs: Mapping[str, LoraConfig],
        dtype: torch.dtype,
        source: Path,
        *,
        whole: Callable[[Tensor], Tensor] = Tensor.detach,
        of_leader: Callable[[Callable[[], str]], str] = lambda compute: compute(),
    ) -> None:
        """`dtype` is that of the computation; `source` the directory of the base model, which is written into the adapter's config;
        `whole` gives all of a base weight, `of_leader` what one rank computes for all (`Placement`). The adapters themselves are small: every rank holds
        them whole. An outline (`outline.py`) has to be sealed when it has its values.

        Raises ConfigError for targets that the model does not have, and ranks above its dimensions.
        """
        self._whole = whole
        _peft()
        modules, stacks = adaptable(model), expert_parameters(model)
        for config in configs.values():
            check(type(model).__name__, modules, stacks, config)
        if is_outline(model):
            self.base_mark = of_leader(lambda: fingerprint(model.named_parameters(), partial(model.files.whole, model)))
        else:
            self.base_mark = fingerprint(model.named_parameters(), whole)
        """Fingerprint of the base model as it was read: it does not depend on the dtype of the computation."""
        kinds = {config.quantise for config in configs.values()}
        assert len(kinds) <= 1, "one base for all adapters"
        kind = kinds.pop() if kinds else ""
        self._quantised = quantise(model, kind, dtype) if kind else {}
        self._modules, self._stacks = adaptable(model), stacks
        self._owners = _owners(model)
        _freeze(model, dtype, [] if any(config.experts for config in configs.values()) else stacks)
        hollow(model)  # peft puts adapters where the weights are
        self._model, self._source = model, source
        self._active: str | None = None
        self._peft: Any = None
        self._inner: dict[str, str] = {}
        self._added = itertools.count()
        for name, config in configs.items():
            self.add(name, config)
        self._frozen_mark = ""
        if not is_outline(model):
            self.seal()
        for name in [*configs][:1]:
            self.activate(name)

    @property
    def _base(self) -> dict[str, Tensor]:
        """The frozen parameters by the model's own names. A placement may have replaced them by others."""
        return {name: getattr(module, attribute) for name, (module, attribute) in self._owners.items()}

    def add(self, name: str, config: LoraConfig) -> None:
        """Adds an adapter. The base is frozen already, so it may not be quantised otherwise or have adapted experts where no adapter had
        them at the start. Raises ConfigError for targets and ranks that the model does not have."""
        check(type(self._model).__name__, self._modules, self._stacks, config)
        # peft takes an adapter's name out of tensors' names wherever it occurs: one called `model` would take that out too
        inner = self._inner[name] = f"headrace-{next(self._added)}"
        settings = _settings(self._modules, self._stacks, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.init_seed)
            if self._peft is None:
                self._peft = _peft().get_peft_model(self._model, settings, adapter_name=inner)
            else:
                self._peft.add_adapter(inner, settings)
        settings.base_model_name_or_path = str(self._source)
        self._layers = _layers(self._model, self._base)
        self._active = None

    def remove(self, name: str) -> None:
        """Removes an adapter with its tensors."""
        self._peft.delete_adapter(self._inner.pop(name))
        self._active = None

    def activate(self, name: str) -> None:
        """Switches forward passes to this adapter. Only its parameters require gradients then."""
        if name != self._active:
            self._peft.base_model.set_adapter(self._inner[name])
            self._active = name

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """The trained parameters in canonical order, by the names under which peft saves them. Activates the adapter."""
        self.activate(name)
        infix = f".{self._inner[name]}"
        return {key.replace(infix, ""): p for key, p in self._peft.named_parameters() if p.requires_grad}

    def state(self, name: str) -> dict[str, Tensor]:
        """The tensors that peft saves of an adapter, in float32. They share the parameters' memory."""
        saved = _peft().get_peft_model_state_dict(
            self._peft, adapter_name=self._inner[name], save_embedding_layers=False
        )
        return {key: tensor.detach() for key, tensor in saved.items()}

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the frozen weights by the model's own names, with the values used in the computation."""
        for name, parameter in self._base.items():
            packed = self._quantised.get(name)
            yield name, packed.full() if packed else self._whole(parameter)

    @torch.no_grad()
    def merged(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's weights with the adapter merged into them, added in float32."""
        for key, weight in self.base():
            layers = self._layers.get(key)
            yield key, weight if layers is None else _add(weight, layers, self._inner[name])

    def seal(self) -> None:
        """Takes the mark of the frozen weights, which `check_base` compares. Does nothing where it was taken."""
        self._frozen_mark = self._frozen_mark or fingerprint(self._base.items(), self._whole)

    def check_base(self) -> None:
        """Raises IdentityError if the frozen weights have changed since the start: an adapter belongs to its base."""
        if (found := fingerprint(self._base.items(), self._whole)) != self._frozen_mark:
            raise IdentityError(
                f"the frozen base weights changed while adapters were trained: their fingerprint was {self._frozen_mark} and is "
                f"now {found}. Nothing trained since then can be trusted; resume from an earlier checkpoint, and please "
                "report this"
            )

    def export(self, name: str, directory: Path) -> None:
        """Writes a directory that `peft.PeftModel.from_pretrained(model, directory)` loads, in float32."""
        directory.mkdir(exist_ok=True)  # not its parents: a run that the user deleted must not reappear
        tensors = {key: tensor.cpu().contiguous() for key, tensor in self.state(name).items()}
        save_file(tensors, directory / ADAPTER_MODEL, metadata={"format": "pt"})
        self.save_config(name, directory)

    def save_config(self, name: str, directory: Path) -> None:
        """Writes `adapter_config.json`, which peft reads with the tensors."""
        settings = self._peft.peft_config[self._inner[name]]
        before, settings.inference_mode = (
            settings.inference_mode,
            True,
        )  # as peft does: an adapter is loaded to be served
        settings.save_pretrained(directory)
        settings.inference_mode = before


def fingerprint(parameters: Iterable[tuple[str, Tensor]], whole: Callable[[Tensor], Tensor]) -> str:
    """xxh3-128 over names and bytes: about 10 GB a second."""
    mark = xxhash.xxh3_128()
    for name, parameter in parameters:
        mark.update(name.encode())
        mark.update(whole(parameter).contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return mark.hexdigest()


# --- making them -------------------------------------------------------------------------------------------------------


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(absent("lora.rank", "peft", "peft", error, "lora") + ", or set lora.rank = 0") from None
    return peft


def _settings(modules: Mapping[str, Any], stacks: Sequence[str], config: LoraConfig) -> Any:
    # Not peft's own "all-linear": in models with experts it adapts the router too.
    targets = _ends(modules) if config.targets == "all-linear" else list(config.targets)
    return _peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        target_parameters=list(stacks) if config.experts else None,
        use_rslora=config.rslora,
        use_dora=config.dora,
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        lora_dropout=0.0,  # under dropout the ratio to the sampler's log-probs means nothing
    )


def _owners(model: Any) -> dict[str, tuple[Any, str]]:
    """The module and the attribute of every parameter, by its name; those of its first owner where modules share one."""
    found: dict[int, tuple[Any, str]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), (module, attribute))
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def _freeze(model: Any, dtype: torch.dtype, stacks: Sequence[str]) -> None:
    """Freezes all weights in place. `stacks`: the experts that are not adapted, which are lowered; adapted ones stay float32, because peft
    adds a product to them that bfloat16 would round away."""
    head = model.get_output_embeddings()
    linears = (
        name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head
    )
    # autocast does not reach transformers' grouped products of experts
    low_stacks = stacks if model.config._experts_implementation == "eager" else []
    ends = (*(f"{name}.weight" for name in linears), *low_stacks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith(ends) and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


# --- what can be adapted -----------------------------------------------------------------------------------------------

STACKED = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that peft takes for the experts' matrices in models with experts."""


def adaptable(model: Any) -> dict[str, Any]:
    """Returns the linear layers that LoRA can adapt, by name: all but the output head, gates of a single output, routers that return more than a product, and the
    `out_proj` of Mamba's mixers, whose fused kernel reads the weight past the adapter (peft refuses it too)."""
    head, foreign = model.get_output_embeddings(), STACKED if expert_parameters(model) else set()
    past = {id(module.out_proj) for module in model.modules() if {"A_log", "D"} <= module._parameters.keys()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and not (type(module).__module__.startswith("transformers.models.") and "forward" in vars(type(module)))
        and module.out_features > 1
        and module is not head
        and id(module) not in past
        and name.rsplit(".", 1)[-1] not in foreign
    }


def expert_parameters(model: Any) -> list[str]:
    """Returns the ends of the names of stacked experts [E, out, in], such as `mlp.experts.down_proj`."""
    stacks = (name for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name)
    return sorted({".".join(name.split(".")[-3:]) for name in stacks})


def check(model: str, modules: Mapping[str, Any], stacks: Sequence[str], config: LoraConfig) -> None:
    """Raises ConfigError for settings that the model cannot serve. `model` is its name in messages."""
    if config.experts and not stacks:
        raise ConfigError(f"lora.experts = true, but {model} has no stacked experts to adapt; set it to false")
    if not modules and not config.experts:
        raise ConfigError(f"{model} has no linear layers that LoRA could adapt; set lora.rank = 0 to train all weights")
    chosen = _chosen(model, modules, stacks, config)
    for name, module in chosen.items():
        rank = config.rank_pattern.get(_key(config.rank_pattern, name), config.rank)
        if rank > (most := min(module.in_features, module.out_features)):
            raise ConfigError(
                f"lora.rank = {rank} is above the {most} dimensions of {name}; lower it, or give the module its own "
                "rank in lora.rank_pattern"
            )
    for setting in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, setting):
            if any(_key([key], name) == key for name in [*chosen, *(stacks if config.experts else ())]):
                continue
            if any(_key([key], name) == key for name in [*modules, *stacks]):
                raise ConfigError(
                    f"lora.{setting} names {key}, which is not adapted; add it to lora.targets (experts: lora.experts = true), or "
                    f"remove it from lora.{setting} (with several adapters, set it only for those that have the module)"
                )
            raise ConfigError(f"lora.{setting} names {key}, which {_nothing(model, modules, key)}")


def _chosen(model: str, modules: Mapping[str, Any], stacks: Sequence[str], config: LoraConfig) -> dict[str, Any]:
    if config.targets == "all-linear":
        return dict(modules)
    chosen: dict[str, Any] = {}
    for target in config.targets:
        found = {name: module for name, module in modules.items() if name == target or name.endswith(f".{target}")}
        if not found:
            experts = "; for its experts there is lora.experts = true" if stacks and target in STACKED else ""
            raise ConfigError(f"lora.targets names {target}, which {_nothing(model, modules, target)}{experts}")
        chosen |= found
    return chosen


def _nothing(model: str, modules: Mapping[str, Any], target: str) -> str:
    ends = _ends(modules)
    near = difflib.get_close_matches(target.rsplit(".", 1)[-1], ends, n=3, cutoff=0.3) or ends
    return f"is not a linear layer of {model} (the output head is never adapted); there are {', '.join(near)}"


def _ends(modules: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in modules})


def _key(patterns: Iterable[str], name: str) -> str:
    """The pattern that peft applies to a module, or the name itself if there is none."""
    from peft.utils.other import get_pattern_key

    return get_pattern_key(list(patterns), name)


# --- merging -----------------------------------------------------------------------------------------------------------


def _layers(model: Any, base: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns peft's layers by the name of the base parameter that each wraps."""
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    names = {id(parameter): name for name, parameter in base.items()}
    layers = {}
    for module in model.modules():
        if isinstance(module, LoraLayer):
            wrapped = module.get_param() if isinstance(module, ParamWrapper) else module.get_base_layer().weight
            layers[names[id(wrapped)]] = module
    return layers


def _add(weight: Tensor, layer: Any, name: str) -> Tensor:
    if name not in layer.lora_A:
        return weight
    whole = weight.float() + layer.get_delta_weight(name).float()
    if layer.use_dora[
        name
    ]:  # DoRA (arXiv 2402.09353), equation 5: the length of every row of W + BA is a parameter of its own
        magnitude = layer.lora_magnitude_vector[name].weight.float()
        whole *= (magnitude / whole.norm(dim=1))[:, None]
    return whole
