"""The start messages of the workers, and their answers."""

from __future__ import annotations

from typing import Any, Literal

from headrace.core.types import Struct
from headrace.core.weights import Manifest
from headrace.durable.shared_directory import DirectoryProbe
from headrace.processes.wire import RankStart
from headrace.weight_sync.transport import AnyTransport


class AdapterStart(Struct, frozen=True):
    """The settings of one adapter: TrainConfig, AlgoConfig and LoraConfig as plain values."""

    train: dict[str, Any]
    algo: dict[str, Any]
    lora: dict[str, Any]


class TrainerStart(RankStart, frozen=True, kw_only=True):
    model_dir: str
    train: dict[str, Any]
    """TrainConfig as plain values."""
    algo: dict[str, Any]
    seed: int
    serving_dtype: str
    """The dtype to which published weights are converted."""
    keep_routing: bool
    """Whether the trainer forces the experts that the sampler chose."""
    transport: AnyTransport
    """The transport that publishes weights."""
    restore: dict[str, str] = {}
    """Checkpoint directories to continue from, by adapter. An adapter without one starts from the model's own weights."""
    shadow: ShadowStart | None = None
    """Set if the student's older self is a teacher."""
    adapters: dict[str, AdapterStart] = {}
    """The adapters that are trained instead of all weights. One with the empty name is published merged into the base weights."""
    rank: int = 0
    """Which of the trainer's ranks this is. Rank 0 publishes, and writes files."""
    ranks: int = 1
    """The number of them (`train.parallel`)."""
    meeting: str = ""
    """The place where they find each other: a file, or HOST:PORT of rank 0 if they are elsewhere. Empty for one."""
    beside: int = 1
    """The number of ranks on this rank's machine, which share its cores."""
    probe: DirectoryProbe | None = None
    """A file by which ranks elsewhere show that they see the run's directory."""


class ShadowStart(Struct, frozen=True):
    """The student's older self, which a teacher's engine serves (`trainer/step/reference.py`)."""

    kind: Literal["snapshot", "average"]
    every: int
    decay: float
    dtype: str
    """The dtype in which it is served."""
    transport: AnyTransport
    """Its own transport, because its versions are published at other times than the run's."""


class TrainerReady(Struct, frozen=True):
    manifests: dict[str, Manifest]
    """The layout of everything that will be published, by adapter. The model's has the empty name."""
    version: int
    dtype: str = "bfloat16"
    """The dtype of the computation, after `auto` was resolved."""
    shadow: Manifest | None = None
    """The layout of the student's older self."""
    arithmetic: str = ""
    """The name of its forward pass (`headrace/native/arithmetic.py`); empty if it has none."""
    packed: bool = True
    """Whether it forwards tokens that rows share once: the controller deals rows to ranks accordingly."""


LAST_WORDS = "last words"
"""The method of a worker's last push."""


class LastWords(Struct, frozen=True):
    """The reason why a worker's process is going to end."""

    why: str
    error: Literal["", "IdentityError", "ConfigError"] = ""
    """Set if another process must not take its place: the class of the error with which the engine is given up."""


class ServerNeeds(Struct, frozen=True, kw_only=True):
    """The facts about a run that its server needs, beside the settings of the engine."""

    adapters: int = 0
    """Adapters that are served at once."""
    rank: int = 1
    """The largest rank among them."""
    adapted: tuple[str, ...] = ()
    """Names of the modules that adapters may adapt."""
    check_every: int = 0
    """`watch.identity_every`."""


class EngineStart(Struct, frozen=True):
    model_dir: str
    engine: dict[str, Any]
    """EngineConfig as plain values."""
    manifests: dict[str, Manifest]
    """The layouts that the trainer reported in `TrainerReady`."""
    transport: AnyTransport | None = None
    """The transport that delivers weights. None: the weights are those in `model_dir`, which never change."""
    asleep: bool = False
    """Whether it begins asleep: the trainer has the devices that both share."""
    server: ServerNeeds | None = None
    """Set if the engine is a server (`engine["kind"]`) that the worker has to start."""
    files: dict[str, str] = {}
    """The digests of the files beside the weights that it reads there (`same_model.digests`): one that takes the place of another must compute as that
    did. Empty: any."""


class SharedStart(Struct, frozen=True):
    """The trainer that clients share (`trainer/shared/`)."""

    model_dir: str
    train: dict[str, Any]
    """SharedConfig as plain values."""
    mark: str = ""
    """The mark of the model's files as the engine has loaded them (`weight_sync/directory.py`); empty: any."""
