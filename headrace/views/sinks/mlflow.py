"""Scalars for MLflow: to the tracking server that `MLFLOW_TRACKING_URI` names, else to files in the directory of the run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.facts.facts import RunStarted
from headrace.facts.recorder import Sink
from headrace.views.sinks.queued import QueuedSink, described, hushed, id_on_dashboards

RUN_ID = "headrace.run"
"""The tag with the id of a run, by which a resumed one is found again."""


def open_sink(run_dir: Path, resume_at_step: int | None, say: Callable[[str], None]) -> Sink:
    return QueuedSink("mlflow", MlflowRun(run_dir), say)


class MlflowRun:
    """A run of the experiment `MLFLOW_EXPERIMENT_NAME`, by default `headrace`. A resumed run continues it."""

    def __init__(self, run_dir: Path) -> None:
        self._place = run_dir.resolve()
        self._client: Any = None
        self._run = ""

    def start(self, fact: RunStarted) -> None:
        if self._run:
            return
        with hushed():
            self._client = self._open()
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "headrace")
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            tags = {RUN_ID: id_on_dashboards(self._place), "mlflow.runName": fact.name}
            earlier = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{tags[RUN_ID]}'")
            run = earlier[0] if earlier else self._client.create_run(experiment, tags=tags)
            self._client.update_run(run.info.run_id, status="RUNNING")
            if not earlier:
                for key, value in described(fact).items():
                    self._client.log_param(run.info.run_id, key, value)
            self._run = run.info.run_id

    def _open(self) -> Any:
        """Returns a client. Files need MLflow's consent, which is given to this process."""
        from mlflow.tracking import MlflowClient

        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (self._place / "mlruns").as_uri()
        return MlflowClient(tracking_uri=address)

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        if self._run:
            moment, named = int(1000 * at), plainly_named(values)
            self._client.log_batch(self._run, [Metric(name, value, moment, step) for name, value in named.items()])

    def close(self) -> None:
        if self._run:
            self._client.set_terminated(self._run)
            self._run = ""


_REFUSED = re.compile(r"[^/\w.\- :]")
LONGEST = 250
"""Characters of a name that MLflow takes."""


def plainly_named(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values by names that MLflow takes, which refuses all numbers of a call for one name: other characters than letters, digits and
    `_-.: /` become underscores. A name that another one has then gets one more."""
    found: dict[str, float] = {}
    for name, value in sorted(values.items(), key=lambda item: item[0] != _plain(item[0])):
        plain = _plain(name)
        while plain in found:
            plain += "_"
        found[plain] = value
    return found


def _plain(name: str) -> str:
    parts = _REFUSED.sub("_", name)[: LONGEST - 10].split("/")
    return "/".join(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)
