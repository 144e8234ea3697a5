"""The ports between the parts. Each has one shipped fake (`engine/fake.py`, `trainer/fake.py`, `tasks/fake.py`, ...).

The first half is what the pipeline sees (asynchronous); the second what a worker process holds (synchronous).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from headrace.reports import Capabilities, EngineStats, LoadReport, TrainReport
from headrace.steps import StepOutput, Transcript
from headrace.types import Batch, Completion, Episode, Failure, Prompt, Request, Scored
from headrace.weights import AdapterSpec, Manifest, WeightUpdate

if TYPE_CHECKING:
    import msgspec
    import torch

T = TypeVar("T")


class Engine(Protocol):
    """Generates, and swaps weights while it generates."""

    capabilities: Capabilities

    async def generate(self, request: Request) -> Completion:
        """Cancelling the awaiting task cancels the request and frees its KV. Raises `ValueError` when the engine refuses the
        request, `WorkerDied` when the engine is given up."""

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """Returns when the weights (the model's, or an adapter's) are live. Raises `IdentityError` if they are not those
        published, `ValueError` if they do not fit.

        `parts` > 1 streams them: parameters are replaced in so many groups of neighbours in canonical order, with a forward
        pass at least between two groups when there is work. What is sampled between the first and the last is `mixed`."""

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        """Its `prompt_logprobs` are those (temperature 1) of tokens[1:] given what precedes them; its span tells the version.
        Runs as a request of its own beside the others, before those that wait."""

    async def drain(self) -> None:
        """Admits nobody new until `resume`. Returns when those that had begun have ended."""

    async def resume(self) -> None: ...

    async def abort(self) -> None:
        """Every request that is here, waiting ones included, ends as `interrupted`, with what there is of it. Requests that come after the call are not touched."""

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, Transcript]:
        """What has been told so far of each request under way (`among` these), by its id. A copy.

        It has an `end` where that is told and whoever awaits it has not had his turn. Of an engine that was given up: what it
        had until then."""

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """`listener` is given every `StepOutput` (msgpack) before anybody is told of a token or an end in it. What it raises
        ends the engine."""

    async def stats(self) -> EngineStats: ...

    async def watch(self) -> None:
        """Returns never; raises `WorkerDied` as soon as the engine is lost for good."""

    def kill(self) -> None:
        """Instead of asking it to leave. `close` still has to be called."""

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Turns batches into new weights."""

    async def step(self, batch: Batch) -> TrainReport: ...

    async def publish(self, adapter: str = "") -> WeightUpdate:
        """Writes the current weights where engines can load them: those of an adapter, or the whole model's. Where adapters are
        trained, the latter are the frozen base, which has to be published first."""

    async def publish_shadow(self) -> WeightUpdate | None:
        """The student's older self, where a new version of it is due."""

    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        """[T-1] log-probs (temperature 1) of tokens[1:] given what precedes them, under the trainer's own weights."""

    async def save(self, directory: Path, adapter: str = "") -> None: ...

    async def watch(self) -> None:
        """Returns never; raises `WorkerDied` as soon as the trainer is lost."""

    def kill(self) -> None:
        """As `Engine.kill`."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """What a worker is wanted for."""

    kind: Literal["engine", "trainer"]
    who: str
    """In messages to people: `engine`, `teacher math`."""
    cores: Sequence[int] = ()
    """CPU cores of its process; empty: all of them."""
    inherited: Sequence[int] = ()
    """File descriptors that it needs under the same numbers (`Transport.inherited`)."""


class Worker(Protocol):
    """A process that works for the controller, wherever it runs. Calls are answered, pushes are not."""

    async def start(self) -> None:
        """Raises `WorkerDied` where it cannot be started."""

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        """Raises what the worker raised, or `WorkerDied`."""

    def push(self, method: str, payload: Any) -> None:
        """Raises `WorkerDied` where the connection has ended already."""

    async def watch(self) -> str:
        """Returns as soon as it is lost, and says how it ended."""

    async def end(self) -> None:
        """Asks it to leave, waits, kills it."""

    def kill(self) -> None:
        """At once. `end` still has to be called."""


Heard = Callable[[str, "msgspec.Raw"], None]
"""Is called with method and payload (msgpack) of what a worker pushes."""


class Launcher(Protocol):
    """Where workers come from: this machine, another one, a simulation."""

    def worker(self, job: Job, heard: Heard) -> Worker:
        """One that has not been started. Raises `ConfigError` for a job that cannot be done there."""


class Task(Protocol):
    """Where prompts come from. Prompts are drawn one after the other; `state` says where the cursor stands (JSON-able)."""

    def draw(self) -> Prompt: ...

    def held_out(self, count: int) -> list[Prompt]:
        """The same `count` prompts at every call; `draw` never yields one of them."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Scorer(Protocol):
    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        """One result per episode, in order. Never raises for what the user's reward did: that is a `Failure`."""

    async def close(self) -> None: ...


