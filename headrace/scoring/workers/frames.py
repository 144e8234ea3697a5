"""Frames between the scorer and its worker processes: four bytes of length, then msgpack."""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO

import msgspec

from headrace.scoring.job import Job, Loaded, Values
from headrace.types import Struct

_LENGTH = struct.Struct(">I")


class Call(Struct, frozen=True):
    id: int
    function: int
    """Which of the worker's functions, by its place on the command line."""
    job: Job
    timeout: float
    """Seconds after which an async function is cancelled. One that is not async can only be killed, by the other side."""


class Reply(Struct, frozen=True, tag_field="kind", tag="reply"):
    id: int
    values: Values


class Ready(Struct, frozen=True, tag_field="kind", tag="ready"):
    """The first frame of a worker: what it loaded, or the sentence why it could not."""

    functions: tuple[Loaded, ...] = ()
    error: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode
_decode_answer = msgspec.msgpack.Decoder(Reply | Ready).decode


def pack(frame: Call | Reply | Ready) -> bytes:
    body = _encode(frame)
    return _LENGTH.pack(len(body)) + body


def read_call(stream: BinaryIO) -> Call | None:
    """None at the end of the stream."""
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
    """Raises IncompleteReadError (an EOFError) at the end of the stream."""
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    return _decode_answer(await stream.readexactly(length))
