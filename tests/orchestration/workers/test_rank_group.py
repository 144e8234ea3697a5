"""The ranks of a trainer as one worker, in virtual time, over workers without processes: children of the run, and ranks that join from elsewhere."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_joining import telemetry_of
from test_joining_run import joining

from headrace.algo.config import AlgoConfig
from headrace.core.batches import Batch, Group, Row
from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, RankUnreachable, WorkerDied
from headrace.core.reports import TrainReport
from headrace.core.types import Prompt
from headrace.durable.shared_directory import check_answer, probing, see
from headrace.facts.facts import WorkerJoined
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.native.resources import local_rank
from headrace.processes.joining.greeting import SILENCE
from headrace.processes.joining.joined import JoinLauncher
from headrace.processes.joining.same_model import weights_digest
from headrace.processes.wire import BEAT, Frame, unpack
from headrace.run.clients.process_trainer import TOGETHER, RankGroup
from headrace.run.config import load_config
from headrace.run.seats import ranks_of, threads_of_rank
from headrace.run.worker import step_messages
from headrace.run.worker.build import _served_here, loaded_models
from headrace.run.worker.step_messages import ROWS, UNDER_WAY, ReceivedRows
from headrace.run.worker.worker_messages import TrainerStart
from headrace.testing.fake_arrivals import FakeArrivals
from headrace.testing.fake_worker import Died, FakeLauncher, FakeProcess, bare_start
from headrace.testing.faultsim.trainer_worker import paths_of
from headrace.trainer.dealing import share as share_module
from headrace.trainer.dealing.deal import Dealing
from headrace.trainer.dealing.share import PackedShare, RowBlock, ShareHead, shares_of
from headrace.trainer.placement.rendezvous import gpu_of, interface_of, shared_gpu
from headrace.weight_sync.tcp import Tcp

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


def batch_of(groups: int, length: int = 6) -> Batch:
    """Groups of two rows, whose prompts begin differently."""
    made = (tuple(plain_row((g, g), length, 2 * g + i) for i in range(2)) for g in range(1, groups + 1))
    return Batch(0, tuple(Group(g, Prompt("p", "", (1,)), (), rows) for g, rows in enumerate(made)))


def plain_row(prompt: tuple[int, ...], length: int, seed: int) -> Row:
    tokens = tuple((seed * 31 + place * 7) % 90 for place in range(length))
    return Row(prompt, tokens, (-0.5,) * length, (0.5,) * length, (True,) * length, (0,) * length)


def test_each_rank_is_sent_its_own_rows_and_begins_when_all_have_theirs() -> None:
    rows = [ReceivedRows() for _ in range(4)]
    order: list[str] = []
    own: dict[int, list[int]] = {}

    async def answer(rank: int, frame: Frame) -> Any:
        order.append(frame.method)
        if frame.method == ROWS:
            await asyncio.sleep(rank)  # one of them is slow
            return rows[rank].take(frame.payload)
        share = rows[rank].share(frame.payload)
        own[rank] = [path.number for path in paths_of(share)]
        return TrainReport(share.head.step, 1)

    async def use(group: RankGroup, made: list[Rank]) -> None:
        shares = shares_of(batch_of(6), Dealing(budget=20, ranks=2))
        report = await group.step(1, shares, lambda rank: rank // 2)  # ranks 0 and 1 compute together
        assert report.version == 1

    run(4, answer, use)
    assert order == [ROWS] * 4 + ["step"] * 4
    assert own[0] == own[1] and own[2] == own[3] and sorted(own[0] + own[2]) == list(range(12))


@pytest.mark.parametrize("millions", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_a_step_of_many_tokens_passes_in_small_messages(millions: int) -> None:
    """100 million tokens were four times what one message can hold. Completions are the same objects in all groups, or the batch alone would have 10 GB."""
    length, size = 5000, 20
    completions = [plain_row((1,), length, seed) for seed in range(size)]
    groups = millions * 1_000_000 // (length * size)
    prompts = [(7, 7, number // 100, number % 100) for number in range(groups)]
    made = [tuple(msgspec.structs.replace(row, prompt=prompt) for row in completions) for prompt in prompts]
    batch = Batch(0, tuple(Group(g, Prompt("p", "", (1,)), (), rows) for g, rows in enumerate(made)))
    largest, sent, trained = [0], [0, 0], [0]
    heads: list[ShareHead] = []

    async def answer(rank: int, frame: Frame) -> Any:
        if frame.method == "step":
            heads.append(unpack(frame.payload, tuple[int, ShareHead])[1])
            return TrainReport(0, 1)
        size = len(memoryview(frame.payload))
        largest[0], sent[rank] = max(largest[0], size), sent[rank] + size
        trained[0] += int(np.frombuffer(unpack(frame.payload, tuple[int, RowBlock])[1].losses, np.int32).sum())
        return None

    async def use(group: RankGroup, made: list[Rank]) -> None:
        await group.step(1, shares_of(batch, Dealing(budget=16_384, ranks=2)), lambda rank: rank)

    run(2, answer, use)
    tokens = groups * size * length
    assert trained[0] == tokens
    assert all(np.frombuffer(head.minibatches[0].trajectories, np.int32).sum() == tokens for head in heads), (
        "those of the whole step"
    )
    assert largest[0] < 3_000_000 and sum(sent) < 14 * tokens and max(sent) < 0.6 * sum(sent)


def test_no_rank_begins_a_step_when_one_dies_while_rows_are_sent() -> None:
    begun: list[int] = []

    async def answer(rank: int, frame: Frame) -> Any:
        if frame.method == "step":
            begun.append(rank)
        elif rank == 1:
            raise Died

    async def use(group: RankGroup, made: list[Rank]) -> None:
        with pytest.raises(WorkerDied, match="the trainer process of rank 1 was killed by SIGKILL"):
            await group.step(1, shares_of(batch_of(4), Dealing(budget=20, ranks=2)), lambda rank: rank)
        assert begun == [] and not any(rank.alive for rank in made)

    run(2, answer, use)


@pytest.mark.parametrize("ranks", [1, 24])
def test_slow_ranks_are_sent_a_few_blocks_ahead(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller packs a block when it is sent: it has as many as are under way, and not the step, however many ranks there are."""
    monkeypatch.setattr(PackedShare.blocks, "__defaults__", (10,))
    monkeypatch.setattr(step_messages, "IN_ALL", 8)
    packed, unpacked, ahead = [0], [0], [0]
    make = share_module._block

    def counting(rows: Any) -> Any:
        packed[0] += 1
        ahead[0] = max(ahead[0], packed[0] - unpacked[0])
        return make(rows)

    monkeypatch.setattr(share_module, "_block", counting)

    async def answer(rank: int, frame: Frame) -> Any:
        if frame.method != ROWS:
            return TrainReport(0, 1)
        await asyncio.sleep(1.0)
        unpacked[0] += 1
        return None

    async def use(group: RankGroup, made: list[Rank]) -> None:
        shares = shares_of(batch_of(20 * ranks), Dealing(budget=1000, ranks=ranks))
        await group.step(1, shares, lambda rank: rank)

    run(ranks, answer, use)
    assert packed[0] >= 20 and ahead[0] == (UNDER_WAY if ranks == 1 else 8)


