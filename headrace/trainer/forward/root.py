"""Runs a computation within the call of the module whose weights it reads.

Hugging Face's own forward makes all logits [T, V], so ours calls the inner model and reads the head's matrix itself. A library
that shards weights over ranks gathers them by hooks on a module's call, the root's first (torch's FSDP2 refuses an inner
module that is called before its root). So our computation runs in place of the root's `forward`, and its last part in place of
the head's: hooks on both see an ordinary call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


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
