"""The ports between the parts. Each has one shipped fake (`testing/fake_engine.py`, `testing/fake_trainer.py`, `testing/fake_task.py`, ...).

The pipeline uses the ports of the first half (asynchronous); a worker process holds those of the second (synchronous).
The ports of environments are in `playing.py`. The examples go on with the values of those in `types.py`, on the fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from headrace.core.batches import Batch, Failure
from headrace.core.reports import Capabilities, Captured, EngineStats, LoadReport, SleepReport, TrainReport, TrialScores
from headrace.core.steps import StepOutput, Transcript
from headrace.core.types import Completion, Episode, Prompt, Request, Scored
from headrace.core.weights import AdapterSpec, Manifest, WeightUpdate

if TYPE_CHECKING:
    import msgspec
    import torch

T = TypeVar("T")


class Engine(Protocol):
    """Generates, and swaps weights while it generates.

    >>> from headrace.testing.fake_engine import FakeEngine
    >>> async def case():
    ...     engine = FakeEngine(seconds_per_token=0, length=lambda rng: 3)
    ...     await engine.load(update)
    ...     return await engine.generate(request)
    >>> sampled = asyncio.run(case())
    >>> len(sampled.tokens), sampled.spans, sampled.stop
    (3, (VersionSpan(start=0, version=6, kv_version=6, mixed=False),), 'stop')
    """

    capabilities: Capabilities

    async def generate(self, request: Request) -> Completion:
        """Samples one completion. Cancelling the awaiting task cancels the request and frees its KV.

        Raises `ValueError` if the engine refuses the request, `WorkerDied` if the engine is lost for good."""

    async def load(self, update: WeightUpdate, parts: int = 1) -> LoadReport:
        """Returns when the weights (the model's, or an adapter's) are live. Raises `IdentityError` if they are not those
        published, `ValueError` if they do not fit.

        `parts` > 1 streams them: the parameters are replaced in this many groups of neighbours in canonical order, with at
        least one forward pass between two groups while there is work. Tokens sampled in between are marked `mixed`."""

    async def score(self, tokens: Sequence[int], adapter: str = "") -> Completion:
        """Returns a completion whose `prompt_logprobs` are those (temperature 1) of tokens[1:], each given the tokens before it,
        and whose span holds the version. Runs as a request of its own, ahead of those that wait."""

    async def drain(self) -> None:
        """Admits no new requests until `resume`. Returns when all running requests have ended."""

    async def resume(self) -> None:
        """Admits requests again after `drain`."""

    async def abort(self) -> None:
        """Ends the requests that are running or waiting at the time of the call as `interrupted`, with the tokens sampled so far,
        even if the engine's process dies meanwhile. Requests that arrive after the call are unaffected."""

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, Transcript]:
        """Returns copies of the transcripts of the requests under way (limited to the ids in `among`), by id. One has an `end`
        if its request has ended but the task that awaits it has not run yet. An engine that is lost for good returns the
        transcripts as they were at that moment."""

    def listen(self, listener: Callable[[bytes], None]) -> None:
        """Calls `listener` with every `StepOutput` (msgpack) before any caller sees a token or an end of it. An exception in
        `listener` ends the engine."""

    async def stats(self) -> EngineStats: ...

    async def watch(self) -> None:
        """Never returns; raises `WorkerDied` as soon as the engine is lost for good."""

    def kill(self) -> None:
        """Ends the engine's process at once. `close` still has to be called."""

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Turns batches into new weights.

    >>> from headrace.testing.fake_trainer import FakeTrainer
    >>> trainer = FakeTrainer(seconds_per_step=0)
    >>> trainer.versions[""] = 5
    >>> asyncio.run(trainer.step(batch)).version, asyncio.run(trainer.publish()).version
    (6, 6)
    """

    async def step(self, batch: Batch) -> TrainReport: ...

    async def copy(self, adapter: str = "") -> None:
        """Copies the current weights of an adapter, or of the whole model. The next `publish` of it publishes this copy, whatever the
        trainer does meanwhile."""

    async def publish(self, adapter: str = "") -> WeightUpdate:
        """Publishes what was copied, or else the current weights, where engines can load them. If adapters are trained, the model is
        their frozen base, which has to be published first."""

    async def publish_shadow(self) -> WeightUpdate | None:
        """Publishes the student's older self (`teacher.kind = "self"`), if a new version of it is due."""

    async def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        """Returns [T-1] log-probs (temperature 1) of tokens[1:], each given the tokens before it, under the trainer's weights."""

    async def begin_trial(self, adapter: str = "") -> None:
        """Changes every trained value a little. Until the trial ends, the weights are of `trial_version` and may be published."""

    async def end_trial(self, pieces: Sequence[Sequence[int]], adapter: str = "", most: int = 0) -> TrialScores:
        """Scores the pieces (as `score`) under the changed weights, and under those with single kinds of parameters unchanged. Then changes all
        values back, bit for bit. `most`: tokens of the first piece that are scored with unchanged kinds; 0: all pieces."""

    async def capture(self, adapter: str = "") -> Captured:
        """Copies what a checkpoint holds of an adapter, or of the whole model. The next `save` of it writes this copy, whatever the trainer
        does meanwhile, unless the report says that there is no copy. Raises CheckpointError while an earlier one is being written."""

    async def save(self, directory: Path, adapter: str = "") -> None:
        """Writes what was captured, or else what there is now."""

    async def watch(self) -> None:
        """Never returns; raises `WorkerDied` as soon as the trainer is lost."""

    def kill(self) -> None:
        """Ends the trainer's process at once. `close` still has to be called."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """The work that a worker is started for.

    >>> job = Job("engine", who="teacher math", cores=(0, 1))
    """

    kind: Literal["engine", "trainer", "shared trainer", "scorer", "environment"]
    who: str
    """The worker's name in messages to people: `engine`, `teacher math`."""
    cores: Sequence[int] = ()
    """CPU cores that its process may use; empty: all of them."""
    inherited: Sequence[int] = ()
    """File descriptors that it needs under the same numbers (`Transport.inherited`)."""


