"""Settings of a trainer over several ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """The ranks of the trainer: processes that train one model, on this machine or on several. The product of the sizes is their number."""

    shard: int = Field(default=1, gt=0)
    """Ranks that split weights, gradients and the optimizer's state (FSDP2)."""
    replicate: int = Field(default=1, gt=0)
    """Copies of the split model, each on `shard` ranks (HSDP), with summed gradients."""
    tensor: int = Field(default=1, gt=0)
    """Ranks that compute every layer together. Divides the number of key and value heads."""
    expert: int = Field(default=1, gt=0)
    """Ranks that split a mixture's experts, to which tokens travel: 1, or all that hold the model (`shard` × `context` × `tensor`)."""
    context: int = Field(default=1, gt=0)
    """Ranks that compute parts of the tokens of each microbatch, for long rows. The model is split among `shard` × `context` ranks."""
    pipeline: int = Field(default=1, gt=0)
    """Ranks that split the layers, through which microbatches pass. With `shard`, each is so many ranks."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Order of microbatches in a `pipeline`. gpipe needs more activations than 1f1b; interleaved and zero_bubble wait less, with twice the
    traffic."""
    reshard: bool = True
    """Free a layer's gathered weights after its forward pass. false: a third fewer bytes between ranks, for more memory."""
    gather: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which ranks send a layer's weights. bfloat16: half the bytes; norms and biases are rounded too.
    Gradients are summed in float32."""
    reduce: Literal["auto", "step", "microbatch"] = "auto"
    """Sum the gradients of the ranks of `shard` once a step (4 more bytes a parameter on each), or after each microbatch. auto: step on GPUs with
    room for it."""

    @property
    def ranks(self) -> int:
        return self.split * self.replicate * self.pipeline

    @property
    def split(self) -> int:
        """Ranks that hold the model together."""
        return self.gathering * self.tensor

    @property
    def gathering(self) -> int:
        """Ranks that gather weights from each other (FSDP2)."""
        return self.shard * self.context

    @property
    def batches(self) -> int:
        """The number of microbatches that are computed at once, and of the shares of a step."""
        return self.shard * self.replicate

    def share_of(self, rank: int) -> int:
        """The share of a step that this rank has: that of all ranks which compute its microbatches together."""
        if self.pipeline > 1:
            return rank % self.batches
        return rank // (self.context * self.tensor)


def sums_once(config: ParallelConfig, parameters: float, memory: float) -> bool:
    """Whether gradients are summed once a step, and not after every microbatch. `parameters`: of the model; `memory`: bytes of a rank's GPU, 0 on
    a CPU. What is free at the moment has no say: sums in another order have other bits, and a resumed run has the same machine."""
    if config.reduce != "auto" or config.gathering == 1:
        return config.reduce == "step"
    whole, own = 4 * parameters / config.tensor, 16 * parameters / config.split
    return whole + own <= memory / 2


def repeats(heads: int, kv_heads: int, context: int) -> int:
    """Returns how often each key head is sent, so that `context` ranks have as many heads. 0: they cannot, and gather keys and values."""
    if heads % context:
        return 0
    shared = heads // kv_heads
    return next(times for times in range(1, shared + 1) if shared % times == 0 and kv_heads * times % context == 0)


# --- The cut of a model into the stages of a pipeline
# The cut of a model into the stages of a pipeline, and which of them a rank holds. Imports no torch.


LOOPS = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 2}
"""Stages that each rank holds, by schedule."""


def stages_of(rank: int, ranks: int, schedule: str) -> tuple[int, ...]:
    """The stages that the rank of this number in a pipeline holds: they go round the ranks."""
    return tuple(rank + ranks * loop for loop in range(LOOPS[schedule]))


def cut(costs: Sequence[float], stages: int, head: float = 0.0) -> list[range]:
    """The layers of each stage, at least one, so that the most expensive stage costs least; earlier stages have more where there is a choice.

    `costs`: of each layer. `head`: of what follows the last layer. Raises ValueError if there are fewer layers than stages.
    """
    count = len(costs)
    if count < stages:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages")
    sums = [0.0, *accumulate(costs)]
    # best[i]: the lowest cost of the most expensive stage if the last i layers are cut into so many stages, and where the first ends
    best: list[tuple[float, int]] = [(sums[count] - sums[i] + head, count) for i in range(count)]
    tables = [best]
    for more in range(2, stages + 1):
        best = [
            min((max(sums[end] - sums[i], tables[-1][end][0]), -end) for end in range(i + 1, count - more + 2))
            for i in range(count - more + 1)
        ]
        best = [(cost, -end) for cost, end in best]
        tables.append(best)
    found, start = [], 0
    for table in reversed(tables):
        end = table[start][1]
        found.append(range(start, end))
        start = end
    return found
