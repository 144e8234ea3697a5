"""Reports of engine and trainer on their work."""

from __future__ import annotations

from typing import Literal

from headrace.core.types import Struct


class LagStats(Struct, frozen=True):
    """The sampler's log-probs against the trainer's, over the loss tokens of one lag (`algo/diagnostics.py`).

    >>> lag = LagStats("1", tokens=4, ratio=1.002, kl=0.004, ess=0.99, chi2=0.01, clipped=0.0)
    """

    name: str
    """`0`, `1`, `2`, `3+`, `swapped`: the tokens of sequences that more than one version sampled, or `experience`: those of good rollouts of earlier
    groups (`algo.experience`)."""
    tokens: int
    ratio: float
    """Mean of exp(logprob - sampled)."""
    kl: float
    """k3 estimate of KL(sampler || trainer)."""
    ess: float
    """(Σr)² / (n Σr²): the effective sample size as a share of the tokens, 0 to 1."""
    chi2: float
    """E[r²] - 1"""
    clipped: float
    """Share of the tokens whose policy gradient a bound took away."""
    masked: dict[str, float] = {}
    """Share of the tokens whose policy loss a rule took out, by rule."""
    gaps: dict[str, float] = {}
    """Quantiles of |logprob - sampled|: p50, p90, p99 and max."""


class Noise(Struct, frozen=True):
    """The difference that rounding alone makes: trainer's minus sampler's log-probs, over tokens of lag 0.

    >>> noise = Noise(tokens=1, token_rms=0.02, sequences=0, sequence_rms=0.0)
    """

    tokens: int
    token_rms: float
    """Root of the mean square over tokens, nats."""
    sequences: int
    """Number of sequences whose loss tokens all have lag 0."""
    sequence_rms: float
    """Root of the mean square over these sequences of each one's mean difference, nats."""


class CriticNumbers(Struct, frozen=True):
    """The critic of a step in numbers (`algo/critic.py`), as it was before the update. Means are over loss tokens.

    >>> critic = CriticNumbers(value_loss=0.11, value_mean=0.4, return_mean=0.5, explained_variance=0.25, advantage_std=0.45)
    """

    value_loss: float
    """½ (V - target)². It is not part of `TrainReport.loss`."""
    value_mean: float
    return_mean: float
    """Mean of the discounted rewards that follow a token."""
    explained_variance: float
    """1 - Var(return - V) / Var(return): 1 for perfect values, 0 for a constant, below 0 for misleading ones; 0 where returns do not differ."""
    advantage_std: float
    """Standard deviation of the advantages before they are whitened."""


class ProcessNumbers(Struct, frozen=True):
    """The implicit process reward of a step in numbers (`algo/implicit.py`).

    >>> process = ProcessNumbers(process_loss=0.61, process_accuracy=0.75, process_reward=0.01)
    """

    process_loss: float
    """Mean over trajectories of the cross-entropy between the reward model's probability and right or wrong, before its update. It is not part of
    `TrainReport.loss`."""
    process_accuracy: float
    """Share of the trajectories whose probability was on the right side of a half."""
    process_reward: float
    """Mean of the rewards of tokens, after the update."""


class TokenNumbers(Struct, frozen=True):
    """The trainer's numbers of the tokens of one training row, as they were before the update. Both are [T] float32 over `Row.tokens`, NaN
    for tokens that are not in the loss.

    >>> numbers = TokenNumbers(12, 0, array("f", [-0.1, -0.75, -0.2]).tobytes(), entropies=array("f", [0.5, 1.25, 0.5]).tobytes())
    """

    ticket: int
    row: int
    """Its place in `Group.rows`."""
    logprobs: bytes
    """Taken at the sampling temperature and under the row's sampling mask, as the loss takes them."""
    entropies: bytes
    """Nats, of the full distribution at the sampling temperature."""


class TrialScores(Struct, frozen=True):
    """Log-probs of the same tokens, one piece behind the other, under weights that were changed for a trial.

    >>> scores = TrialScores([-2.1, -0.4], {"model.layers.*.mlp.up_proj.weight": [-2.0, -0.7]})
    """

    changed: list[float]
    kept: dict[str, list[float]]
    """Log-probs that each kind of parameter, and each block of layers, would give if it had kept its old values: of all these tokens, or of
    the first."""


