"""A transport is its file and one line: one that is planted is in settings, docs, refusals, plan and words without another edit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PLANTED = """
import json, sys
from typing import ClassVar

sys.path.insert(0, {docs!r})
from headrace.weight_sync import transport
from headrace.weight_sync.kind import TransportKind

class Pigeon(TransportKind, frozen=True, tag="pigeon"):
    words: ClassVar = "a pigeon"
    about: ClassVar = "a bird carries them"
    reaches: ClassVar = frozenset({{"child", "joined"}})
    waits_for_all: ClassVar = True
    encrypts: ClassVar = False
    keeps: ClassVar = "one letter"
    untried: ClassVar = "a hawk"

    @staticmethod
    def copies(engines: int, delta: bool = False) -> int:
        return 100 * engines

transport.TRANSPORTS["pigeon"] = Pigeon

from headrace.run.config import load_config
from headrace.run.wording import placement, untried, weight_way
from headrace.core.errors import ConfigError
from headrace.weight_sync.config import WeightEnds, WeightSyncConfig, weight_sync_problems
from headrace.commands.plan.rates.rates import travel_of
import make_settings

def refused(text):
    try:
        load_config(text)
    except ConfigError as error:
        return str(error)
    return ""

run = {{"model": {{"path": {model!r}}}, "task": {{"kind": "reasoning_gym", "name": "basic_arithmetic"}}, "weight_sync": {{"kind": "pigeon"}}}}
config = load_config(run)
print(json.dumps({{
    "docs": make_settings.reference(),
    "unknown": refused(run | {{"weight_sync": {{"kind": "owl"}}}}),
    "words": placement(config, "kernels")["weights"],
    "fact": [weight_way(config.way, "full").transport, weight_way(config.way, "full").words],
    "far": list(weight_sync_problems(config.weight_sync, WeightEnds(bus=True))),
    "secret": list(weight_sync_problems(config.weight_sync, WeightEnds(joined="a", encrypted=True))),
    "delta": [refused(run | {{"weight_sync": {{"kind": kind, "encoding": "delta"}}}}) for kind in ("shared_memory", "tcp", "files", "pigeon")],
    "lent": refused(run | {{"orchestration": {{"lend": True}}}}),
    "slept": refused(run | {{"orchestration": {{"placement": "shared"}}}}),
    "untried": untried(config.engine, config.orchestration, config.way),
    "plan": travel_of(config.weight_sync, 1e-6, 1.0, 1.0, engines=3).fetch,
}}))
"""


def test_a_planted_transport_is_known_everywhere(tiny_llama: Path) -> None:
    script = PLANTED.format(docs=str(ROOT / "docs"), model=str(tiny_llama))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "pigeon: a bird carries them. auto: chosen by" in found["docs"] and '`"pigeon"`' in found["docs"]
    assert "'pigeon'" in found["unknown"]
    assert found["words"].startswith("a pigeon: one letter (") and found["fact"] == ["pigeon", "a pigeon"]
    assert [one for one in found["far"] if '"pigeon" does not reach rollout hosts' in one and '"tcp", "http" or' in one]
    assert ['weight_sync.kind = "pigeon" cannot be encrypted' in one for one in found["secret"]] == [True]
    shared, *sending, whole = found["delta"]
    assert "through memory that both ends share" in shared and sending == ["", ""]
    assert '"pigeon", which sends whole copies alone; remove it, or set weight_sync.kind = "tcp"' in whole
    assert 'weight_sync.kind = "pigeon" waits for all' in found["lent"]
    assert 'weight_sync.kind = "pigeon" does not keep them for it' in found["slept"]
    assert found["untried"] == ["weights by a pigeon never met a hawk"]
    assert found["plan"] == 2 * 3 * 100  # bfloat16, one parameter, one byte a second
