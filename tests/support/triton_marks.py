"""Marks of tests that need Triton, or its interpreter, which computes kernels on a CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import numpy as np
import pytest

HERE = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not HERE, reason="triton is not installed: torch brings it along on CUDA, and `pip install triton` here"
)


def numbers(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version."""
    first, second, *_ = version.split(".")
    return int(first), int(second)


needs_interpreter = pytest.mark.skipif(
    not HERE or (numbers(importlib.metadata.version("triton")) < (3, 7) and numbers(np.__version__) >= (2, 4)),
    reason="needs triton, from 3.7 on beside numpy 2.4: the interpreter of 3.6 makes an index of an array, which that numpy refuses",
)
