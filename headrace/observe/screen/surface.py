"""Where a live view is drawn: a terminal, or the output of a notebook's cell. Both draw the same view."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from headrace.observe.config import ObserveConfig

REFRESH = 4.0
"""Frames a second; a thread redraws, so that the clock moves while the event loop waits for a worker."""

NOTEBOOK_REFRESH = 2.0
"""A notebook's frames travel to a browser, and are kept there until the next one."""

COLUMNS = 104

FRAME = (
    '<pre style="margin:0;padding:10px 14px;max-width:max-content;overflow-x:auto;border:1px solid #8884;border-radius:6px;'
    "font:12.5px/1.35 ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre\">{code}</pre>"
)
"""No colour of its own behind or beneath: it stands on a light notebook and on a dark one."""

Update = Callable[[str], None]
"""Replaces the HTML that is shown."""


class Screen(Protocol):
    def stop(self) -> None:
        """Takes the view away."""


def terminal_mode(config: ObserveConfig) -> str:
    """`live`, `plain` or `off`."""
    if config.terminal != "auto":
        return config.terminal
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return "live" if on_terminal or in_notebook() else "plain"


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel (JupyterLab, VS Code, Colab), whose cells show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def open_screen(view: Callable[[], RenderableType], console: Console) -> Screen:
    """Draws what `view` returns, again and again, in a thread of its own."""
    if in_notebook():
        return NotebookScreen(view, _display)
    live = Live(get_renderable=view, console=console, refresh_per_second=REFRESH, transient=True)
    live.start(refresh=True)
    return live


def _display(first: str) -> Update:
    from IPython.display import HTML, display  # what runs in a kernel has it

    handle = display(HTML(first), display_id=True)
    return lambda text: handle.update(HTML(text))


class NotebookScreen:
    """One display that is updated in place."""

    def __init__(self, view: Callable[[], RenderableType], display: Callable[[str], Update]) -> None:
        """`display` shows a first HTML, and returns what replaces it."""
        self._view, self._shown = view, as_html(view())
        self._update = display(self._shown)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="headrace-notebook", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        while not self._over.wait(1 / NOTEBOOK_REFRESH):
            text = as_html(self._view())
            if text != self._shown:
                self._update(text)
                self._shown = text

    def stop(self) -> None:
        """Idempotent. The summary and the report come in its place."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._update("")


def as_html(view: RenderableType) -> str:
    """What a terminal would show, with styles for each stretch of text and nothing else."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=COLUMNS,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
    )
    console.print(view)
    return console.export_html(inline_styles=True, code_format=FRAME)
