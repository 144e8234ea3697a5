"""Settings of a trainer over several ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from headrace.settings.strict import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """The ranks of the trainer: processes on this machine that train one model. The product of the sizes is their number."""

    shard: int = Field(default=1, gt=0)
    """Ranks among which weights, gradients and the optimizer's state are split (FSDP2): each holds one part."""
    replicate: int = Field(default=1, gt=0)
    """Copies of the split model, each on `shard` ranks (HSDP). Gradients are summed over the copies."""
    tensor: int = Field(default=1, gt=0)
    """Ranks that compute every layer together, by the model's tensor-parallel plan: each holds some heads, columns and rows of the
    vocabulary, and all have the same microbatches. It divides the number of key and value heads."""
    expert: int = Field(default=1, gt=0)
    """Ranks among which the experts of a mixture are split: whole experts on each, to which tokens travel. They are all
    ranks that hold the model together (`shard` × `context` × `tensor`), or 1: experts are then split like all other weights."""
    context: int = Field(default=1, gt=0)
    """Ranks that compute each microbatch together, every one a part of its tokens: for rows whose activations do not fit into
    one. The model is split among them too, so among `shard` × `context` ranks."""
    pipeline: int = Field(default=1, gt=0)
    """Ranks among which the layers are split: each holds some consecutive ones, and microbatches pass from rank to rank. With `shard`,
    each of them is so many ranks, which split its layers (FSDP2)."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the microbatches in a `pipeline`. 1f1b: a backward pass after each forward pass. gpipe: all forward passes
    first, which keeps more activations. interleaved: as 1f1b, with two stages on each rank: less waiting, twice the
    traffic. zero_bubble: as interleaved, and gradients of weights are computed where a rank would wait."""
    reshard: bool = True
    """Free a layer's gathered weights after its forward pass, and gather them again for the backward pass. false: keep
    them; a third fewer bytes between ranks, and the whole model in the memory of each during a microbatch."""
    gather: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which ranks send each other the weights of a layer. bfloat16: half the bytes; the layer's norms and biases
    are then rounded too, as the engine serves them. Gradients are always summed in float32."""

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
        """The number of microbatches that are computed at once."""
        return self.shard * self.replicate


def repeats(heads: int, kv_heads: int, context: int) -> int:
    """Returns how often each key head is sent, so that `context` ranks have as many heads. 0: they cannot, and gather keys and values."""
    if heads % context:
        return 0
    shared = heads // kv_heads
    return next(times for times in range(1, shared + 1) if shared % times == 0 and kv_heads * times % context == 0)


def parallel_problems(train: Any, lora: Any, *, itself: bool) -> Iterator[str]:
    """Yields the settings that several ranks exclude, each with its remedy.

    `train` and `lora`: their settings. `itself`: whether a teacher is the student's older self.
    """
    parallel, ranks = train.parallel, train.parallel.ranks
    if parallel.gathering == 1:
        for name in ("reshard", "gather", *(["expert", "schedule"] if ranks == 1 else [])):
            if getattr(parallel, name) != getattr(ParallelConfig(), name):
                who = "one rank" if ranks == 1 else "weights that are never gathered"
                yield f"train.parallel.{name} has no meaning for {who}; set train.parallel.shard, or remove it"
    if ranks == 1:
        return
    yield from _mesh_problems(parallel)
    asks = f"train.parallel asks for {ranks} ranks"
    yield from _pipeline_problems(train)
    if train.parity == "bitwise":
        yield f'{asks}, and train.parity = "bitwise" is proven for one device only; set train.parity = "off"'
    if train.path == "kernels":
        yield f'{asks}, and train.path = "kernels" reads whole weights, of which each rank holds a part; use "auto" or "torch"'
    if train.offload_optimizer:
        yield (
            f"{asks}, which split the optimizer's state, and train.offload_optimizer = true keeps all of it in one place; remove it, and "
            "raise train.parallel.shard for less memory"
        )
    if parallel.gather == "bfloat16" and train.dtype == "float32":
        yield (
            'train.parallel.gather = "bfloat16" with train.dtype = "float32" would round weights that are computed with; set train.dtype = '
            '"bfloat16", or remove train.parallel.gather'
        )
    if parallel.gather == "bfloat16" and lora.rank:
        yield (
            "train.parallel.gather has no meaning where an adapter is trained: the frozen weights are gathered in train.dtype anyway; remove it"
        )
    if lora.quantise:
        yield f"{asks}, and the packed weights of lora.quantise are not split over ranks; remove one of the two"
    if lora.experts:
        yield f"{asks}, and adapters of experts (lora.experts) wrap weights that are split; set lora.experts = false"
    if itself:
        yield f"{asks}, and a teacher that is the student's older self is kept by one rank; train on one rank, or give the teacher a model"
    if 0 < len(train.cores) < ranks:
        yield f"{asks}, and train.cores has {len(train.cores)}; give each rank at least one core, or leave train.cores empty"


def _pipeline_problems(train: Any) -> Iterator[str]:
    """Yields the settings that do not go together with a pipeline."""
    parallel = train.parallel
    if parallel.pipeline == 1:
        if parallel.schedule != ParallelConfig().schedule:
            yield "train.parallel.schedule orders the microbatches of a pipeline; set train.parallel.pipeline, or remove it"
        return
    asks = f"train.parallel.pipeline = {parallel.pipeline}"
    for name in ("expert", "context", "tensor"):
        if (size := getattr(parallel, name)) > 1:
            yield (
                f"{asks} is not combined with train.parallel.{name} = {size}; remove one of the two (train.parallel.replicate gives "
                "several pipelines, and train.parallel.shard splits their stages)"
            )
    if parallel.schedule == "zero_bubble" and parallel.shard > 1:
        yield (
            'train.parallel.schedule = "zero_bubble" computes gradients of weights after the pass in which train.parallel.shard sums and splits them; '
            'use "1f1b" or "interleaved"'
        )
    if parallel.schedule == "zero_bubble" and train.gradient_checkpointing:
        yield (
            'train.parallel.schedule = "zero_bubble" goes through a layer backwards twice, and train.gradient_checkpointing keeps '
            'nothing for the second time; use "1f1b" or "interleaved"'
        )


def _mesh_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Yields sizes that do not go together."""
    if parallel.gathering == parallel.pipeline == 1 and parallel.replicate > 1:
        held = "the whole model" if parallel.tensor == 1 else "its whole part of each layer"
        yield (
            f"train.parallel.replicate = {parallel.replicate} alone would keep {held} on every rank; set train.parallel.shard = "
            f"{parallel.replicate} instead, which computes the same with less memory"
        )
    if parallel.expert not in (1, parallel.split):
        among = " × ".join(["shard", *(name for name in ("context", "tensor") if getattr(parallel, name) > 1)])
        yield (
            f"train.parallel.expert = {parallel.expert} would leave copies of experts among train.parallel.{among} = {parallel.split} ranks; set it "
            f"to {parallel.split}, or remove it"
        )
    if parallel.expert > 1 and parallel.replicate > 1:
        yield (
            f"train.parallel.expert = {parallel.expert} is not combined with train.parallel.replicate = {parallel.replicate}; set shard to "
            f"{parallel.shard * parallel.replicate} and expert to {parallel.ranks} and remove replicate, or remove expert"
        )
    if parallel.tensor == 1:
        return
    asks = f"train.parallel.tensor = {parallel.tensor}"
    if parallel.context > 1:
        yield (
            f"{asks} is not combined with train.parallel.context = {parallel.context}: both split the heads of attention; set one of them to "
            f"{parallel.tensor * parallel.context} and remove the other"
        )
