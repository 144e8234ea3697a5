"""A fleet whose engines are sent weights over TCP or by broadcast, for real: one of them is killed with half of a version received."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.facts.facts import FleetSample, MemberMoved, WeightsLive
from support.runs.beside import until
from support.server_processes import checked_run
from support.tiny_run import engines_of, held_reward, of, release, tiny_config, trained_steps, when_step

WIDE = 57344
"""The width of the model's only layer: its 22 MB do not fit into the buffers of a connection. Not 65,536: on AMX, PyTorch 2.13's
product of 24 rows of that width with 64 columns in bfloat16 divides by zero in oneDNN and ends the engine with SIGFPE."""

HELD = range(2, 1000)
"""Steps at which the run is held."""

SLICE = 0.002
"""Seconds for which an engine runs until it is looked at again. Its 22 MB take several of these on any machine."""


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    import shutil

    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("wide") / "llama"
    shutil.copytree(tiny_tokenizer, directory)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(directory)),
        hidden_size=64,
        intermediate_size=WIDE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def waiting_bytes(pid: int) -> int:
    """Bytes that have arrived at the connected TCP sockets of a process, and that it has not read."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a thread that has not yet stopped has closed it
            own.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = 0
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "01" and words[9] in own:  # ESTABLISHED; https://docs.kernel.org/networking/proc_net_tcp.html
            found += int(words[4].partition(":")[2], 16)
    return found


def is_met(pid: int) -> bool:
    """Whether an engine, which is then left stopped, is in the middle of a version. If it is not, it has run for a slice."""
    os.kill(pid, signal.SIGSTOP)
    if waiting_bytes(pid):
        return True
    os.kill(pid, signal.SIGCONT)
    time.sleep(SLICE)
    return False


def kill_while_it_fetches(pid: int, run: Path) -> int:
    """Kills an engine in the middle of a version. The run is held at each step until its version is live, so that hardly a step is
    trained meanwhile, however slow the machine is. Returns the step at which it is still held."""
    met: list[bool] = []
    for step in HELD:
        until(lambda step=step: trained_steps(run) >= step)  # type: ignore[misc]
        while not met and len(of(run, WeightsLive)) <= step:  # the first is that of step 0
            met += [True] if is_met(pid) else []
        if met:
            os.kill(pid, signal.SIGKILL)
            return step
        release(run.parent.parent, step)
    raise AssertionError("it was never met in the middle of a version")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "broadcast"])
def test_an_engine_that_is_killed_with_half_of_a_version(kind: str, wide_llama: Path, tmp_path: Path) -> None:
    """It leaves the rotation, the other one goes live and takes its requests, and it comes back with the newest weights: a full copy,
    though differences are published."""
    run = tmp_path / "runs" / "tiny"
    config: dict[str, Any] = tiny_config(
        tmp_path,
        wide_llama,
        engine={"replicas": 2, "dtype": "bfloat16", "path": "hf"},
        weight_sync={"kind": kind, "encoding": "delta", "anchor_every": 1},
        train={"steps": 100_000, "learning_rate": 1e-6, "path": "torch", "dtype": "float32"},
        staleness={"groups_per_step": 2},
    )
    killed: list[int] = []

    config["reward"] = held_reward(tmp_path, *HELD)

    def kill() -> None:
        killed.append(engines_of(os.getpid())[0])
        step = HELD.start
        try:
            step = kill_while_it_fetches(killed[0], run)
            release(tmp_path, step)
            until(lambda: any(fact.state == "serving" for fact in of(run, MemberMoved)))
        finally:
            for one in HELD[HELD.index(step) :]:
                release(tmp_path, one)

    def enough(step: headrace.Step) -> None:
        """One version has gone live in both since the engine is back, and the fleet has been sampled."""
        back = [fact.t for fact in of(run, MemberMoved) if fact.state == "serving"]
        later = lambda kind: len([fact for fact in of(run, kind) if fact.t > back[0]])  # noqa: E731
        if back and later(WeightsLive) > 1 and later(FleetSample):
            raise headrace.StopTraining("the engine is back")

    thread = when_step(run, 2, kill)
    result = headrace.train(config, on_step=enough)
    thread.join()
    assert killed
    checked_run(run, result.step, "interrupted")
    moves = [(fact.member, fact.state) for fact in of(run, MemberMoved)]
    (victim,) = {member for member, _ in moves}
    assert moves == [(victim, "away"), (victim, "serving")]
    assert all(member.state == "serving" for member in of(run, FleetSample)[-1].members)
    away, back = [fact.t for fact in of(run, MemberMoved)]
    live = of(run, WeightsLive)
    assert {"base" in fact.update.where for fact in live} == {True, False}, "full copies, and differences between them"
    engines = [round(fact.load.received / fact.update.where.get("delta", fact.update.nbytes)) for fact in live]
    assert engines[0] == engines[-1] == live[0].load.engines == live[-1].load.engines == 2
    alone = [count for fact, count in zip(live, engines, strict=True) if away < fact.t < back]
    assert set(alone) <= {1}, "what went live meanwhile did so in the other one; nothing did if it was back before"
