"""The browser's part of `board.py --frames`: the time between two frames while the page of a long run is scrolled, dragged and pointed at.

A headless Chromium without a GPU draws on the cores that the server uses too. Frames are those of `requestAnimationFrame`: at 60 a second
two are 16.7 ms apart. Input is real: wheel gestures and mouse events through the DevTools protocol.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.views.board.board_routes import make_board_app
from headrace.views.board.runs_board import RunsBoard
from headrace.web.server import address_of, bind, make_server

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "observe" / "board"))
from headless import Headless

RECORD = """(() => {
  window.deltas = [];
  let before = performance.now();
  const tick = (now) => { if (!window.deltas) return; deltas.push(now - before); before = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
})()"""
TAKE = "(() => { const found = window.deltas.slice(1); window.deltas = null; return found; })()"
LATE = 33.0
"""Milliseconds of a frame that can be seen as a jump: one was left out."""


@contextmanager
def served(board: RunsBoard) -> Iterator[str]:
    sock = bind("127.0.0.1", 0)
    server = make_server(make_board_app(board))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        yield address_of(sock)
    finally:
        board.closed = server.should_exit = True
        thread.join()
        sock.close()


class Frames:
    def __init__(self, browser: Headless, place: str, steps: int) -> None:
        self._browser, self._place = browser, place
        self._middle = steps // 2

    def open(self, view: str, ready: str) -> None:
        self._browser.open("about:blank")
        self._browser.open(f"{self._place}/#run=long&runs=long&{view}")
        self._browser.wait(ready)

    def measure(self, what: str, act: Callable[[], None]) -> None:
        self._browser.evaluate(RECORD)
        before = _cpu_seconds(self._browser)
        act()
        spent = _cpu_seconds(self._browser) - before
        found = sorted(self._browser.evaluate(TAKE))
        late = sum(one > LATE for one in found) / len(found)
        p95 = found[int(0.95 * (len(found) - 1))]
        print(
            f"{statistics.median(found):7.1f} {p95:7.1f} {found[-1]:7.1f} ms {100 * late:5.1f} %  of {len(found):4} {1000 * spent / len(found):7.1f} ms  {what}",
            flush=True,
        )

    def scroll(self) -> None:
        tall = self._browser.evaluate("document.documentElement.scrollHeight - innerHeight")
        for distance in (-tall, tall):  # positive: up
            self._browser.call(
                "Input.synthesizeScrollGesture", x=700, y=500, yDistance=distance, speed=1600, gestureSourceType="mouse"
            )

    def drag(self, where: str) -> None:
        left, top, width = self._box(where)
        self._browser.mouse("mouseMoved", (left + 0.5 * width, top + 15))
        self._browser.mouse("mousePressed", (left + 0.5 * width, top + 15))
        for number in range(240):
            share = 0.5 + 0.4 * (1 - abs(number % 120 - 60) / 30) / 2
            self._browser.mouse("mouseMoved", (left + share * width, top + 15))
        self._browser.mouse("mouseReleased", (left + 0.5 * width, top + 15))

    def point(self, where: str) -> None:
        left, top, width = self._box(where)
        for number in range(240):
            self._browser.call(
                "Input.dispatchMouseEvent", type="mouseMoved", x=left + width * (number % 120) / 120, y=top + 60
            )

    def _box(self, where: str) -> tuple[float, float, float]:
        found: tuple[float, float, float] = self._browser.evaluate(
            f"(({{left, top, width}}) => [left, top, width])(document.querySelector('{where}').getBoundingClientRect())"
        )
        return found

    def all(self) -> None:
        browser, middle = self._browser, self._middle
        self.open("tab=curves", "document.querySelectorAll('.live-chart canvas').length >= 12")
        self.measure("the machine itself: nothing moves for two seconds", lambda: browser.evaluate("new Promise((done) => setTimeout(done, 2000))"))  # fmt: skip
        self.measure("Curves, scrolled down and up", self.scroll)
        browser.evaluate("scrollTo(0, 0)")
        self.measure("Curves, the pointer over a chart", lambda: self.point(".u-over"))
        self.open("tab=samples", "document.querySelector('.rollouts')")
        for pages in range(2, 6):
            browser.evaluate("document.querySelector('.more-line button').click()")
            browser.wait(f"document.querySelectorAll('.rollouts').length == {pages}")
        self.measure("Samples, five pages of them, scrolled", self.scroll)
        for width in (40, 600):
            steps = f"steps={middle}-{middle + width - 1}"
            self.open(f"tab=pools&{steps}", "document.querySelector('.gantt rect.steps')")
            browser.evaluate("document.querySelector('[data-do=in]').click()")
            self.measure(f"Pools, {width} steps, dragged", lambda: self.drag(".gantt-svg"))
        for width in (6, 600):
            steps = f"steps={middle}-{middle + width - 1}"
            self.open(f"tab=lanes&{steps}", "document.querySelector('.lane')")
            self.measure(f"Swimlanes of {width} steps, scrolled", self.scroll)
            browser.evaluate("scrollTo(0, 0); document.querySelector('[data-do=in]').click()")
            self.measure(f"Swimlanes of {width} steps, dragged", lambda: self.drag(".gantt-svg"))
        assert not browser.errors, browser.errors


def _cpu_seconds(browser: Headless) -> float:
    """CPU seconds of the browser's processes, which are a group of their own."""
    ticks = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:  # gone meanwhile
            continue
        if int(words[2]) == browser.group:
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def frames(board: RunsBoard, steps: int) -> None:
    browser = Headless(1400, 900)
    try:
        with served(board) as place:
            print(" median     p95     max     > 33 ms   frames   CPU a frame")
            Frames(browser, place, steps).all()
    finally:
        browser.close()
