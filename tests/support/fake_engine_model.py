"""A model whose cache can be read: every entry holds the token, the version and the adapter that made it.

Logits are a hash of the tokens found through the block table, so a wrong table, a lost copy or a stale block changes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from headrace.core.steps import StepOutput
from headrace.core.types import Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.core import Core
from headrace.engine.native.draws import Settings
from headrace.engine.native.forward_pass import BLOCK, ForwardInput, ForwardOutput, PassCounts, WithoutStates
from headrace.engine.native.model_loading import GIB, ServableModel
from headrace.engine.native.sampler import sample

VOCABULARY = 40
POISON = 39
"""A token whose entries are not a number, while the weights are poisoned."""
ADAPTERS = ("north", "south")
ENTRY = np.dtype([("token", np.int64), ("version", np.int64), ("adapter", np.int64), ("nan", np.bool_)])
LAYERS, K = 2, 3


def logits_of(tokens: Iterable[int], version: int, adapter: int = -1, part: int = 0) -> np.ndarray:
    """[V] what the model says after `tokens`. `part`: how many parts of the next version are in already."""
    seed = zlib.crc32(np.array([*tokens, version, adapter, part], dtype=np.int64).tobytes())
    return np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)


def routing_of(token: int, position: int, version: int) -> np.ndarray:
    """[LAYERS, K]"""
    return (np.arange(LAYERS * K).reshape(LAYERS, K) * 5 + token + 3 * position + 7 * version) % 251


class FakeRunner(WithoutStates):
    path, arithmetic, exact, keeps = "fake", "", True, False
    feeds = False
    """True: passes are asked for ahead, with tokens that the host has not seen."""
    vocabulary = VOCABULARY
    block_nbytes = 1024
    experts = (LAYERS, K)
    passes = PassCounts()

    def __init__(self) -> None:
        self.version, self.part = -1, 0
        self.poisoned = False
        self.adapters: dict[int, int] = {}
        """Slot -> what tells one adapter's weights from others': number of its name, and version."""
        self.forwarded: list[ForwardInput] = []
        self.fed = 0
        """Passes that were asked for ahead."""
        self.oldest: np.ndarray = np.zeros(0)
        """Of each row of the last pass: the oldest version among its entries."""

    def allocate(self, blocks: int, states: int = 0) -> None:
        self.cache = np.zeros((blocks, BLOCK), dtype=ENTRY)
        self.cache["token"] = -1

    def free(self) -> None:
        self.version, self.cache = -1, None

    def take_out(self, blocks: np.ndarray) -> Any:
        return self.cache[blocks]

    def put_back(self, blocks: np.ndarray, content: Any) -> None:
        self.cache[blocks] = content

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        assert not set(source.tolist()) & set(target.tolist()) and len(set(target.tolist())) == len(target)
        self.cache[target] = self.cache[source]

    def clear_blocks(self, blocks: np.ndarray) -> None:
        self.cache[blocks] = np.zeros((), dtype=ENTRY)
        self.cache["token"][blocks] = -1

    def prepare(self, tensors: Any) -> Any:
        return {name: tensor.item() for name, tensor in tensors.items()}

    def use(self, weights: Any) -> None:
        self.version, self.poisoned = int(weights["version"]), bool(weights["poisoned"])
        self.part = int(weights["part"])

    def prepare_adapter(self, spec: AdapterSpec, tensors: Any) -> Any:
        return tensors["number"]

    def use_adapter(self, slot: int, adapter: Any) -> None:
        self.adapters.pop(slot, None)
        if adapter is not None:
            self.adapters[slot] = adapter

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        self.fed += batch.fed is not None
        if batch.fed is not None:
            assert self.feeds and not batch.tokens.any()
            batch = replace(batch, tokens=batch.fed.numpy())
        self.forwarded.append(batch)
        self._check(batch)
        segments, positions = batch.segments(), batch.positions()
        blocks = batch.tables[segments, positions // BLOCK]
        entries = np.zeros(len(batch.tokens), dtype=ENTRY)
        adapters = np.array([self.adapters.get(int(slot), -1) for slot in batch.adapters])[segments]
        entries["token"], entries["adapter"] = batch.tokens, adapters
        entries["version"] = np.where(adapters < 0, self.version, adapters // 10)
        entries["nan"] = self.poisoned & (batch.tokens == POISON)
        self.cache[blocks, positions % BLOCK] = entries
        found = [self._seen(batch, int(row), segments, positions) for row in batch.rows]
        self.oldest = np.array([int(seen["version"].min()) for seen in found])
        logits = [self._logits(batch, int(row), segments, seen) for row, seen in zip(batch.rows, found, strict=True)]
        told = [routing_of(*at, self.version) for at in zip(batch.tokens, positions, strict=True)]
        return ForwardOutput(
            torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, self.vocabulary)),
            np.array(told, dtype=np.uint8) if batch.routing else None,
        )

    def _seen(self, batch: ForwardInput, row: int, segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
        table = batch.tables[segments[row]]
        return self.cache[table].reshape(-1)[: positions[row] + 1]

    def _logits(self, batch: ForwardInput, row: int, segments: np.ndarray, seen: np.ndarray) -> np.ndarray:
        adapter = self.adapters.get(int(batch.adapters[segments[row]]), -1)
        if seen["nan"].any():
            return np.full(self.vocabulary, np.nan, dtype=np.float32)
        makers = {adapter % 10 if adapter >= 0 else -1 for adapter in seen["adapter"].tolist()}
        assert len(makers) == 1, "entries of the base model and of an adapter, or of two, do not mix"
        return logits_of(seen["token"].tolist(), 0 if adapter >= 0 else self.version, adapter, self.part)

    def _check(self, batch: ForwardInput) -> None:
        """What `ForwardInput` promises."""
        lengths = np.diff(batch.starts)
        assert (lengths > 0).all() and batch.starts[-1] == len(batch.tokens) and (np.diff(batch.rows) > 0).all()
        tables = [
            set(row[: -(-int(end) // BLOCK)].tolist())
            for row, end in zip(batch.tables, batch.context + lengths, strict=True)
        ]
        written = [
            set(row[int(start) // BLOCK : -(-int(end) // BLOCK)].tolist())
            for row, start, end in zip(batch.tables, batch.context, batch.context + lengths, strict=True)
        ]
        for i, blocks in enumerate(written):
            assert not any(blocks & table for j, table in enumerate(tables) if i != j), (
                "written by one, seen by another"
            )

    def blame(self, batch: ForwardInput) -> np.ndarray:
        segments, positions = batch.segments(), batch.positions()
        seen = [self._seen(batch, token, segments, positions)["nan"].any() for token in range(len(batch.tokens))]
        return np.where(seen, 1, -1)


class RecurrentRunner(FakeRunner):
    """One whose sequences have states too: all entries that a state has seen, which must be those of the blocks whenever somebody goes on from it."""

    state_nbytes = 64

    def allocate(self, blocks: int, states: int = 0) -> None:
        super().allocate(blocks)
        self.states = [np.full(1, POISON, dtype=ENTRY)] * states

    def copy_state(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        assert batch.states is not None
        kept = np.zeros((0, 3), np.int32) if batch.kept is None else batch.kept
        written = [*batch.states.tolist(), *kept[:, 2].tolist()]
        assert len(set(written)) == len(written) and min(written) >= 0, "no two write to one slot"
        tables = [self.cache[table].reshape(-1) for table in batch.tables]
        for state, context, there in zip(batch.states, batch.context, tables, strict=True):
            assert not context or np.array_equal(self.states[state], there[:context]), (
                "a state has seen what the blocks hold"
            )
        output = super().forward(batch)
        whole = [self.cache[table].reshape(-1) for table in batch.tables]
        ends = batch.context + np.diff(batch.starts)
        for segment, tokens, slot in kept.tolist():
            assert batch.context[segment] < tokens <= ends[segment]
            self.states[slot] = whole[segment][:tokens].copy()
        for state, end, there in zip(batch.states, ends, whole, strict=True):
            self.states[state] = there[:end].copy()
        return output


@dataclass
class Reported:
    """What an engine reported of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    """Of an update that was being streamed in, how many were live; 0 where none was."""
    stop: str = ""
    error: str = ""
    output: list[StepOutput] = field(default_factory=list)


