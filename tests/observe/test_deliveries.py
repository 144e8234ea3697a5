"""What a run says about the bytes that travel to its engines for a version: in its summary, its report, the live view and the status."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import RenderableType

from headrace.core.reports import LoadReport
from headrace.core.weights import WeightUpdate
from headrace.facts.facts import Fact, FleetSample, MemberSample, RunStarted, StepTrained, WeightsLive, WeightWay
from headrace.facts.recorder import Recorder
from headrace.facts.records import METRICS, read_metrics, summarise
from headrace.facts.run_state import RunState
from headrace.facts.run_totals import as_counter
from headrace.facts.texts import size
from headrace.facts.verdicts import travelled
from headrace.processes.health.live_status import Status
from headrace.views.report import write_report
from headrace.views.screen import live, status_view
from headrace.views.screen.console import Console
from headrace.views.screen.summary import summary
from support.fact_stream import FactStream

WHOLE, CHANGES = 269_000_000, 2_690_000
STEPS = 9
TCP = WeightWay("tcp", "delta")
FLEET = FleetSample(
    1.0,
    (MemberSample(name="1", state="serving", version=0, running=0, tokens=0, rate=0.0, absences=0),),
)

Received = Callable[[int], int]
"""Bytes that an engine reports, from those that were offered to it."""


def everything(offered: int) -> int:
    return offered


def nothing(offered: int) -> int:
    return 0


def facts_of(
    way: WeightWay | None, received: Received, *, old: str = "", engines: int = 0, kind: str = "full"
) -> list[Fact]:
    """A run of ten versions: the first two travel whole, and with `encoding = "delta"` the others as differences of a hundredth.

    `old`: the words of a run that recorded nothing else; `engines`: of a fleet that counted them."""
    delta = way.encoding == "delta" if way else "deltas" in old
    made: list[Fact] = []
    for fact in FactStream(steps=STEPS, troubles=False).facts():
        if isinstance(fact, RunStarted):
            fact = replace(fact, weights=way, where={"weights": old} if old else {})
        elif isinstance(fact, WeightsLive):
            where = {"base": "f", "delta": CHANGES} if delta and fact.update.version > 1 else {}
            bytes_each = received(where.get("delta", WHOLE))  # type: ignore[arg-type]
            load = replace(fact.load, received=bytes_each * max(1, engines), engines=engines)
            fact = replace(fact, update=replace(fact.update, where=where, kind=kind), load=load)
        made.append(fact)
    return made


def folded(facts: list[Fact]) -> RunState:
    state = RunState()
    for fact in facts:
        state.fold(summarise(fact) if isinstance(fact, StepTrained) else fact)  # type: ignore[arg-type]
    return state


def shown(what: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=60)
    console.print(what)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("way", "received", "engines", "value", "detail"),
    [
        (WeightWay("shared_memory", "full"), nothing, 0, "no bytes travel", "shared memory"),
        (WeightWay("cuda_ipc", "full"), nothing, 0, "no bytes travel", "CUDA IPC"),
        (WeightWay("tcp", "full"), everything, 0, "269 MB a version", "TCP, full"),
        (WeightWay("broadcast", "full"), everything, 2, "538 MB a version to 2 engines", "broadcast, full"),
        (TCP, everything, 0, "56 MB a version", "TCP, delta: 21 % of 269 MB (2 of 10 whole)"),
        (TCP, everything, 3, "168 MB a version to 3 engines", "TCP, delta: 21 % of 269 MB each (2 of 10 whole)"),
        (WeightWay("files", "full"), nothing, 0, "269 MB a version written", "files, full"),
        (
            WeightWay("files", "delta"),
            lambda offered: WHOLE,  # an engine reads the full copy too, if it has missed a version
            0,
            "56 MB a version written",
            "files, delta: 21 % of 269 MB (2 of 10 whole)",
        ),
        (
            WeightWay("http", "delta"),
            nothing,
            0,
            "56 MB a version",
            "HTTP, delta: 21 % of 269 MB (2 of 10 whole), as offered by the trainer",
        ),
        (WeightWay("http", "full"), nothing, 0, "269 MB a version", "HTTP, full: as offered by the trainer"),
    ],
)
def test_the_transport_the_form_the_bytes_and_their_share(
    way: WeightWay, received: Received, engines: int, value: str, detail: str
) -> None:
    assert travelled(folded(facts_of(way, received, engines=engines))) == (value, detail)


def test_what_engines_received_counts_and_not_what_was_offered_to_them() -> None:
    missed = folded(facts_of(TCP, lambda offered: WHOLE))
    assert travelled(missed) == ("269 MB a version", "TCP, delta: 100 % of 269 MB (2 of 10 whole)")


def test_an_adapter_is_not_mixed_with_its_base() -> None:
    state = folded(facts_of(WeightWay("tcp", "full"), everything, kind="adapter"))
    base = WeightUpdate(version=0, kind="full", fingerprint="b", nbytes=10**12, seconds=0.0)
    state.fold(WeightsLive(1.0, base, LoadReport(0, 0.0, 0.0, received=10**12)))
    assert travelled(state) == ("269 MB a version", "TCP, adapters")


def test_runs_that_recorded_their_way_in_words() -> None:
    facts = facts_of(None, everything, old='TCP: deltas, full every 50 (weight_sync.kind = "tcp")')
    assert travelled(folded(facts)) == ("56 MB a version", "TCP, delta: 21 % of 269 MB (2 of 10 whole)")
    shared = facts_of(None, nothing, old="shared memory: two packed buffers (trainer and engine are processes)")
    assert travelled(folded(shared)) == ("no bytes travel", "shared memory")
    assert travelled(folded(facts_of(None, everything))) is None, "nothing is known"


def test_the_sum_of_a_fleet_that_was_not_counted_is_not_taken_for_one_engine() -> None:
    old = facts_of(TCP, lambda offered: 3 * offered)
    told = travelled(folded([old[0], FLEET, *old[1:]]))
    assert told == ("56 MB a version", "TCP, delta: 21 % of 269 MB (2 of 10 whole), as offered by the trainer")


def test_metrics_from_before_these_fields_are_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for fact in facts_of(TCP, everything, old="TCP: deltas, full every 50 (x)"):
        recorder.record(fact)
    recorder.close()
    metrics = tmp_path / METRICS
    lines: list[dict[str, Any]] = [msgspec.json.decode(line) for line in metrics.read_bytes().splitlines()]
    for line in lines:
        line.pop("weights", None)
        line.get("load", {}).pop("engines", None)
    metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    state = folded(list(read_metrics(tmp_path)))
    assert state.started and state.started.weights is None and travelled(state) == travelled(recorder.state)


def test_the_sums_come_back_from_a_digest() -> None:
    state = folded(facts_of(TCP, everything))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RunState, dec_hook=as_counter)
    assert travelled(again) == travelled(state) is not None


def test_summary_report_status_and_live_view_say_it(tmp_path: Path) -> None:
    state = folded(facts_of(TCP, everything))
    value, detail = "56 MB a version", "TCP, delta: 21 % of 269 MB (2 of 10 whole)"
    below = [line for line in shown(summary(state)) if value in line]
    assert len(below) == 1 and f"                   {value}   TCP, delta: 21 % of 269 MB" in below[0]
    for view in (live.frame(state), status_view.panel("x", Status("alive", "training", None), state)):
        lines = shown(view)
        (at,) = [number for number, line in enumerate(lines) if "10 swaps, mean gap" in line]
        assert value in lines[at] and detail in lines[at + 1] and max(map(len, lines)) <= 80
    recorder = Recorder(tmp_path)
    for fact in facts_of(TCP, everything):
        recorder.record(fact)
    recorder.close()
    html = write_report(tmp_path).read_text()
    assert f"<b>{value}</b><p>{detail}</p>" in html


def test_nothing_is_said_before_the_first_version() -> None:
    state = folded([fact for fact in facts_of(TCP, everything) if not isinstance(fact, WeightsLive)])
    for view in (summary(state), live.frame(state), status_view.panel("x", Status("alive", "training", None), state)):
        assert "TCP" not in "".join(shown(view))


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (640, "640 bytes"), (4_310_000, "4.31 MB"), (999_600, "1 MB"), (1.5e12, "1,500 GB")],
)
def test_bytes_for_people(count: float, said: str) -> None:
    assert size(count) == said
