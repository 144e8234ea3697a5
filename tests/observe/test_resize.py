"""A live view in a terminal whose size changes: nothing of an older frame stays, whatever the terminal has made of it meanwhile."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VIEW = """
import time
from rich.text import Text
from headrace.views.screen.console import Console, LiveView
console, frames = Console(), 0
def view():
    global frames
    frames += 1
    return Text("\\n".join([f"frame {frames}"] + [f"line {n} ".ljust(min(70, console.width - 1), ".") for n in range(console.height - 4)] + ["end"]))
with LiveView(get_renderable=view, console=console, refresh_per_second=10, transient=True):
    time.sleep(30)
"""
COMMANDS = re.compile(r"\x1b\[(\??)(\d*)([A-Za-z])|\x1b\[[\d;]*m|(\r)|(\n)|([^\x1b\r\n]+)")


class Grid:
    """What a terminal shows after it has obeyed: cursor up and down, the first place, erased lines, text."""

    def __init__(self, width: int, height: int, junk: str) -> None:
        self.width, self.height = width, height
        self.rows = [(junk * width)[:width] for _ in range(height)]
        self.x, self.y = 3, height - 1

    def feed(self, sent: str) -> None:
        for private, count, letter, start, line, text in COMMANDS.findall(sent):
            if text:
                row = self.rows[self.y].ljust(self.x)
                assert self.x + len(text) <= self.width, "a line that is wrapped would be two"
                self.rows[self.y] = row[: self.x] + text + row[self.x + len(text) :]
                self.x += len(text)
            elif start:
                self.x = 0
            elif line:
                self._down()
            elif letter == "A":
                self.y = max(0, self.y - int(count or 1))
            elif letter == "B":
                self.y = min(self.height - 1, self.y + int(count or 1))
            elif letter == "H":
                self.x = self.y = 0
            elif letter == "K" and count == "2":
                self.rows[self.y] = ""
            else:
                assert letter == "" or private, f"the emulator does not know {letter}"

    def _down(self) -> None:
        self.x = 0
        if self.y + 1 < self.height:
            self.y += 1
        else:
            self.rows = [*self.rows[1:], ""]


def resized(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def read(terminal: int, until: str) -> str:
    sent, end = "", time.monotonic() + 60
    ready = select.poll()  # not `select.select`, which knows the first 1,024 files of a process only
    ready.register(terminal, select.POLLIN)
    while not re.search(until, sent):
        assert time.monotonic() < end, sent
        if ready.poll(100):
            sent += os.read(terminal, 1 << 16).decode()
    return sent


@pytest.mark.parametrize("size", [(60, 20), (120, 40), (80, 12), (50, 30)])
def test_after_a_resize_the_terminal_shows_one_frame_and_nothing_else(size: tuple[int, int]) -> None:
    ours, theirs = pty.openpty()
    resized(ours, 80, 24)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    with subprocess.Popen([sys.executable, "-c", VIEW], stdin=theirs, stdout=theirs, env=environment) as view:
        os.close(theirs)
        try:
            read(ours, r"frame 2\b[\s\S]*end")
            resized(ours, *size)
            sent = read(
                ours, r"\x1b\[H[\s\S]*end[\s\S]*end"
            )  # the first frame of the new size, and one more in its place
        finally:
            view.kill()
    os.close(ours)
    grid = Grid(*size, junk="ghost ")
    grid.feed(sent[sent.index("\x1b[H") : sent.rindex("end") + 3])
    shown = [row.rstrip() for row in grid.rows]
    assert sum(row.startswith("frame ") for row in shown) == 1 and shown[0].startswith("frame ")
    assert shown[1 : size[1] - 3] == [f"line {n} ".ljust(min(70, size[0] - 1), ".") for n in range(size[1] - 4)]
    assert shown[size[1] - 3 :] == ["end", "", ""]
