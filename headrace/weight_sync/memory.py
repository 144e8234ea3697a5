"""Shared memory without a name. In a file of its own because the controller makes it, and the controller loads no torch."""

from __future__ import annotations

import os
import tempfile


def anonymous_memory() -> int:
    """A file descriptor for shared memory that both workers inherit. Its owner sizes it; it vanishes with its last user."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace-weights", 0)
    with tempfile.TemporaryFile() as file:  # already unlinked
        return os.dup(file.fileno())
