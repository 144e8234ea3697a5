"""A place where workers run is its file and one line: one that is planted is in settings, docs, refusals and words without another edit, and
seats the workers of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PLANTED = """
import asyncio, json, sys
from pathlib import Path

sys.path.insert(0, {docs!r})
from headrace.processes import places
from headrace.processes.placed.placed import NodeShare
from headrace.processes.placed.placed import ClusterPlace, PlacedLauncher
from headrace.testing.fake_cluster import FakeCluster

clusters = []

class Flock(ClusterPlace):
    name = "flock"
    about = "Shepherd starts its engines on a flock"
    software = "Shepherd"
    needs = "redis", "Shepherd"  # any package that may be missing
    untried = "a wolf"

    def problems(self, settings):
        if settings.address == "10.0.0.5:7":
            yield "a wolf is there"

    def cluster(self, address):
        clusters.append(FakeCluster([NodeShare(4)]))
        clusters[-1].address, clusters[-1].software = address, self.software
        return clusters[-1]

places.PLACES["flock"] = Flock()

from headrace.commands.installed.cluster_check import examine_cluster
from headrace.core.errors import ConfigError
from headrace.facts.telemetry import Telemetry
from headrace.processes.joining import joined
from headrace.run.config import load_config
from headrace.run.fleets.core_shares import nothing_to_lend
from headrace.run.seats import check_seats, open_seats
from headrace.run.wording import placement, untried
from headrace.facts.waits import Waits
import make_settings

RUN = {{"model": {{"path": {model!r}}}, "task": {{"kind": "reasoning_gym", "name": "basic_arithmetic"}}}}

def load(**own):
    return load_config(RUN | {{"orchestration": {{"kind": "flock"}} | own}})

def refused(work):
    try:
        work()
    except ConfigError as error:
        return str(error)
    return ""

async def seats(config, **more):
    async with open_seats(config, Path({model!r}), None, Path("."), telemetry) as found:
        return [isinstance(found.engines, PlacedLauncher), found.trainer is None, str(found.engines.bundle)]

telemetry = Telemetry(list().append, lambda: 0.0, Waits(list().append, lambda: 0.0, 1e6, 2e6))
config = load(gpus=0)
found = {{
    "docs": make_settings.reference(),
    "unknown": refused(lambda: load(kind="herd")),
    "foreign": refused(lambda: load(kind="join", token_file="x", gpus=1)),
    "address": refused(lambda: load(address="10.0.0.5:7")),
    "cores": refused(lambda: load_config(RUN | {{"orchestration": {{"kind": "flock"}}, "engine": {{"cores": [0]}}}})),
    "wildcard": refused(lambda: load(listen="0.0.0.0:7")),
    "hosts": refused(lambda: load(scorers=1)),
    "weights": refused(lambda: load_config(RUN | {{"orchestration": {{"kind": "flock"}}, "weight_sync": {{"kind": "shared_memory"}}}})),
    "words": placement(config, "kernels"),
    "untried": untried(config.engine, config.orchestration, config.way),
    "local": refused(lambda: examine_cluster(load(kind="local"))),
    "seats": asyncio.run(seats(load_config(RUN | {{"orchestration": {{"kind": "flock"}}, "engine": {{"threads": 3}}}}))),
    "room": refused(lambda: asyncio.run(seats(load_config(RUN | {{"orchestration": {{"kind": "flock", "gpus": 1}}}})))),
}}
joined.is_installed = lambda module: False
found["missing"] = refused(lambda: check_seats(config.orchestration))
print(json.dumps(found))
"""


def test_a_planted_place_is_known_everywhere_and_seats_workers(tiny_llama: Path) -> None:
    script = PLANTED.format(docs=str(ROOT / "docs"), model=str(tiny_llama))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "flock: Shepherd starts its engines on a flock." in found["docs"] and '`"flock"`' in found["docs"]
    assert "'flock'" in found["unknown"]
    assert (
        'orchestration.gpus is for orchestration.kind = "ray"' in found["foreign"]
        and ' or "flock"; set that' in found["foreign"]
    )
    assert "a wolf is there" in found["address"]
    assert "remove it; Shepherd gives each engine.threads CPUs" in found["cores"]
    assert "and workers that Shepherd places are given one to connect to" in found["wildcard"]
    assert 'orchestration.kind = "flock" places engines and ranks' in found["hosts"]
    assert 'does not reach engines elsewhere (orchestration.kind = "join", "ray"' in found["weights"]
    assert ' or "flock");' in found["weights"]
    assert "an engine placed by Shepherd (local)" in found["words"]["engine"]
    assert ' or "flock")' in found["words"]["weights"]
    assert found["untried"] == ["workers elsewhere never met a wolf"]
    assert '"flock" or "join", or scorers' in found["local"]
    assert found["seats"] == [True, True, "3 CPUs"]
    assert "the Shepherd cluster (orchestration.address = local) can never place an engine" in found["room"]
    assert 'orchestration.kind = "flock" needs Shepherd, which is not installed' in found["missing"]
