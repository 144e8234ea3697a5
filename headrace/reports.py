"""What engine and trainer tell of their work."""

from __future__ import annotations

from headrace.types import Struct


class LagStats(Struct, frozen=True):
    """Sampler against trainer on the loss tokens of one lag (`algo/loss/diagnostics.py`)."""

    name: str
    """`0`, `1`, `2`, `3+`, or `swapped`: tokens of sequences that more than one version sampled."""
    tokens: int
    ratio: float
    """Mean of exp(logprob - sampled)."""
    kl: float
    """k3 estimate of KL(sampler || trainer)."""
    ess: float
    """(Σr)² / (n Σr²): share of the tokens that the weighted sample is worth, 0 to 1."""
    chi2: float
    """E[r²] - 1"""
    clipped: float
    """Share of tokens."""
    masked: dict[str, float] = {}
    """Share of tokens whose policy loss a rule took out, by rule."""
    gaps: dict[str, float] = {}
    """Quantiles of |logprob - sampled| by name: p50, p90, p99, max."""


class Noise(Struct, frozen=True):
    """What rounding alone makes of log-probs: trainer - sampler of tokens that the very weights being trained have sampled."""

    tokens: int
    token_rms: float
    """Root of the mean square over tokens, nats."""
    sequences: int
    """Those of which every loss token has lag 0."""
    sequence_rms: float
    """The same of the mean over each of them."""


class TrainReport(Struct, frozen=True):
    """What one `Trainer.step` did. Means are over the tokens in the loss, with the denominator of the whole step (C9)."""

    step: int
    """Optimizer steps done before this one."""
    version: int
    """The version the weights have now: step + 1, or step when the update was skipped."""
    skipped: str = ""
    """Empty, or the reason why the weights did not change: `nonfinite_gradient`, `no_tokens`, `all_rejected` (rules and bounds of the
    algorithm left nothing of the policy loss)."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
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
    """Tokens really forwarded: a prompt shared by a group counts once."""
    dropped_tokens: int = 0
    """Tokens with a non-finite sampler log-prob."""
    microbatches: int = 0
    seconds: float = 0.0
    lags: tuple[LagStats, ...] = ()
    """Diagnostics by lag, those that have tokens."""
    outside_tokens: int = 0
    """Loss tokens that are not in their own sampling mask: they count with the whole vocabulary."""
    missing_routes: int = 0
    """Positions (times layers) without recorded experts: the live router chose."""
    routing_conflicts: int = 0
    """Prompt tokens that rows share and whose recorded experts differ: those of the first row were forced."""
    reference_kl: float = 0.0
    """Mean k3 estimate of KL(trainer || reference), at most 10 a token, whatever `algo.kl.estimator` the loss has."""
    teacher_kl: float = 0.0
    """Mean of logprob - teacher over the tokens that a teacher scored: the sampled-token estimate of the reverse KL."""
    bitwise_tokens: int = 0
    """Loss tokens at lag 0 whose log-probs were found to be the sampler's, bit for bit (`train.parity`)."""
    noise: Noise | None = None
    """None of a step without tokens of lag 0, and in journals from before 2026-11-22."""


def differing(report: TrainReport, before: TrainReport) -> list[str]:
    """Fields that are not equal bit for bit, but for the time, and for what an earlier version did not report."""
    return [
        name
        for name in before.__struct_fields__
        if name != "seconds"
        and getattr(before, name) is not None
        and repr(getattr(report, name)) != repr(getattr(before, name))  # NaN differs from itself
    ]


class EngineStats(Struct, frozen=True):
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Share of the KV budget that requests hold, 0 to 1. What is cached beyond it is given away when room is needed."""
    sampled_tokens: int = 0
    """Since the process started, as all totals."""
    prompt_tokens: int = 0
    """Prompt tokens really forwarded (a group's prompt counts once)."""
    steps: int = 0
    busy_seconds: float = 0.0
    version: int = -1
    """-1 until weights are loaded."""
    asked_tokens: int = 0
    """Prompt tokens of the requests that were admitted."""
    cached_tokens: int = 0
    """How many of these were found in the prefix cache."""
    recomputed_tokens: int = 0
    """Forwarded a second time: after a preemption, or a swap with `engine.swap = "recompute"`."""
    swaps: int = 0
    preemptions: int = 0
    """Requests that had to make room for others, and went on later."""

    @property
    def tokens_per_second(self) -> float:
        """While there was work."""
        return self.sampled_tokens / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        return self.cached_tokens / self.asked_tokens if self.asked_tokens else 0.0


class LoadReport(Struct, frozen=True):
    """How a `WeightUpdate` went live."""

    version: int
    verify_seconds: float
    """Fingerprinting and unpacking, beside generation."""
    swap_seconds: float
    """The gap between two forward passes (the gaps, of an update that was streamed): the only time in which generation
    stood still."""
    mixed_tokens: int = 0
    """Sampled between the first and the last part of an update that was streamed."""


class Capabilities(Struct, frozen=True):
    """What can be asked of an engine. What a run needs and an engine lacks is refused at the start with a sentence
    (`orchestration/needs.py`), never ignored.

    Whatever is not said is not there: an engine that is asked for it would have to ignore it."""

    context_length: int
    """Tokens of prompt and completion together."""
    path: str = ""
    """A word for people: `fused llama`, `hugging face gpt_neox`, `fake`."""
    stop_strings: bool = False
    """Ends completions at strings (`Sampling.stop`)."""
    masks: bool = False
    """Returns which vocabulary was left at each position (`Request.return_mask`)."""
    routing: bool = False
    """Returns which experts every position went to (`Request.return_routing`)."""
    adapters: int = 0
    """LoRA adapters that it serves at once beside the model."""
    forks: bool = False
    """Goes on from any token of another request over the cache entries that it has (`Request.fork`)."""
    streamed: bool = False
    """Takes an update in parts, and marks what is sampled between them (`Engine.load`)."""
    spans: bool = False
    """Reports under which version it sampled each token, also where weights are swapped in the middle of a completion."""
    prompt_logprobs: bool = False
    """Scores given tokens (`Request.prompt_logprobs`)."""
    top_logprobs: bool = False
    """Returns the most probable tokens of each position (`Request.top_logprobs`)."""
    exact: bool = False
    """Tokens and log-probs of a request depend on nothing but itself and the weights, bit for bit: not on what else is in the
    batch, and not on where it was interrupted before it went on from its prefix."""
    arithmetic: str = ""
    """The name of its forward pass: a trainer that has the same name gets the same log-probs of equal weights, bit for bit."""


def capable(
    context_length: int, path: str, *, adapters: int = 0, routing: bool = False, arithmetic: str = "", **more: bool
) -> Capabilities:
    """Of an engine of our own: everything, but what depends on its settings and its model."""
    always = ("masks", "forks", "streamed", "spans", "prompt_logprobs", "top_logprobs")
    has = {**dict.fromkeys(always, True), "stop_strings": True, **more}
    return Capabilities(context_length, path, adapters=adapters, routing=routing, arithmetic=arithmetic, **has)
