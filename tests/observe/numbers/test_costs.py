"""The cost of a run, against literal dollars."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from headrace import cli
from headrace.commands.show.compare import compare
from headrace.core.errors import ConfigError
from headrace.facts import run_state
from headrace.facts.facts import Evaluated, Fact, FleetSample, MemberSample, RunStarted, StepTrained
from headrace.facts.index_file import NumbersIndex
from headrace.facts.number_tables import scalars
from headrace.facts.recorder import Recorder
from headrace.facts.records import METRICS, StepRow, summarise
from headrace.facts.run_state import RunState
from headrace.facts.texts import dollars
from headrace.run.config import load_config
from headrace.views.board.followed_run import RunList
from headrace.views.config import ObserveConfig
from headrace.views.report import write_report
from headrace.views.screen.console import Console
from headrace.views.screen.summary import summary
from support.fact_stream import FactStream

PRICES = {"engine": 2.0, "trainer": 3.0}


def started(t: float, prices: dict[str, float], resumed_at: int = 0) -> RunStarted:
    return msgspec.structs.replace(FactStream(prices=prices).start(resumed_at), t=t)


def step(t: float, number: int, tokens: int) -> StepRow:
    row = next(summarise(fact) for fact in FactStream(steps=1).facts() if isinstance(fact, StepTrained))
    report = msgspec.structs.replace(row.report, step=number, version=number + 1, loss_tokens=tokens)
    return msgspec.structs.replace(row, t=t, report=report)


def members(t: float, *states: str) -> FleetSample:
    one = MemberSample(name="", state="", version=0, running=0, tokens=0, rate=0.0, absences=0)
    return FleetSample(t, tuple(msgspec.structs.replace(one, name=str(i), state=s) for i, s in enumerate(states)))


def folded(*facts: Fact) -> RunState:
    state = RunState()
    for fact in facts:
        state.fold(fact)  # type: ignore[arg-type]
    return state


def test_every_hour_of_the_clock_is_paid_for_once() -> None:
    state = folded(started(360.0, PRICES), step(720.0, 0, 1000), step(1080.0, 1, 3000))
    assert state.costs.total == pytest.approx(0.3 * 5)  # loading is 0.1 h of it
    assert state.costs.spent == pytest.approx({"engine": 0.6, "trainer": 0.9}) and state.costs.of_step == pytest.approx(
        0.5
    )
    state.fold(Evaluated(1440.0, "after", 2, 1, 1.0, 0.0, 1.0))
    state.fold(Evaluated(1400.0, "after", 2, 1, 1.0, 0.0, 1.0))  # late: its time has been counted
    assert state.costs.total == pytest.approx(0.4 * 5)
    assert run_state.cost_numbers(state) == pytest.approx(
        {
            "cost": 2.0,
            "cost of the engines": 0.8,
            "cost of the trainer": 1.2,
            "cost a step": 1.0,
            "cost of a million trained tokens": 500.0,
        }
    )


def test_an_engine_of_a_fleet_costs_its_price_while_it_is_there() -> None:
    state = folded(
        started(0.0, {"engine": 2.0}),
        members(0.0, "serving", "serving", "away"),
        members(3600.0, "serving", "lost", "lost"),
        members(7200.0, "serving"),
    )
    assert state.costs.spent == pytest.approx({"engine": 3 * 2.0 + 1 * 2.0, "trainer": 0.0})


def test_a_resumed_run_goes_on_adding_with_its_present_prices() -> None:
    state = folded(
        started(0.0, {"trainer": 3.0}), step(3600.0, 0, 1), started(3700.0, {"trainer": 36.0}, 1), step(4000.0, 1, 1)
    )
    assert state.costs.total == pytest.approx(3.0 + 4.0)
    assert run_state.cost_numbers(folded(started(0.0, {}), step(3600.0, 0, 1))) == {}


def test_cost_is_among_the_numbers_of_dashboards_only_with_a_price() -> None:
    rows = step(1800.0, 0, 2000)
    _, values = scalars(rows, folded(started(0.0, PRICES), rows))
    assert {name: value for name, value in values.items() if name.startswith("cost/")} == pytest.approx(
        {"cost/dollars": 2.5, "cost/dollars_per_step": 2.5, "cost/dollars_per_million_tokens": 1250.0}
    )
    assert not any(name.startswith("cost/") for name in scalars(rows, folded(started(0.0, {}), rows))[1])


def written(run_dir: Path, prices: dict[str, float]) -> Path:
    run_dir.mkdir()
    recorder = Recorder(run_dir)
    for fact in FactStream(steps=6, prices=prices).facts():
        recorder.record(fact)
    recorder.close()
    assert ("prices" in (run_dir / METRICS).read_text()) and (run_dir / "config.toml").write_text("seed = 0\n")
    return run_dir


def shown(*runs: Path) -> str:
    console = Console(file=io.StringIO(), width=150)
    assert compare(runs, console=console) == 0
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_summary_report_and_comparison_name_it(tmp_path: Path) -> None:
    paid, free, also = (
        written(tmp_path / "paid", PRICES),
        written(tmp_path / "free", {}),
        written(tmp_path / "also", {}),
    )
    console = Console(file=io.StringIO(), width=120)
    facts = FactStream(steps=6, prices=PRICES).facts()
    state = folded(*(summarise(fact) if isinstance(fact, StepTrained) else fact for fact in facts))
    console.print(summary(state))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    total = f"${state.now / 3600 * 5:.2g}"
    assert f"Cost            {total}" in text and "a step $" in text and "trained tokens $" in text
    assert f"<b>{total}</b><span>cost</span>" in write_report(paid).read_text()
    assert "<span>cost" not in write_report(free).read_text()
    assert total in shown(paid, free) and "cost" not in shown(free, also)


def test_a_price_below_zero_is_refused_and_adapters_share_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observe\.engine_price"):
        load_config({"model": {"path": "m"}, "observe": {"engine_price": -1.0}})
    assert ObserveConfig(engine_price=3.0, trainer_price=1.5).shared_by(3).prices == {"engine": 1.0, "trainer": 0.5}


def test_a_list_of_runs_has_their_cost_from_the_ends_of_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headrace.views.board.followed_run.HEAD", 1000)
    monkeypatch.setattr("headrace.views.board.followed_run.TAIL", 3000)
    monkeypatch.setenv("COLUMNS", "200")
    facts = list(FactStream(steps=40, prices=PRICES).facts())
    costly = [*facts[:60], members(facts[60].t, "serving", "serving", "serving"), *facts[60:]]
    for name, given in (("one", facts), ("fleet", costly), ("free", list(FactStream(steps=3).facts()))):
        (tmp_path / name).mkdir()
        recorder = Recorder(tmp_path / name, index=NumbersIndex(tmp_path / name, every=3000))
        for fact in given:
            recorder.record(fact)
        recorder.close()
    whole = {
        name: folded(*(summarise(fact) if isinstance(fact, StepTrained) else fact for fact in given)).costs.total
        for name, given in (("one", facts), ("fleet", costly))
    }
    found = {line.name: line.cost for line in RunList(tmp_path, lambda path: False).lines()}
    assert found == {"one": pytest.approx(whole["one"]), "fleet": pytest.approx(whole["fleet"]), "free": None}
    assert cli.main(["ls", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "cost" in lines["run"] and dollars(whole["fleet"]) in lines["fleet"] and "$" not in lines["free"]
