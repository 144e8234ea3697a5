"""The facts that the loops report, in order: small frozen values. Metrics, terminal view and report are made from these alone.

`t` is always in seconds since the start of the run; a resumed run continues the clock of the process before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from headrace.core.batches import Group
from headrace.core.reports import EngineStats, Finding, LoadReport, PromptChoice, Sight, SleepReport, TrainReport
from headrace.core.types import Struct
from headrace.core.weights import WeightUpdate


class Fact(Struct, frozen=True, tag_field="fact", tag=True):
    """Base class: encoded with the class name under `fact`, so that one decoder reads a whole file."""

    t: float


class WeightWay(Struct, frozen=True):
    """The way of weights from the trainer to the engines."""

    transport: str
    """The value of `weight_sync.kind`, with `auto` resolved."""
    encoding: str
    """The value of `weight_sync.encoding`."""
    words: str = ""
    """The transport's name in sentences. Empty in runs from before 2026-11-29."""
    travels: Literal["bytes", "files", "nothing"] = "bytes"
    """Files: the bytes of a version are those that were written, whoever reads them; nothing: both ends share memory."""


class RunStarted(Fact, frozen=True):
    """A process of the run begins."""

    name: str
    headline: str
    """Model, task and algorithm in one line."""
    seed: int
    steps: int
    groups_per_step: int
    group_size: int
    slots: int
    window: int
    max_lag: int
    """The lag bound that is guaranteed (C1)."""
    where: dict[str, str]
    """engine, trainer, scorer -> device, threads, path."""
    resumed_at: int = 0
    """Optimizer steps already done; 0 for a fresh run."""
    books: Books | None = None
    """The state of every ticket when a run is resumed, because the killed process may not have recorded its last facts."""
    machine: dict[str, str] = {}
    """Properties of the machine on which the bits of a training step depend (`facts/machine_mark.py`)."""
    max_tokens: int = 0
    """Length at which completions are cut off; 0 in runs that did not record it."""
    chosen: dict[str, str] = {}
    """The settings that headrace chose, and why (`ChosenConfig.why`)."""
    prices: dict[str, float] = {}
    """Dollars an hour, `engine` of each engine and `trainer` of all its devices; empty if no price was set."""
    weights: WeightWay | None = None
    """None in runs that recorded it only in words (`where["weights"]`)."""


class TicketDrawn(Fact, frozen=True):
    """A ticket was drawn and its prompt admitted."""

    ticket: int
    prompt_id: str


class PromptChosen(Fact, frozen=True):
    """How the prompt of a ticket was chosen; only in runs with a curriculum."""

    ticket: int
    choice: PromptChoice


class GroupEnded(Fact, frozen=True):
    """Generation and scoring of a ticket's group are over. `ready` groups wait in the buffer; the others have left the pipeline."""

    ticket: int
    prompt_id: str
    outcome: Literal["ready", "dropped", "failed"]
    reason: str = ""
    """`no_contrast`, `reward_timeout`, `engine_error`, ...; empty if ready."""
    detail: str = ""
    rewards: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    """Tokens of each completion."""
    truncated: int = 0
    """Completions that ended at max_tokens."""
    failures: dict[str, int] = {}
    """Rollouts that failed, by reason."""
    seconds: float = 0.0
    """Seconds from drawing the ticket to the outcome."""
    lost_tokens: int = 0
    """Tokens of rollouts that were cancelled before they were finished."""
    kinds: dict[str, int] = {}
    """Failed rollouts by `Failure.kind`, for example `KeyError` for the reason `reward_raised`."""
    talk: dict[str, int] = {}
    """Counts over the rollouts of an environment that talks: `turns`, those that were `forked` (on a path of their own, because the chat
    template rewrote earlier messages), turns behind the first of their rollout (`later`) and those of them that began in a state in which another turn of the
    group began (`met`, see `algo.credit`), results of tools (`calls`), among them those with a problem, by its name, and messages that hold the text of control tokens
    (`specials`), which the model reads as text."""
    turns: tuple[int, ...] = ()
    """Turns of each rollout; empty if all have one. So are the next two."""
    read: tuple[int, ...] = ()
    """Tokens of each rollout that lie between its turns: results of tools, what others said."""
    between: tuple[float, ...] = ()
    """Seconds of each rollout in which no turn was sampled."""
    rollouts: int = 0
    """Rollouts of the group, if a curriculum has chosen their number; else 0."""
    times: tuple[tuple[float, ...], ...] = ()
    """Seconds before `t` at which each turn of each rollout was asked for and had ended, in pairs; empty if not recorded."""


