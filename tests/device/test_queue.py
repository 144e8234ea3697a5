"""The queue of measurements for a machine with a GPU: every entry runs here with tiny shapes, so that none of its minutes is spent on a typo."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.device import __main__ as queue  # noqa: E402
from benchmarks.device import demo, vllm  # noqa: E402
from benchmarks.device.entry import ORDER, Figure, Line, Result, all_results, entry_of, failed, read, verdict  # noqa: E402
from benchmarks.device.packages import missing, needed, remedy  # noqa: E402
from benchmarks.device.run_entry import run_entry  # noqa: E402
from benchmarks.device.runs import Case  # noqa: E402
from headrace.commands.plan.rates.hardware import GPUS  # noqa: E402
from headrace.run.config import load_config  # noqa: E402

SLOW = ("demo", "ranks", "compiled")
"""Entries that start processes, or compile."""


def rehearsed(name: str, directory: Path) -> Result:
    result = run_entry(name, "cpu", directory, tiny=True)
    assert result.ended == "finished"
    entry = entry_of(name)
    assert [figure.name for figure in result.figures] and {f.name for f in result.figures} == {
        line.name for line in entry.lines
    }
    wrong = [figure for figure in result.figures if failed(entry.line(figure.name), figure)]
    assert wrong == []
    assert read(directory / result.name).figures == result.figures
    return result


QUICK = ("smoke", "long")
"""Entries of at most two seconds."""


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ORDER if name not in SLOW],
)
def test_an_entry_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    rehearsed(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW if name in ORDER])
def test_an_entry_with_processes_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    rehearsed(name, tmp_path)


def test_every_figure_has_a_prediction_for_both_cards_with_its_formula() -> None:
    for entry in map(entry_of, ORDER):
        assert 0 < entry.limit <= 180, entry.name
        assert len({line.name for line in entry.lines}) == len(entry.lines)
        for line in entry.lines:
            assert line.formula, (entry.name, line.name)
            if line.unit != "check":
                assert line.predicted is not None, (entry.name, line.name)
                assert all(line.predicted(GPUS[card]) > 0 for card in ("h100", "h200")), (entry.name, line.name)


@pytest.mark.parametrize("case", [*demo.CASES, *vllm.CASES], ids=lambda case: case.name)
def test_settings_of_whole_runs_are_not_refused(case: Case) -> None:
    """Those that only a GPU can run, too: their minutes would go to a sentence."""
    load_config(ROOT / "recipes" / "demo" / "demo.toml", case.sets)


def test_kept_results_are_of_lines_that_there_are() -> None:
    for result in all_results():
        entry = entry_of(result.entry)
        for figure in result.figures:
            assert entry.line(figure.name), (result.name, figure.name)


def test_the_page_and_the_planners_rates_are_what_the_results_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_device.py"))
    page = made["TARGET"].read_text(encoding="utf-8")
    assert page == made["page"](page, all_results()), "a result or a prediction has changed: run `make docs`"
    assert made["RATES"].read_text(encoding="utf-8") == made["rates"](all_results()), "run `make docs`"
    assert "not measured" in page


def test_the_order_is_what_this_card_lacks_then_the_oldest(tmp_path: Path) -> None:
    def result(entry: str, date: str, card: str = "NVIDIA H200", ended: str = "finished") -> None:
        Result(entry=entry, card=card, date=date, commit="c", torch="2", ended=ended).write(tmp_path)

    result("smoke", "2026-12-02")
    result("decode", "2026-12-01")
    result("training", "2026-12-03", card="NVIDIA H100 80GB HBM3")
    result("demo", "2026-12-03", ended="failed: out of memory")
    names = queue.order(tmp_path, "NVIDIA H200")
    assert names == [*(name for name in ORDER if name not in ("smoke", "decode")), "decode", "smoke"]


def test_a_verdict_is_about_the_prediction_and_a_wrong_figure_fails() -> None:
    rate = Line(name="x", predicted=lambda chip: chip.bandwidth / 1e9, formula="GB/s")
    assert verdict(rate, Figure("x", 3350.0), GPUS["h100"]) == "as predicted"
    assert verdict(rate, Figure("x", 100.0), GPUS["h100"]).startswith("slower: 0.03")
    assert verdict(rate, Figure("x", 100.0), None) == "no prediction"
    time_ = Line(name="x", unit="ms", predicted=lambda chip: 10.0, formula="")
    assert verdict(time_, Figure("x", 30.0), GPUS["h100"]) == "worse: 3.00 times the prediction"
    nats = Line(name="x", unit="nats", predicted=lambda chip: 1e-3, most=0.5, formula="")
    assert (
        failed(nats, Figure("x", 0.6))
        and not failed(nats, Figure("x", 0.4))
        and not failed(nats, Figure("x", None, "no GPU"))
    )
    assert failed(Line(name="x", unit="check", formula=""), Figure("x", False)) and not failed(rate, Figure("x", 1.0))


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[sys.argv.index("--results") + 1] + "/child", "w").write(str(child.pid))
time.sleep(600)
"""


@pytest.mark.waits
def test_an_entry_that_hangs_is_ended_with_what_it_started_and_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks.device.run_entry` is another module here: the children's path has it first."""
    other = tmp_path / "other" / "benchmarks" / "device"
    other.mkdir(parents=True)
    for folder in (other.parent, other):
        (folder / "__init__.py").touch()
    (other / "run_entry.py").write_text(
        f"import sys\nif sys.argv[1] == 'smoke':\n    exec({HANGS!r})\nsys.exit(sys.argv[1] == 'training')\n"
    )
    monkeypatch.chdir(tmp_path / "other")
    endings: dict[str, str] = {}
    environment = {"PYTHONPATH": str(tmp_path / "other")}
    for name, limit in (("smoke", 12.0), ("decode", 90.0), ("training", 90.0)):
        endings[name] = queue._child(name, limit, tmp_path, "cpu", environment)
    assert endings == {
        "smoke": "ended at its limit of 12 s",
        "decode": "finished",
        "training": "failed (exit status 1)",
    }
    pid = int((tmp_path / "child").read_text())
    ends = time.monotonic() + 60
    while (
        (status := Path(f"/proc/{pid}/stat")).exists()
        and status.read_text().split()[2] != "Z"
        and time.monotonic() < ends
    ):
        time.sleep(0.02)
    assert time.monotonic() < ends, "a process of the entry lives on"


def test_a_budget_that_is_used_up_begins_no_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert queue.run(["smoke", "decode"], 1.0, tmp_path, "cpu", {}) == 0
    printed = capsys.readouterr().out
    assert printed.count("not begun: the budget is used up") == 2 and printed.count("  0/") == 2


def test_packages_that_are_missing_are_named_with_the_way_to_bring_them() -> None:
    assert missing(("tasks",)) == []
    said = remedy(["pydantic>=2.11,<3"])
    assert "lacks pydantic>=2.11,<3" in said and "make device WHEELS=wheels" in said
    assert "make device PYTHON=" in remedy(["torch>=2.11,<2.14", "pydantic>=2.11,<3"])


def test_what_is_needed_is_walked_through_but_not_into_torch() -> None:
    """`pydantic-core` is no requirement of headrace's own; `sympy` may be one of torch's, whose build is the machine's own."""
    walked = [name for name, _ in needed()]
    assert "pydantic-core" in walked and "torch" in walked and "jinja2" not in walked
