"""Frames between the scorer and its worker processes: four bytes of length, then msgpack."""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO

import msgspec

from headrace.core.types import Struct
from headrace.episodes.scoring.job import LoadedReward, ScoringJob, Values

_LENGTH = struct.Struct(">I")


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
_decode_answer = msgspec.msgpack.Decoder(Reply | Ready).decode


def pack(frame: Call | Reply | Ready) -> bytes:
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


def read_call(stream: BinaryIO) -> Call | None:
    """Reads one call; None at the end of the stream."""
    body = _read_body(stream)
    return None if body is None else _decode_call(body)


def read_answer(stream: BinaryIO) -> Reply | Ready | None:
    body = _read_body(stream)
    return None if body is None else _decode_answer(body)


def _read_body(stream: BinaryIO) -> bytes | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(head)[0])
    return body if len(body) == _LENGTH.unpack(head)[0] else None


async def receive(stream: asyncio.StreamReader) -> Reply | Ready:
    """Reads one answer. Raises IncompleteReadError (an EOFError) at the end of the stream."""
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    return _decode_answer(await stream.readexactly(length))
