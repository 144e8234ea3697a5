"""Names the concrete classes of the workers: the transport of weights, the launcher, and the cores that run in the processes."""

from __future__ import annotations

import importlib
import itertools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.algo.config import AlgoConfig
from headrace.core.errors import ConfigError, IdentityError
from headrace.core.protocols import EngineCore, Launcher, TrainerCore, WeightReceiver, WeightSender
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate
from headrace.durable.shared_directory import see
from headrace.engine.config import EngineConfig
from headrace.engine.kinds import core_class
from headrace.models.lora import LoraConfig
from headrace.models.resolve import resolve_model
from headrace.processes.joining.same_model import changed_packages, digests, own_packages, weights_digest
from headrace.processes.launch.forking import ForkLauncher, can_fork_for_parent, end_idle, load_ahead
from headrace.processes.launch.local import LocalLauncher, environment
from headrace.run.rehearsal.machine import may_have_gpu
from headrace.run.worker.worker_messages import EngineStart, SharedStart, TrainerStart
from headrace.trainer.config import TrainConfig
from headrace.trainer.shared.calls import SharedConfig
from headrace.weight_sync.directory import mark_of
from headrace.weight_sync.fetching import NetworkTransport
from headrace.weight_sync.ranges import RankParts, ValueRange, follower_update, parts_of

if TYPE_CHECKING:
    import torch

    from headrace.trainer.placement.port import Placement
    from headrace.trainer.shared.shared_trainer import SharedTrainer
    from headrace.trainer.step.reference import Shadow
    from headrace.trainer.step.trainer import TorchTrainer


def open_launcher(logs: Path) -> Launcher:
    """The launcher that runs take: child processes of the controller. Where there may be a GPU, each is a new interpreter, because no
    process can use one that its parent has opened. None is started once torch or transformers are others: it would compute something else than
    those before it."""
    problem = partial(changed_packages, own_packages())
    return ForkLauncher(logs, problem) if _forks() else LocalLauncher(logs, problem)


def _forks() -> bool:
    return can_fork_for_parent() and not may_have_gpu()


@contextmanager
def libraries_ahead(cores: Iterable[Sequence[int]]) -> Iterator[None]:
    """Within this context the libraries of workers on these cores are loaded, for workers that this thread starts in it. If none is started, the
    processes that load them end with it."""
    if _forks():
        for own in cores:
            load_ahead(environment(own))
    try:
        yield
    finally:
        end_idle()


KINDS = {
    "trainer": "headrace.trainer.step.trainer",
    "engine": "headrace.engine.native.core",
    "shared trainer": "headrace.trainer.shared.shared_trainer",
}
"""The module with the libraries of each kind of worker."""


def preload(kind: str) -> None:
    """Imports a worker's libraries before its start message arrives, while the controller starts the other worker."""
    importlib.import_module(KINDS[kind])


def build_trainer_core(
    start: TrainerStart, door: socket.socket | None = None
) -> tuple[TrainerCore, WeightSender, dict[str, Manifest]]:
    """`door`: the socket at which this rank listens, if it is elsewhere."""
    import torch

    from headrace.trainer.step.learner import Assignment
    from headrace.trainer.step.trainer import TorchTrainer
    from headrace.weight_sync.packed import lay_out

    if start.probe:
        see(start.probe, start.rank)
    start = _served_here(start)
    train, algo = TrainConfig(**start.train), AlgoConfig(**start.algo)
    torch.set_num_threads(_threads(start, train, torch.get_num_threads()))
    adapters = {
        name: Assignment(TrainConfig(**adapter.train), AlgoConfig(**adapter.algo), LoraConfig(**adapter.lora))
        for name, adapter in start.adapters.items()
    }
    core = TorchTrainer(
        model_dir=Path(start.model_dir),
        config=train,
        algo=algo,
        seed=start.seed,
        keep_routing=start.keep_routing,
        adapters=adapters,
        placement=_placement(start, train, loaded_models(start.model_dir, algo), door),
        beside=start.beside,
    )
    for name, checkpoint in start.restore.items():
        core.restore(Path(checkpoint), name)
    served = [spec.name for spec in core.adapters()]
    dtype = getattr(torch, start.serving_dtype)
    manifests = {name: lay_out(core.parameters(name), dtype, core.tied, core.kept) for name in ("", *served)}
    once = [""] if served else []
    return core, _sender(start, core, manifests, once), manifests