def test_at_the_start_each_learns_its_number_and_where_they_meet() -> None:
    heard: list[TrainerStart] = []

    async def answer(rank: int, frame: Frame) -> None:
        heard.append(unpack(frame.payload, TrainerStart))

    async def use(group: RankGroup, made: list[Rank]) -> None:
        await group.call("start", bare_start(ranks=2), type(None))

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


def test_a_rank_whose_disk_is_full_fails_when_the_others_have_written_their_parts() -> None:
    """A full disk must not end a run, and no rank may write when the directory is removed."""
    ended: list[int] = []

    async def answer(rank: int, frame: Frame) -> int | None:
        if frame.method == "version":
            return rank
        if rank == 1:
            raise CheckpointError("no space left on device")
        await asyncio.sleep(10 * TOGETHER)
        ended.append(rank)
        return None

    async def use(group: RankGroup, made: list[Rank]) -> None:
        with pytest.raises(CheckpointError, match="no space left"):
            await group.call("save", None, type(None))
        assert ended == [0, 2] and all(rank.alive for rank in made)
        assert await group.call("version", None, int) == 0

    run(3, answer, use)


def test_a_rank_that_dies_while_others_write_ends_them() -> None:
    async def answer(rank: int, frame: Frame) -> None:
        if rank == 1:
            raise CheckpointError("no space left on device")
        await asyncio.sleep(TOGETHER)
        raise Died

    async def use(group: RankGroup, made: list[Rank]) -> None:
        with pytest.raises(WorkerDied, match="of rank 0 was killed by SIGKILL"):
            await group.call("save", None, type(None))
        assert not any(rank.alive for rank in made)

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


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_does_not_reach_another_one_is_no_failure_of_its_own(dies: bool) -> None:
    """The one that has died had answered already, as those do that only copy while rank 0 publishes."""

    async def answer(rank: int, frame: Frame) -> None:
        if rank == 0:
            raise RankUnreachable("the connection ended 45696 bytes too early")

    async def use(group: RankGroup, made: list[Rank]) -> None:
        if dies:
            asyncio.get_running_loop().call_later(1.0, made[1].die, "was killed by SIGKILL")
        how = (
            "of rank 1 was killed"
            if dies
            else "lost the connection between two ranks, which both still run: the connection ended"
        )
        with pytest.raises(WorkerDied, match=how):
            await group.call("publish", None, type(None))
        assert not any(rank.alive for rank in made)

    run(2, answer, use)


