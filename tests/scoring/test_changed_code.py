"""Code of the user's that is edited while a run goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, IdentityError, WorkerDied
from headrace.core.protocols import Job, Launcher
from headrace.episodes.environments.agents.agent_process import code_of
from headrace.episodes.scoring.functions import FunctionPools
from headrace.episodes.scoring.job import Effort, ScoringJob
from headrace.processes.asked_process import UserProgram
from headrace.processes.joining.greeting import Kind
from headrace.processes.joining.same_model import changed_code, digests
from headrace.processes.wire import WorkerEnd
from headrace.run.config import RunConfig, load_config
from headrace.run.resume_rules import check_resumable, contents_of, meaning
from headrace.run.seats import own_sites
from headrace.run.worker.build import build_engine_core, open_launcher
from headrace.run.worker.server_loop import ServerWorker
from headrace.run.worker.worker_messages import EngineStart, ServerNeeds
from headrace.weight_sync.files import Files


def settings_of(directory: Path, sets: Sequence[Any] = ()) -> RunConfig:
    (directory / "reward.py").write_text("def exact(completions, **columns):\n    return [1.0] * len(completions)\n")
    return load_config(
        {
            "model": {"path": "smollm2-135m-instruct"},
            "task": {"kind": "reasoning_gym", "name": "chain_sum"},
            "reward": {"function": f"{directory / 'reward.py'}:exact"},
            "eval": {"prompts": 4, "sets": list(sets)},
        }
    )


def test_code_that_changes_during_a_run_scores_nothing(tmp_path: Path) -> None:
    """A process that takes the place of another would load it: rewards of two meanings would stand beside each other, and nothing say so."""
    config = settings_of(tmp_path)
    (tmp_path / "reward.py").write_text(
        "import marks\n\n\ndef exact(completions, **columns):\n    return [marks.VALUE] * len(completions)\n"
    )
    (tmp_path / "marks.py").write_text("VALUE = 1.0\n")
    job = ScoringJob("2 + 2?", ("4",), ((1,),), {})

    async def go() -> None:
        sites = own_sites(config.code_files)
        pools = FunctionPools(config.reward, (), None, config.sandbox.settings, sites.scorers)
        (part,) = pools.parts
        try:
            assert await part.ask(job, Effort()) == [1.0]
            (tmp_path / "marks.py").write_text("VALUE = 0.5\n")
            assert await part.ask(job, Effort()) == [1.0], "what is loaded goes on"
            for pid in pools.pids:
                os.kill(pid, signal.SIGKILL)
            (died,), (refused,) = [await part.ask(job, Effort()) for _ in range(2)]
            assert isinstance(died, Failure) and isinstance(refused, Failure)
            assert f"{tmp_path / 'marks.py'} has changed since the run began" in refused.detail
            (tmp_path / "marks.py").write_text("VALUE = 1.0\n")
            assert await part.ask(job, Effort()) == [1.0]
        finally:
            await pools.close()

    asyncio.run(go())


def installed(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch, name: str = "judged") -> None:
    """As if this version of a package had been installed over the one before."""
    place = tmp_path / version / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(place.parent)


@pytest.mark.parametrize("kind", ["scorer", "environment"])
def test_a_package_that_changes_during_a_run_starts_no_process(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes the place of another would import it: rewards of two meanings would stand beside each other, and nothing say so."""
    config = settings_of(tmp_path)
    (tmp_path / "reward.py").write_text("def exact(completions, **columns):\n    import judged\n")
    installed(tmp_path, "1.0", monkeypatch)
    sites = own_sites({code: [str(tmp_path / "reward.py")] for code in config.code_files})
    (here,) = (sites.scorers if kind == "scorer" else sites.environments).every
    installed(tmp_path, "1.1", monkeypatch)
    with pytest.raises(OSError, match=r"judged 1\.1 \(the run has 1\.0\).*; pip install judged==1\.0, or stop"):
        asyncio.run(here.spawn(UserProgram(who="scorer 1", words=["none"], log=None)))


def test_an_engine_or_trainer_that_takes_the_place_of_another_refuses_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(launcher: Launcher) -> None:
        await launcher.worker(Job("engine", "engine"), lambda method, payload: None).start()

    launcher = open_launcher(tmp_path)
    installed(tmp_path, "99.9", monkeypatch, "torch")
    with pytest.raises(
        WorkerDied, match=r"engine process could not be started: .*torch 99\.9 \(the run has .*pip install torch=="
    ):
        asyncio.run(started(launcher))


def test_an_agent_of_another_environment_has_packages_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text("import judged\n")
    installed(tmp_path, "1.0", monkeypatch)
    ours, other = (code_of([program, str(tmp_path / "agent.py")]) for program in (sys.executable, "/usr/bin/env"))
    assert ours.packages == {"judged": "1.0"} and not other.packages
    assert not changed_code(ours)
    installed(tmp_path, "1.1", monkeypatch)
    assert "judged 1.1 (the run has 1.0)" in changed_code(ours) and not changed_code(other)


