"""Text on its way to a terminal: the one place that prints, and the one place that says which characters a terminal may be sent.

Prompts, completions, tool results and exceptions may hold any character, and a terminal obeys some of them: ESC clears the screen,
renames the window and writes to the clipboard, CR overwrites a line, and the bidirectional controls reorder it. They are replaced here, one
character for one, and what was there is still seen (`␛[2J`). Views with colours and columns are printed by `views/screen/console.py`.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import sys
import textwrap
import traceback
from typing import Any

# C0 (but tab and newline), DEL and C1; invisible and bidirectional format characters, but not the joiners that scripts and emoji need;
# line separators; surrogates, which no encoding has; tags. Spaces, combining marks and what is unassigned do nothing to a terminal.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Replaces every character that a terminal would obey or could not be sent. The length stays."""
    return _UNSAFE.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "�"


def printable_json(text: str) -> str:
    """JSON of the same value in which such characters are escapes. JSON has them in strings only."""
    return _UNSAFE.sub(lambda found: "".join(f"\\u{unit:04x}" for unit in _units(found[0])), text)


def _units(character: str) -> tuple[int, ...]:
    data = character.encode("utf-16-be", "surrogatepass")
    return tuple(int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2))


def lenient(stream: Any) -> Any:
    """Returns the stream, which writes an escape for each character that its encoding lacks (`✓` in a terminal of Latin-1) and does not fail."""
    if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="backslashreplace")
    return stream


def echo(text: object = "", *, err: bool = False) -> None:
    """Prints lines at once. `err`: on standard error, which is for all that is no result."""
    try:
        print(printable(str(text)), file=lenient(sys.stderr if err else sys.stdout), flush=True)
    except BrokenPipeError:  # nobody reads on: no reason to end, unless the result was all there was to do
        if not err:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its end
            raise SystemExit(1) from None


def say(message: object) -> None:
    """Prints a message of headrace itself on standard error."""
    echo(f"headrace: {message}", err=True)


def fitted(line: str) -> list[str]:
    """Wraps a line of standard error for a terminal. For a file or a pipe it stays whole, so that it can be searched."""
    if not sys.stderr.isatty():
        return [line]
    width, indent = shutil.get_terminal_size().columns, " " * len("headrace: ")
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [
        line
    ]


def say_from_handler(message: str) -> None:
    """Prints a message of headrace itself from a signal handler: `print` may be what the signal has interrupted."""
    os.write(2, f"headrace: {printable(message)}\n".encode())


def echo_traceback() -> None:
    """Prints the exception that is being handled on standard error, with its traceback."""
    echo(traceback.format_exc().rstrip("\n"), err=True)


class PrintableStream:
    """A text stream that prints only printable characters: for what others print in a process of ours (libraries, their loggers, the
    interpreter's tracebacks, the user's code)."""

    def __init__(self, stream: Any) -> None:
        self.unguarded = stream
        """The stream beneath, for a console whose own colours are to arrive."""

    def write(self, text: str) -> int:
        self.unguarded.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


class PrintableBytes:
    """Writes what another process printed to a file descriptor, printable. A character may arrive in two pieces."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._decoder = descriptor, codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        os.write(self._descriptor, printable(self._decoder.decode(data)).encode())


def guard_streams() -> None:
    """Guards the standard output and error of this process from here on, and tells libraries to draw no progress bars.

    A bar is redrawn by CR, which a guarded stream shows as a picture. The libraries read these variables when they are imported.
    """
    for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(bars, "1")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PrintableStream):
            setattr(sys, name, PrintableStream(lenient(stream)))
