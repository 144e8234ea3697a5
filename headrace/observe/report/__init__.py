"""`report.html`: one self-contained file, made from a run's directory at any time, finished or not."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.errors import ConfigError, HeadraceError
from headrace.observe.looks import Pieces
from headrace.observe.records import METRICS, REPORT


def write_report(run_dir: Path, pieces: Pieces | None = None) -> Path:
    """Writes `run_dir/report.html` and returns its path. Needs no network to make or to read. `pieces`: tokens as text.

    Raises `ConfigError` when `run_dir` holds no run, `HeadraceError` when its files cannot be read or the report written.
    """
    from headrace.observe.report.data import load
    from headrace.observe.report.page import page

    if not (run_dir / METRICS).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {METRICS}")
    html = page(load(run_dir, pieces))
    path, part = run_dir / REPORT, run_dir / f"{REPORT}.part"
    try:
        part.write_text(html, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise HeadraceError(f"could not write {path}: {error.strerror}") from error
    return path