@pytest.mark.parametrize("kind", ["scorer", "environment"])
def test_evaluation_sets_code_is_watched_too(kind: Kind, tmp_path: Path) -> None:
    code = "def exact(completions, **columns):\n    return [1.0] * len(completions)\n\n\nasync def play(agent):\n    return 0.0\n"
    (tmp_path / "other.py").write_text(code)
    own = {"reward": {"function": f"{tmp_path / 'other.py'}:exact"}}
    if kind == "environment":
        own = {"environment": {"function": f"{tmp_path / 'other.py'}:play"}}
    config = settings_of(tmp_path, [{"name": "other", **own}])
    sites = own_sites(config.code_files)
    (here,) = (sites.scorers if kind == "scorer" else sites.environments).every
    (tmp_path / "other.py").unlink()
    with pytest.raises(OSError, match=r"other\.py cannot be read any more"):
        asyncio.run(here.spawn(UserProgram(who="scorer 1", words=["none"], log=None)))


def test_rows_in_directories_of_a_directory_are_known_to_a_run_that_is_resumed(tmp_path: Path) -> None:
    place = tmp_path / "rows" / "lang=de"
    place.mkdir(parents=True)
    (place / "0.parquet").write_bytes(b"one")
    tables = {"model": {"path": "org/name"}, "reward": {"function": f"{tmp_path / 'reward.py'}:exact"}}
    settings_of(tmp_path)
    config = load_config({**tables, "task": {"kind": "parquet", "path": str(tmp_path / "rows")}})
    before = contents_of(config)
    assert contents_of(config) == before
    (place / "0.parquet").write_bytes(b"two")
    changed = contents_of(config)
    assert {name for name in changed if changed[name] != before[name]} == {"task.path"}


def test_another_version_of_a_package_that_a_reward_imports_is_known_to_a_run_that_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of the form before, which knew of no packages, still holds; one of another file does not."""

    config = settings_of(tmp_path, [])
    plain = contents_of(config)
    reward = tmp_path / "reward.py"
    reward.write_text("import json\nimport judged\n" + reward.read_text())
    without = contents_of(config)
    installed(tmp_path, "1.0", monkeypatch)
    before = contents_of(config)
    assert contents_of(config) == before != without != plain
    assert contents_of(config, without) == without and contents_of(config, plain) == before
    installed(tmp_path, "1.1", monkeypatch)
    assert contents_of(config)["reward.function"] != before["reward.function"]
    assert contents_of(config, before) == contents_of(config)


@pytest.mark.parametrize("size", [100, 3 << 20])
def test_other_weights_of_the_same_size_are_known_to_a_run_that_is_resumed(size: int, tmp_path: Path) -> None:
    """The reference of a KL term, or a teacher, would be another one from then on."""
    settings_of(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(size))
    task = {"kind": "reasoning_gym", "name": "chain_sum"}
    reward = {"function": f"{tmp_path / 'reward.py'}:exact"}
    config = load_config({"model": {"path": str(model)}, "task": task, "reward": reward})
    before = contents_of(config)
    (model / "model.safetensors").write_bytes(b"\1" * size)
    with pytest.raises(ConfigError, match=r"the contents of model\.path have changed"):
        check_resumable(meaning(config, before), meaning(config, contents_of(config)))


def test_an_engine_that_takes_the_place_of_another_refuses_other_files_of_the_model(tmp_path: Path) -> None:
    """The weights come from the trainer; their use follows from these files."""
    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0}')
    start = EngineStart(str(tmp_path), {}, {}, files=digests(tmp_path))
    (tmp_path / "config.json").write_text('{"rope_theta": 500000.0}')
    (tmp_path / "merges.txt").write_text("a b")
    with pytest.raises(IdentityError, match=r"has other files than when the run began \(config\.json, merges\.txt\)"):
        build_engine_core(start)


def test_a_worker_with_a_server_refuses_other_files_of_the_model_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0}')
    needs, transport = ServerNeeds(), Files(str(tmp_path / "weights"))
    start = EngineStart(
        str(tmp_path), {"kind": "vllm", "python": ""}, {}, transport, files=digests(tmp_path), server=needs
    )
    (tmp_path / "config.json").write_text('{"rope_theta": 500000.0}')
    ours, other = socket.socketpair()
    with ours, other, pytest.raises(IdentityError, match=r"has other files than when the run began \(config\.json\)"):
        ServerWorker(WorkerEnd(ours), start)


def test_a_run_of_an_earlier_version_goes_on_by_its_own_digest(tmp_path: Path) -> None:
    """That knew the sizes of weights alone: it stays as it is while it holds, and another size is seen."""
    settings_of(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes(b"{}")
    (model / "model.safetensors").write_bytes(bytes(100))
    task = {"kind": "reasoning_gym", "name": "chain_sum"}
    reward = {"function": f"{tmp_path / 'reward.py'}:exact"}
    config = load_config({"model": {"path": str(model)}, "task": task, "reward": reward})
    now = contents_of(config)
    recorded = now | {"model.path": xxhash.xxh3_128(b"config.json{}model.safetensors 100").hexdigest()}
    assert recorded["model.path"] != now["model.path"] and contents_of(config, recorded) == recorded
    (model / "model.safetensors").write_bytes(bytes(101))
    assert contents_of(config, recorded)["model.path"] not in (recorded["model.path"], now["model.path"])
