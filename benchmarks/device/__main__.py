"""`make device`: runs the queue's entries one after the other, within a budget of seconds, and says what they found.

    python -m benchmarks.device [ENTRY ...] [--seconds 600] [--device cuda|cpu] [--wheels DIRECTORY] [--results DIRECTORY]

Without names, entries that have no finished result for this card come first, in the queue's order, then those whose result is oldest. An entry is
ended at its limit, or when the budget ends; one that fails stops no other. Each figure is in the result's file as soon as it is known.
Ends with 1 if an entry failed, or a figure is wrong (slow is not wrong).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.device.packages import provide

LEAST = 20
"""Seconds below which no further entry is begun: a process that has loaded torch and made a model has used so many."""
GRACE = 5


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all entries together")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, with tiny shapes")
    parser.add_argument("--wheels", type=Path, help="packages to install where there is no index")
    parser.add_argument(
        "--results", type=Path, help="where results are read and written; in a rehearsal nowhere that is kept"
    )
    options = parser.parse_args(words)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # an entry is a session of its own: it would live on
    environment = provide(options.wheels)
    from benchmarks.device.entry import RESULTS  # headrace can be imported from here on

    rehearsed = options.device == "cpu"
    results = options.results or (
        Path(environment.get("TMPDIR", "/tmp")) / "headrace-rehearsal" if rehearsed else RESULTS
    )
    names = options.entries or order(results, card(environment, options.device))
    return run(names, options.seconds, results, options.device, environment)


def card(environment: Mapping[str, str], device: str) -> str:
    """Returns torch's name of the device, asked of a process of its own: this one must hold no memory of it."""
    if device == "cpu":
        return "cpu"
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    asked = subprocess.run(
        [sys.executable, "-c", code], env=dict(environment), capture_output=True, text=True, check=False
    )
    if not (name := asked.stdout.strip()):
        raise SystemExit(
            f"torch finds no GPU here; make device-rehearsal tries the scripts without one\n{asked.stderr[-500:]}"
        )
    return name


def order(results: Path, on: str) -> list[str]:
    """Returns the names of all entries: those without a finished result for this card, then the others by the age of theirs."""
    from benchmarks.device.entry import ORDER, all_results, chip_of

    done = {
        result.entry: result.date
        for result in all_results(results)
        if result.ended == "finished" and chip_of(result.card) == chip_of(on)
    }
    return sorted(ORDER, key=lambda name: (done.get(name, ""), ORDER.index(name)))


def run(names: Sequence[str], seconds: float, results: Path, device: str, environment: Mapping[str, str]) -> int:
    from benchmarks.device.entry import entry_of

    ends, endings = time.monotonic() + seconds, dict[str, str]()
    for name in names:
        left = ends - time.monotonic()
        if left < LEAST:
            endings[name] = "not begun: the budget is used up"
            continue
        print(f"\n{name}: {entry_of(name).about}", flush=True)
        endings[name] = _child(name, min(left, entry_of(name).limit), results, device, environment)
    print("\n".join(summary(names, endings, results, ends - time.monotonic())), flush=True)
    return int(any(ending != "finished" and not ending.startswith("not begun") for ending in endings.values()))


def _child(name: str, limit: float, results: Path, device: str, environment: Mapping[str, str]) -> str:
    command = [sys.executable, "-m", "benchmarks.device.run_entry", name, "--device", device, "--results", str(results)]
    command += ["--tiny"] if device == "cpu" else []
    child = subprocess.Popen(command, env=dict(environment), start_new_session=True)
    try:
        code = child.wait(limit)
    except subprocess.TimeoutExpired:
        _end(child)
        return f"ended at its limit of {limit:.0f} s"
    finally:
        if child.poll() is None:
            _end(child)
    return {0: "finished", 3: "not begun: the card is too small"}.get(code, f"failed (exit status {code})")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the entry with all that it started: they are a process group."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        os.killpg(child.pid, number)
        try:
            child.wait(patience)
            return
        except subprocess.TimeoutExpired:
            continue


def summary(names: Sequence[str], endings: Mapping[str, str], results: Path, left: float) -> Iterator[str]:
    """Yields a table: every entry, how it ended, and its figures that are not as predicted."""
    from benchmarks.device.entry import entry_of, read, verdict

    paths = sorted(results.glob("*.json"), key=lambda path: path.stat().st_mtime)
    newest = {result.entry: result for result in map(read, paths)}
    yield f"\n{'entry':10} {'ended':34} {'s':>5} {'figures':>8}  not as predicted"
    for name in names:
        result, entry = newest.get(name), entry_of(name)
        begun = result is not None and not endings[name].startswith("not begun")
        figures = [figure for figure in result.figures if figure.value is not None] if result and begun else []
        words = {
            figure.name: verdict(entry.line(figure.name), figure, result.chip if result else None) for figure in figures
        }
        other = [
            f"{key} ({word})" for key, word in words.items() if word not in ("as predicted", "holds", "no prediction")
        ]
        seconds = f"{result.seconds:.0f}" if result and begun else "–"
        yield f"{name:10} {endings[name]:34} {seconds:>5} {f'{len(figures)}/{len(entry.lines)}':>8}  {', '.join(other[:3]) or '–'}"
    yield f"{max(left, 0):.0f} s of the budget are left; `make docs` writes the results into docs/gpu_queue.md"


if __name__ == "__main__":
    sys.exit(main())
