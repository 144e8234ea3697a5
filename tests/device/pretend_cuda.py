"""A CUDA device that computes on the CPU: tensors say that they lie on `cuda:0`, and a call that mixes devices fails as on a GPU.

Unlike torch's fake tensors it has real values, so that whole optimizer steps and decoding run, with all that reads numbers back, and can
be compared with the CPU. It says nothing about the kernels, the speed, the streams or the memory of a GPU, and calls of torch are checked
as Python makes them: what a C++ function does inside is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

DEVICE = torch.device("cuda", 0)
FREE, TOTAL = 6 << 30, 8 << 30
"""Bytes of the device: free now, and all."""
T = torch.Tensor
MOVES = {T.to, T.cuda, T.cpu, T.copy_, T.type_as}
INDEXED = {T.__getitem__, T.__setitem__}
"""Their indices may lie on the CPU."""
READS = {T.device.__get__: DEVICE, T.is_cuda.__get__: True, T.is_cpu.__get__: False, T.get_device: 0}
HOST_ONLY = {T.numpy, T.__array__}


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on the device."""


class PretendedCuda(TorchFunctionMode):
    """While it is entered, `cuda` is a device."""

    def __init__(self) -> None:
        super().__init__()
        self.backward = 0
        self.calls = 0
        self.crossings: list[str] = []
        """Copies from the host (`up`) and to it (`down`), in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # the memory of a machine without a GPU cannot be pinned
        if func in READS and isinstance(args[0], OnDevice):
            return READS[func]
        if func in HOST_ONLY and isinstance(args[0], OnDevice):
            raise TypeError(f"a tensor on {DEVICE} has no {func.__name__}: copy it to the CPU first")
        if func is torch.autograd.backward or func is T.backward:
            self.backward += 1  # gradients that C++ makes carry no mark
            try:
                return func(*args, **kwargs)
            finally:
                self.backward -= 1
        if func in (T.to, T.cuda, T.cpu):
            found = _moved(func, args, kwargs)
            self._crossed(args[0], found)
            return found
        if func is T.copy_:
            self._crossed(args[1], args[0])
        if func is T.__deepcopy__ and isinstance(args[0], OnDevice):
            return _copied(*args)
        if func is torch._has_compatible_shallow_copy_type:
            return True
        if func == T.data.__set__:
            return _set_data(*args)
        here = any(isinstance(leaf, OnDevice) for leaf in _leaves((args, kwargs)))
        if kwargs.get("device") is not None:
            here = _is_device(kwargs["device"])
            if here:
                kwargs["device"] = "cpu"
        if here and not self.backward:
            _refuse_mixtures(func, args, kwargs)
        self.calls += here
        if func is torch.histc and not args[0].is_floating_point():  # on CUDA it takes whole numbers
            args = (args[0].double(), *args[1:])
        if func is torch.mm and "out_dtype" in kwargs:  # CUDA alone has it
            args = [one.to(kwargs["out_dtype"]) for one in args]
            del kwargs["out_dtype"]
        found = func(*args, **kwargs)
        if isinstance(found, torch.Size):
            return found
        return _mapped(_marked if here else _unmarked, found)

    def _crossed(self, source: Any, target: Any) -> None:
        if isinstance(source, OnDevice) != isinstance(target, OnDevice):
            self.crossings.append("up" if isinstance(target, OnDevice) else "down")


def _leaves(tree: Any) -> Iterator[Any]:
    """What lies in lists, tuples and dicts. Torch's own `tree_leaves` took more than half of the time of these tests."""
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _leaves(one)
    elif isinstance(tree, dict):
        for one in tree.values():
            yield from _leaves(one)
    else:
        yield tree


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same with its tensors changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (list, tuple, dict)):
        return tree_map_only(torch.Tensor, change, tree)
    return tree


def _copied(tensor: Any, memo: Any) -> Any:
    if id(tensor) not in memo:
        memo[id(tensor)] = made = _marked(_unmarked(tensor.detach()).clone()).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            made._is_param = True
    return memo[id(tensor)]


def _set_data(tensor: Any, data: Any) -> None:
    """Modules move like this, so that a parameter stays the same object."""
    T.data.__set__(tensor, _unmarked(data))
    if isinstance(data, OnDevice) and not isinstance(tensor, OnDevice):
        is_param = isinstance(tensor, torch.nn.Parameter)
        tensor.__class__ = OnDevice
        tensor._is_param = is_param
    elif isinstance(tensor, OnDevice) and not isinstance(data, OnDevice):
        tensor.__class__ = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor


def _is_device(device: Any) -> bool:
    return isinstance(device, int) or torch.device(device).type == "cuda"


def _marked(tensor: Any) -> Any:
    return tensor if isinstance(tensor, OnDevice) else tensor.as_subclass(OnDevice)


def _unmarked(tensor: Any) -> Any:
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, OnDevice) else tensor


def _refuse_mixtures(func: Any, args: Any, kwargs: Any) -> None:
    if func is T.copy_:
        return
    checked = (args[0], *args[2:]) if func in INDEXED else args
    tensors = [leaf for leaf in _leaves((checked, kwargs)) if isinstance(leaf, torch.Tensor)]
    strangers = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and T.dim(tensor) > 0]
    if strangers and len(strangers) < len(tensors):
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}: a tensor of shape {tuple(strangers[0].shape)} is on the CPU, and others are on {DEVICE}"
        )


def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    copy = kwargs.pop("copy", False)
    here, dtype = isinstance(tensor, OnDevice), None
    if func is not T.to:
        wanted = func is T.cuda
    elif rest and isinstance(rest[0], torch.Tensor):
        wanted, dtype = isinstance(rest[0], OnDevice), rest[0].dtype
    else:
        device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
        wanted = here if device is None else _is_device(device)
    found = tensor if dtype in (None, tensor.dtype) else T.to(tensor, dtype)
    if found is tensor and (copy or wanted != here):
        found = tensor.clone()
    return _marked(found) if wanted else _unmarked(found)


class PretendedEvent:
    """Has happened when it is recorded: there is one stream, and it never runs ahead."""

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


class PretendedStream:
    """The only one: all that was asked of it has been done."""

    def synchronize(self) -> None: ...


def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    """A fixture's body: torch finds the device, an A100 by its capability, and needs not wait for it; autocast is the CPU's."""
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device_type, *args, **kwargs: autocast("cpu", *args, **kwargs))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (FREE, TOTAL))
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: PretendedStream())
    with PretendedCuda() as mode:
        yield mode
