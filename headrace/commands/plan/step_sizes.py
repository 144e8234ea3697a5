"""The bytes that an optimizer step moves: rows to the trainer's ranks, a checkpoint, new weights. In all, and of the busiest process."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.commands.plan.rates.rates import BFLOAT16
from headrace.trainer.parallel import ParallelConfig
from headrace.weight_sync.config import WeightSyncConfig
from headrace.weight_sync.kind import TransportKind
from headrace.weight_sync.transport import TRANSPORTS

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


def sends_parts(way: WeightSyncConfig) -> bool:
    """Whether each rank sends what it holds. Differences, and other transports, are sent by rank 0."""
    if way.encoding != "full":
        return False
    kind = TRANSPORTS.get(way.kind)
    return kind is None or kind.part_sender is not TransportKind.part_sender  # auto: shared memory, or TCP


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
