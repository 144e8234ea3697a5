"""What the programs of clients share. They run in an environment without headrace: the server's address is their argument."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable

URL = sys.argv[1]
NOT_SERVED = "is not served"
SETTINGS = "What are your settings?"
WEATHER = "How is the weather in Paris?"
STORY = "Tell me a story."
PERSON = "Who is Ann?"
LONG = "x" * 200_000
PATIENCE = 300.0


def get_weather(place: str) -> str:
    """The weather of a place."""
    assert place == "Paris", place
    CALLED.append(place)
    return "rain, 12 degrees"


CALLED: list[str] = []


def counted(name: str) -> float:
    """A number of the server's metrics."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith(f"headrace_{name} ")]
    return float(found)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_freed() -> None:
    """Waits until the server has no request. A story has no end, so its client has left it."""
    until(lambda: counted("requests_running") + counted("requests_waiting") == 0)


def refused(words: str, ask: Callable[[], object], kind: type[BaseException] = Exception) -> None:
    """Checks that the client shows the sentence of the refusal."""
    answer: object
    try:
        answer = ask()
    except kind as error:
        assert words in str(error), f"{type(error).__name__}: {error}"
        return
    raise AssertionError(f"{answer!r} in place of a refusal: {words}")


def if_served(ask: Callable[[], object], expected: object) -> str:
    """Checks an answer that needs constrained decoding: the right one, or a refusal that the client shows."""
    try:
        answer = ask()
    except Exception as error:
        assert NOT_SERVED in str(error), f"{type(error).__name__}: {error}"
        return "refused"
    assert answer == expected, answer
    return "served"


def done(**found: object) -> None:
    """Prints what the test reads."""
    print(json.dumps(found))
