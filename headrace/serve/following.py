"""The completions of one HTTP request, followed to their ends together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from headrace.core.types import Request
from headrace.serve.serving import Serving, Stream
from headrace.web.errors import Refused


@dataclass(frozen=True)
class Piece:
    index: int
    """Index of the completion within the request."""
    stream: Stream
    start: int
    """Tokens [start, stop) of it are new."""
    stop: int
    ended: bool


async def follow(serving: Serving, requests: Sequence[Request], whole: bool = False) -> AsyncGenerator[Piece, None]:
    """Yields the pieces of all completions as they arrive, and the end of each; with `whole`, only the ends. All completions
    are released on exit, normal or not. Raises the engine's refusals and failures."""
    streams: list[Stream] = []
    pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
    followers: list[asyncio.Task[None]] = []
    try:
        for index, request in enumerate(requests):
            streams.append(serving.submit(request))
            followers.append(asyncio.ensure_future(_pump(index, streams[-1], pieces, whole)))
        left = len(streams)
        while left:
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.ended
            yield piece
    finally:
        for follower in followers:
            follower.cancel()
        ending = [serving.release(stream) for stream in streams]
        await asyncio.gather(*followers, *ending, return_exceptions=True)


def check_end(piece: Piece) -> None:
    """Raises Refused for a completion that has failed: who reads its text would take what there is for an answer."""
    if piece.ended and piece.stream.end and piece.stream.end.error:
        raise Refused(500, f"the completion has failed: {piece.stream.end.error}", "engine_error")


async def to_their_ends(serving: Serving, requests: Sequence[Request]) -> list[Piece]:
    """Whole completions, in the order of the requests."""
    async with aclosing(follow(serving, requests, whole=True)) as pieces:
        return sorted([piece async for piece in pieces], key=lambda piece: piece.index)


async def _pump(index: int, stream: Stream, pieces: asyncio.Queue[Piece | Exception], whole: bool) -> None:
    seen = 0
    try:
        while await stream.more(seen):
            now = len(stream.tokens)
            if not whole:
                pieces.put_nowait(Piece(index, stream, seen, now, ended=False))
            seen = now
    except Exception as error:
        pieces.put_nowait(error)
        return
    pieces.put_nowait(Piece(index, stream, 0 if whole else seen, len(stream.tokens), ended=True))
