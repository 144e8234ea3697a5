"""A run keeps to `train.minutes`: the real pipeline in virtual time; and what was chosen stays chosen when it goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.durable.journal import read_steps
from headrace.facts.facts import FirstText, Planned, RunStarted, Warned
from headrace.loop.run_limits import MARGIN, Allowance, Minutes
from headrace.loop.world import virtual_time
from headrace.run import one_shot, run
from headrace.run.auto.candidates import Figures
from headrace.run.auto.measurer import share_of
from headrace.run.choosing import allowance_of, fit_minutes, resumed_settings, settle, wish_of
from headrace.run.config import config_of_run, load_config, read_config
from headrace.run.rehearsal.machine import Machine
from headrace.run.rehearse import rehearse
from headrace.run.wording import machine_change
from headrace.testing.fake_engine import FakeEngine
from headrace.testing.fake_measurer import FakeMeasurer
from headrace.testing.fake_trainer import FakeTrainer
from headrace.trainer.config import TrainConfig
from support.fake_world import FakeWorld
from support.tiny_run import of, tiny_config

SMOLLM = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "eos_token_id": [2, 49000],
}  # fmt: skip
OLD_XEON = {
    "engine bfloat16 kernels": 40.0, "engine bfloat16 fused": 17.0, "engine float32 fused": 61.0,
    "trainer bfloat16 kernels": 30.0, "trainer float32 kernels": 55.0, "trainer float32 torch": 54.0,
}  # fmt: skip
AMX = {
    "engine bfloat16 kernels": 900.0, "engine bfloat16 fused": 300.0, "engine float32 fused": 120.0,
    "trainer bfloat16 kernels": 700.0, "trainer float32 kernels": 90.0, "trainer bfloat16 torch": 400.0,
}  # fmt: skip


@dataclass(kw_only=True)
class Timed(FakeWorld):
    """A world whose run has an allowance, and an evaluation before and after."""

    allowance: Allowance | None = None
    slower: float = 1.0
    """Times by which the machine changes in the middle."""

    def build(self, resume: bool = False):
        pipeline = super().build(resume)
        self.kept: list[tuple[int, int]] = []
        telemetry = self.parts.telemetry
        minutes = Minutes(self.allowance, lambda *told: self.kept.append(told), telemetry.record, telemetry.clock)
        pipeline._parts = self.parts = dataclasses.replace(self.parts, minutes=minutes)
        return pipeline

    async def timed(self, evaluation: float) -> float:
        pipeline, clock = self.build(), asyncio.get_running_loop().time
        await self.go_live()
        await asyncio.sleep(evaluation)
        self.parts.minutes.measured(evaluation=evaluation)
        change = asyncio.get_running_loop().call_later(self.allowance.end / 2, self._change)
        await pipeline.run()
        change.cancel()
        self.trained = clock()
        await asyncio.sleep(evaluation * max(1.0, self.slower))
        return clock()

    def _change(self) -> None:
        self.engine.seconds_per_token *= self.slower
        self.trainer.seconds_per_step *= self.slower


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.floats(0.001, 2.0), st.floats(0.01, 30.0), st.floats(0.0, 20.0), st.floats(1 / 3, 3.0), st.integers(2, 40),
    st.floats(60.0, 1200.0), st.sampled_from((0.25, 1.0, 2.0)),
)  # fmt: skip
def test_a_run_never_exceeds_its_minutes(
    tmp_path_factory, token: float, step: float, evaluation: float, off: float, steps: int, end: float, slower: float
):
    """However fast the machine is, the measurement being off by three, and the machine another one in the middle."""
    expected = (step + 3 * 2 * 8 * token) * off
    engine, trainer = FakeEngine(seconds_per_token=token), FakeTrainer(seconds_per_step=step)
    one = Allowance(end=end, steps=steps, most=40, evaluation=evaluation * off, save=0.0, step=expected)
    world = Timed(
        tmp_path_factory.mktemp("timed"), steps=steps, engine=engine, trainer=trainer, allowance=one, slower=slower
    )
    over = virtual_time.run(world.timed(evaluation))
    done = world.pipeline.step
    longest = max(1.0, slower) * (step + 8 * token * 4) + max(0.0, slower - MARGIN) * evaluation
    assert over <= end + (longest if done == 1 or slower > 1 else 1e-6), (over, end, done)
    assert 1 <= done <= 40 and world.buffer.accounting().balance() == 0
    planned = [fact.steps for fact in world.facts.of(Planned)]
    assert done == (planned[-1] if planned else steps) and [kept for kept, _ in world.kept] == planned
    assert world.facts.facts  # C2 was asserted at every fact


def test_a_run_with_time_to_spare_does_more_and_one_without_ends_early(tmp_path):
    fast = Timed(
        tmp_path / "a",
        steps=5,
        trainer=FakeTrainer(seconds_per_step=0.1),
        allowance=Allowance(end=360, steps=5, most=30, evaluation=1.0, save=0.0, step=10.0),
    )
    virtual_time.run(fast.timed(1.0))
    assert fast.pipeline.step == 30 and fast.kept == [(30, 3)]
    assert "30 steps instead of 5" in fast.facts.of(Planned)[0].message
    slow = Timed(
        tmp_path / "b",
        steps=30,
        trainer=FakeTrainer(seconds_per_step=20.0),
        allowance=Allowance(end=200, steps=30, most=30, evaluation=1.0, save=0.0, step=5.0),
    )
    assert virtual_time.run(slow.timed(10.0)) <= 200
    assert 5 <= slow.pipeline.step < 10 and slow.kept[0] == (slow.kept[0][0], 3)


def test_waiting_for_groups_that_never_come_ends_in_time(tmp_path):
    """Prompts without contrast: the trainer waits, and would for ever."""

    class Fading(FakeEngine):
        async def generate(self, request):
            if asyncio.get_running_loop().time() > 60:
                await asyncio.sleep(10_000)
            return await super().generate(request)

    one = Allowance(end=200, steps=100, most=100, evaluation=5.0, save=0.0, step=1.0)
    world = Timed(tmp_path / "a", steps=100, engine=Fading(), trainer=FakeTrainer(seconds_per_step=2.0), allowance=one)
    assert virtual_time.run(world.timed(5.0)) <= 200
    assert world.kept[-1][0] == world.pipeline.step and world.checkpoints.all()


def test_a_resumed_run_whose_time_is_over_says_so_and_trains_nothing(tmp_path):
    said: list[Any] = []
    minutes = Minutes(
        Allowance(end=100.0, steps=20, most=60, evaluation=10.0, save=8.0, step=10.0),
        record=said.append,
        clock=lambda: 99.0,
    )
    minutes.begin(7)
    assert not minutes.another(7) and minutes.another(0)
    assert [type(fact) for fact in said] == [Warned] and "train.minutes" in said[0].message


# --- settings --------------------------------------------------------------------------------------------------------------

MACHINE = Machine(2, 16 << 30, 16 << 30, None, None)


def model_of(directory: Path, config: dict[str, Any] = SMOLLM) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_what_is_chosen_stands_in_the_settings_beside_what_was_asked_for(tmp_path, tiny_llama):
    config = load_config(tiny_config(tmp_path, tiny_llama, train={"dtype": "auto"}, engine={"dtype": "auto"}))
    measurer = FakeMeasurer(Figures(OLD_XEON, update=0.1, rows=32))
    settled = settle(config, model_of(tmp_path / "m"), MACHINE, 135_000_000, measurer)
    assert (settled.config.engine.dtype, settled.config.train.dtype) == ("float32", "float32")
    assert settled.config.chosen.wishes["engine.dtype"] == "auto" and measurer.asked
    assert "61 tokens a second" in settled.config.chosen.why["engine chosen"]
    assert load_config(dataclasses.asdict(settled.config)) == settled.config


def test_minutes_are_fitted_and_written_down(tmp_path, tiny_llama):
    tables = {"train": {"steps": 60, "minutes": 2}, "rollout": {"max_tokens": 40}, "eval": {"prompts": 16}}
    config = load_config(tiny_config(tmp_path, tiny_llama, staleness={"groups_per_step": 8}, **tables))
    settled = settle(
        config, model_of(tmp_path / "m"), MACHINE, 135_000_000, FakeMeasurer(Figures(OLD_XEON, 0.1, rows=32))
    )
    fitted = fit_minutes(settled, share_of(2, 0, 0), 10**8, 46)
    assert fitted.config.staleness.groups_per_step == 2 < 8 and fitted.config.train.steps < 60
    assert fitted.config.chosen.wishes["staleness.groups_per_step"] == 8
    one = allowance_of(fitted.config.train, fitted.config.chosen)
    assert one is not None and (one.end, one.most, one.steps) == (120.0, 60, fitted.config.train.steps)
    assert "one turn" not in fitted.config.chosen.why["minutes"]
    game = dataclasses.replace(config.environment, kind="textarena", name="Nim-v0", max_turns=8)
    turns = dataclasses.replace(settled, config=dataclasses.replace(settled.config, environment=game))
    said = fit_minutes(turns, share_of(2, 0, 0), 10**8, 46).config.chosen.why["minutes"]
    assert "if a rollout had one turn; the first steps will correct it" in said
    busy = fit_minutes(settled, share_of(2, 30, 0), 10**8, 46)
    assert (
        "too short for this machine" in busy.notes[0]
        and "other processes leave about" in busy.config.chosen.why["minutes"]
    )


def test_where_nothing_was_measured_everything_is_planned_and_the_first_steps_tell(tmp_path, tiny_llama):
    tables = {"train": {"steps": 500, "minutes": 5}, "staleness": {"groups_per_step": 8}}
    found = asyncio.run(rehearse(load_config(tiny_config(tmp_path, tiny_llama, **tables))))
    assert found.config.train.steps == 500 and found.config.chosen.wishes == {}
    assert "500 steps are planned" in dict(found.sections["Where"])["minutes"]
    one = allowance_of(found.config.train, found.config.chosen)
    assert one is not None and one.step == 0 and one.end == 300


@pytest.mark.slow
def test_a_run_keeps_what_was_chosen_when_it_goes_on(tmp_path, tiny_llama):
    """Whole: a run with a fitted plan, then the same config file again with --resume."""
    tables = {
        "train": {"steps": 3, "minutes": 30, "dtype": "auto"},
        "engine": {"dtype": "auto"},
        "checkpoint": {"every": 2},
    }
    source = tiny_config(tmp_path, tiny_llama, eval={"prompts": 4, "samples": 1}, **tables)
    figures = Figures({**OLD_XEON, "trainer float32 torch": 80.0}, 0.001, rows=32)
    done = run.train(load_config(source), measurer=FakeMeasurer(figures))
    directory = done.run_dir if hasattr(done, "run_dir") else Path(source["out"]) / "tiny"
    kept = read_config(config_of_run(directory))
    assert (kept.engine.dtype, kept.train.dtype, kept.train.path, kept.train.steps) == (
        "float32",
        "float32",
        "torch",
        3,
    )
    started, texts = of(directory, RunStarted), of(directory, FirstText)
    assert "float32 PyTorch" in started[0].chosen["trainer chosen"] and "float32" in started[0].where["engine"]
    assert texts and texts[0].tokens > 0
    again = resumed_settings({**source, "train": {**source["train"], "steps": 5}}, directory)
    assert again["engine"]["dtype"] == "float32" and again["train"]["path"] == "torch" and again["train"]["steps"] == 5
    result = headrace.train({**source, "train": {**source["train"], "steps": 5}}, resume=directory)
    assert result.step == 5 and read_config(config_of_run(directory)).train.path == "torch"
    assert msgspec.structs.asdict(started[0])["steps"] == 3


@pytest.mark.slow
def test_an_evaluation_of_a_config_chooses_as_a_run_would_and_one_of_a_run_does_not(tmp_path, tiny_llama, capsys):
    config = load_config(tiny_config(tmp_path, tiny_llama, train={"dtype": "auto"}, engine={"dtype": "auto"}))
    measurer = FakeMeasurer(Figures(OLD_XEON, update=0.1, rows=32))
    one_shot.evaluate(config, prompts=2, measurer=measurer)
    assert measurer.asked and "engine chosen: float32 PyTorch: 61 tokens a second" in capsys.readouterr().err
    done = run.train(config, measurer=measurer)
    asked = len(measurer.asked)
    one_shot.evaluate(read_config(config_of_run(done.directory)), done.directory, prompts=2, measurer=measurer)
    assert len(measurer.asked) == asked and "chosen" not in capsys.readouterr().err


def test_what_is_otherwise_than_at_the_beginning_is_said():
    def started(cpu: str, engine: str) -> RunStarted:
        where = {"engine": engine, "trainer": "2 threads"}
        return RunStarted(0.0, "a", "b", 0, 5, 2, 2, 4, 1, 1, where, machine={"cpu": cpu, "threads": "2"})

    assert machine_change(started("Xeon", "kernels llama"), started("Xeon", "kernels llama")) == ""
    message = machine_change(started("Xeon", "kernels llama"), started("EPYC", "fused llama"))
    assert "cpu was Xeon, now EPYC" in message and "engine: it was kernels llama, now fused llama" in message


def test_the_learning_rate_falls_to_the_end_that_is_planned_now():
    config = TrainConfig(steps=100, learning_rate=1.0, schedule="cosine", warmup_steps=2)
    from headrace.trainer.config import learning_rate

    assert learning_rate(11, config) > 0.9 and learning_rate(11, config, 12) < 0.1
    assert learning_rate(11, config, 100) == learning_rate(11, config)


def test_a_step_that_is_done_again_has_the_number_of_steps_that_it_had(tmp_path):
    world = Timed(
        tmp_path,
        steps=5,
        trainer=FakeTrainer(seconds_per_step=0.1),
        allowance=Allowance(end=360, steps=5, most=30, evaluation=1.0, save=0.0, step=10.0),
    )
    virtual_time.run(world.timed(1.0))
    assert [step.steps for step in read_steps(tmp_path)][:4] == [5, 5, 5, 30]
    assert [batch.steps for batch in world.trainer.batches] == [step.steps for step in read_steps(tmp_path)]


def test_alternatives_of_a_fork_count_as_the_turns_that_they_play() -> None:
    """Of rollouts with at most four turns: from the last turn on a quarter of a rollout, from any on average 5/8."""
    known = {"model": {"path": "m"}, "task": {"kind": "seeds"}, "environment": {"function": "e.py:E", "max_turns": 4}}

    def rollouts(**forks: Any) -> int:
        return wish_of(load_config({**known, "rollout": {"group_size": 8, "forks": forks}}), 50).rollouts

    assert rollouts() == 8
    assert rollouts(alternatives=3, turn="first") == 32
    assert rollouts(alternatives=3, turn="last") == 14
    assert rollouts(alternatives=3, turn="random") == rollouts(alternatives=3, turn="entropy") == 23
