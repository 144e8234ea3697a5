"""Ranks that are killed or stopped at random moments of a whole run: the run goes on by itself, and ends at the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.facts.facts import RunEnded
from support.tiny_run import (
    SYNCHRONOUS,
    Config,
    held_reward,
    of,
    ranks_of,
    release,
    tiny_config,
    trained_steps,
    weights_of,
)

STEPS = 6
MESHES: dict[str, dict[str, int]] = {"shard": {"shard": 2}, "pipeline": {"pipeline": 2}, "context": {"context": 2}}


def config_of(directory: Path, model: Path, mesh: str, **tables: Any) -> Config:
    """A checkpoint after every second step, and an evaluation: there is always something that a rank can die in."""
    train = {**SYNCHRONOUS["train"], "steps": STEPS, "microbatch_tokens": 48, "parallel": MESHES[mesh], "max_deaths": 4}
    return tiny_config(
        directory,
        model,
        rollout={"max_tokens": 12},
        train=train,
        engine=SYNCHRONOUS["engine"],
        staleness={"max_lag": 0, "groups_per_step": 4},
        eval={"prompts": 4, "samples": 1, "every": 2},
        **tables,
    )


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """The last checkpoint (weights, and the optimizer's state) of a run on that mesh."""
    known: dict[str, dict[str, torch.Tensor]] = {}

    def weights(mesh: str) -> dict[str, torch.Tensor]:
        if mesh not in known:
            directory = tmp_path_factory.mktemp(mesh)
            assert headrace.train(config_of(directory, tiny_llama, mesh)).reason == "finished"
            known[mesh] = weights_of(directory / "runs" / "tiny")
        return known[mesh]

    return weights


class Harm(threading.Thread):
    """Does something to a rank, and perhaps to a second one after that. The run is held at its second step until the first is done."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__()
        self._directory, self._run, self._chance = directory, directory / "runs" / "tiny", random.Random(seed)
        self.mesh = self._chance.choice(sorted(MESHES)) if seed else "shard"
        self._signals = self._chance.choices([signal.SIGKILL, signal.SIGSTOP], k=1 + seed % 2) if seed else [9]
        self.done: list[str] = []

    def run(self) -> None:
        for number, sent in enumerate(self._signals):
            self._await_moment(least=0 if number == 0 else 3, most=2 if number == 0 else STEPS - 1)
            self._harm(sent)
            if number == 0:
                release(self._directory)

    def _await_moment(self, least: int, most: int) -> None:
        """A part of a second after some step, or the middle of a checkpoint's writing."""
        step, writing = self._chance.randint(least, most), self._chance.random() < 0.3
        while not (self._shows("RunStarted") and trained_steps(self._run) >= step) and not self._over():
            time.sleep(0.01)  # a rank that dies before a run has begun ends it
        if writing and step >= 2:
            until = time.monotonic() + 5.0
            while not list(self._run.glob("checkpoints/.writing-*")) and time.monotonic() < until:
                time.sleep(0.001)
        time.sleep(self._chance.random() * 0.5)

    def _harm(self, sent: int) -> None:
        rank = self._chance.randint(0, 1)
        while not self._over():
            found = ranks_of(os.getpid())
            if len(found) == 2:
                try:
                    os.kill(found[rank], sent)
                except ProcessLookupError:  # gone meanwhile
                    continue
                self.done.append(f"{signal.Signals(sent).name} to rank {rank} after step {trained_steps(self._run)}")
                return
            time.sleep(0.01)

    def _over(self) -> bool:
        return self._shows('"reason":"finished"')

    def _shows(self, text: str) -> bool:
        metrics = self._run / "metrics.jsonl"
        return metrics.exists() and text in metrics.read_text().replace(" ", "")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_a_rank_that_is_killed_or_stopped_at_a_random_moment_costs_no_bit(
    seed: int, undisturbed: Callable[[str], dict[str, torch.Tensor]], tiny_llama: Path, tmp_path: Path
) -> None:
    harm = Harm(tmp_path, seed)
    expected = undisturbed(harm.mesh)
    harm.start()
    result = headrace.train(config_of(tmp_path, tiny_llama, harm.mesh, reward=held_reward(tmp_path)))
    harm.join()
    assert result.reason == "finished" and result.step == STEPS and harm.done
    run = tmp_path / "runs" / "tiny"
    ended = of(run, RunEnded)
    assert ended[-1].reason == "finished" and ended[-1].accounting.balance() == 0
    assert all("of rank" in one.reason for one in ended[:-1]), ended
    found = weights_of(run)
    assert found.keys() == expected.keys()
    different = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert not different, (harm.mesh, harm.done, different)
    assert not ranks_of(os.getpid())
