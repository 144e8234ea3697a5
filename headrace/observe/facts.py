"""What the loops report: small frozen facts, in order. Metrics, journal, terminal view and report are made from these alone.

`t` is always seconds since the start of the run (a resumed run goes on from where the killed one stood).
"""

from __future__ import annotations

from typing import Literal

from headrace.reports import EngineStats, LoadReport, TrainReport
from headrace.types import Group, Struct
from headrace.weights import WeightUpdate


class Fact(Struct, frozen=True, tag_field="fact", tag=True):
    """Base: encoded with its class name under `fact`, so that one decoder reads a whole file."""

    t: float


class RunStarted(Fact, frozen=True):
    name: str
    headline: str
    """One line for people: model, task, algorithm."""
    seed: int
    steps: int
    groups_per_step: int
    group_size: int
    slots: int
    window: int
    max_lag: int
    """The bound that holds (C1)."""
    where: dict[str, str]
    """What runs where: engine, trainer, scorer -> device, threads, path."""
    resumed_at: int = 0
    """Optimizer steps already done, 0 for a fresh run."""
    books: Books | None = None
    """Of a run that goes on: the state of every ticket, in case the killed process could not tell its last facts."""
    machine: dict[str, str] = {}
    """What the bits of a step depend on beside its input (`observe/machine.py`)."""
    max_tokens: int = 0
    """Where completions are cut off; 0 of a run that did not say."""
    chosen: dict[str, str] = {}
    """What was chosen where the settings leave it, and why (`ChosenConfig.why`)."""


class TicketDrawn(Fact, frozen=True):
    ticket: int
    prompt_id: str


class GroupEnded(Fact, frozen=True):
    """A ticket's generation and scoring are over. `ready` groups wait in the buffer; the others have left the pipeline."""

    ticket: int
    prompt_id: str
    outcome: Literal["ready", "dropped", "failed"]
    reason: str = ""
    """`no_contrast`, `reward_timeout`, `engine_error`, ...; empty when ready."""
    detail: str = ""
    rewards: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    """Tokens of each completion."""
    truncated: int = 0
    """Completions that ended at max_tokens."""
    failures: dict[str, int] = {}
    """Rollouts that failed, by reason."""
    seconds: float = 0.0
    """From ticket to outcome."""
    lost_tokens: int = 0
    """Sampled for rollouts of it that were ended before they were done."""
    kinds: dict[str, int] = {}
    """Rollouts that failed by `Failure.kind`: `KeyError` where the reason is `reward_raised`."""


class FirstFailure(Fact, frozen=True):
    """The first rollout of this process that failed in one way; how often it happens since is in `GroupEnded.kinds`."""

    reason: str
    kind: str
    """`KeyError`, or the reason where nothing was raised."""
    detail: str
    """One line."""
    traceback: str
    """Several, of the user's own frames; empty where nothing was raised."""
    prompt_id: str
    held_out: bool = False
    """Whether an evaluation met it."""


class StepTrained(Fact, frozen=True):
    """One optimizer step. `t` is its end; it began at `t - report.seconds`."""

    report: TrainReport
    groups: tuple[Group, ...]
    """Complete, for the journal; sinks take what they need."""
    lags: dict[int, int]
    """Lag -> number of trained tokens."""
    reward_mean: float
    """Over the rollouts that this step trained. Groups without contrast are not among them: as a policy gets better, the
    easy prompts leave this mean. `reward_drawn` is the policy's."""
    reward_std: float
    reward_drawn: float
    """Over all scored rollouts whose group ended since the step before, trained or not (the last known, if none ended)."""
    wait_seconds: float
    """How long the trainer waited for this batch."""


class WeightsLive(Fact, frozen=True):
    """`t` is the moment of the swap."""

    update: WeightUpdate
    load: LoadReport
    interrupted: int = 0
    """Rollouts that were ended in the middle for it, to go on from their tokens or not at all."""
    pause: float = 0.0
    """Seconds in which the engine was kept from generating all it could."""


class IdentityChecked(Fact, frozen=True):
    """The probe (C3): log-probs of a fixed prompt, engine against trainer, at one version."""

    version: int
    mean_abs_diff: float
    max_abs_diff: float
    tolerance: float
    ok: bool


class EngineSample(Fact, frozen=True):
    """About once a second."""

    stats: EngineStats


class Evaluated(Fact, frozen=True):
    phase: Literal["before", "during", "after"]
    step: int
    prompts: int
    """With a reward: the mean is over these."""
    reward_mean: float
    reward_sem: float
    """Standard error of the mean."""
    length_mean: float
    failures: dict[str, int] = {}
    """Rollouts that failed, by reason."""
    seconds: float = 0.0
    asked: int = 0
    """Prompts that were to be measured; 0 of a run that did not say."""
    kinds: dict[str, int] = {}
    """As in `GroupEnded`."""
    truncated: int = 0
    """Completions that ended at max_tokens."""

    @property
    def failed_prompts(self) -> int:
        """Those of which no rollout has a reward."""
        return max(0, self.asked - self.prompts)


class CheckpointSaved(Fact, frozen=True):
    step: int
    path: str
    seconds: float
    error: str = ""
    """Empty, or why it could not be written (the run goes on; the last good one stays)."""


class WorkerLost(Fact, frozen=True):
    who: str
    how: str
    deaths: int
    requests_reissued: int = 0


class Waited(Fact, frozen=True):
    """A named wait that is over (C6): `owner` waited for `what` during the `seconds` before `t`."""

    owner: str
    what: str
    seconds: float


class Warned(Fact, frozen=True):
    """A sentence the user should read: a wait past its first deadline, a failed checkpoint, a skipped step, ..."""

    message: str


class Planned(Fact, frozen=True):
    """The number of optimizer steps is another one from now on, so that the run ends within `train.minutes`."""

    steps: int
    message: str


class FirstText(Fact, frozen=True):
    """The first completion of this process, so that one sees early what the model writes."""

    prompt: str
    text: str
    tokens: int
    stop: str
    version: int


class Accounting(Struct, frozen=True):
    """C2. drawn = trained + dropped + failed + in_pipeline + in_checkpoint, at every instant, in tickets."""

    drawn: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    failed: dict[str, int] = {}
    in_pipeline: int = 0
    in_checkpoint: int = 0
    """Of a run that has ended: what a resumed one would go on with."""
    rollout_failures: dict[str, int] = {}
    """Single rollouts that failed inside groups that went on, by reason."""

    def balance(self) -> int:
        """Zero when the identity holds."""
        ended = self.trained + sum(self.dropped.values()) + sum(self.failed.values())
        return self.drawn - ended - self.in_pipeline - self.in_checkpoint


class Books(Struct, frozen=True):
    """The state of every ticket that has not ended, and how many have."""

    accounting: Accounting
    flying: tuple[int, ...]
    ready: tuple[int, ...]


class RunEnded(Fact, frozen=True):
    reason: str
    """`finished`, `interrupted`, or the sentence of the error that ended it; one that begins with `paused:` left a checkpoint to
    go on from as soon as what it names is mended."""
    step: int
    accounting: Accounting
    engine_idle: float
    """Share of the run's training time in which the engine pool did nothing, 0 to 1."""
    trainer_idle: float
    prompt_tokens: int = 0
    sampled_tokens: int = 0


AnyFact = (
    RunStarted
    | TicketDrawn
    | GroupEnded
    | FirstFailure
    | StepTrained
    | WeightsLive
    | IdentityChecked
    | EngineSample
    | Evaluated
    | CheckpointSaved
    | WorkerLost
    | Waited
    | Warned
    | Planned
    | FirstText
    | RunEnded
)