def _threads(start: TrainerStart, train: TrainConfig, own: int) -> int:
    """Returns the threads of this rank. `train.threads` are those of all ranks of this machine, or of each that is elsewhere. `own`: those
    that torch would take."""
    if start.door and train.threads:
        return train.threads
    return max(1, (train.threads or own) // start.beside)


def _served_here(start: TrainerStart) -> TrainerStart:
    """Returns the start message with a transport that listens at this rank's own address, if it is elsewhere."""
    transport = start.transport
    if not start.door or not isinstance(transport, NetworkTransport):
        return start
    host = start.door.rpartition(":")[0]
    return msgspec.structs.replace(start, transport=msgspec.structs.replace(transport, host=host))


def _sender(start: TrainerStart, core: TorchTrainer, manifests: dict[str, Manifest], once: list[str]) -> WeightSender:
    """The trainer's end of the way of weights: in each rank for its part, where the transport can fetch parts, else in rank 0."""
    if start.ranks == 1:
        return start.transport.sender(manifests, once)

    def values(name: str) -> Iterator[ValueRange]:
        return itertools.starmap(ValueRange, core.own_values(name, start.rank, start.ranks))

    return rank_sender(start, values, manifests, once)


def loaded_models(model_dir: str, algo: AlgoConfig) -> dict[str, Path]:
    """Returns the directories of the models that each rank of the trainer reads its part of, by what they are. Raises ConfigError for one that is not on
    this machine."""
    critic, teacher = algo.recipe.critic.model if algo.has_critic else "", algo.recipe.distill.model
    found = {"the files of weights": Path(model_dir)}
    if critic:
        found["the critic's files of weights"] = resolve_model(critic, setting="algo.critic.model")
    if teacher:
        found["the teacher's files of weights"] = resolve_model(teacher, setting="algo.distill.model")
    return found


def _placement(
    start: TrainerStart, train: TrainConfig, models: Mapping[str, Path], door: socket.socket | None
) -> Placement | None:
    """The placement of one rank among several. Blocks until all have come. None: one device, the default. `models`: as `loaded_models` returns them."""
    if start.ranks == 1:
        return None
    import torch

    from headrace.trainer.model.causal_lm import resolve_device, resolve_dtype
    from headrace.trainer.placement.rendezvous import check_own_gpus, check_same, meet
    from headrace.trainer.placement.staged import placement_of

    device = resolve_device(train.device)
    if train.parallel.gather != "float32" and str(resolve_dtype(train.dtype, device)) != "torch.bfloat16":
        raise ConfigError(
            f'train.parallel.gather = "{train.parallel.gather}", but train.dtype comes to float32 here; set train.dtype = "bfloat16", or '
            "remove train.parallel.gather"
        )
    meet(start.rank, start.ranks, start.meeting, device, door)
    if door and device.type == "cuda":
        check_own_gpus()
    if door:
        computed = f"{device.type}, {resolve_dtype(train.dtype, device)}, torch {torch.__version__}"
        check_same(
            "device, dtype and torch", computed, "make them alike (train.device and train.dtype name the first two)"
        )
        for what, directory in models.items():
            check_same(what, weights_digest(directory), "copy the same files to all machines")
    return placement_of(train.parallel, device)


def build_shadow(start: TrainerStart, core: TrainerCore) -> tuple[Shadow | None, Manifest | None]:
    """The student's older self, which is published as a teacher, and its layout; None where it is no teacher."""
    if start.shadow is None:
        return None, None
    import torch

    from headrace.trainer.step.reference import Shadow
    from headrace.weight_sync.packed import lay_out

    wanted, dtype = start.shadow, getattr(torch, start.shadow.dtype)
    manifest = lay_out(core.parameters(), dtype, kept=core.kept)
    sender = wanted.transport.sender({"": manifest})
    shadow = Shadow(
        kind=wanted.kind,
        every=wanted.every,
        decay=wanted.decay,
        dtype=dtype,
        sender=sender,
        version=core.version,
        parameters=core.parameters(),
    )
    if checkpoint := start.restore.get(""):
        shadow.restore(Path(checkpoint))
    return shadow, manifest


def build_shared_trainer(start: SharedStart) -> SharedTrainer:
    import torch

    from headrace.trainer.shared.shared_trainer import SharedTrainer

    config = SharedConfig(**start.train)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    trainer = SharedTrainer(directory := Path(start.model_dir), config)
    if start.mark and mark_of(directory) != start.mark:
        raise ConfigError(
            f"the weights in {directory} have been written since the engine has loaded them: adapters would be trained over others than are "
            "served. Restore the old files, or start the server again"
        )
    return trainer


def check_files(start: EngineStart) -> None:
    """Raises IdentityError if the model's files are others than those that the run began with."""
    here = digests(Path(start.model_dir)) if start.files else {}
    if others := sorted(name for name in {*here, *start.files} if here.get(name) != start.files.get(name)):
        raise IdentityError(
            f"{start.model_dir} has other files than when the run began ({', '.join(others)}), with which an engine would compute something else than those "
            "before it; put them back, and resume the run"
        )


def build_engine_core(start: EngineStart) -> tuple[EngineCore, WeightReceiver]:
    """Raises what `check_files` raises."""
    check_files(start)
    import torch

    from headrace.engine.native.runners.skeleton import parameters_from_dir
    from headrace.weight_sync.directory import DirectoryReceiver

    directory, config = Path(start.model_dir), EngineConfig(**start.engine)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    core = core_class(config.kind)(directory, config, start.asleep)
    if start.transport:
        return core, start.transport.receiver(start.manifests)
    dtype = getattr(torch, config.serving_dtype)
    return core, DirectoryReceiver(directory, lambda path: parameters_from_dir(path, dtype), dtype)


def rank_sender(
    start: TrainerStart,
    values: Callable[[str], Iterator[ValueRange]],
    manifests: Mapping[str, Manifest],
    once: Sequence[str],
) -> WeightSender:
    """Returns this rank's end: for its part of the weights, where engines can put parts together, else for all of them in rank 0.

    `values`: as of `RankParts`. Every rank calls this at the same time."""
    transport = start.transport

    def parts() -> RankParts | None:
        return parts_of(manifests, start.rank, values, lambda value: _exchanged(value, start.ranks))

    if transport.takes_parts and (own := parts()):
        return transport.part_sender(manifests, once, own)
    return FollowingSender() if start.rank else transport.sender(manifests, once)


def _exchanged(value: Any, ranks: int) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, value)
    return found


class FollowingSender(WeightSender):
    """The sender of a rank that does not lead: it takes part in gathering the weights, and sends nothing."""

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        for _ in parameters:
            pass
        return lambda: follower_update(version, adapter)
