"""Checks that a run can write its directory. Leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path


def place_problem(run_dir: Path, out: str) -> str:
    """Returns an empty string, or why the directory of the run cannot be created or written."""
    above = run_dir.absolute()
    while not above.exists() and not above.is_symlink():
        above = above.parent
    if not above.is_dir():
        what = "is a broken link" if above.is_symlink() else "is a file"
        return f"the run cannot be written to {run_dir}: {above} {what}; set out (now {out}) or name to another place"
    try:
        with tempfile.TemporaryFile(dir=above):
            return ""
    except OSError as error:
        said = error.strerror or type(error).__name__
        return f"the run cannot be written to {run_dir}: {above} is not writable ({said}); set out (now {out}) to a directory that you may write to"
