"""The speeds of the parts: measured (`calibrate.py`), taken from a run (`from_run.py`), or computed (`hardware.py`)."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.core.errors import ConfigError
from headrace.core.types import Struct
from headrace.loop.world.surroundings import Distribution
from headrace.trainer.parallel import ParallelConfig
from headrace.weight_sync.config import WeightSyncConfig
from headrace.weight_sync.kind import TransportKind
from headrace.weight_sync.transport import TRANSPORTS


class EngineRates(Struct, frozen=True):
    """The speeds of one replica. A forward pass gives one token to every running sequence, and takes

    decode(running) + context · (tokens in the caches of the running sequences) + prefill · (prompt tokens computed in it)
        + request · (sequences that begin with it)  seconds.
    """

    decode: tuple[tuple[float, float], ...]
    """The batch curve: (running sequences, seconds of a pass), ascending. It is linear in between, and beyond the last point."""
    prefill: float = 0.0
    context: float = 0.0
    max_running: int = 64
    kv_tokens: float = float("inf")
    """Tokens of prompts and completions that the KV cache holds."""
    verify: float = 0.0
    """Seconds from a published update to the swap in an otherwise idle engine: transfer, fingerprint, packing."""
    verify_slows: float = 1.0
    """Factor by which verification slows down during generation, and a pass during verification."""
    swap: float = 0.0
    """Seconds for which the swap stops generation."""
    request: float = 0.0
    """Seconds of a sequence beside its tokens: messages, a row, the way back."""
    gpus: int = 1

    def pass_seconds(self, running: float) -> float:
        return interpolate(self.decode, running)

    def tokens_per_second(self, running: int, context: float = 0.0) -> float:
        """Returns the rate of all sequences together. `context`: tokens in the cache of each."""
        return running / (self.pass_seconds(running) + self.context * running * context)


class TrainerRates(Struct, frozen=True):
    """The speeds of the whole pool: a step of N forwarded tokens takes `step + token · N` seconds."""

    token: float
    step: float = 0.0
    publish: float = 0.0
    """Seconds in which new weights are copied; the next step waits for them."""
    send: float = 0.0
    """Seconds from the copy to the update that an engine can load: its fingerprint or difference, computed beside the next step."""
    send_slows: float = 1.0
    """Factor by which these seconds and those of a step beside them get longer."""
    save: float = 0.0
    score: float = 0.0
    """Seconds of the probe of C3."""
    gpus: int = 1


class Rates(Struct, frozen=True):
    engine: EngineRates
    trainer: TrainerRates
    engine_slowed: float = 1.0
    """Factor by which a pass takes longer while the trainer works, if both share cores, caches, memory or power."""
    trainer_slowed: float = 1.0
    """Factor by which the trainer's work takes longer while the engine works."""
    overhead: float = 0.0
    """Seconds between a group's last token and its place in the buffer that are spent neither in engine nor in
    scorer."""
    completions: Distribution | None = None
    """Lengths of completions, if they were measured."""
    prompts: Distribution | None = None
    turns: Distribution | None = None
    """Turns of a rollout, if a run of several turns was measured; then `completions` are those of one turn."""
    tools: Distribution | None = None
    """Seconds between two turns."""
    results: Distribution | None = None
    """Tokens between two turns."""
    source: str = ""
    """The source of these rates, in words."""
    model: str = ""


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """Interpolates linearly; below the first point it returns its value, beyond the last it continues with the last slope."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    after = min(bisect_right(points, (x, 0.0)), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def save_rates(rates: Rates, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no infinity: an unlimited value is left out.
    text = msgspec.to_builtins(rates)
    if text["engine"]["kv_tokens"] == float("inf"):
        del text["engine"]["kv_tokens"]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(text), indent=1) + b"\n")


def load_rates(path: Path) -> Rates:
    """Reads rates. Raises ConfigError with the file and the problem."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rates)
    except FileNotFoundError:
        raise ConfigError(
            f"there are no measured rates in {path}: measure them with headrace plan CONFIG.toml --calibrate, or name "
            "the hardware with --hardware h100 --model 7b"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as rates ({error}); write it again with headrace plan --calibrate"
        ) from None


# --- New weights on their way from the trainer to an engine
# Bytes and seconds, whole and as the difference from the version before.
#
#     whole        bytes of the weights / network
#     difference   comparing (trainer) + its bytes / network + applying (engine)
#
# A value that changed takes a gap and the bits of its change. The gaps of a random share p of values have H(p) / p bits of entropy each, H being
# that of one value; the changes took CHANGE bytes. Both agree with the measurements in docs/benchmarks.md within 15 %.


BFLOAT16 = 2
CHANGE = 0.6
"""Bytes of the difference between two values, compressed."""
COMPARES, APPLIES = 1.6e9, 7e9
"""Bytes of weights a second that one core compares and compresses, and that it brings forward (AMD EPYC Zen 5, docs/benchmarks.md)."""
CHANGED = ((1e-6, 0.0064), (1e-5, 0.0208), (1e-4, 0.123))
"""Share of bfloat16 values that a step of AdamW changes, by learning rate: measured on SmolLM2-135M. Mixtures of experts change fewer: 0.02 to
0.05 % in early steps of Qwen3-235B-A22B (verl, pull request 7085)."""


