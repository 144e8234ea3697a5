"""Languages that completions are held to, by the library llguidance: checked before a request is admitted, and compiled for a model's tokenizer.

llguidance was chosen by measurement (docs/decisions/0027-constrained-decoding.md): it refuses what it cannot express, where others leave
parts of a schema out without a word.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

from headrace.core.chat.tool_calls import SPACES
from headrace.core.types import Constraint
from headrace.settings.extras import absent

LONGEST = 1 << 17
"""Characters of a constraint. A schema of that length compiles in about 0.2 s; one of 3 MB took four."""
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "max_grammar_size": 200_000,
    "max_lexer_states": 50_000,
}
"""Limits of llguidance that bound the time to compile (50,000 fuel a millisecond), the time of a mask (14,000), and memory (2 kB a state)."""
JSON = {"whitespace_pattern": SPACES}
KEPT = 64
"""Compiled constraints that are kept."""
TRIAL_SECONDS = 30.0
"""Time that a constraint may take to compile in its trial. Two seconds are the longest that was seen within the limits."""
TRIAL_STACK = 1 << 21
"""Bytes of the stack of a trial: a quarter of what threads elsewhere have, because the library recurses as deep as references go."""


def loaded() -> Any:
    """Returns the library. Raises ValueError with the command that installs it."""
    try:
        import llguidance
    except ImportError as error:
        asked = "a constraint on completions (response_format, a forced tool call)"
        raise ValueError(absent(asked, "llguidance", "llguidance", error, "constrained")) from None
    return llguidance


@lru_cache(KEPT)
def check_constraint(constraint: Constraint) -> None:
    """Takes up to half a second: do it off an event loop. Raises ValueError with the reason for a constraint that cannot be expressed, that
    nothing satisfies, that is too large, or that ends the library's process."""
    loaded()
    if problem := _trials(os.getpid()).problem(constraint):
        raise ValueError(problem)


class Trials:
    """A process of its own that compiles constraints before any other does. Some end the process that they are compiled in, such as
    {"const": -9223372036854775808}, or a chain of a thousand references: an overflow of the stack in Rust is no exception."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def problem(self, constraint: Constraint) -> str:
        """Returns why a constraint cannot be followed; empty if it can be."""
        with self._lock:
            process = self._process = self._process or self._started()
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps([constraint.kind, constraint.text]).encode() + b"\n")
                process.stdin.flush()
                there, _, _ = select.select([process.stdout], [], [], TRIAL_SECONDS)
                if there and (answer := process.stdout.readline()):
                    return str(json.loads(answer))
                how = "" if there else f"it took longer than {TRIAL_SECONDS:g} s"
            except BrokenPipeError:
                how = ""
            self._process = None
            process.kill()
            process.stdin.close()
            process.stdout.close()
            code = process.wait()
            how = how or f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
            return f"{_NAMES[constraint.kind]} made llguidance fail: {how}"

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as it; it.try_all()"
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        # a session of its own: Ctrl-C in the terminal is not for it
        return subprocess.Popen(
            [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=null, start_new_session=True
        )


@cache
def _trials(pid: int) -> Trials:
    """`pid`: ours. A fork has no part in the trials of its parent."""
    return Trials()


def try_all() -> None:
    """The program of `Trials`: a constraint a line, and for each a line with its problem. Ends with its input."""

    answers = os.fdopen(os.dup(1), "w")

    def go() -> None:
        for line in sys.stdin:
            constraint, problem = Constraint(*json.loads(line)), ""
            try:
                _matcher(_of_bytes(), constraint)
            except ValueError as error:
                problem = str(error)
            answers.write(f"{json.dumps(problem)}\n")
            answers.flush()

    threading.stack_size(TRIAL_STACK)
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()


class Grammars:
    """Compiles constraints for one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Iterable[int]) -> None:
        """`tokenizer`: of transformers. `vocabulary`: the model's, which may be larger. Raises ValueError if it does not fit the library."""
        self.vocabulary, self.ends = vocabulary, sorted(ends)
        if not self.ends:
            raise ValueError("a constraint needs a model with an end-of-sequence token, which ends what satisfies it")
        self._tokenizer = _wrapped(tokenizer, vocabulary, self.ends)
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Any:
        """Returns an `llguidance.LLMatcher` at its start. Raises ValueError with the reason."""
        with self._lock:
            compiled = self._compiled.pop(constraint, None)
        if compiled is None:
            compiled = _matcher(self._tokenizer, constraint)
        with self._lock:
            self._compiled[constraint] = compiled
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()


def _matcher(tokenizer: Any, constraint: Constraint) -> Any:
    try:
        return _compiled(tokenizer, constraint)
    except ValueError:
        raise
    except BaseException as error:
        raise ValueError(f"{_NAMES[constraint.kind]} made llguidance fail: {broken_by(error)}") from None


def broken_by(error: BaseException) -> str:
    """Words for a failure within the library, such as a panic in Rust, which is no `Exception`. Raises again what ends a process."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    return _shortened(repr(error))


def _compiled(tokenizer: Any, constraint: Constraint) -> Any:
    if len(constraint.text) > LONGEST:
        raise ValueError(
            f"{_NAMES[constraint.kind]} of {len(constraint.text)} characters is too long; it may have {LONGEST}: shorten it"
        )
    library = loaded()
    limits = library.LLParserLimits(verbose_errors=False, **LIMITS)
    matcher = library.LLMatcher(tokenizer, _grammar(library, constraint), log_level=0, limits=limits)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not (matcher.is_accepting() or any(mask)):
            raise ValueError(f"{_NAMES[constraint.kind]} is not satisfied by any text; correct it")
        return matcher
    problem = matcher.get_error().strip().split("\n<state>")[0]
    raise ValueError(f"{_NAMES[constraint.kind]} cannot be followed: {_shortened(problem)}")


_NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
}


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _grammar(library: Any, constraint: Constraint) -> str:
    make = library.LLMatcher
    match constraint.kind:
        case "json_schema":
            return str(make.grammar_from_json_schema(constraint.text, overrides=JSON))
        case "regex":
            return str(make.grammar_from_regex(constraint.text))
        case "choice":
            choices = json.loads(constraint.text)
            # JSON's escapes are Lark's
            return str(make.grammar_from_lark(f"start: {' | '.join(json.dumps(choice) for choice in choices)}"))
        case "grammar":
            return str(make.grammar_from_lark(constraint.text))


@cache
def _of_bytes() -> Any:
    """A tokenizer of single bytes: what it can spell, any other can."""
    return loaded().LLTokenizer("byte")


def _wrapped(tokenizer: Any, vocabulary: int, ends: list[int]) -> Any:
    library = loaded()
    from llguidance import hf

    try:
        return hf.from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)), eos_token=ends)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) cannot be used with constraints by llguidance {library.__version__}: {error}"
        ) from None
