"""What Python and pytest keep of source files is made once, before workers of the suite collect tests.

In a fresh checkout nothing is kept: each worker would compile the package and rewrite the assertions of all test files by itself, 16 s of CPU time,
four times. The process that starts the workers does it meanwhile, on the core that the loading of libraries leaves idle.
"""

from __future__ import annotations

import compileall
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_once(config: pytest.Config, tests: Path) -> None:
    """Keeps what Python makes of the package and of `tests/support/`, and what pytest makes of test files, where that of an earlier suite is not there
    or not valid any more."""
    if sys.dont_write_bytecode:
        return
    for file in tests.rglob("test_*.py"):
        kept = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, kept) is None and rewrite.try_makedirs(kept.parent):
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)
    for folder in (tests / "support", tests.parent / "headrace"):
        compileall.compile_dir(folder, quiet=2)