def changed_share(learning_rate: float) -> float:
    """Returns the share of values that a step changes, by the table on logarithmic scales."""
    points = tuple((math.log(rate), math.log(share)) for rate, share in CHANGED)
    beyond = (points[1][1] - points[0][1]) / (points[1][0] - points[0][0]) * (math.log(learning_rate) - points[0][0])
    found = points[0][1] + beyond if learning_rate < CHANGED[0][0] else interpolate(points, math.log(learning_rate))
    return min(0.5, math.exp(found))


def bytes_per_change(share: float) -> float:
    """Returns the bytes that one changed value takes in headrace's encoding."""
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return entropy / share / 8 + CHANGE


@dataclass(frozen=True)
class Travel:
    bytes: float
    compare: float = 0.0
    """Seconds in the trainer's process."""
    fetch: float = 0.0
    """Seconds on the network."""
    apply: float = 0.0
    """Seconds in the engine's process."""

    @property
    def seconds(self) -> float:
        return self.compare + self.fetch + self.apply


def whole(parameters: float, network: float) -> Travel:
    """`network`: bytes per second between trainer and engine."""
    size = BFLOAT16 * parameters
    return Travel(size, fetch=size / network)


def difference(parameters: float, network: float, share: float, each: float | None = None) -> Travel:
    """`share`: of the values that change. `each`: bytes of a change; headrace's own by default."""
    size, full = parameters * share * (each or bytes_per_change(share)), BFLOAT16 * parameters
    return Travel(size, compare=full / COMPARES, fetch=size / network, apply=full / APPLIES)


def travel_of(
    settings: WeightSyncConfig,
    learning_rate: float,
    parameters: float,
    network: float,
    *,
    engines: int = 1,
    senders: int = 1,
) -> Travel:
    """Returns the way that a run with these settings takes, once the first version has arrived. `senders`: ranks that hold the model together; an
    engine receives no faster than over its own link."""
    delta = settings.encoding == "delta"
    times = TRANSPORTS[settings.kind].copies(engines, delta) if settings.kind in TRANSPORTS else 1
    network /= max(1.0, times / senders) if sends_parts(settings) else times
    if delta:
        return difference(parameters, network, changed_share(learning_rate))
    return whole(parameters, network)


def sends_parts(way: WeightSyncConfig) -> bool:
    """Whether each rank sends what it holds. Differences, and other transports, are sent by rank 0."""
    if way.encoding != "full":
        return False
    kind = TRANSPORTS.get(way.kind)
    return kind is None or kind.part_sender is not TransportKind.part_sender  # auto: shared memory, or TCP


def pays_below(parameters: float, share: float) -> float:
    """Returns the bytes per second of a network on which both take the same time: on faster ones the whole arrives earlier."""
    less = difference(parameters, 1.0, share)
    return (BFLOAT16 * parameters - less.bytes) / (less.compare + less.apply)


# --- The bytes that an optimizer step moves, in all, and of the busiest process ---------------------------------------


PROMPT_TOKEN, SAMPLED_TOKEN = 4.0, 4 + 4 + 1 / 8
"""Bytes of a token in a share (`trainer/dealing/share.py`): its number; its log-prob too, and a bit for whether it is in the loss. Columns of equal
numbers have none."""

ADAMW = {"float32": 12, "bfloat16": 10}
"""Bytes of a parameter in a checkpoint, by `train.weights`: the weight and its two moments."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    rows: float
    """Sent by the controller. Ranks that compute the same microbatches each get them."""
    rank_rows: float
    """Received by a rank."""
    checkpoint: float
    rank_checkpoint: float
    """Copied and written by a rank."""
    weights: float
    rank_weights: float
    """Packed and sent by the busiest rank, to one engine."""

    @property
    def words(self) -> str:
        return (
            f"  bytes of a step: the controller sends {_size(self.rows)} of rows, {_size(self.rank_rows)} to a rank; new weights are {_size(self.weights)}, "
            f"of which the busiest rank sends {_size(self.rank_weights)} to an engine; a checkpoint has {_size(self.checkpoint)}, of a rank "
            f"{_size(self.rank_checkpoint)}"
        )


def step_sizes(
    *, sampled: float, prompts: float, parameters: float, mesh: ParallelConfig, weights: str, way: WeightSyncConfig
) -> StepSizes:
    """`sampled`, `prompts`: tokens of the step; each row is sent with its prompt. `weights`: the dtype in which they are trained. New weights are whole
    copies."""
    share = (SAMPLED_TOKEN * sampled + PROMPT_TOKEN * prompts) / mesh.batches
    checkpoint, published = ADAMW[weights] * parameters, BFLOAT16 * parameters
    return StepSizes(
        rows=share * mesh.ranks,
        rank_rows=share,
        checkpoint=checkpoint,
        rank_checkpoint=checkpoint / (mesh.ranks // mesh.replicate),
        weights=published,
        rank_weights=published / (mesh.ranks // mesh.replicate) if sends_parts(way) else published,
    )


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
