"""Seconds and CPU-seconds from the command to the first sampled token, and of a resume that does one step: here, and in other checkouts.

    git worktree add /tmp/before COMMIT
    python benchmarks/starting.py --against /tmp/before --rounds 3

The checkouts take turns, so that what else the machine does meets all of them. CPU-seconds are those of the command and of all processes that it
started. Run each checkout once before: the first run fetches the model, compiles kernels and measures the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

CONFIG = """
[model]
path = "smollm2-135m-instruct"
[task]
kind = "reasoning_gym"
name = "chain_sum"
options = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
[[reward.functions]]
function = "reasoning_gym"
extract = "last_number"
[rollout]
group_size = 8
max_tokens = 24
[train]
learning_rate = 1e-5
[engine]
kv_gib = 0.5
context_length = 128
[staleness]
groups_per_step = 2
[checkpoint]
every = 1
[eval]
prompts = 0
[observe]
terminal = "plain"
"""
LONGEST = 1800
"""Seconds after which a command is given up."""
RUN = "import sys; from headrace.cli import main; sys.exit(main())"


class Took(NamedTuple):
    seconds: float
    cpu: float


def main() -> None:
    asks = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asks.add_argument("--against", type=Path, nargs="*", action="extend", default=[], metavar="CHECKOUT")
    asks.add_argument("--rounds", type=int, default=3)
    given = asks.parse_args()
    places = [Path(__file__).resolve().parents[1], *given.against]
    found: dict[tuple[Path, str], list[Took]] = {}
    with tempfile.TemporaryDirectory() as name:
        for number in range(given.rounds):
            for place in places:
                directory = Path(name) / f"{places.index(place)}-{number}"
                directory.mkdir()
                for what, took in (
                    ("first token", first_token(place, directory)),
                    ("one step", one_step(place, directory)),
                ):
                    print(
                        json.dumps({"round": number, "checkout": str(place), "what": what, **took._asdict()}),
                        flush=True,
                    )
                    found.setdefault((place, what), []).append(took)
    for (place, what), each in found.items():
        seconds, cpu = (median(values) for values in zip(*each, strict=True))
        print(f"{what:12} {seconds:6.1f} s {cpu:6.1f} CPU-s   {place}")


def first_token(place: Path, directory: Path) -> Took:
    """Starts a run and kills it when its first token is in the log of passes, behind the scores of the first weights' proof."""
    (directory / "config.toml").write_text(CONFIG)
    command = ["train", "config.toml", "--name", "run", "--set", "train.steps=1000"]
    process, began = _begun(place, directory, command), time.monotonic()
    try:
        proof = 0
        while process.poll() is None and time.monotonic() - began < LONGEST:
            written = _written(directory / "runs/run")
            if proof and written > proof:
                break
            proof = proof or (written if _proven(directory / "runs/run") else 0)
            time.sleep(0.02)
        took = Took(time.monotonic() - began, _cpu(process.pid))
        assert process.poll() is None, (directory / "out").read_text()
    finally:
        _end(process)
    return took


def one_step(place: Path, directory: Path) -> Took:
    """Trains two steps, and measures the resume that does a third."""
    for steps in (2, 3):
        words = ["config.toml", "--name", "short"] if steps == 2 else ["--resume", "runs/short"]
        process, began = _begun(place, directory, ["train", *words, "--set", f"train.steps={steps}"]), time.monotonic()
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            _end(process)
        assert status == 0, (directory / "out").read_text()
    return Took(time.monotonic() - began, used.ru_utime + used.ru_stime)


def _begun(place: Path, directory: Path, words: list[str]) -> subprocess.Popen[bytes]:
    with (directory / "out").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, *words],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(place)},
            stdout=out,
            stderr=out,
        )


def _written(run: Path) -> int:
    """Bytes of the log of passes: a token is there before anybody sees it."""
    return 1 + sum(path.stat().st_size for path in run.glob("passes/*"))


def _proven(run: Path) -> bool:
    """Whether the first weights are live and proven. Rollouts begin then."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and "IdentityChecked" in metrics.read_text()


def _cpu(pid: int) -> float:
    """CPU-seconds of a process, of those that it started, and of their ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return own + sum(_cpu(int(child)) for one in listed for child in one.read_text().split())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None and process.poll() is None:
        process.send_signal(signal.SIGKILL)  # its workers end with it
        process.wait()


if __name__ == "__main__":
    main()