class Worker(Protocol):
    """A process that works for the controller, wherever it runs. It answers calls, and does not answer pushes."""

    left: bool
    """Whether it was asked to end where it runs, and has left: this is no death."""

    async def start(self) -> None:
        """Raises `WorkerDied` if it cannot be started."""

    async def call(self, method: str, payload: Any, returns: type[T]) -> T:
        """Returns the worker's answer. Raises the exception that the worker raised, or `WorkerDied`."""

    def push(self, method: str, payload: Any) -> None:
        """Sends a message without an answer. Raises `WorkerDied` if the connection has ended already."""

    async def watch(self) -> str:
        """Returns how the worker ended, as soon as it is lost."""

    async def end(self) -> None:
        """Asks the worker to leave, waits, and kills it if it has not left."""

    def kill(self) -> None:
        """Kills the worker at once. `end` still has to be called."""

    @property
    def door(self) -> str:
        """HOST:PORT at which a trainer's worker elsewhere listens for the other ranks; empty for all others."""


Heard = Callable[[str, "msgspec.Raw"], None]
"""A function that is called with method and payload (msgpack) of every push of a worker."""


class Launcher(Protocol):
    """The place where workers run: this machine, another one, a simulation."""

    def worker(self, job: Job, heard: Heard) -> Worker:
        """Makes a worker that has not been started. Raises `ConfigError` for a job that this place cannot do."""


class Task(Protocol):
    """The source of prompts, which are drawn one after the other.

    >>> from headrace.testing.fake_task import FakeTask
    >>> task = FakeTask()
    >>> task.draw().id, task.draw().id, task.state()
    ('train/0', 'train/1', {'next': 2})
    """

    def draw(self) -> Prompt: ...

    def held_out(self, count: int) -> list[Prompt]:
        """Returns the same `count` prompts at every call; `draw` never yields one of them."""

    def state(self) -> dict[str, Any]:
        """Returns the position of the cursor (JSON-able)."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Scorer(Protocol):
    """Gives rewards.

    >>> from headrace.testing.fake_scorer import FakeScorer
    >>> scorer = FakeScorer(reward=lambda prompt, episode: float(episode.last.text.startswith(prompt.columns["answer"])))
    >>> [one] = asyncio.run(scorer.score(prompt, [episode]))
    >>> one.reward, one.rewards
    (1.0, {'fake': 1.0})
    """

    async def score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[Scored | Failure]:
        """Returns one result per episode, in order. An exception in the user's reward function becomes a `Failure`."""

    async def close(self) -> None: ...


class Observer(Protocol):
    """The one receiver of facts (`facts/facts.py`)."""

    def record(self, fact: Any) -> None: ...


class Transport(Protocol):
    """The way of weights to engines, as a value: the controller opens it and passes it to trainer and engines at their start.

    It fills the packed buffer of the manifest (`weight_sync/packed.py`), and writes its place into `WeightUpdate.where`.

    >>> import torch
    >>> from headrace.weight_sync.shared_memory import SharedMemory
    >>> transport = SharedMemory.open()
    >>> sender, receiver = transport.sender({"": manifest}), transport.receiver({"": manifest})
    >>> sent = sender.send(6, [("fc.weight", torch.ones(8, 8)), ("fc.bias", torch.zeros(8))])
    >>> received = receiver.receive(sent)
    >>> received["fc.weight"].shape, received["fc.weight"].dtype, sent.where
    (torch.Size([8, 8]), torch.bfloat16, {'offset': 0})
    >>> transport.close()
    """

    @classmethod
    def open(cls, opening: Any = ...) -> Transport:
        """Raises OSError if this machine does not support it. `opening`: a `weight_sync.kind.Opening`, of which each takes what it needs."""

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that both ends inherit under the same numbers. Empty for a transport that works between machines."""

    def sender(self, manifests: Mapping[str, Manifest], once: Collection[str] = ()) -> WeightSender:
        """Makes the trainer's end. `manifests`: the layouts of everything that is published, by adapter; the model's has the
        empty name. `once`: the names of those that are published a single time, and need no second buffer."""

    def receiver(self, manifests: Mapping[str, Manifest]) -> WeightReceiver:
        """Makes the engine's end, from the manifests that the sender was made with."""

    def close(self) -> None:
        """Frees what `open` took. The controller calls it after both ends have ended."""


