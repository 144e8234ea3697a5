from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.shapes import shapes_are_checked

__all__ = ["seeded", "shapes_are_checked"]


@pytest.fixture
def seeded() -> Iterator[None]:
    """The same random numbers in each test, and as many threads after it as before."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
