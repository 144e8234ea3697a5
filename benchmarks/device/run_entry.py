"""Runs one entry in this process and writes its result after every figure. The queue starts it as a child; a rehearsal calls it.

python -m benchmarks.device.run_entry ENTRY [--device cuda|cpu] [--results DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.device.entry import RESULTS, Figure, Result, entry_of, failed, verdict, written
from benchmarks.device.loads import Bench, Device

ROOT = Path(__file__).parent.parent.parent


def run_entry(name: str, device: Device, results: Path, *, tiny: bool = False) -> Result:
    """Returns what was measured; an exception of the entry is the reason in `Result.ended`, behind the figures there were."""
    entry, began = entry_of(name), time.perf_counter()
    result = Result(
        entry=name, card=card_of(device), date=f"{datetime.now(UTC):%Y-%m-%d}", commit=commit(), torch=torch.__version__
    )
    if device == "cuda" and (memory := torch.cuda.get_device_properties(0).total_memory) < entry.least_memory:
        result.ended = f"not begun: it needs {entry.least_memory / 1e9:.0f} GB, and the card has {memory / 1e9:.0f}"
        return result
    with tempfile.TemporaryDirectory(prefix="headrace-device-") as folder:
        bench = Bench(device=device, folder=Path(folder), chip=result.chip, tiny=tiny)
        try:
            for figure in entry.measure(bench):
                result.figures.append(figure)
                result.seconds = round(time.perf_counter() - began, 1)
                result.write(results)
                print(line_of(result, figure), flush=True)
            result.ended = "finished"
        except Exception as error:
            if tiny:
                raise
            result.ended = f"failed: {type(error).__name__}: {error}"[:500]
    result.seconds = round(time.perf_counter() - began, 1)
    result.write(results)
    return result


def line_of(result: Result, figure: Figure) -> str:
    """Returns the verdict line of a figure."""
    line = entry_of(result.entry).line(figure.name)
    share = "" if figure.share is None else f" ({figure.share:.1%} of the peak)"
    told = f"{result.entry}: {figure.name}: {written(figure.value, line.unit)}{share}: {verdict(line, figure, result.chip)}"
    return f"{told}; {figure.note}" if figure.note and figure.value is not None else told


def card_of(device: Device) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def commit() -> str:
    """Returns the short name of the checkout's commit; of a copy without a repository, what the environment's HEADRACE_COMMIT says."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or os.environ.get("HEADRACE_COMMIT", "unknown")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entry")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    disable_progress_bar()
    result = run_entry(options.entry, options.device, options.results, tiny=options.tiny)
    print(f"{result.entry}: {result.ended} after {result.seconds:.0f} s", flush=True)
    entry = entry_of(options.entry)
    wrong = [figure for figure in result.figures if failed(entry.line(figure.name), figure)]
    return int(result.ended != "finished" or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