class Observer(Protocol):
    """The one place where facts go (see `observe/facts.py`)."""

    def record(self, fact: Any) -> None: ...


class Transport(Protocol):
    """How weights reach engines, as a value: opened by the controller, handed to trainer and engines at their start.

    It fills the packed buffer of the manifest (`weight_sync/packed.py`); an update says in `where`, in a form that the transport
    owns, where its bytes are."""

    @classmethod
    def open(cls) -> Transport:
        """Raises OSError where this machine cannot have it."""

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that both ends have to inherit under the same numbers. Empty for what works between machines."""

    def sender(self, manifests: Mapping[str, Manifest], once: Collection[str] = ()) -> WeightSender:
        """`manifests`: the layout of all that will be published, by adapter; the model's has the empty name. `once`: names of
        what is published a single time, and needs no second buffer."""

    def receiver(self, manifests: Mapping[str, Manifest]) -> WeightReceiver:
        """`manifests`: those that the sender was made with."""

    def close(self) -> None:
        """At the controller, when both ends are gone."""


class WeightSender(Protocol):
    """The trainer's end of a transport."""

    def send(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> WeightUpdate:
        """`adapter`: whose parameters they are, where they are not the model's."""


class WeightReceiver(Protocol):
    """The engine's end of a transport."""

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Views of the published parameters by name, verified against the fingerprint. Thread-safe.

        The views stay valid until the version after the next one is published."""


class EngineCore(Protocol):
    """An engine as its worker process drives it: one thread calls `step` for ever; `prepare` may run beside it."""

    capabilities: Capabilities

    def add(self, request: Request) -> None:
        """Raises `ValueError` with the remedy when the request can never run."""

    def cancel(self, request_id: str) -> None:
        """Frees its KV at once; unknown ids are ignored (it may just have ended)."""

    def prepare(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor], mixed: bool = False) -> Any:
        """Whatever must be done to new weights before they can serve; called in a side thread, beside `step`.

        `mixed`: some of the tensors are still those of the version before, which keeps its number until all are swapped.
        Raises `ValueError` naming the first parameter that is missing, unknown, or of another shape or dtype."""

    def swap(self, prepared: Any) -> None:
        """Called between two steps: the next forward pass uses the new weights. Running sequences go on.

        Raises `ValueError` when they do not go with what was loaded since they were prepared; nothing has changed then.
        After mixed ones, the version of before may be swapped in once more: that takes the update back."""

    def unload(self, adapter: str) -> None: ...

    def pause(self) -> None: ...

    def drain(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    @property
    def drained(self) -> bool:
        """Whether nothing is left to do for those that had begun, or nobody drains any more."""

    def has_work(self) -> bool: ...

    def step(self) -> StepOutput:
        """One forward pass: chunks of waiting prompts beside one token for every running sequence."""

    def stats(self) -> EngineStats: ...


class TrainerCore(Protocol):
    """A trainer as its worker process drives it. It trains all weights, which go by the empty name, or adapters of a frozen
    base, which go by theirs."""

    def step(self, batch: Batch) -> TrainReport: ...

    @property
    def version(self) -> int:
        """Of the model's weights; 0 for ever of a frozen base."""

    def version_of(self, adapter: str) -> int: ...

    @property
    def dtype(self) -> str:
        """In which it computes: `bfloat16` or `float32`."""

    @property
    def arithmetic(self) -> str:
        """The name of its forward pass: an engine that has the same name gets the same log-probs of equal weights, bit for bit.
        Empty where it has none."""

    def parameters(self, adapter: str = "") -> Iterable[tuple[str, torch.Tensor]]:
        """As they are published: in canonical order (`named_parameters()`, tied ones once; of an adapter as peft saves it).
        The sender casts to the serving dtype."""

    def adapters(self) -> Sequence[AdapterSpec]:
        """Those that are trained and published beside the base."""

    def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]: ...

    def save(self, directory: Path, adapter: str = "") -> None:
        """Weights, optimizer, RNG, schedule. Files are flushed to disk; the caller renames the directory."""

    def restore(self, directory: Path, adapter: str = "") -> None: ...

    def export(self, directory: Path) -> None:
        """A directory that `transformers` loads."""