class FirstFailure(Fact, frozen=True):
    """The first rollout of this process that failed in a particular way; `GroupEnded.kinds` counts how often it happens."""

    reason: str
    kind: str
    """The class of the exception such as `KeyError`, or the reason if nothing was raised."""
    detail: str
    """One line."""
    traceback: str
    """Several lines, with the user's own frames only; empty if nothing was raised."""
    prompt_id: str
    held_out: bool = False
    """Whether it happened during an evaluation."""


class StepTrained(Fact, frozen=True):
    """An optimizer step is over. It began at `t - report.seconds`."""

    report: TrainReport
    groups: tuple[Group, ...]
    """The complete groups; sinks take what they need."""
    lags: dict[int, int]
    """Lag -> number of trained tokens."""
    reward_mean: float
    """Mean over the rollouts that this step trained. Groups without contrast are not among them, so as a policy gets better, the easy
    prompts leave this mean. `reward_drawn` measures the policy."""
    reward_std: float
    reward_drawn: float
    """Mean over all scored rollouts whose group ended since the step before, trained or not (the last known value if none ended)."""
    wait_seconds: float
    """Seconds that the trainer waited for this batch."""
    ages: dict[int, int] = {}
    """Lag -> number of trained tokens of good rollouts of earlier groups (`algo.experience`), which are not in `lags`: the bound is not theirs."""


class WeightsLive(Fact, frozen=True):
    """The engine serves new weights. `t` is the moment of the swap."""

    update: WeightUpdate
    load: LoadReport
    interrupted: int = 0
    """Rollouts that were interrupted for the swap, whether they are resumed or cancelled."""
    pause: float = 0.0
    """Seconds for which admission or generation was held back for the swap."""


class ScorerAsked(Fact, frozen=True, kw_only=True):
    """A part of the reward was called for one group."""

    scorer: str
    """The name of its reward."""
    what: str
    """`function`, `service` or `judge`."""
    completions: int
    seconds: float
    """Time of the call, waiting included."""
    waited: float = 0.0
    """Seconds for which its requests waited for their turn (`concurrency`), added up."""
    attempts: int = 0
    """Requests over the network."""
    retries: int = 0
    """Requests that repeated one that had failed."""
    tokens: int = 0
    """Tokens that a judge read and wrote."""
    failures: dict[str, int] = {}
    """Completions without a score, by reason."""


class WarmStarted(Fact, frozen=True, kw_only=True):
    """The policy was trained on demonstrations before the run, which begins with the weights of that."""

    model: str
    """The model that it began with."""
    path: str
    """The file with the rows."""
    rows: int
    """Rows that were trained."""
    held_out_rows: int
    epochs: int
    tokens: int
    """Tokens in the loss, over all epochs."""
    seconds: float
    learning_rate: float
    """The largest."""
    losses: tuple[float, ...]
    """The mean loss of a token in each optimizer step, in nats, before its update."""
    held_out: tuple[float, ...]
    """The mean loss of a token of the held-out rows, in nats: before the first epoch, and after each. Empty without such rows."""
    mark: str
    """A fingerprint of all that the weights depend on but the machine."""
    loss: str = "ce"
    """Cross-entropy, or a loss of pairs; `losses` and `held_out` are then means over pairs."""
    agreed: tuple[float, ...] = ()
    """Share of the held-out pairs whose preferred answer the model prefers, when `held_out` was measured. Ties count as half. Empty without pairs."""

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def unit(self) -> str:
        """Returns the unit of `losses`."""
        return "nats a token" if self.loss == "ce" else f"a pair ({self.loss})"

    @property
    def words(self) -> str:
        """Says in one line what was done."""
        held = f", held-out {self.held_out[0]:.3f} → {self.held_out[-1]:.3f}" if self.held_out else ""
        agreed = f", of the held-out pairs {self.agreed[0]:.0%} → {self.agreed[-1]:.0%} agree" if self.agreed else ""
        return (
            f"{self.steps:,} steps on {self.rows:,} rows of {Path(self.path).name}: loss {self.losses[0]:.3f} → {self.losses[-1]:.3f}{held} "
            f"{self.unit}{agreed}"
        )


class FilesChecked(Fact, frozen=True):
    """The preflight of the model's files, before anything was loaded."""

    findings: tuple[Finding, ...]
    sight: Sight | None = None
    """One row as the model and as the reward see it."""