# --- ranks elsewhere ----------------------------------------------------------------------------------------------------


class Beating(Rank):
    """Sends a beat every second, until its machine is `gone`."""

    gone = False

    async def serve(self) -> None:
        await asyncio.sleep(0)  # until it has offered itself
        beating = asyncio.ensure_future(self._beat())
        try:
            await super().serve()
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while not self.gone:
            self.push(BEAT, None)
            await asyncio.sleep(1.0)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_join_meet_at_the_door_of_rank_0_and_a_machine_that_vanishes_is_named(fails: bool) -> None:
    """Also where another one `fails` of it before the machine counts as lost."""
    heard: dict[int, TrainerStart] = {}
    facts = FactList()

    async def answer(rank: int, frame: Frame) -> Any:
        if frame.method == "step":
            if rank == 0 and fails:
                await asyncio.sleep(31)
                raise HeadraceError("the connection was reset")
            await never()
        heard[rank] = unpack(frame.payload, TrainerStart)
        return None

    async def go() -> None:
        arrivals = FakeArrivals()
        group = RankGroup(JoinLauncher(arrivals, telemetry_of(facts)), 3, (), ())
        made: list[Beating] = []

        def come(host: str) -> None:
            made.append(Beating(len(made), answer))
            arrivals.offer(made[-1], host, "", f"10.0.0.{ord(host)}:{6999 + len(made)}")

        loop = asyncio.get_running_loop()
        for seconds, host in ((0, "a"), (20, "a"), (40, "b")):
            loop.call_later(seconds, come, host)
        await group.start()
        await group.call("start", bare_start(transport=Tcp("t"), ranks=3), type(None))
        step = asyncio.ensure_future(group.call("step", None, type(None)))
        await asyncio.sleep(30)
        made[1].gone, began = True, loop.time()
        with pytest.raises(
            WorkerDied, match=r"the trainer process of rank 1 on a \(process 1\) is lost: it was silent"
        ):
            await step
        assert loop.time() - began < SILENCE + 3
        await asyncio.sleep(1)
        assert not any(process.alive for process in made)
        await group.end()

    virtual_time.run(go())
    assert [heard[rank].meeting for rank in range(3)] == ["10.0.0.97:7000"] * 3
    assert [heard[rank].door for rank in range(3)] == ["10.0.0.97:7000", "10.0.0.97:7001", "10.0.0.98:7002"]
    assert [(heard[rank].rank, heard[rank].beside) for rank in range(3)] == [(0, 2), (1, 2), (2, 1)]
    assert [worker.who for worker in facts.of(WorkerJoined)] == [f"trainer rank {rank}" for rank in range(3)]


def joined(hosts: str, parallel: dict[str, int], locals_: Sequence[int] = ()) -> tuple[list[TrainerStart], list[str]]:
    """What ranks that come from these machines, one after another, are told at their start, by their number; and what people are told. `locals_`: the numbers
    that they have on their machines."""
    heard: list[TrainerStart] = []

    async def answer(rank: int, frame: Frame) -> None:
        heard.append(unpack(frame.payload, TrainerStart))

    async def go() -> list[str]:
        arrivals = FakeArrivals()
        group = RankGroup(JoinLauncher(arrivals, telemetry_of(FactList())), len(hosts), (), ())
        for number, host in enumerate(hosts):
            local_rank = locals_[number] if locals_ else 0
            door = f"10.0.0.{ord(host)}:{7000 + number}"
            arrivals.offer(Beating(number, answer), host, "", door, local_rank=local_rank)
        await group.start()
        start = msgspec.structs.replace(bare_start(transport=Tcp("t"), ranks=len(hosts)), train={"parallel": parallel})
        try:
            await group.call("start", start, type(None))
        finally:
            await group.end()
        return group.notes

    notes = virtual_time.run(go())
    return sorted(heard, key=lambda start: start.rank), notes


