"""Tokens that engine and trainer forward where rollouts have ten turns and branch, with shared prefixes and without: counts, not times.

    python benchmarks/forks.py --alternatives 3

A short run of the real model with an environment of ten turns. Generation: prompt tokens of all requests, and those of them that the engine
found in its cache. Training: tokens of all rows, and those that the trainer forwarded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import headrace
from headrace.durable.journal import read_steps
from headrace.facts.facts import EngineSample
from headrace.facts.records import StepRow, read_metrics

ENV = """
class Ten:
    def __init__(self, prompt):
        self.prompt, self.turns, self.length = prompt, 0, 0

    def step(self, agent, reply):
        if reply is None:
            return self.prompt
        self.turns, self.length = self.turns + 1, self.length + len(reply.text)
        return {"length": self.length / 1000} if self.turns == 10 else f"That was step {self.turns}. What comes next?"

    def export_state(self):
        return [self.turns, self.length]

    def restore(self, state):
        self.turns, self.length = state
"""


def main() -> None:
    asks = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asks.add_argument("--alternatives", type=int, default=3)
    asks.add_argument("--turn", default="random")
    asks.add_argument("--max-lag", type=int, default=0)
    given = asks.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), given)


def measure(directory: Path, given: argparse.Namespace) -> None:
    (directory / "env.py").write_text(ENV)
    config = {
        "name": "forks",
        "out": str(directory),
        "model": {"path": "smollm2-135m-instruct"},
        "task": {"kind": "reasoning_gym", "name": "chain_sum"},
        "environment": {"function": f"{directory / 'env.py'}:Ten", "max_turns": 12},
        "rollout": {
            "group_size": 4,
            "max_tokens": 16,
            "forks": {"alternatives": given.alternatives, "turn": given.turn},
        },
        "algo": {"name": "grpo"},
        "train": {"steps": 3, "learning_rate": 1e-9},
        "engine": {"context_length": 1024, "kv_gib": 1.0},
        "staleness": {"groups_per_step": 2, "max_lag": given.max_lag},
        "checkpoint": {"every": 0},
        "eval": {"prompts": 0},
        "observe": {"terminal": "off"},
    }
    headrace.train(config)
    facts = read_metrics(directory / "forks")
    stats = [fact.stats for fact in facts if isinstance(fact, EngineSample)][-1]
    print(f"generation: {stats.asked_tokens:,} prompt tokens asked for, {stats.cached_tokens:,} found in the cache")
    rows = [row for step in read_steps(directory / "forks") for group in step.groups for row in group.rows]
    whole = sum(len(row.prompt) + len(row.tokens) for row in rows)
    forwarded = sum(fact.report.forward_tokens for fact in facts if isinstance(fact, StepRow))
    print(
        f"training: {len(rows)} rows of {whole:,} tokens, {forwarded:,} forwarded ({whole / forwarded:.2f} times fewer)"
    )


if __name__ == "__main__":
    main()
