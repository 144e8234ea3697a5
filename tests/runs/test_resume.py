"""Going on with a run: everything is read and checked before anything is changed, and killed in between it can be done again.

The runs are those of the simulation (`headrace/testing/faultsim/lives.py`), with settings put beside them: no model is loaded.
"""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.commands.show.status import report as status
from headrace.core.errors import ConfigError, HeadraceError, WorkerDied
from headrace.core.reports import TrainReport
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Prompt, Request, RolloutKey, Sampling
from headrace.durable.atomic_files import read_lines
from headrace.durable.journal import (
    AnyRecord,
    Damage,
    DrawnRecord,
    Journal,
    SteppedRecord,
    end_of_journal,
    read_steps,
)
from headrace.durable.pass_log import PassLog, read_passes
from headrace.facts.facts import RunEnded, TicketDrawn, Warned
from headrace.facts.kept_settings import configs_until
from headrace.facts.records import METRICS, StepRow
from headrace.loop.checkpoints import Checkpoints, ControllerState, load_controller
from headrace.loop.recovery import SavedRun, _begun, read_saved_run
from headrace.run.config import RunConfig, dump_config, read_config
from headrace.run.lane import Lane, open_lane
from headrace.run.resume_rules import changes, meaning
from headrace.run.run_directory import RunDirectory
from headrace.testing.faultsim.faults import Disk, Fault, Killed
from headrace.testing.faultsim.lives import Case
from support.journal_frames import frames_of, put_frames, spoil
from support.kill_child import FINISHED, live
from support.tiny_run import Config, of, tiny_config

CASE = Case(7, steps=7, checkpoint_every=2)


@dataclass(frozen=True)
class Killed7:
    """A run of seven steps that was killed with steps behind its newest checkpoint."""

    path: Path
    config: Config

    def copy(self, to: Path) -> Path:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.path, to)
        return to

    def settings(self, **tables: Any) -> RunConfig:
        config = dict(self.config)
        for name, table in tables.items():
            config[name] = {**config[name], **table}
        return read_config(config)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Killed7:
    home = tmp_path_factory.mktemp("killed")
    config = tiny_config(home, tiny_llama, train={"steps": CASE.steps})
    for at in range(130, 400, 3):
        path = home / "run"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        live(path, CASE, 0, Fault("kill", 0, at, 0.5))
        saved = saved_of(path)
        in_step = len(of(path, StepRow)) == saved.step and len(of(path, TicketDrawn)) == saved.resume.next_ticket
        if saved.state and saved.step == saved.saved_step + 2 and in_step and saved.resume.flying:
            break
    else:
        raise AssertionError("no kill leaves such a run")
    (path / "config.toml").write_text(dump_config(read_config(config)))
    (path / ".lock").touch()
    (path / "logs").mkdir()
    return Killed7(path, config)


def saved_of(path: Path, same_training: bool = True) -> SavedRun:
    checkpoint, _ = Checkpoints(path / "checkpoints", 2).newest_good()
    return read_saved_run(path, load_controller(checkpoint) if checkpoint else None, same_training)


def begun(path: Path, config: RunConfig | None = None) -> Lane:
    """As far as a resume changes files before it goes on. Without `config`: with the settings of the directory."""
    with RunDirectory.of(path, resume=True) as directory:
        lane = open_lane(config or read_config(path / "config.toml"), directory, resume=True)
        try:
            lane.storage.begin()
        finally:
            lane.storage.close()
    return lane


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def goes_on(path: Path, number: int = 1) -> None:
    """Through other processes, to its end."""
    while (code := live(path, CASE, number, None)) != FINISHED:
        assert code < 0 and number < 9
        number += 1
    steps = [step.step for step in read_steps(path)]
    assert steps == list(range(CASE.steps)), "the journal"
    assert [row.report.step for row in of(path, StepRow)] == steps, "the metrics"
    prompts = [group.prompt.id for step in read_steps(path) for group in step.groups]
    assert len(prompts) == len(set(prompts)), "a prompt was trained twice"
    ended = of(path, RunEnded)[-1]
    assert ended.reason == "finished" and ended.accounting.balance() == 0


def settings_in(path: Path) -> str:
    """The settings of a run, without the digests of what is in the files that they name."""
    return settings_of_file(path / "config.toml")


