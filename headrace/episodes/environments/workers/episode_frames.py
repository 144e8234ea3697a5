"""Messages between the controller and the processes that run environments: frames of msgpack (`processes/frames.py`)."""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec

from headrace.core.batches import Failure
from headrace.core.types import Struct
from headrace.processes.frames import framed, read_frame

LARGEST = 64 << 20
"""Bytes of a frame. A larger one is a mistake of the user's code, which must not fill the controller's memory."""

PROBLEM = "problem"
"""The key of a message with the result of a tool that says why there is none: `malformed`, `unknown_tool`, `wrong_arguments`, `raised`
or `timeout`. No chat template sees it."""

SPECIALS = "specials"
"""The key of a message that holds the texts of control tokens, which the model reads as text: a list of these. No chat template sees it."""

Rewards = dict[str, float]
"""Rewards by name."""


class WrittenCall(Struct, frozen=True, kw_only=True):
    """A tool call that was read from a completion."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it; the whole text of a malformed call."""
    id: str
    problem: str = ""
    """The reason why a call is malformed; empty if it is not."""


# -- from the controller ------------------------------------------------------------------------------------------------------


class ResumedTurn(Struct, frozen=True, kw_only=True):
    """The turn in which a rollout goes on. Its reply is the answer to the first `ChatAsked`."""

    state: bytes = b""
    """The state that was exported when the turn was asked for, as msgpack; empty for an environment without state."""
    role: str = ""
    results: tuple[dict[str, Any], ...] = ()
    """The results of the tool calls of the turn's reply that were finished, as messages."""


class Play(Struct, frozen=True, tag="play"):
    id: int
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    seed: int
    resumed: ResumedTurn | None = None
    """None: the rollout begins."""


class ChatReply(Struct, frozen=True, kw_only=True, tag="reply"):
    """The answer to a `ChatAsked`: what was sampled, or the limit that was reached (`over`), or why the messages were refused."""

    id: int = 0
    text: str = ""
    """The text outside the tool calls."""
    calls: tuple[WrittenCall, ...] = ()
    stop: str = ""
    """`stop` or `length`."""
    tokens: int = 0
    over: str = ""
    refused: str = ""


class Cancel(Struct, frozen=True, tag="cancel"):
    id: int


# -- from the process -----------------------------------------------------------------------------------------------------------


class FunctionLoaded(Struct, frozen=True, tag="ready"):
    """The first frame: empty, or why the function could not be loaded."""

    error: str = ""
    stepped: bool = False
    """Whether it is a class of the user that goes from turn to turn (`step_driver.py`)."""
    exports: bool = False
    """Whether it is a class that exports its state."""
    exports_if_set: bool = False
    """Whether it does so only if the settings say that it may."""


class ChatAsked(Struct, frozen=True, tag="chat"):
    id: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    role: str = ""
    """The agent of the rollout that is to answer."""
    state: bytes = b""
    """The state of the environment before the turn, as msgpack; empty unless it is exported."""
    resumes: bool = False
    """Whether it asks for the reply of the turn in which the rollout goes on, instead of another one."""
    begins_in: str = ""
    """The name that the environment gave the state in which the turn begins."""


class Rewarded(Struct, frozen=True, tag="rewarded"):
    id: int
    name: str
    value: float
    role: str = ""


class ToolAnswered(Struct, frozen=True, tag="answered"):
    """The result of a tool call, sent as soon as it is there by environments without state."""

    id: int
    message: dict[str, Any]
    role: str = ""


class RolloutDone(Struct, frozen=True, kw_only=True, tag="ended"):
    id: int
    rewards: Rewards | None = None
    """None if the environment returned no rewards."""
    failure: Failure | None = None
    leaves: int = 0
    """Threads of tools that it left behind: they still run, and nothing can end them but the end of the process."""


class Beat(Struct, frozen=True, tag="beat"):
    """Sent every second by a thread of its own."""

    blocked_by: int = -1
    """The rollout whose async function has kept the event loop for too long."""


FromController = Play | ChatReply | Cancel
FromProcess = FunctionLoaded | ChatAsked | Rewarded | ToolAnswered | RolloutDone | Beat

_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(FromController).decode
decode_report = msgspec.msgpack.Decoder(FromProcess).decode


def pack(frame: FromController | FromProcess) -> bytes:
    body = _encode(frame)
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body):,} bytes is larger than {LARGEST:,}")
    return framed(body)


def read_order(stream: BinaryIO) -> FromController:
    """Reads one order of the controller. Raises StreamEnded. Blocks."""
    return _decode_order(read_frame(stream.read))