class IdentityChecked(Fact, frozen=True):
    """The result of a probe (C3): log-probs of a fixed prompt, engine against trainer, at one version."""

    version: int
    mean_abs_diff: float
    max_abs_diff: float
    tolerance: float
    ok: bool
    weights: str = ""
    """How the engine has quantised the weights (`engine.weights`); empty if it has not."""
    tokens: int = 0
    """Tokens that were compared; 0 in facts of earlier versions, which have no `kl`."""
    kl: float = 0.0
    """KL(sampler || trainer) per token, in nats: its k3 estimate over these tokens, which is one of the policy where the sampler has sampled them."""


class TrialChecked(Fact, frozen=True):
    """The result of a trial (C3): whether an engine loads every kind of parameter, and computes with what it has loaded."""

    mean_abs_diff: float
    """Between the engine's log-probs and the trainer's, under the changed weights."""
    kinds: int
    """Kinds of parameters and blocks of layers that were tried."""
    unseen: tuple[str, ...] = ()
    """Kinds whose effect is too small to be told from rounding."""
    stale: str = ""
    """The one that is the most certain to have kept its old values."""
    ok: bool = True


class EngineSample(Fact, frozen=True):
    """The engine's counters, about once a second."""

    stats: EngineStats


class ProcessUse(Struct, frozen=True):
    """Cores and memory of the processes of one kind."""

    processes: int = 0
    cores: float = 0.0
    """Seconds of a core per second."""
    memory: int = 0
    """Bytes in memory; pages that several processes share count in each."""


class GpuUse(Struct, frozen=True):
    index: int
    busy: float
    """Share of the time in which a kernel ran; -1 where the driver does not say."""
    memory: int
    """Bytes in use, of all processes."""


class ProcessesUsed(Fact, frozen=True):
    """Cores and memory of the run's processes on this machine since the last such fact, twice a minute."""

    processes: dict[str, ProcessUse]
    """Kinds: controller, engine, trainer, scorer, ..."""
    gpus: tuple[GpuUse, ...] = ()


class MemberSample(Struct, frozen=True, kw_only=True):
    """One engine of a fleet."""

    name: str
    state: str
    """`serving`; `away`: it comes back when it answers and has the newest weights; `lost`: it does not come back; `resting`: the trainer has its
    devices."""
    version: int
    """-1 if it is not known."""
    running: int
    """Requests that it has."""
    tokens: int
    """Tokens that it has sampled."""
    rate: float
    """Tokens per second."""
    absences: int
    """Number of times that it has left the rotation."""
    why: str = ""
    """The reason why it does not serve."""
    lent: bool = False  # whether it is on devices of the trainer


class FleetSample(Fact, frozen=True):
    """The members of a fleet, about once a second."""

    members: tuple[MemberSample, ...]


class MemberMoved(Fact, frozen=True):
    """An engine of a fleet has entered the rotation, or left it."""

    member: str
    state: str
    """Its new state: one of `MemberSample.state`, or `removed`."""
    why: str
    requests: int
    """Requests that go on elsewhere."""
    tokens: int
    """Tokens that they go on from. None of them is sampled again."""
    serving: int
    """Members in the rotation now."""


class HeldOutLook(Struct, frozen=True):
    """One held-out prompt of an evaluation, to be read by people."""

    prompt_id: str
    prompt: str
    text: str
    """The last turn of the first rollout that has a reward, or the beginning of it; empty if none has."""
    rewards: tuple[float, ...] = ()
    """Rewards of all rollouts that have one; the first is that of `text`."""


class Evaluated(Fact, frozen=True):
    """The held-out prompts were evaluated, or those of another evaluation set."""

    phase: Literal["before", "during", "after"]
    step: int
    prompts: int
    """Prompts with a reward, over which the mean is taken."""
    reward_mean: float
    reward_sem: float
    """Standard error of the mean."""
    length_mean: float
    failures: dict[str, int] = {}
    """Rollouts that failed, by reason."""
    seconds: float = 0.0
    """Seconds that it took; for the held-out prompts, until all sets were measured."""
    asked: int = 0
    """Prompts that were to be evaluated; 0 in runs that did not record it."""
    kinds: dict[str, int] = {}
    """Failed rollouts by `Failure.kind`."""
    truncated: int = 0
    """Completions that ended at max_tokens."""
    looks: tuple[HeldOutLook, ...] = ()
    """The first few prompts, the same ones in every evaluation; empty in runs that did not record them."""
    name: str = ""
    """The name of the set; the held-out prompts have one only if `eval.name` gives it."""
    beside: bool = False
    """Whether it is a further set of `eval.sets`, which no verdict reads."""
    measure: str = ""
    """A mark of the settings and files that decide what the reward means (`loop.evaluation.measure_of`): evaluations with other marks are not compared.
    Empty in runs that did not record it."""
    later: float = 0.0
    """Share of the sampled tokens that are of later weights than those of `step`: training goes on meanwhile."""

    @property
    def failed_prompts(self) -> int:
        """Prompts none of whose rollouts has a reward."""
        return max(0, self.asked - self.prompts)