class TrainReport(Struct, frozen=True):
    """The result of one `Trainer.step`. Means are over the tokens in the loss, with the denominator of the whole step (C9).

    >>> report = TrainReport(step=5, version=6, loss_tokens=5, lags=(lag,), noise=noise)
    """

    step: int
    """Optimizer steps done before this one."""
    version: int
    """The version of the weights after the step: step + 1, or step if the update was skipped."""
    skipped: str = ""
    """The reason why the weights did not change: `nonfinite_gradient`, `no_tokens`, or `all_rejected` (the algorithm's rules and bounds
    left nothing of the policy loss). Empty if they did."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """The norm before clipping; the mean over updates."""
    lr: float = 0.0
    entropy: float = 0.0
    """Mean over tokens, nats, of the full distribution at the sampling temperature."""
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    clip_fraction: float = 0.0
    kl: float = 0.0
    """k3 estimate of KL(sampler || trainer)."""
    loss_tokens: int = 0
    forward_tokens: int = 0
    """Tokens that were forwarded: a prompt that a group shares counts once."""
    dropped_tokens: int = 0
    """Number of tokens left out because the sampler's log-prob is not finite."""
    microbatches: int = 0
    seconds: float = 0.0
    lags: tuple[LagStats, ...] = ()
    """Diagnostics by lag, for each lag that has tokens."""
    outside_tokens: int = 0
    """Loss tokens that their own sampling mask does not contain; their log-prob is over the whole vocabulary."""
    missing_routes: int = 0
    """Positions times layers without recorded experts, for which the trainer's router chose."""
    routing_conflicts: int = 0
    """Prompt tokens that rows share but whose recorded experts differ; the first row's experts were used."""
    reference_kl: float = 0.0
    """Mean k3 estimate of KL(trainer || reference), at most 10 per token, whichever `algo.kl.estimator` the loss uses."""
    teacher_kl: float = 0.0
    """Mean of logprob - teacher's over the tokens that a teacher scored: the sampled-token estimate of the reverse KL."""
    divergence: float = 0.0
    """Mean over the loss tokens of the divergence from the teacher that the trainer holds, in nats, as the loss has it."""
    bitwise_tokens: int = 0
    """Loss tokens at lag 0 whose log-probs were found to be the sampler's, bit for bit (`train.parity`)."""
    noise: Noise | None = None
    """None for a step without tokens of lag 0, and in journals from before 2026-11-22."""
    pairs: int = 0
    """Number of preferences (`algo/policy/pairs.py`) that were trained on."""
    pairs_agreed: float = 0.0
    """Share of them whose margin was positive before the update: the policy prefers what was preferred."""
    pair_margin: float = 0.0
    """Mean of their margins, in nats (SimPO: per token)."""
    critic: CriticNumbers | None = None
    """None without a critic."""
    process: ProcessNumbers | None = None
    """None without a process reward that is trained (`algo.name = prime`)."""
    demonstration_tokens: int = 0
    """Tokens of given answers that were trained beside the groups. They are in no other number but `loss` and the norm of the gradient."""
    demonstration_loss: float = 0.0
    """Mean of -logprob over them, whatever their own loss is."""
    demonstration_share: float = 0.0
    """The share μ of the loss that is theirs."""
    token_numbers: tuple[TokenNumbers, ...] | None = None
    """Numbers of single tokens, for some rows of the step (`trainer/packing/plan.py`). Only the journal keeps them; None in journals from before
    2026-11-23."""
    graphs: int = 0
    """Graphs that torch.compile has made for this step (`train.compile`): time that no later step of the same kinds spends again."""
    updates: int = 1
    """Updates that were made (`train.epochs`, `train.minibatches`). What the step reports is over all of them, and each token counts once."""
    left_out: int = 0
    """Further updates that were not: their gradient was not finite, or the algorithm's rules and bounds left nothing of the policy loss."""
    notice: str = ""
    """A sentence of the trainer for whoever watches the run: why layers are not compiled, or that they are compiled too often."""

    @property
    def skippable(self) -> bool:
        """Whether the step, or an update of it, was left out, so that it must be left out again where the step is repeated."""
        return bool(self.skipped or self.left_out)


