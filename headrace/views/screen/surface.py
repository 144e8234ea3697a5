"""The surface of a live view: a terminal, or the output of a notebook cell. Both show the same view."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from rich.console import RenderableType
from rich.live import Live

from headrace.views.config import ObserveConfig
from headrace.views.screen.console import Console

REFRESH = 4.0
"""Frames per second. A thread redraws, so that the clock moves while the event loop waits for a worker."""

NOTEBOOK_REFRESH = 2.0
"""Frames per second in a notebook, which sends each frame to a browser."""

COLUMNS = 104
"""Width of the view in a notebook."""

FRAME = (
    '<pre style="margin:0;padding:10px 14px;max-width:max-content;overflow-x:auto;border:1px solid #8884;border-radius:6px;'
    "font:12.5px/1.35 ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre\">{code}</pre>"
)
"""HTML of a frame. It sets no background, so that it fits light and dark notebooks."""

Update = Callable[[str], None]
"""Replaces the displayed HTML."""


class Screen(Protocol):
    """A surface that shows a view until it is stopped."""

    def stop(self) -> None:
        """Removes the view."""


def terminal_mode(config: ObserveConfig) -> str:
    """Returns `live`, `plain` or `off`."""
    if config.terminal != "auto":
        return config.terminal
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return "live" if on_terminal or in_notebook() else "plain"


def in_notebook() -> bool:
    """Returns whether this process is a Jupyter kernel (JupyterLab, VS Code, Colab), whose cells show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def open_screen(view: Callable[[], RenderableType], console: Console) -> Screen:
    """Starts a thread that draws the result of `view` repeatedly."""
    if in_notebook():
        return NotebookScreen(view, _display)
    live = Live(get_renderable=view, console=console, refresh_per_second=REFRESH, transient=True)
    live.start(refresh=True)
    return live


def _display(first: str) -> Update:
    from IPython.display import HTML, display  # available in every kernel

    handle = display(HTML(first), display_id=True)
    return lambda text: handle.update(HTML(text))


class NotebookScreen:
    """A view in one notebook display, updated in place."""

    def __init__(self, view: Callable[[], RenderableType], display: Callable[[str], Update]) -> None:
        """`display` shows the first HTML and returns the function that replaces it."""
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
        """Stops the thread and empties the display; may be called twice. The summary and the report take its place."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()
            self._update("")


def as_html(view: RenderableType) -> str:
    """Returns the view as HTML with inline styles."""
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
