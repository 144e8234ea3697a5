"""The ports between the parts. Each has one shipped fake (`testing/fake_engine.py`, `testing/fake_trainer.py`, `testing/fake_task.py`, ...).

The pipeline uses the ports of the first half (asynchronous); a worker process holds those of the second (synchronous).
The ports of environments are in `protocols.py`. The examples go on with the values of those in `types.py`, on the fakes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from headrace.core.batches import Batch, Failure
from headrace.core.reports import Capabilities, Captured, EngineStats, LoadReport, SleepReport, TrainReport, TrialScores
from headrace.core.steps import SoFar, StepOutput
from headrace.core.types import Completion, Constraint, Episode, Prompt, Request, Scored
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

    def unfinished(self, among: Iterable[str] | None = None) -> Mapping[str, SoFar]:
        """Returns what is reported of the requests under way (limited to the ids in `among`), by id. One has an `end`
        if its request has ended but the task that awaits it has not run yet. An engine that is lost for good returns the
        transcripts as they were at that moment."""

    def listen(self, listener: Callable[[StepOutput], None]) -> None:
        """Calls `listener` with every `StepOutput` before any caller sees a token or an end of it. An exception in
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

    @property
    def local_rank(self) -> int:
        """The number that whoever started a worker elsewhere gave it on its machine (`resources.local_rank`); 0 for all others."""

    @property
    def late(self) -> float:
        """Seconds for which its loss may stay unnoticed; 0 for a child of the run."""


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

    def step(self, given: Any) -> TrainReport:
        """Makes an optimizer step. `given`: a `Batch`, or what this rank has of one (`trainer/dealing/share.py`)."""

    @property
    def packed(self) -> bool:
        """Whether rows that begin alike share tokens."""

    @property
    def version(self) -> int:
        """The version of the model's weights; always 0 for a frozen base."""

    @property
    def kept(self) -> frozenset[str]:
        """Names of published tensors that keep their own dtype: buffers that the model saves."""

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

    def export(
        self,
        directory: Path,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        adapter: str = "",
        merge: bool = False,
    ) -> None:
        """Writes a directory that `transformers` loads; for an adapter, one that peft loads, unless it is to be merged."""


# --- The ports of environments
# What plays a rollout (`Environment`), and the handle that it asks for turns (`Agent`).
#
# The shipped fake is `testing/fake_environments.py`. The example goes on with the values of those in `types.py`.


TokenListener = Callable[[int, float], None]
"""A function that is called with each token of a turn and its log-prob as soon as it is sampled. It must not raise."""


class Agent(Protocol):
    """The engine as the environment of one rollout sees it: a handle that samples turns, one after the other."""

    async def turn(
        self,
        context: Sequence[int],
        *,
        fresh: bool = False,
        after: Completion | None = None,
        most: int = 0,
        role: str = "",
        messages: Sequence[Mapping[str, Any]] = (),
        read: Callable[[Completion], dict[str, Any]] | None = None,
        heard: TokenListener | None = None,
        constraint: Constraint | None = None,
        state: str = "",
    ) -> Completion:
        """Samples the next turn, and returns it decoded. `context`: the tokens before it that no turn holds yet (the prompt, or
        a tool's result before a later turn). They are never in the loss.

        `fresh`: the context is all that precedes the turn, and the turn begins a path of its own. `after`: the turn extends the turn with
        this completion, which `turn` has returned, so that several turns may extend one and be sampled at the same time; None: it
        extends the last turn. `most`: the most tokens of the completion, if fewer than rollout.max_tokens; 0: as many. `role`: the agent whose
        turn it is, if the rollout has several. `messages` and `read` (which returns the completion as a message) are kept with the turn for
        reward functions and people. `heard` is called with the tokens as they are sampled, in their order; it may miss some at the end.
        `constraint`: the language that the completion is held to, in place of rollout.constraint; what it leaves is recorded and trained over. `state`: the name of the
        environment's state in which the turn begins.

        Raises `RolloutOver` if the rollout has failed: it took more turns than its limit, or the engine refused a request."""

    @property
    def longest(self) -> int:
        """The most tokens that may come before a turn."""

    def cut_off(self, context: int, *, fresh: bool = False, after: Completion | None = None) -> str:
        """Returns the limit (`turns`, `tokens` or `seconds`) that a turn after a context of so many tokens would exceed; empty if it may be asked for. Once it has
        returned a limit the episode counts as cut off, and no more turns can be had."""

    def reward(self, name: str, value: float, of: Completion | None = None) -> None:
        """Gives a turn a reward, which is added to those that `play` returns. `of`: its completion, which `turn` has returned; None: that
        of the turn that was sampled last."""

    def leave_out(self, role: str) -> None:
        """Leaves the turns of a role out of the loss, also those that it has had: it is a part of the world of the others."""

    @property
    def kept(self) -> Sequence[bytes]:
        """The notes of this rollout, in order, those of earlier processes of the run included."""

    def keep(self, note: bytes) -> None:
        """Keeps a note, which a later process finds in `kept` if this one is killed. It is written before the call returns, behind all
        tokens that the environment has been given."""

    def again(self) -> None:
        """Forgets the turns, but not the notes: the environment was lost and begins again. A turn with the context of a recorded one is
        not sampled again."""