def test_ranks_of_a_machine_are_neighbours_in_whatever_order_they_come() -> None:
    heard, notes = joined("abab", {"shard": 2, "tensor": 2})
    assert [start.door for start in heard] == ["10.0.0.97:7000", "10.0.0.97:7002", "10.0.0.98:7001", "10.0.0.98:7003"]
    assert {start.meeting for start in heard} == {"10.0.0.97:7000"}
    assert [start.beside for start in heard] == [2] * 4
    assert len(notes) == 1 and "trainer rank 2 is rank 1, trainer rank 1 is rank 2" in notes[0]
    assert joined("aabb", {"shard": 4})[1] == []


def test_the_numbers_of_a_machine_are_those_of_its_starter() -> None:
    heard, _ = joined("abab", {"shard": 4}, locals_=(1, 0, 0, 1))
    assert [start.door for start in heard] == ["10.0.0.97:7002", "10.0.0.97:7000", "10.0.0.98:7001", "10.0.0.98:7003"]
    assert {start.meeting for start in heard} == {"10.0.0.97:7002"}


def test_layers_that_would_be_split_between_machines_are_refused() -> None:
    words = r"tensor = 2 .* different machines \(ranks: 3 on 10.0.0.97, 1 on 10.0.0.98\); start a multiple of 2 ranks on each"
    with pytest.raises(ConfigError, match=words):
        joined("aaba", {"shard": 2, "tensor": 2})
    joined("abba", {"shard": 2, "tensor": 2})  # the remedies
    joined("aaba", {"shard": 4})


@pytest.mark.parametrize("name", ["context", "expert"])
def test_what_travels_between_machines_in_every_layer_is_told(name: str) -> None:
    parallel = {"shard": 2, "context": 2} if name == "context" else {"shard": 4, "expert": 4}
    (note,) = joined("aaab", parallel)[1]
    assert f"train.parallel.{name} = " in note and "is spread over machines (ranks: 3 on 10.0.0.97, 1 on" in note
    assert joined("aabb" if name == "context" else "aaaa", parallel)[1] == []


def test_a_rank_that_leaves_before_the_last_one_has_come_ends_the_start() -> None:
    async def go() -> None:
        arrivals = FakeArrivals()
        group = RankGroup(JoinLauncher(arrivals, telemetry_of(FactList())), 2, (), ())

        async def answer(rank: int, frame: Frame) -> None: ...

        first = Beating(0, answer)
        arrivals.offer(first, "a", "", "10.0.0.1:7000")
        asyncio.get_running_loop().call_later(9.0, first.die, "was killed")
        with pytest.raises(WorkerDied, match="of rank 0 on a"):
            await group.start()
        await group.end()

    virtual_time.run(go())


def test_weights_are_served_at_the_rank_s_own_address() -> None:
    child = bare_start(transport=Tcp("t"), ranks=1)
    assert _served_here(child).transport == Tcp("t")
    elsewhere = msgspec.structs.replace(child, door="10.0.0.7:55")
    assert _served_here(elsewhere).transport == Tcp("t", host="10.0.0.7")


def test_ranks_compare_the_files_of_the_critic_too(tiny_llama: Path) -> None:
    """Those of its own model, which each rank finds by its setting."""
    own = {"model": str(tiny_llama)}
    for algo, found in (
        (
            AlgoConfig("ppo", critic=own),
            {"the files of weights": Path("m"), "the critic's files of weights": tiny_llama},
        ),
        (AlgoConfig("ppo"), {"the files of weights": Path("m")}),
        (
            AlgoConfig("gkd", distill=own),
            {"the files of weights": Path("m"), "the teacher's files of weights": tiny_llama},
        ),
    ):
        assert loaded_models("m", algo) == found
    with pytest.raises(ConfigError, match="algo.critic.model = /nowhere is not a directory"):
        loaded_models("m", AlgoConfig("ppo", critic={"model": "/nowhere"}))


