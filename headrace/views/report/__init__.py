"""`report.html`: one self-contained file, made from a run's directory at any time, finished or not.

Read `data.py` (the data), `page.py` (the page), `plots.py` and `curves.py` (charts over steps) with `frame.py` (their common parts),
`gantt.py`, `lag_charts.py`, `sieves.py`, `files_page.py` (the preflight), `rollouts.py` with `episode_graph.py`, `side_by_side.py` with `apart.py` (several runs compared),
and the elements of all charts: `axes.py` (scales and ticks), `svg.py` (marks), `tables.py`.
"""

from __future__ import annotations

from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.durable.atomic_files import replace_file
from headrace.facts.records import METRICS, REPORT
from headrace.facts.rollout_view import Pieces


def write_report(run_dir: Path, pieces: Pieces | None = None) -> Path:
    """Writes `run_dir/report.html` and returns its path. Neither writing nor reading it needs a network. `pieces`: returns
    tokens as text.

    Raises `ConfigError` if `run_dir` holds no run, and `HeadraceError` if its files cannot be read or the report cannot be written.
    """
    from headrace.views.report.data import load
    from headrace.views.report.page import page

    if not (run_dir / METRICS).is_file():
        raise ConfigError(f"{run_dir} is not a run directory: it has no {METRICS}")
    html = page(load(run_dir, pieces))
    path = run_dir / REPORT
    replace_file(path, html.encode(), flush=False)
    return path