class Environment(Protocol):
    """The environment of one rollout: it is made for that rollout, and never reset or used for another one.

    >>> from headrace.episodes.environments.single_turn import SINGLE_TURN
    >>> environment = SINGLE_TURN.make(prompt, 7)
    """

    async def play(self, agent: Agent) -> Mapping[str, float]:
        """Asks the agent for turns until the episode is over. Returns the environment's own rewards by name, which are added to
        the scorer's. An exception makes the rollout a `Failure`, never a reward of zero; `RolloutFailed` names its reason."""


@dataclass(frozen=True)
class Limits:
    """Limits of a rollout. An environment that asks `Agent.cut_off` first is cut off at the limits of turns and tokens, and keeps what it
    has; one that does not, or that takes too long, has failed.

    >>> limits = Limits(turns=4, seconds=30.0)
    """

    turns: int
    seconds: float = 0.0
    """Total time that the environment itself may take between its turns. 0 sets no limit."""
    tokens: int = 0
    """The most tokens of a path of the episode: prompt, completions and what lies between them. 0: the engine's context."""
    whole: float = 0.0
    """Seconds since its begin, sampling included, after which the episode is cut off at its next turn. 0 sets no limit."""


async def _nothing_to_close() -> None:
    pass


Resumes = Literal["replayed", "restarted", "exported", "stateless"]
"""The ways to resume a rollout that was in progress when the run was killed. In all of them its environment is made again, and a turn
with the same context as the recorded one is not sampled again.

replayed: given the same turns, the environment asks for the same ones, and the episode continues where it was. What it does between its
turns, it does again.
restarted: it may ask for others. Then the tokens of its recorded turns are lost, and counted (`GroupEnded.lost_tokens`).
exported: it keeps its state with each turn (`Agent.keep`), and goes on from the last one. Nothing before that turn is done again.
stateless: it has no state but the conversation, and goes on from the last turn too. A tool call that was finished is not made again,
even if others of the same turn were not."""

KEPT: tuple[Resumes, ...] = ("exported", "stateless")
"""Ways of going on from the last turn."""


@dataclass(frozen=True)
class EnvironmentKind:
    """The environments of a run: how they are made, and their common properties.

    >>> SINGLE_TURN.limits.turns, SINGLE_TURN.resumes
    (1, 'replayed')
    """

    make: Callable[[Prompt, int], Environment]
    """Makes one from the prompt and a seed, which are the same when the run is resumed."""
    limits: Limits
    resumes: Resumes
    _: KW_ONLY
    close: Callable[[], Awaitable[None]] = _nothing_to_close
    """Ends what they share, such as processes."""
    players: str = ""
    """Clients or users who have to come for a rollout to be played, in words for the report of waits; empty if nobody has to."""
    remarks: Callable[[], Sequence[str]] = tuple
    """Sentences on requests of its agents that were answered in another way than they were asked for. The rehearsal prints them."""