class WeightSender(Protocol):
    """The trainer's end of a transport."""

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> Callable[[], WeightUpdate]:
        """Copies the parameters of the model, or of `adapter`. Returns the rest of the work, which returns the update that announces them.
        It may be done in another thread while the parameters change, and before the next copy. Both raise OSError."""

    def send(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]], adapter: AdapterSpec | None = None
    ) -> WeightUpdate:
        """Does all of it."""
        return self.copy(version, parameters, adapter)()


class WeightReceiver(Protocol):
    """The engine's end of a transport."""

    @property
    def received(self) -> int:
        """Bytes of all updates that travelled to it, in their encoding. 0 where none travel."""

    def receive(self, update: WeightUpdate) -> Mapping[str, torch.Tensor]:
        """Returns views of the published parameters by name, valid until the version after the next one is published. Raises
        `IdentityError` if the bytes do not have the published fingerprint. Thread-safe."""


class EngineCore(Protocol):
    """An engine inside its worker process: one thread calls `step` for ever; `prepare` may run beside it in another."""

    capabilities: Capabilities

    def add(self, request: Request) -> None:
        """Raises `ValueError` with the remedy when the request can never run."""

    def cancel(self, request_id: str) -> None:
        """Ends a request and frees its KV at once. Unknown ids are ignored: the request may just have ended."""

    def prepare(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor], mixed: bool = False) -> Any:
        """Makes new weights ready to serve, and returns what `swap` takes. Called in a side thread, beside `step`.

        `mixed`: some of the tensors are still those of the previous version, whose number stays until all are swapped.
        Raises `ValueError` naming the first parameter that is missing, unknown, or of another shape or dtype."""

    def swap(self, prepared: Any) -> Any:
        """Puts prepared weights into service between two steps: the next forward pass uses them. Running sequences continue. Returns what
        was replaced, so that the caller decides when its memory is given back.
        Raises `ValueError`, and changes nothing, if they do not fit weights loaded since they were prepared. After a mixed
        swap the previous version may be swapped in again, which undoes a streamed update."""

    def unload(self, adapter: str) -> None: ...

    def sleep(self, keep: bool) -> SleepReport:
        """Gives the memory of its device back. `keep`: the KV entries of requests go to the host, else they are computed again."""

    def wake(self) -> SleepReport:
        """Takes it again; weights are swapped in afterwards."""

    def pause(self) -> None: ...

    def drain(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    @property
    def drained(self) -> bool:
        """Whether all requests that were running at `drain` have ended, or `resume` has been called since."""

    def has_work(self) -> bool: ...

    def step(self) -> StepOutput:
        """Runs one forward pass: chunks of waiting prompts beside one token for every running sequence."""

    def stats(self) -> EngineStats: ...


class TrainerCore(Protocol):
    """A trainer inside its worker process. It trains all weights, under the empty name, or adapters of a frozen base, under
    their own names."""

    def step(self, batch: Batch) -> TrainReport: ...

    @property
    def version(self) -> int:
        """The version of the model's weights; always 0 for a frozen base."""

    def version_of(self, adapter: str) -> int: ...

    @property
    def dtype(self) -> str:
        """The dtype of its computation: `bfloat16` or `float32`."""

    @property
    def arithmetic(self) -> str:
        """The name of its forward pass: an engine that has the same name gets the same log-probs of equal weights, bit for bit.
        Empty where it has none."""

    def parameters(self, adapter: str = "") -> Iterable[tuple[str, torch.Tensor]]:
        """Yields names and tensors in the order of publishing: canonical (`named_parameters()`, tied ones once) for the model,
        as peft saves them for an adapter. The sender casts to the serving dtype."""

    def adapters(self) -> Sequence[AdapterSpec]:
        """Returns the adapters that are trained and published beside the base."""

    def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]: ...

    def begin_trial(self, adapter: str = "") -> None: ...

    def end_trial(self, pieces: Sequence[Sequence[int]], adapter: str = "", most: int = 0) -> TrialScores: ...

    def reserve(self) -> None:
        """Does in advance what would delay the first steps."""

    def sleep(self) -> SleepReport:
        """Gives the memory of its device back: optimizer state and weights go to the host, and what a step makes anew is freed."""

    def wake(self) -> SleepReport:
        """Takes it again."""

    def save(self, directory: Path, adapter: str = "") -> None:
        """Writes weights, optimizer, RNG and schedule. Files are flushed to disk; the caller renames the directory."""

    def capture(self, adapter: str = "") -> tuple[Captured, Callable[[Path], None]]:
        """Copies them, and returns the rest of `save`, which may be done in another thread if the report says so."""

    def restore(self, directory: Path, adapter: str = "") -> None: ...

    def export(self, directory: Path) -> None:
        """Writes a directory that `transformers` loads."""