def settings_of_file(path: Path) -> str:
    return path.read_text().partition("# contents of ")[0]


def assert_whole(path: Path, before: RunConfig, after: RunConfig) -> None:
    """What a reader of the directory can tell of a run that can go on."""
    current = settings_in(path)
    assert current in (dump_config(before), dump_config(after)), "the settings are others, or none"
    saved = saved_of(path)
    assert not saved.complaints, saved.complaints
    steps = [row.report.step for row in of(path, StepRow)]
    assert steps == list(range(saved.step)), f"the metrics have steps {steps}, the journal {saved.step}"
    tickets = [fact.ticket for fact in of(path, TicketDrawn)]
    assert tickets == list(range(saved.resume.next_ticket)), "tickets twice, or without a record"
    for until, settings in configs_until(path):
        assert settings_of_file(settings) == dump_config(before) and until <= saved.step
    state = saved.state
    assert state is not None
    passes = read_passes(path, state.step, state.passes)
    assert all(output.version <= saved.step for output in passes), "tokens of weights that no step has made"
    assert current == dump_config(before) or not changes(meaning(before), meaning(after)).steps or not saved.records, (
        "steps of other settings"
    )
    assert not list(path.glob(".*.part")), "what a kill left of a file is cleaned up"


def set_aside(path: Path) -> list[bytes]:
    """The records that were moved out of the journal."""
    aside = path / "journal.discarded"
    (path / "aside").mkdir(exist_ok=True)
    return frames_of(put_frames(path / "aside", [aside.read_bytes()])) if aside.exists() else []


def operations_of(act: Callable[[Path], object], path: Path) -> int:
    disk = Disk(path)
    with disk.mounted() as mounted:
        act(mounted)
    return disk.operations


CHANGES = [
    pytest.param({"train": {"learning_rate": 2e-2}}, id="another course"),
    pytest.param({"checkpoint": {"every": 3}}, id="the same course"),
]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_killed_at_any_file_operation_of_a_resume_with_other_settings_it_can_be_resumed(
    killed: Killed7, tmp_path: Path, change: dict[str, Any]
) -> None:
    before, after = killed.settings(), killed.settings(**change)
    count = operations_of(lambda path: begun(path, after), killed.copy(tmp_path / "count"))
    assert count >= (9 if "train" in change else 5)
    settings = set()
    for at in range(count + 1):
        path = killed.copy(tmp_path / "run")
        known = set(frames_of(path))
        disk = Disk(path, [Fault("kill", 0, at, 0.5)])
        try:
            with disk.mounted() as mounted:
                begun(mounted, after)
        except Killed:
            assert at < count
        settings.add(settings_in(path))
        begun(path)  # plainly, by the next process
        assert_whole(path, before, after)
        aside = set(set_aside(path))
        assert known <= set(frames_of(path)) | aside, "a record is neither in the journal nor set aside"
        whole = frames_of(path)
        begun(path)
        assert frames_of(path) == whole
        assert_whole(path, before, after)
        if at % 3 == 0:
            goes_on(path)
    assert settings == {dump_config(before), dump_config(after)}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.99])
def test_a_disk_that_is_full_at_any_write_of_a_resume_costs_a_sentence(
    killed: Killed7, tmp_path: Path, share: float
) -> None:
    before, after = killed.settings(), killed.settings(train={"learning_rate": 2e-2})
    count, said = operations_of(lambda path: begun(path, after), killed.copy(tmp_path / "count")), 0
    for at in range(count):
        path = killed.copy(tmp_path / "run")
        disk = Disk(path, [Fault("full", 0, at, share)])
        with disk.mounted() as mounted:
            try:
                begun(mounted, after)
            except HeadraceError as error:
                said += 1
                assert "No space left" in str(error) and str(path) in str(error)
        begun(path)
        assert_whole(path, before, after)
    assert said > count / 2, "passes, and what is only tidied up, may fail in peace"