class CoreDriver:
    """Steps an engine core over the fake model, and keeps everything that it reports."""

    def __init__(
        self, blocks: int = 64, context_length: int = 128, ends: Iterable[int] = (), runner: Any = None, **config: Any
    ) -> None:
        """`runner`: one that can be read as `FakeRunner` can."""
        self.runner = runner or FakeRunner()
        model = ServableModel(
            runner=self.runner,
            context_length=context_length,
            vocabulary=VOCABULARY,
            ends=frozenset(ends),
            decode=None,
            shapes={"version": (), "poisoned": (), "part": ()},
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        defaults = {"max_running": 4, "prefill_chunk": 16, "check": True, "kv_gib": (blocks + 0.5) * 1024 / GIB}
        self.engine = Core(model, EngineConfig(**{**defaults, **config}))
        self.told: dict[str, Reported] = {}
        self.requests: dict[str, Request] = {}
        self.version = -1
        self.adapters: dict[str, int] = {}
        self.swap()

    def swap(self, poisoned: bool = False) -> None:
        self.version += 1
        self._put(self.version, 0, poisoned)

    def stream(self, part: int) -> None:
        """So many parts of the next version are live; 0 takes them back."""
        self._put(self.version, part)

    def _put(self, version: int, part: int, poisoned: bool = False) -> None:
        values = {"version": version, "poisoned": poisoned, "part": part}
        tensors = {name: torch.tensor(float(value)) for name, value in values.items()}
        number = version + bool(part)
        update = WeightUpdate(version=number, kind="full", fingerprint=f"base-{number}", nbytes=0, seconds=0.0)
        self.engine.swap(self.engine.prepare(update, tensors, mixed=part > 0))

    def swap_adapter(self, name: str) -> None:
        self.adapters[name] = version = self.adapters.get(name, -1) + 1
        spec = AdapterSpec(name, 8, 16.0)
        update = WeightUpdate(version=version, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=spec)
        self.engine.swap(self.engine.prepare(update, {"number": version * 10 + ADAPTERS.index(name)}))

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.requests[request.id] = request
            self.told[request.id] = Reported()

    def step(self) -> StepOutput:
        before = len(self.runner.forwarded)
        output = self.engine.step()
        assert output.mixed == (self.runner.part > 0) or not output.tokens, "what is told of a mixture is true"
        for i, name in enumerate(output.request_ids):
            told = self.told[name]
            assert not told.stop, "nothing comes after the end"
            told.tokens.append(output.tokens[i])
            told.logprobs.append(output.logprobs[i])
            told.versions.append(output.versions[i] if output.versions else output.version)
            told.kv_versions.append(output.kv_versions[i])
            told.parts.append(self.runner.part)
        if (
            not self.runner.feeds
            and len(self.runner.forwarded) > before
            and len(output.kv_versions) == len(self.runner.oldest)
        ):
            assert list(output.kv_versions) == self.runner.oldest.tolist(), "what spans say of the cache is true"
        for end in output.finished:
            told = self.told[end.request_id]
            assert not told.stop, "a request ends once"
            told.stop, told.error = end.stop, end.error
        for name in self.told:
            self.told[name].output.append(output)
        return output

    def run(self, *requests: Request) -> dict[str, Reported]:
        self.add(*requests)
        for _ in range(5000):
            if not self.engine.has_work():
                return self.told
            self.step()
        raise AssertionError("the engine does not come to an end")

    def check(self, name: str, context: tuple[int, ...] | None = None, adapter: str = "") -> None:
        """Every token is what the model says after what came before it (`context`, where that is not the request's prompt and
        prefix), drawn with the request's own numbers."""
        request, told = self.requests[name], self.told[name]
        tokens = [*(request.prompt + request.prefix if context is None else context)]
        columns = zip(told.tokens, told.versions, told.parts, told.logprobs, strict=True)
        for t, (token, version, part, logprob) in enumerate(columns):
            maker = version * 10 + ADAPTERS.index(adapter) if adapter else -1
            logits = logits_of(tokens, 0 if adapter else version, maker, part)
            drawn = draw(logits, request.sampling, len(request.prefix) + t)
            assert token == drawn[0] and abs(logprob - drawn[1]) < 1e-9, f"token {t} of {name}"
            tokens.append(token)


def draw(logits: np.ndarray, sampling: Sampling, counter: int) -> tuple[int, float]:
    """By the sampler, alone in its batch."""
    settings = Settings(
        temperature=np.array([sampling.temperature], np.float64),
        top_k=np.array([sampling.top_k], np.int64),
        top_p=np.array([sampling.top_p], np.float64),
        min_p=np.array([sampling.min_p], np.float64),
        seed=np.array([sampling.seed], np.uint64),
        counter=np.array([counter], np.int64),
    )
    drawn = sample(torch.from_numpy(logits[None]), settings)
    return int(drawn.tokens[0]), float(drawn.logprobs[0])


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Without the poison."""
    return tuple(np.random.default_rng([length, seed]).integers(0, POISON, length).tolist())
