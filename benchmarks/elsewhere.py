"""The cost of an engine that Ray places, or that joins, against one that is a child of the run.

The same run (the demo's model and task, a fixed number of steps, a learning rate close to zero) with each, in turn, in one session on one machine:

    python benchmarks/elsewhere.py --rounds 3 --steps 12

It prints the medians over the rounds, and their ratios to local. A start lasts until everything is loaded; trained tokens a second are those
from the end of the first step to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from headrace.facts.facts import RunStarted
from headrace.facts.records import StepRow, read_metrics

KINDS = ("local", "join", "ray")
RUN = "import json, sys, headrace; headrace.train(json.loads(sys.argv[1]))"


REWARD = """
def letters(prompts, completions, **columns):
    return [text.count("e") + len(text) / 1000 for text in completions]
"""
"""A reward with contrast in nearly every group, so that every step trains the same number of rollouts."""


class Figures(NamedTuple):
    start: float
    """Seconds."""
    rate: float
    """Trained tokens a second."""


def config(kind: str, out: Path, steps: int, port: int) -> dict[str, Any]:
    place: dict[str, Any] = {"kind": kind}
    if kind == "join":
        place |= {"listen": f"127.0.0.1:{port}", "token_file": str(out / "token")}
    return {
        "name": kind,
        "out": str(out),
        "model": {"path": "smollm2-135m-instruct"},
        "task": {
            "kind": "reasoning_gym",
            "name": "chain_sum",
            "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
        "reward": {"function": f"{out / 'reward.py'}:letters"},
        "rollout": {"group_size": 8, "max_tokens": 24},
        "train": {"steps": steps, "learning_rate": 1e-8, "threads": 1},
        "engine": {"kv_gib": 0.5, "context_length": 128, "threads": 1},
        "staleness": {"groups_per_step": 2, "max_lag": 1},
        "checkpoint": {"every": 0},
        "eval": {"prompts": 0},
        "observe": {"terminal": "off"},
        "orchestration": place,
    }


def measured(kind: str, steps: int) -> Figures:
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as server:
        out, port = Path(name), server.getsockname()[1]
        server.close()
        token = out / "token"
        token.write_text(os.urandom(16).hex())
        token.chmod(0o600)
        (out / "reward.py").write_text(REWARD)
        words = ["worker", "--connect", f"127.0.0.1:{port}", "--token-file", str(token), "--offers", "engine"]
        joins = (
            [subprocess.Popen([sys.executable, "-m", "headrace", *words, "--patience", "600"])]
            if kind == "join"
            else []
        )
        asked = json.dumps(config(kind, out, steps, port))
        subprocess.run([sys.executable, "-c", RUN, asked], check=True, stdout=subprocess.DEVNULL)
        for join in joins:
            join.wait()
        facts = list(read_metrics(out / kind))
    (started,) = (fact for fact in facts if isinstance(fact, RunStarted))
    trained = [fact for fact in facts if isinstance(fact, StepRow)]
    tokens = sum(sum(fact.lags.values()) for fact in trained[1:])
    return Figures(started.t, tokens / (trained[-1].t - trained[0].t))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args()
    found: dict[str, list[Figures]] = {kind: [] for kind in given.kinds}
    for number in range(1, given.rounds + 1):
        for kind in given.kinds:
            found[kind].append(measured(kind, given.steps))
            print(
                f"round {number}  {kind:6s} start {found[kind][-1].start:6.1f} s  {found[kind][-1].rate:6.1f} tokens/s",
                flush=True,
            )
    starts = {kind: statistics.median(one.start for one in found[kind]) for kind in given.kinds}
    rates = {kind: statistics.median(one.rate for one in found[kind]) for kind in given.kinds}
    first = given.kinds[0]
    for kind in given.kinds:
        print(
            f"median   {kind:6s} start {starts[kind]:6.1f} s ({starts[kind] - starts[first]:+.1f} s)  trained {rates[kind]:6.1f} tokens/s "
            f"({rates[kind] / rates[first]:.2f} of {first})"
        )


if __name__ == "__main__":
    main()