class CheckpointSaved(Fact, frozen=True):
    """A checkpoint was written, or failed."""

    step: int
    path: str
    seconds: float
    error: str = ""
    """Empty, or why it could not be written. The run goes on, and the last good checkpoint stays."""
    stopped: float | None = None
    """Seconds for which the trainer stood still. None in runs that did not record it: it stood still until the checkpoint was written."""

    @property
    def held(self) -> float:
        """Seconds for which the trainer stood still."""
        return self.seconds if self.stopped is None else self.stopped


class WorkerLost(Fact, frozen=True):
    """A worker process died."""

    who: str
    how: str
    deaths: int
    requests_reissued: int = 0


class WorkerJoined(Fact, frozen=True):
    """A worker that was started elsewhere took a seat of the run."""

    who: str
    """The seat: `engine`, `engine 2`."""
    host: str
    """Name of its machine."""
    pid: int
    address: str
    """The address from which it connected."""


class Slept(Fact, frozen=True):
    """A worker has given up the devices that engine and trainer share."""

    who: str
    """`engine`, `trainer`, or `lent engine`: one on devices that the trainer lends while it waits."""
    report: SleepReport


class Woke(Fact, frozen=True):
    """A worker has taken the devices that engine and trainer share."""

    who: str
    report: SleepReport


class Waited(Fact, frozen=True):
    """A named wait is over (C6): `owner` waited for `what` during the `seconds` before `t`."""

    owner: str
    what: str
    seconds: float


class Warned(Fact, frozen=True):
    """A sentence the user should read: a wait past its first deadline, a failed checkpoint, a skipped step, ..."""

    message: str
    key: str = ""
    """Names the state of affairs that it is about, if that may pass; `Withdrawn` then says so."""


class Withdrawn(Fact, frozen=True):
    """The warnings of a key are no longer true: the wait is over, the checkpoint was written, the engine serves again."""

    key: str


class Planned(Fact, frozen=True):
    """The number of optimizer steps was changed, so that the run ends within `train.minutes`."""

    steps: int
    message: str


class FirstText(Fact, frozen=True):
    """The first completion of this process, which shows early what the model writes."""

    prompt: str
    text: str
    tokens: int
    stop: str
    version: int


class Accounting(Struct, frozen=True):
    """Counts of tickets (C2): drawn = trained + dropped + failed + in_pipeline + in_checkpoint, at every instant."""

    drawn: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    failed: dict[str, int] = {}
    in_pipeline: int = 0
    in_checkpoint: int = 0
    """Tickets of a run that has ended which a resumed run would continue."""
    rollout_failures: dict[str, int] = {}
    """Single failed rollouts in groups that were not lost, by reason."""

    def balance(self) -> int:
        """Returns zero if the identity holds."""
        ended = self.trained + sum(self.dropped.values()) + sum(self.failed.values())
        return self.drawn - ended - self.in_pipeline - self.in_checkpoint


class Books(Struct, frozen=True):
    """The tickets that have not ended, and the counts of all."""

    accounting: Accounting
    flying: tuple[int, ...]
    """Tickets whose groups are generated or scored."""
    ready: tuple[int, ...]
    """Tickets whose groups wait in the buffer."""


class RunEnded(Fact, frozen=True):
    """A process of the run ends."""

    reason: str
    """`finished`, `interrupted`, or the message of the error that ended the run. If it begins with `paused:`, the run left a checkpoint
    and can be resumed once the named cause is corrected."""
    step: int
    accounting: Accounting
    engine_idle: float
    """Share of the run's training time in which the engine pool did nothing, 0 to 1."""
    trainer_idle: float
    prompt_tokens: int = 0
    sampled_tokens: int = 0