@pytest.mark.slow
def test_several_adapters_killed_between_any_two_operations_all_go_on(killed: Killed7, tmp_path: Path) -> None:
    """In the order of `run.py`: each adapter's directory, then that of all."""
    before, after = killed.settings(), killed.settings(train={"learning_rate": 2e-2})

    def make() -> Path:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        for name in ("e", "o"):
            killed.copy(tmp_path / "run" / name)
        (tmp_path / "run/config.toml").write_text(dump_config(before))
        return tmp_path / "run"

    def resumed(path: Path, config: RunConfig) -> None:
        for name in ("e", "o"):
            begun(path / name, config)
        with RunDirectory.reopen(path) as directory:
            directory.keep_config(dump_config(config), 0)

    for at in range(0, operations_of(lambda path: resumed(path, after), make()), 2):
        path = make()
        with pytest.raises(Killed), Disk(path, [Fault("kill", 0, at, 0.5)]).mounted() as mounted:
            resumed(mounted, after)
        resumed(path, read_config(path / "config.toml"))
        for name in ("e", "o"):
            assert settings_in(path / name) == settings_in(path)
            assert [row.report.step for row in of(path / name, StepRow)] == list(range(saved_of(path / name).step))


# --- refused, finished ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward": {"function": "{home}/reward.py:typo"}}, "typo"),
        ({"task": {"path": "{home}/nowhere.jsonl"}}, "nowhere.jsonl"),
        ({"model": {"path": "{home}/no-model"}}, "model.path was"),
        ({"train": {"steps": 3}}, r"has done \d steps, and train.steps = 3 asks for fewer: set train.steps to \d"),
    ],
)
def test_a_refused_resume_leaves_every_byte_as_it_was(
    killed: Killed7, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    home = str(killed.path.parent)
    path = killed.copy(tmp_path / "run")
    tree = {name: {key: str(value).replace("{home}", home) if key != "steps" else value for key, value in table.items()}
            for name, table in change.items()}  # fmt: skip
    before = bytes_of(path)
    with pytest.raises(ConfigError, match=words):
        headrace.train(killed.settings(**tree), resume=path)
    assert bytes_of(path) == before


def test_a_finished_run_says_so_and_how_to_go_on(
    killed: Killed7, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = killed.copy(tmp_path / "run")
    goes_on(path)
    before = bytes_of(path)
    result = headrace.train(killed.settings(), resume=path)
    assert (result.reason, result.step, result.directory) == ("finished", CASE.steps, path)
    output = capsys.readouterr().out
    assert f"{path} is finished: all of its 7 steps are done" in output
    assert f"headrace train --resume {path} --set train.steps=14" in output
    assert bytes_of(path) == before
    with pytest.raises(ConfigError, match="has done 7 steps, and train.steps = 5 asks for fewer"):
        headrace.train(killed.settings(train={"steps": 5}), resume=path)
    assert bytes_of(path) == before


def test_a_refused_start_leaves_no_directory(killed: Killed7, tmp_path: Path) -> None:
    wrong = {"reward": {"function": f"{killed.path.parent}/reward.py:typo"}}
    config = {**killed.config, **wrong, "out": str(tmp_path / "runs" / "deep")}
    for _ in range(2):
        with pytest.raises(ConfigError, match="typo"):
            headrace.train(config)
        assert not list(tmp_path.iterdir())


def test_what_was_made_for_a_run_that_never_began_goes_again(tmp_path: Path) -> None:
    """Refused, or interrupted, while the models are loaded; where a process died its log stays, for that is what it is there for."""
    path = tmp_path / "runs/deep/tiny"

    def leaves(error: BaseException) -> None:
        with pytest.raises(type(error)), RunDirectory.of(path, resume=False) as directory:
            (directory.logs / "engine.log").write_text("its last words")
            (directory.path / "status.json").write_text("{}")
            raise error

    for error in (ConfigError("no such layer"), KeyboardInterrupt()):
        leaves(error)
        assert not list(tmp_path.iterdir())
    leaves(ConfigError(f"the server did not come up (its output is in {path / 'logs/engine.log'})"))
    assert bytes_of(path) == {"logs/engine.log": b"its last words"}, "the message names it"
    shutil.rmtree(path.parents[1])
    leaves(WorkerDied("engine", "was killed"))
    assert bytes_of(path) == {"logs/engine.log": b"its last words"}
    with pytest.raises(ConfigError, match=r"holds no run: .* \(a run was started there, but ended before it began\)"):
        status(path)
    (path / "mine.txt").write_text("somebody else's")
    leaves(ConfigError("no such layer"))
    assert (path / "mine.txt").exists(), "what was there stays"


# --- a loss of power, and damage -----------------------------------------------------------------------------------------


def test_a_journal_that_is_shorter_than_the_checkpoint_knows_is_repaired_at_once(
    killed: Killed7, tmp_path: Path
) -> None:
    state = saved_of(killed.path).state
    assert state is not None
    for left in (0, 1, state.journal // 2, state.journal - 1):
        path = killed.copy(tmp_path / "run")
        put_frames(path, frames_of(path)[:left])
        if not left:
            shutil.move(path / "journal", tmp_path / "away")  # as a message of `pipeline.unlike` says
        lane = begun(path)
        (said,) = lane.storage.saved.complaints  # type: ignore[union-attr]
        assert f"({state.journal - left} records before the checkpoint of step {state.step})" in said
        assert f"The run is resumed from step {state.step}, whose weights and groups are complete" in said
        assert any(said == fact.message for fact in of(path, Warned)), "the user reads it"
        assert end_of_journal(path) in (state.journal, left), "what the checkpoint knows of them is there again"
        more = _one_more_step(path, state)  # by a process that is killed then
        for _ in range(2):
            saved = begun(path).storage.saved
            assert saved is not None and saved.records == more and not saved.rewinds and saved.step == state.step + 1
        assert [step.step for step in read_steps(path)][-1:] == [state.step], "with all of its groups"
        damage = Damage()
        list(read_steps(path, damage=damage))
        assert "cannot be found" in str(damage) and "trains ticket" not in str(damage)


def _one_more_step(path: Path, state: ControllerState) -> tuple[AnyRecord, ...]:
    """Of the groups that waited in the checkpoint, written as the run would."""
    journal = Journal(path, position=state.journal)
    assert journal.position == state.journal
    tickets = tuple(group.ticket for group in state.buffer.ready)
    records = (
        DrawnRecord(99.0, state.buffer.next_ticket, Prompt("new", "", (1,))),
        SteppedRecord(99.5, TrainReport(state.step, state.step + 1), tickets),
    )
    for record in records:
        journal.write(record)
    journal.close()
    return records


def test_damage_before_the_checkpoint_is_said_and_costs_nothing(killed: Killed7, tmp_path: Path) -> None:
    path = killed.copy(tmp_path / "run")
    spoil(path, 3)
    lane = begun(path)
    saved = lane.storage.saved
    assert saved is not None and saved.step == saved_of(killed.path).step and not saved.rewinds
    assert any(
        "record 3 does not match its checksum. The run itself is complete" in warning.message
        for warning in of(path, Warned)
    )


def test_damage_behind_the_checkpoint_sets_aside_what_follows(killed: Killed7, tmp_path: Path) -> None:
    path = killed.copy(tmp_path / "run")
    state = saved_of(path).state
    assert state is not None
    frames = frames_of(path)
    for place, in_head in ((state.journal, True), (len(frames) - 1, True), (state.journal, False)):
        put_frames(path, frames)
        spoil(path, place, in_head)
        lane = begun(path)
        assert lane.storage.saved is not None and lane.storage.saved.rewinds
        assert frames_of(path) == frames[: state.journal]
        assert_whole(path, read_config(path / "config.toml"), read_config(path / "config.toml"))


@pytest.mark.parametrize("place", [2, -5])
def test_a_bad_byte_in_the_metrics_stops_nothing(killed: Killed7, tmp_path: Path, place: int) -> None:
    """Behind the checkpoint it is moved. What is before is not read again, and its line was counted when it could be read."""
    path = killed.copy(tmp_path / "run")
    sound = begun(killed.copy(tmp_path / "sound")).storage.recorder.state.totals.tokens
    lines = (path / METRICS).read_bytes().splitlines(keepends=True)
    damaged = lines[place] = lines[place][:10] + b"\xff" + lines[place][11:]
    (path / METRICS).write_bytes(b"".join(lines))
    assert status(path) == 1, "it is dead, and can be asked"
    state = begun(path).storage.recorder.state
    behind = place < 0
    assert (damaged[:-1] in read_lines(path / "metrics.jsonl.discarded")) == behind
    assert (damaged[:-1] in read_lines(path / METRICS)) != behind
    assert any("1 line of metrics.jsonl cannot" in warning.message for warning in state.warnings) == behind
    assert behind or state.totals.tokens == sound
    assert any("1 line of metrics.jsonl cannot be read" in warning.message for warning in of(path, Warned))
    goes_on(path)


# --- memory --------------------------------------------------------------------------------------------------------------


def test_passes_are_folded_as_they_are_read(tmp_path: Path) -> None:
    """8 MB of passes, of which a few tokens belong to what is in flight."""
    log = PassLog(tmp_path, 0, pytest.fail)
    over = tuple(str(RolloutKey(ticket, 0)) for ticket in range(64))
    mine = str(RolloutKey(99, 0))
    for number in range(2000):
        names = (*over, mine) if number % 200 == 0 else over
        ends = tuple(Finished(name, "stop") for name in over) if number % 50 == 49 else ()
        count = len(names)
        output = StepOutput(0, names, (number,) * count, (-0.5,) * count, (0,) * count, ends)
        log.write(output)
    log.close()
    size = sum(one.stat().st_size for one in (tmp_path / "passes").iterdir())
    request, drawn = (
        Request(mine, (1,), Sampling()),
        tuple(DrawnRecord(0.0, t, Prompt("p", "", ())) for t in range(100)),
    )
    tracemalloc.start()
    try:
        found = _begun(SavedRun(run_dir=tmp_path, state=None, records=drawn), {mine: request}.get, "")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (
        found is not None
        and found.completions[mine].tokens == tuple(range(0, 2000, 200))
        and found.completions.keys() == {mine}
    )
    assert peak < size / 10, f"{peak} bytes for {size} on the disk"


def newest_state(run: Path) -> ControllerState:
    return load_controller(run / "checkpoints" / f"step-{of(run, RunEnded)[-1].step:06d}")


def is_under_way(run: Path, state: ControllerState) -> bool:
    """Whether a rollout of 96 tokens has some and is not done, counting what its engine did between the checkpoint and the end."""
    tokens = {name: len(one.tokens) for name, one in state.begun.items() if one.stop == "interrupted"}
    for output in read_passes(run, state.step, state.passes):
        if isinstance(output, StepOutput):
            for name in output.request_ids:
                tokens[name] = tokens.get(name, 0) + 1
            for end in output.finished:
                tokens.pop(end.request_id, None)
    return any(0 < count < 95 for count in tokens.values())


def stop_after_two(step: headrace.Step) -> None:
    if step.step >= 2:
        raise headrace.StopTraining


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0.9, 1.0), (1.0, 0.9)])
def test_rollouts_under_way_go_on_with_another_top_p(
    tmp_path: Path, tiny_llama: Path, before: float, after: float
) -> None:
    """Their tokens before the resume keep the masks that they were sampled under, or have none."""
    config = tiny_config(
        tmp_path,
        tiny_llama,
        rollout={"group_size": 2, "max_tokens": 96, "top_p": before},
        train={"steps": 100, "learning_rate": 1e-7},
        engine={"context_length": 128, "max_running": 1},
        staleness={
            "max_lag": 40,
            "groups_per_step": 1,
        },  # 82 rollouts one by one: the engine has work when the run stops
    )
    run = headrace.train(config, on_step=stop_after_two).directory
    while not is_under_way(run, state := newest_state(run)):  # it stopped between two rollouts
        headrace.train(resume=run, on_step=stop_after_two)
    steps = (
        of(run, RunEnded)[-1].step + len(state.buffer.ready) + 3
    )  # the groups behind those that are ready are the ones under way
    headrace.train(resume=run, sets=[f"rollout.top_p={after}", f"train.steps={steps}"])
    mixed = 0
    for step in read_steps(run):
        for row in (row for group in step.groups for row in group.rows):
            cut = np.diff(np.frombuffer(row.sampling_mask.offsets, np.int64)) > 0 if row.sampling_mask else None
            assert cut is None or len(cut) == len(row.tokens)
            mixed += cut is not None and 0 < cut.sum() < len(cut)
    assert mixed, "no rollout was under way"
    for row in of(run, StepRow):
        assert abs(row.report.kl) < 1e-3, "each token is trained under the distribution that it was sampled from"
