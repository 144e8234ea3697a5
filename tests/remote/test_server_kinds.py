"""A server is its file and one line: one that is planted is in settings, docs, refusals and commands without another edit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PLANTED = """
import json, sys, types

sys.path.insert(0, {docs!r})
from headrace.engine.kinds import SERVERS
from headrace.engine.remote.server_kind import Control, Described, ServerKind, Startable, server_kind

planted = types.ModuleType("parrots")
planted.SERVER = ServerKind(
    words="Parrot",
    about="a server that repeats",
    dialect=lambda one: ("a dialect", one.check_every),
    starts=Startable(
        modules=[["parrots_not_here", "parrots"]],
        install="pip install parrots",
        command=lambda config, found, place: (["parrot", str(place.port)], {{}}),
        settings=("kv_gib",),
    ),
    fetches=True,
)
planted.JOINED = ServerKind(words="Owl", about="a server at night", dialect=lambda one: None, untried="the day")
sys.modules["parrots"] = planted
SERVERS["parrot"], SERVERS["owl"] = "parrots:SERVER", "parrots:JOINED"

from headrace.run.config import load_config
from headrace.core.errors import ConfigError
from headrace.run.wording import untried
from headrace.engine.remote.server_kind import startable_servers
from headrace.engine.servers.installed import require
import make_settings

def refused(run):
    try:
        return load_config(run)
    except ConfigError as error:
        return str(error)

def run(**engine):
    task = {{"kind": "reasoning_gym", "name": "basic_arithmetic"}}
    more = engine.pop("more", {{}})
    return {{"model": {{"path": {model!r}}}, "task": task, "engine": engine, **more}}

config = refused(run(kind="parrot", kv_gib=1.0))
try:
    missing = require("parrot", "")
except ConfigError as error:
    missing = str(error)
delta = {{"weight_sync": {{"encoding": "delta"}}}}
print(json.dumps({{
    "docs": make_settings.reference(),
    "reach": config.ends.reach,
    "unknown": refused(run(kind="crow")),
    "native": refused(run(server_args=["x"])),
    "swap": refused(run(kind="parrot", swap="recompute")),
    "own": refused(run(kind="parrot", prefill_chunk=7)),
    "joined": refused(run(kind="owl")),
    "delta": [refused(run(kind=kind, urls=["http://a:1"], more=delta)) for kind in ("parrot", "owl")],
    "untried": [
        untried(known.engine, known.orchestration, known.way)
        for kind in ("parrot", "owl")
        for known in [refused(run(kind=kind, urls=["http://a:1"]))]
    ],
    "dialect": server_kind("parrot").dialect(Described({model!r}, 7))[1],
    "starts": list(startable_servers()),
    "missing": missing,
}}))
"""


def test_a_planted_server_is_known_everywhere(tiny_llama: Path) -> None:
    script = PLANTED.format(docs=str(ROOT / "docs"), model=str(tiny_llama))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "parrot: a server that repeats; owl: a server at night." in found["docs"]
    assert found["reach"] == "fetching server" and found["dialect"] == 7
    assert "there are: native, " in found["unknown"] and ", parrot, owl" in found["unknown"]
    assert '"parrot" or "owl"' in found["native"]
    assert 'engine.kind = "parrot" caches are always recomputed' in found["swap"]
    assert "Parrot has no setting like it" in found["own"]
    assert "a run starts no Owl server" in found["joined"]
    fetching, reading = found["delta"]
    assert 'set weight_sync.kind = "tcp", or remove it' in fetching and "set weight_sync.kind" not in reading
    assert found["untried"] == [[], ['engine.kind = "owl" never met the day']]
    assert {"parrot", "owl"} & set(found["starts"]) == {"parrot"}
    assert "no parrots_not_here: install it (pip install parrots)" in found["missing"]
