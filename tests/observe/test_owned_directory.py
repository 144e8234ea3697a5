"""Temporary directories go with their owners, even if those and whoever cleans up after them are killed at once."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.episodes.environments.agents.agent_process import AgentProcess, Reaper
from headrace.processes.health.owned_directory import OwnedDirectory, remove_all, sweep

OWNER = """
import os, sys, time
from headrace.processes.health.owned_directory import OwnedDirectory
print(OwnedDirectory("agent").path, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_what_a_killed_process_leaves_is_removed_with_the_next_directory(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "file").write_text("of an agent")
        own = OwnedDirectory("agent")
        assert left.is_dir(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    assert left.is_dir()
    other = OwnedDirectory("ranks")
    assert not left.exists() and Path(own.path).is_dir() and Path(other.path).is_dir()
    own.remove()
    other.remove()
    assert list(place.iterdir()) == []


def nested(depth: int) -> None:
    """Makes directories within each other, deeper than any path may be long, and a file in the last one."""
    here = os.getcwd()
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    Path("file").write_text("")
    os.chdir(here)


def test_whatever_a_program_has_left_is_removed_and_nothing_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that stays is one that the next call of a sandbox finds, and one of many that fill the disk."""
    (outside := place / "mine").mkdir(mode=0o500)
    left = Path(OwnedDirectory("agent").path)
    monkeypatch.chdir(left)
    nested(3000)
    (left / "link").symlink_to(outside)
    for mode in (0o000, 0o300, 0o500):
        (left / f"{mode:o}" / "d" / "e").mkdir(parents=True)
        (left / f"{mode:o}" / "d" / "file").write_text("")
        (left / f"{mode:o}" / "d").chmod(mode)
        (left / f"{mode:o}").chmod(mode)
    monkeypatch.chdir(place)
    remove_all(str(left))
    assert [path.name for path in place.iterdir()] == ["mine"] and outside.stat().st_mode & 0o777 == 0o500
    (link := place / "link").symlink_to(outside)
    remove_all(str(link))
    assert outside.is_dir() and link.is_symlink()


def test_nothing_else_is_swept(place: Path) -> None:
    for name in ("headrace-own-file", "headrace-logs-x", "mine"):
        (place / name).mkdir() if "file" not in name else (place / name).write_text("")
    (place / "headrace-own-link").symlink_to(place / "mine")
    sweep()
    assert sorted(path.name for path in place.iterdir()) == [
        "headrace-logs-x",
        "headrace-own-file",
        "headrace-own-link",
        "mine",
    ]


def test_the_directory_of_an_agent_is_owned_while_it_runs(place: Path) -> None:
    """With its reaper killed as well, the next directory removes it."""

    class NoReaper(Reaper):
        def started(self, group: int, directory: str) -> None: ...

        def ended(self, group: int) -> None: ...

    async def go() -> None:
        command = [sys.executable, "-c", "import os; open('x', 'w'); print(os.getcwd())"]
        agent = await AgentProcess.start(command, dict(os.environ), given=b"", directory="", reaper=NoReaper())
        assert await agent.wait() == 0
        sweep()
        (name,) = os.listdir(place)
        assert agent.output.strip() == str(place / name) and os.listdir(place / name) == ["x"]
        await agent.end(None)
        assert os.listdir(place) == []

    asyncio.run(go())


def test_a_directory_that_somebody_is_sweeping_already_is_given_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a directory and the lock on it, another process may have found it without an owner."""
    made = iter([place / "headrace-own-agent-swept", place / "headrace-own-agent-mine"])

    def make(prefix: str) -> str:
        path = next(made)
        path.mkdir()
        if "swept" in path.name:
            held.append(os.open(path, os.O_RDONLY))
            fcntl.flock(held[0], fcntl.LOCK_EX)
        return str(path)

    held: list[int] = []
    monkeypatch.setattr("tempfile.mkdtemp", make)
    assert OwnedDirectory("agent").path == str(place / "headrace-own-agent-mine")
    os.close(held[0])
