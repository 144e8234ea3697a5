"""A command in a pseudo-terminal: what it sent, and what of that the terminal would have obeyed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BIDI = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u061c\u200e\u200f"

POISON = (
    "\x1b[2J\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x1b[38;5;213mpink\r\x08over\u202eesrever\u2066\u200f\x9b7mC1\x7f\u2028"
    "[red]kept[/red] [/] [link=http://x]y[/link] :fire: \\[bold]"
)
"""Text that clears the screen, renames the window, writes to the clipboard, colours, overwrites and reverses; and markup of rich."""

SURROGATE = "\ud800"
"""A character that no encoding has; an exception may hold it, a UTF-8 file cannot."""


def in_terminal(
    command: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str] | None = None,
    width: int = 80,
    start: type[subprocess.Popen[Any]] = subprocess.Popen,
) -> tuple[int, str]:
    """Returns the exit code and all that the terminal was sent. Raises UnicodeDecodeError if it was not UTF-8. `start`: `Program` for a
    command whose own start is not tested (`preloaded_python.py`)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "PYTHONIOENCODING": "utf-8",
        **(variables or {}),
    }
    env.pop("COLUMNS", None)
    sent = b""
    with start(command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            while piece := os.read(ours, 1 << 16):
                sent += piece
        except OSError:  # the last process has closed its end
            pass
    os.close(ours)
    return process.returncode, sent.decode()


def obeyed(sent: str, live: bool = False) -> list[str]:
    """What the terminal would obey, with what stands around it, but for line ends and colours of ours. `live`: a view that moves the cursor
    may do so."""
    own = r"\r\n|\x1b\[[0-9;]*m|\r(?:headrace: \d+ s[^\r\n\x1b]*)?\x1b\[K"  # the last: the line of a start
    own += r"|\r|\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A" if live else ""
    wrong = re.findall(r"\x1b\[38;5;213m", sent)
    left = re.sub(own, "", sent)
    return wrong + [repr(left[max(0, i - 60) : i + 20]) for i, one in enumerate(left) if is_unsafe(one)]


def is_unsafe(character: str) -> bool:
    """By the tables of Unicode, which the guard does not use."""
    kind = unicodedata.category(character)
    control = kind in ("Cc", "Cs", "Zl", "Zp") and character not in "\n\t"
    return control or character in MARKS or unicodedata.bidirectional(character) in BIDI
