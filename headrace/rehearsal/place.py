"""Whether a run can write where it is told to; nothing stays behind."""

from __future__ import annotations

import tempfile
from pathlib import Path


def place_problem(run_dir: Path, out: str) -> str:
    """Empty, or why the directory of the run could not be made or written."""
    above = run_dir.absolute()
    while not above.exists() and not above.is_symlink():
        above = above.parent
    if not above.is_dir():
        what = "leads nowhere" if above.is_symlink() else "is a file"
        return f"the run cannot lie in {run_dir}: {above} {what}; set out (now {out}) or name to another place"
    try:
        with tempfile.TemporaryFile(dir=above):
            return ""
    except OSError as error:
        said = error.strerror or type(error).__name__
        return f"the run cannot lie in {run_dir}: nothing can be written in {above} ({said}); set out (now {out}) to a place where you may write"
