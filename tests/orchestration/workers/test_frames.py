"""Frames on a stream: whole ones, cut ones, and those that are too long."""

from __future__ import annotations

import asyncio
import io
import struct

import pytest

from headrace.processes.frames import HEAD, FrameTooLong, StreamEnded, framed, read_frame, receive_frame

BODY = bytes(range(256)) * 300


def received(data: bytes, *, limit: int = len(BODY), heard: list[int] | None = None) -> bytes:
    async def go() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await receive_frame(reader, limit, None if heard is None else lambda: heard.append(1))

    return asyncio.run(go())


def test_a_body_arrives_whole_in_whatever_pieces() -> None:
    stream = io.BytesIO(framed(BODY) + framed(b""))
    assert read_frame(lambda count: stream.read(min(count, 7))) == BODY
    assert read_frame(stream.read) == b""
    assert received(framed(BODY)) == BODY
    assert framed(b"ab") == b"\x02\x00\x00\x00ab", "the lowest byte first, as those that are not Python read it"


@pytest.mark.parametrize("kept", [0, 1, HEAD, HEAD + 1, HEAD + len(BODY) - 1])
def test_a_stream_that_ends_early_has_one_error(kept: int) -> None:
    cut = framed(BODY)[:kept]
    with pytest.raises(StreamEnded, match="bytes too early"):
        read_frame(io.BytesIO(cut).read)
    with pytest.raises(StreamEnded, match="bytes too early"):
        received(cut)


def test_a_length_above_the_limit_is_refused_before_the_body() -> None:
    stream = io.BytesIO(struct.pack("<I", len(BODY) + 1) + BODY)
    with pytest.raises(FrameTooLong, match=f"the limit is {len(BODY)}"):
        read_frame(stream.read, len(BODY))
    assert stream.tell() == HEAD
    with pytest.raises(FrameTooLong):
        received(struct.pack("<I", len(BODY) + 1))


def test_every_piece_of_a_frame_is_a_sign_of_life() -> None:
    async def go() -> int:
        reader, heard = asyncio.StreamReader(), list[int]()
        receiving = asyncio.ensure_future(receive_frame(reader, heard=lambda: heard.append(1)))
        for piece in (framed(BODY)[:2], framed(BODY)[2:9], framed(BODY)[9:]):
            reader.feed_data(piece)
            await asyncio.sleep(0)
        assert await receiving == BODY
        return len(heard)

    assert asyncio.run(go()) >= 3