def differing(report: TrainReport, before: TrainReport) -> list[str]:
    """Names the fields that differ in any bit, except those of time and of compiling, and fields that an earlier release did not report.

    >>> differing(TrainReport(step=5, version=6, loss=0.5, seconds=1.0), TrainReport(step=5, version=6, loss=0.25))
    ['loss']
    """
    return [
        name
        for name in before.__struct_fields__
        if name not in ("seconds", "graphs", "notice")
        and getattr(before, name) is not None
        and repr(getattr(report, name)) != repr(getattr(before, name))  # NaN differs from itself
    ]


class EngineStats(Struct, frozen=True):
    """The load and the totals of an engine. Totals count from the start of its process.

    >>> stats = EngineStats(running=2, version=5, asked_tokens=8, cached_tokens=4, sampled_tokens=5, busy_seconds=0.25)
    >>> stats.tokens_per_second
    20.0
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Share of the KV budget that requests hold, 0 to 1. Cached entries that no request holds are not counted: they are
    freed when room is needed."""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that were forwarded (a group's prompt counts once)."""
    steps: int = 0
    busy_seconds: float = 0.0
    version: int = -1
    """-1 until weights are loaded."""
    asked_tokens: int = 0
    """Number of prompt tokens of all admitted requests."""
    cached_tokens: int = 0
    """Asked tokens that were in the prefix cache."""
    recomputed_tokens: int = 0
    """Tokens forwarded a second time: after a preemption, or after a swap with `engine.swap = "recompute"`."""
    swaps: int = 0
    preemptions: int = 0
    """The number of times that a request had to make room for others and was continued later."""
    graphed_passes: int = 0
    """Forward passes that were replayed as CUDA graphs."""
    eager_passes: int = 0
    """Forward passes on a GPU that were not, each operation of which Python launches. The engine's log has the reasons."""

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of work."""
        return self.sampled_tokens / self.busy_seconds if self.busy_seconds else 0.0


TOTALS = (
    "sampled_tokens", "prompt_tokens", "steps", "busy_seconds", "asked_tokens", "cached_tokens", "recomputed_tokens", "swaps",
    "preemptions", "graphed_passes", "eager_passes",
)  # fmt: skip
"""Statistics that count from the start of a process."""


class LoadReport(Struct, frozen=True):
    """The report of a `WeightUpdate` that went live.

    >>> live = LoadReport(version=6, verify_seconds=0.08, swap_seconds=0.003)
    """

    version: int
    verify_seconds: float
    """Time for fingerprinting and unpacking, while generation continues."""
    swap_seconds: float
    """The gap between two forward passes (the sum of the gaps, for a streamed update): the only time in which generation was
    stopped."""
    mixed_tokens: int = 0
    """Tokens sampled between the first and the last part of a streamed update."""
    received: int = 0
    """Bytes that travelled to this engine for the update, to all of them in a fleet. 0 where none do, and where it is not known."""
    engines: int = 0
    """Engines of a fleet that `received` is the sum over. 0: one engine, or a fleet of a run from before 2026-11-28."""


class Captured(Struct, frozen=True):
    """The report of a trainer that has noted what a checkpoint holds.

    >>> Captured(nbytes=1_620_000_000).short
    ''
    """

    nbytes: int = 0
    """Bytes of its tensors."""
    short: str = ""
    """The reason why there is no copy of them; the trainer may then do nothing else until they are written. Empty if there is one."""


class SleepReport(Struct, frozen=True):
    """The report of a worker that gave the devices up, or took them back (`orchestration.placement = "shared"`, `orchestration.lend`).

    >>> slept = SleepReport(seconds=0.25, memory=1 << 30, moved=1 << 20)
    """

    seconds: float = 0.0
    memory: int = 0
    """Bytes that the change freed, or took again: those that torch has reserved on a GPU, else the resident memory of the process."""
    moved: int = 0
    """Bytes that were copied to the host's memory, or back."""
    tokens: int = 0
    """Tokens that were sampled on lent devices since they were lent."""


class Capabilities(Struct, frozen=True):
    """The abilities of an engine. A run that needs more is refused at its start with a sentence (`run/needs.py`).

    An engine can do nothing that it does not declare here.

    >>> server = Capabilities(context_length=4096, path="a server", stop_strings=True, spans=True)
    >>> server.masks, server.adapters  # no top-p can be replayed in the trainer, and no adapter served
    (False, 0)
    """

    context_length: int
    """Most tokens of prompt and completion together."""
    path: str = ""
    """The forward path in words, for people: `fused llama`, `hugging face gpt_neox`, `fake`."""
    stop_strings: bool = False
    """Ends completions at strings (`Sampling.stop`)."""
    masks: bool = False
    """Returns the vocabulary that was left at each position (`Request.return_mask`)."""
    constraints: bool = False
    """Holds completions to a language (`Sampling.constraint`)."""
    routing: bool = False
    """Returns the experts that every position was routed to (`Request.return_routing`)."""
    adapters: int = 0
    """Number of LoRA adapters that it serves at once beside the model."""
    forks: bool = False
    """Continues another request from any of its tokens, over that request's KV entries (`Request.fork`)."""
    streamed: bool = False
    """Takes an update in parts, and marks the tokens that are sampled between them (`Engine.load`)."""
    spans: bool = False
    """Reports the version that sampled each token, even if weights are swapped in the middle of a completion."""
    prompt_logprobs: bool = False
    """Returns log-probs of given tokens (`Request.prompt_logprobs`)."""
    top_logprobs: bool = False
    """Returns the most probable tokens of each position (`Request.top_logprobs`)."""
    exact: bool = False
    """Tokens and log-probs of a request depend, bit for bit, on the request and the weights alone: not on the rest of the
    batch, and not on where it was interrupted before it was continued from its prefix."""
    arithmetic: str = ""
    """The name of its forward pass: a trainer that has the same name gets the same log-probs of equal weights, bit for bit."""
    rows: int = 0
    """Most sequences that it samples at once; further ones wait. 0: not known."""
    kv_tokens: int = 0
    """Tokens whose cache entries it has memory for. 0: not known."""


def capable(
    context_length: int,
    path: str,
    *,
    adapters: int = 0,
    routing: bool = False,
    arithmetic: str = "",
    rows: int = 0,
    kv_tokens: int = 0,
    **more: bool,
) -> Capabilities:
    """Makes the capabilities of headrace's own engines: everything, except what depends on their settings and model."""
    always = ("masks", "forks", "streamed", "spans", "prompt_logprobs", "top_logprobs")
    has = {**dict.fromkeys(always, True), "stop_strings": True, **more}
    return Capabilities(
        context_length,
        path,
        adapters=adapters,
        routing=routing,
        arithmetic=arithmetic,
        rows=rows,
        kv_tokens=kv_tokens,
        **has,
    )


class PromptChoice(Struct, frozen=True):
    """How the prompt of a draw was chosen among candidates.

    >>> looked = {"mixed": 3, "solved": 12, "new": 1}
    >>> PromptChoice(pool="mixed", looked=looked, drawn=4, known=90, mean=0.375, offered=0.8125).pool
    'mixed'
    """

    pool: str
    """The prompt's pool before the draw: new, mixed, solved, hopeless or failed (`loop/curriculum.py`)."""
    looked: dict[str, int]
    """The number of candidates in each pool."""
    drawn: int
    """How often the prompt has been drawn, this time included."""
    known: int
    """Number of different prompts that have been drawn and are remembered."""
    mean: float
    """Mean reward of the prompt's last group; NaN if it has none."""
    offered: float
    """Mean of the same over the candidates that have one; NaN if none has."""


class Finding(Struct, frozen=True):
    """One check of the preflight (`run/rehearsal/preflight.py`).

    >>> finding = Finding("ends", "agrees", "<|im_end|> (2) ends an answer in the template, and a completion by the configs")
    """

    what: str
    """The subject, in one or two words."""
    verdict: Literal["agrees", "remark", "refused"]
    text: str


class TextPart(Struct, frozen=True):
    """A piece of a rendered prompt or completion.

    >>> part = TextPart("<|im_start|>", "special")
    """

    text: str
    kind: str
    """special: a special token; template: text that the chat template wrote; else the role of who wrote it."""


class Sight(Struct, frozen=True):
    """One row as the model sees it, and as the reward sees it.

    >>> sight = Sight("sums/7", (TextPart("2+3=", "user"),), (TextPart("5", "assistant"),), prompt="2+3=", completion="5")
    """

    row: str
    """Its id."""
    asked: tuple[TextPart, ...]
    """The prompt of the model, token for token."""
    answered: tuple[TextPart, ...]
    """A completion of the model, with its end: the row's own answer, or a sentence in its place."""
    prompt: str
    """`prompts` of a reward function."""
    completion: str
    """`completions` of a reward function."""
    reward: str = ""
    """The rewards that it gave, in words; empty if there is none yet."""