def test_a_machine_that_does_not_see_the_run_s_directory_is_refused(tmp_path: Path) -> None:
    with probing(tmp_path) as probe:
        see(probe, 1)
        with pytest.raises(ConfigError, match="is not seen on the run's machine; mount that directory"):
            check_answer(probe)
        see(probe, 0)
        check_answer(probe)
        Path(probe.path).write_text("of another directory")
        with pytest.raises(ConfigError, match=rf"rank 3 on {socket.gethostname()} does not see {tmp_path}, in which"):
            see(probe, 3)
    assert not list(tmp_path.iterdir())


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (file := tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    before = weights_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert weights_digest(tmp_path) == before
    file.write_bytes(b"\0" * 99 + b"\1")
    assert weights_digest(tmp_path) != before


def test_an_address_that_no_interface_has_is_refused() -> None:
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"
    for address in ("192.0.2.1", "2001:db8::1"):
        with pytest.raises(ConfigError, match="no network interface of .* has the address"):
            interface_of(address)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["orchestration.listen=127.0.0.1:0"], "after the death of a rank the run listens anew"),
        (["orchestration.cert=a.pem", "orchestration.key=b.pem"], "encrypt nothing"),
        (["train.cores=[0]"], "train.cores are cores of this machine, and the trainer is elsewhere"),
        (["weight_sync.host=10.0.0.1"], "engines fetch from the ranks, which are elsewhere"),
        (["weight_sync.kind=http"], 'use weight_sync.kind = "tcp"'),
    ],
)
def test_what_does_not_go_with_a_trainer_elsewhere_is_refused(sets: list[str], said: str, tmp_path: Path) -> None:
    config = joining(tmp_path, tmp_path, 7400, orchestration={"trainer": "elsewhere"})
    assert ranks_of((loaded := load_config(config)).orchestration, loaded.train) == ["trainer"]
    with pytest.raises(ConfigError, match=said):
        load_config(config, sets)


def test_a_trainer_elsewhere_needs_a_kind_of_orchestration(tmp_path: Path) -> None:
    config = joining(tmp_path, tmp_path, 7400)
    config["orchestration"] = {"trainer": "elsewhere"}
    with pytest.raises(ConfigError, match='orchestration.trainer is for orchestration.kind = "join" or "ray"'):
        load_config(config)
    config["orchestration"] = {"kind": "ray", "rank_gpus": 1}
    with pytest.raises(ConfigError, match='rank_gpus is for orchestration.trainer = "elsewhere"'):
        load_config(config)
    config["orchestration"] = {"kind": "ray", "trainer": "elsewhere", "rank_gpus": 1}
    loaded = load_config(config, ["train.parallel.shard=2", "train.threads=3"])
    assert ranks_of(loaded.orchestration, loaded.train) == ["trainer rank 0", "trainer rank 1"]
    assert threads_of_rank(loaded.orchestration, loaded.train, loaded.chosen) == 3


STARTERS = {
    "torchrun in a job of Slurm": ({"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 4, 2),
    "Open MPI in a job of Slurm": ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 4, 3),
    "MPICH": ({"MPI_LOCALRANKID": "1"}, 4, 1),
    "srun": ({"SLURM_LOCALID": "1"}, 4, 1),
    "srun that gives each a GPU": ({"SLURM_LOCALID": "3"}, 1, 0),
    "a person": ({"CUDA_VISIBLE_DEVICES": "3"}, 1, 0),
    "a name without a number": ({"LOCAL_RANK": ""}, 4, 0),
}


@pytest.mark.parametrize("starter", STARTERS)
def test_a_rank_takes_the_gpu_of_its_number_on_its_machine(starter: str) -> None:
    environ, count, gpu = STARTERS[starter]
    assert gpu_of(local_rank(environ), count, rank=5) == gpu


def test_a_number_beyond_the_gpus_and_one_gpu_for_two_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_LOCALID = 4 in the environment of rank 5 on .* sees 4 GPUs"):
        gpu_of(local_rank({"SLURM_LOCALID": "4"}), 4, rank=5)
    alone = [gpu_of(local_rank({}), 4, rank) for rank in range(2)]
    problem = shared_gpu([("a", "GPU-9"), *(("b", f"GPU-{gpu}") for gpu in alone)])
    assert "ranks 1 and 2 have taken the same GPU of b (GPU-0)" in problem and "SLURM_LOCALID" in problem
    numbered = [
        gpu_of(local_rank({"SLURM_LOCALID": str(place)}), 4, rank=1 + place) for place in range(2)
    ]  # the remedy
    assert not shared_gpu([("a", "GPU-9"), *(("b", f"GPU-{gpu}") for gpu in numbered)])
