"""Messages between the scorer and its worker processes: frames of msgpack (`processes/frames.py`)."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

from headrace.core.types import Struct
from headrace.episodes.scoring.job import LoadedReward, ScoringJob, Values
from headrace.processes.frames import framed, read_frame


class Call(Struct, frozen=True):
    id: int
    function: int
    """The function's place on the worker's command line, from 0."""
    job: ScoringJob
    timeout: float
    """Seconds after which the worker cancels an async function. Any other function can only be killed, by the scorer."""


class Reply(Struct, frozen=True, tag_field="kind", tag="reply"):
    id: int
    values: Values


class Ready(Struct, frozen=True, tag_field="kind", tag="ready"):
    """The first frame of a worker: the functions that it loaded, or why it could not."""

    functions: tuple[LoadedReward, ...] = ()
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Reply | Ready).decode


def pack(frame: Call | Reply | Ready) -> bytes:
    return framed(_encode(frame))


def read_call(stream: BinaryIO) -> Call:
    """Reads one call. Raises StreamEnded. Blocks."""
    return _decode_call(read_frame(stream.read))
