"""The ranks of a trainer as one worker, in virtual time, over workers without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.errors import CheckpointError, HeadraceError, WorkerDied
from headrace.orchestration.clients.rank_group import TOGETHER, RankGroup
from headrace.orchestration.workers.fake import Died, FakeLauncher, FakeProcess
from headrace.orchestration.workers.wire import Frame, unpack
from headrace.orchestration.workers.worker_messages import TrainerStart
from headrace.simulate import virtual_time
from headrace.weight_sync.shared_memory import SharedMemory

Answer = Callable[[int, Frame], Awaitable[Any]]


class Rank(FakeProcess):
    """Answers with what `answer` returns, and fails with what it raises. A rank that waits in a collective never answers."""

    def __init__(self, number: int, answer: Answer) -> None:
        super().__init__()
        self._rank, self._answer = number, answer

    async def serve(self) -> None:
        while True:
            frame = await self.receive()
            try:
                self.reply(frame, await self._answer(self._rank, frame))
            except HeadraceError as error:
                self.fail(frame, error)
            except Died:
                self.die("was killed by SIGKILL")
                raise


async def never() -> None:
    await asyncio.Event().wait()


def run(ranks: int, answer: Answer, use: Callable[[RankGroup, list[Rank]], Awaitable[None]]) -> None:
    async def go() -> None:
        made: list[Rank] = []

        def begin() -> Rank:
            made.append(Rank(len(made), answer))
            return made[-1]

        group = RankGroup(FakeLauncher({"trainer": begin}), ranks, (), ())
        await group.start()
        try:
            await use(group, made)
        finally:
            await group.end()

    virtual_time.run(go())


def test_every_rank_gets_the_frame_and_the_answer_is_that_of_rank_0() -> None:
    heard: list[Any] = []

    async def answer(rank: int, frame: Frame) -> Any:
        heard.append((rank, frame.method, unpack(frame.payload, Any)))
        return rank + 7

    async def use(group: RankGroup, made: list[Rank]) -> None:
        assert await group.call("score", [1, 2], int) == 7

    run(3, answer, use)
    assert sorted(heard) == [(rank, "score", [1, 2]) for rank in range(3)]


def test_at_the_start_each_learns_its_number_and_where_they_meet() -> None:
    heard: list[TrainerStart] = []

    async def answer(rank: int, frame: Frame) -> None:
        heard.append(unpack(frame.payload, TrainerStart))

    async def use(group: RankGroup, made: list[Rank]) -> None:
        start = TrainerStart(
            model_dir="",
            train={},
            algo={},
            seed=0,
            serving_dtype="",
            keep_routing=False,
            transport=SharedMemory(-1),
            ranks=2,
        )
        await group.call("start", start, type(None))

    run(2, answer, use)
    assert [start.rank for start in heard] == [0, 1]
    assert heard[0].meeting == heard[1].meeting != ""


def test_when_one_dies_the_others_are_killed_and_it_is_named() -> None:
    async def answer(rank: int, frame: Frame) -> None:
        if rank == 1:
            raise Died
        await never()

    async def use(group: RankGroup, made: list[Rank]) -> None:
        with pytest.raises(WorkerDied, match="the trainer process of rank 1 was killed by SIGKILL"):
            await group.call("step", None, type(None))
        assert "of rank 1" in await group.watch()
        assert not any(rank.alive for rank in made)

    run(3, answer, use)


def test_a_rank_that_sees_the_connection_break_is_not_the_one_that_is_named() -> None:
    """The collective of rank 0 fails first; rank 1 is the reason."""

    async def answer(rank: int, frame: Frame) -> None:
        if rank == 0:
            raise HeadraceError("connection closed by peer")
        await asyncio.sleep(0.5)
        raise Died

    async def use(group: RankGroup, made: list[Rank]) -> None:
        with pytest.raises(WorkerDied, match="the trainer process of rank 1"):
            await group.call("step", None, type(None))

    run(2, answer, use)


def test_ranks_that_fail_alike_go_on() -> None:
    async def answer(rank: int, frame: Frame) -> int:
        if frame.method == "save":
            raise CheckpointError("no room")
        return 1

    async def use(group: RankGroup, made: list[Rank]) -> None:
        with pytest.raises(CheckpointError, match="no room"):
            await group.call("save", None, type(None))
        assert await group.call("version", None, int) == 1
        assert all(rank.alive for rank in made)

    run(2, answer, use)


def test_a_rank_that_fails_alone_ends_the_others_in_seconds() -> None:
    async def answer(rank: int, frame: Frame) -> None:
        if rank == 2:
            raise HeadraceError("out of memory")
        await never()

    async def use(group: RankGroup, made: list[Rank]) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(HeadraceError, match="out of memory"):
            await group.call("step", None, type(None))
        assert asyncio.get_running_loop().time() - began <= TOGETHER + 1
        assert "rank 2 failed while others waited for it: out of memory" in await group.watch()
        assert not any(rank.alive for rank in made)

    run(3, answer, use)
