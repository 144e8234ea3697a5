"""The messages between the trainer and the engines of a broadcast. Each is sent as `sockets.py` describes.

An engine keeps one connection to the trainer. On it, for every update:

    engine    AskWeights                     it wants these weights now
    trainer   BeginRound                     with whom, and in which group
    engine    GotBucket ...                  a bucket has arrived, and was copied out of it
    engine    RoundFailed                    or its group has failed
    trainer   AbortRound                     or that of another engine has: all ask again
    trainer   RefuseWeights                  or it does not have them

A group that is being made meets through connections for one question each: `PutKey`, and `GetKey`, which `KeyValue` answers.
"""

from __future__ import annotations

from typing import Literal

from headrace.core.types import Struct
from headrace.weight_sync.slots import Part

Backend = Literal["gloo", "nccl"]


class JoinGroup(Struct, frozen=True, tag=True):
    """An engine's first message."""

    token: str
    gpu: str
    """The identity of the GPU that its process uses; empty for none."""


class AskWeights(Struct, frozen=True, tag=True):
    name: str
    """The adapter's; empty for the model."""
    fingerprint: str
    part: Part
    group: int
    """The group that the engine is a member of; 0 for none."""


class GotBucket(Struct, frozen=True, tag=True):
    round: int
    number: int


class RoundFailed(Struct, frozen=True, tag=True):
    round: int
    why: str


class BeginRound(Struct, frozen=True, tag=True):
    round: int
    group: int
    """A group that the engine is no member of is new, and is made now."""
    rank: int
    """The engine's. The trainer's is 0."""
    size: int
    backend: Backend
    nbytes: int


class AbortRound(Struct, frozen=True, tag=True):
    round: int
    why: str


class RefuseWeights(Struct, frozen=True, tag=True):
    why: str


class PutKey(Struct, frozen=True, tag=True):
    token: str
    group: int
    key: str
    value: bytes


class GetKey(Struct, frozen=True, tag=True):
    token: str
    group: int
    key: str


class KeyValue(Struct, frozen=True, tag=True):
    value: bytes = b""
    missing: bool = False
    """Nobody has put it, and its group may have been given up."""


FromEngine = JoinGroup | AskWeights | GotBucket | RoundFailed | PutKey | GetKey
FromTrainer = BeginRound | AbortRound | RefuseWeights
