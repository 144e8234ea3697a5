"""Checks of the shapes in signatures, while tests run: `Float[Tensor, " M"]` in `algo/` and `trainer/step/` is what it says.

The package names shapes in annotations, which are strings, and imports jaxtyping for mypy alone. Here they are evaluated, and each function
that has one is replaced in place by one that checks: whoever imported it before calls the checked one too. A call in which one name
stands for two sizes raises `jaxtyping.TypeCheckError`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
import pytest
from beartype import beartype
from torch import Tensor

ROOMS = ("headrace.algo", "headrace.trainer.step")
SHAPES = ("Bool", "Float", "Int", "Shaped", "UInt8")


@pytest.fixture(autouse=True, scope="module")
def shapes_are_checked() -> Iterator[None]:
    """For the tests of a folder whose conftest.py imports it."""
    functions = [function for room in ROOMS for module in modules_of(room) for function in functions_of(module)]
    assert len(functions) > 60, f"only {len(functions)} functions state shapes"
    with checked(functions):
        yield


def modules_of(room: str) -> Iterator[types.ModuleType]:
    package = importlib.import_module(room)
    for found in pkgutil.walk_packages(package.__path__, f"{room}."):
        yield importlib.import_module(found.name)


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """The functions and methods of a module that state a shape, and `__new__` of its named tuples."""
    owners = [
        module,
        *(one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__),
    ]
    for owner in owners:
        for value in vars(owner).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            own = isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")
            here = own and (owner is not module or function.__module__ == module.__name__)
            if here and not function.__code__.co_freevars and any(map(_is_shape, _written(function).values())):
                yield function


@contextmanager
def checked(functions: list[types.FunctionType]) -> Iterator[None]:
    """Replaces the code of functions by a call of their checked copies, and puts it back."""
    before = [(function, function.__code__, function.__defaults__, function.__kwdefaults__) for function in functions]
    for function in functions:
        copy = _checked_copy(function)
        function.__code__, function.__defaults__ = _call_of_copy.__code__, None
        function.__kwdefaults__ = {"_copy": copy}
    try:
        yield
    finally:
        for function, code, defaults, named in before:
            function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, named


def _call_of_copy(*args: Any, _copy: Callable[..., Any], **named: Any) -> Any:
    return _copy(*args, **named)


@functools.cache
def _checked_copy(function: types.FunctionType) -> Callable[..., Any]:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__module__,
    )
    # a named tuple's `__new__` has a namespace without builtins
    known = {
        **function.__globals__,
        "__builtins__": __builtins__,
        **{name: getattr(jaxtyping, name) for name in SHAPES},
        "Tensor": Tensor,
    }
    written = _written(function)
    copy.__annotations__ = {name: eval(text, known) for name, text in written.items() if _is_shape(text)}
    return jaxtyping.jaxtyped(copy, typechecker=beartype)


def _written(function: types.FunctionType) -> dict[str, str]:
    """The annotations as they are written; those of a named tuple are wrapped."""
    return {name: getattr(one, "__forward_arg__", str(one)) for name, one in function.__annotations__.items()}


def _is_shape(text: str) -> bool:
    return any(f"{name}[" in text for name in SHAPES) and not text.startswith("Iterator")
