"""The reason why a server ended, found in its log: in those of vLLM, of a plain Python program, and where there is no traceback."""

from __future__ import annotations

import pytest

from headrace.engine.servers.server_process import LENGTH, last_line, not_loaded, raised
from support.fake_servers import log_of_vllm

NO_KERNEL, NO_ROOM, TOO_LONG, WORKS = map(log_of_vllm, ("no_kernel", "no_room", "too_long", "works"))
KERNEL = "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0"


def traceback(exception: str, source: str = "work()") -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    {source}\n{exception}\n'


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (NO_KERNEL, KERNEL),
        (
            TOO_LONG,
            "ValidationError: 1 validation error for ModelConfig Value error, User-specified max_model_len (100000)",
        ),
        (NO_ROOM, "ValueError: No available memory for the cache blocks. Try increasing"),
        (
            traceback("OSError: [Errno 28] No space left") + "INFO:     Shutting down\n",
            "OSError: [Errno 28] No space left",
        ),
        (
            traceback("headrace.core.errors.ConfigError: no such model") + "warnings.warn(\n",
            "ConfigError: no such model",
        ),
        (traceback("AssertionError"), "AssertionError"),
        (
            traceback("KeyError: 'x'")
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + traceback("ValueError: transformers does not know the model type x"),
            "ValueError: transformers does not know the model type x",
        ),
        (
            f"Exception ignored in: <function f>\n{traceback('TypeError: late')}{traceback('ValueError: early')}",
            "ValueError: early",
        ),
        (traceback("INFO:     beside\nValueError: late"), "ValueError: late"),
        (
            "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: unhandled errors (1 sub-exception)\n"
            "  +-+---------------- 1 ----------------\n"
            + "".join(f"    | {line}\n" for line in traceback("ValueError: inner").splitlines()),
            "ValueError: inner",
        ),
        ("usage: a.py [-h]\na.py: error: unrecognized arguments: --no\n", "a.py: error: unrecognized arguments: --no"),
        (
            traceback("RuntimeError: CUDA driver initialization failed, see the stack trace"),
            "RuntimeError: CUDA driver initialization failed, see the stack trace",
        ),
        ("no room\n", ""),
        (traceback("KeyboardInterrupt"), ""),
        ("", ""),
    ],
)
def test_the_reason_is_the_exception_that_was_raised_first(log: str, reason: str) -> None:
    found = raised(log)
    assert found.startswith(reason) and bool(found) == bool(reason) and len(found) <= LENGTH


def test_two_processes_that_write_at_the_same_time_are_told_apart() -> None:
    one, other = (traceback(f"ValueError: of {name}").splitlines() for name in "ab")
    mixed = [
        line
        for pair in zip((f"(A pid=1) {x}" for x in one), (f"(B pid=2) {x}" for x in other), strict=True)
        for line in pair
    ]
    assert raised("\n".join(mixed)) == "ValueError: of a"


def test_what_went_wrong_before_it_worked_again_did_not_end_it() -> None:
    assert raised(traceback("ValueError: of one request") + WORKS + NO_KERNEL) == KERNEL
    assert not raised(NO_KERNEL + WORKS)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("no room\n", "no room"),
        ('no room\nINFO:     Shutting down\n\nnanobind: leaked 4 instances!\n - leaked type "x"\n', "no room"),
        (
            "(A pid=1) ERROR 11-28 09:03:31 [a.py:1] no room\n(A pid=1) INFO 11-28 09:03:31 [a.py:1] complete\n",
            "no room",
        ),
        ("x" * 999, "x" * (LENGTH - 3) + "..."),
        ("INFO:     Shutting down\n", ""),
    ],
)
def test_without_an_exception_the_last_line_that_is_no_notice_is_told(log: str, said: str) -> None:
    assert last_line(log) == said and not raised(log)


def test_warnings_of_weights_that_were_not_loaded() -> None:
    """Lines of vLLM 0.32."""
    log = """(Worker pid=4049) WARNING 11-28 08:47:09 [layerwise.py:266] RotaryEmbedding: Failed to load weights
(Worker pid=4049) WARNING 11-28 08:47:09 [layerwise.py:266] \x1b[33mParallelLMHead: Failed to load weights\x1b[0m
(Worker pid=4049) WARNING 11-28 08:47:09 [inplace.py:120] Following weights were not loaded from checkpoint: {'b.weight', 'a.bias'}
(Worker pid=4049) INFO 11-28 08:47:09 [inplace.py:110] Reloading and processing weights took 0.02 seconds
"""
    assert not_loaded(log) == {"RotaryEmbedding", "ParallelLMHead", "a.bias", "b.weight"}
    assert not not_loaded(WORKS)
