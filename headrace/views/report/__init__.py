"""`report.html`: one self-contained file, made from a run's directory at any time, finished or not.

Read `data.py` (the data), `page.py` (the page), `overview.py` (its first screen, also the board's), `plots.py` (charts over steps and lags),
`distributions.py`, `gantt.py`, `rollouts.py` (rollouts and their turns, and samples of evaluation sets), `side_by_side.py` (several runs compared),
and the elements of all charts: `svg.py`.
"""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.durable.atomic_files import replace_file
from headrace.facts.records import METRICS, REPORT
from headrace.facts.rollout_view import Pieces
from headrace.processes.health.live_status import Status


def write_report(run_dir: Path, pieces: Pieces | None = None, status: Status | None = None) -> Path:
    """Writes `run_dir/report.html` and returns its path. Neither writing nor reading it needs a network. `pieces`: returns
    tokens as text. `status`: whether the run is alive; None if nobody has looked.

    Raises `ConfigError` if `run_dir` holds no run, and `HeadraceError` if its files cannot be read or the report cannot be written.
    """
    if not (run_dir / METRICS).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {METRICS}")
    path = run_dir / REPORT
    replace_file(path, page_of(run_dir, pieces, status).encode(), flush=False)
    return path


def page_of(run_dir: Path, pieces: Pieces | None = None, status: Status | None = None) -> str:
    """Returns the page that `write_report` writes."""
    from headrace.facts.health import Standing
    from headrace.views.report.data import load
    from headrace.views.report.page import page

    standing = Standing(status.words, status.mark) if status else None
    return page(load(run_dir, pieces, standing))
