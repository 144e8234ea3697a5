"""The native engine: continuous batching in one process, weights swapped between two forward passes.

    add ──▶ waiting ──admission: a slot is free──▶ prompt (computed once, shared) ──▶ running ──▶ finished
                                                        └──── one forward pass ────┘
                                                prompt chunks beside one token per sequence

One `step` is one forward pass and one token for every running sequence, with exactly one version of the weights (C4).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.native import requests, skeleton, weights
from headrace.engine.native.attention import Chunk, Ragged
from headrace.engine.native.kv import KVCache, budget
from headrace.engine.native.prompts import Entry
from headrace.engine.native.runner_hf import HuggingFaceRunner
from headrace.engine.native.runner_llama import LlamaRunner, serves
from headrace.engine.native.sampler import Drawn, sample
from headrace.engine.native.scheduler import Scheduler
from headrace.engine.native.sequences import Sequence
from headrace.engine.native.stopping import Decode, Stopper
from headrace.errors import ConfigError
from headrace.types import Capabilities, EngineStats, Finished, Request, StepOutput, Stop, WeightUpdate

SCORE_CHUNK = 128
"""Tokens forwarded at once by `score`, which needs the logits of all of them."""


class Runner(Protocol):
    """A model's forward pass over a ragged batch."""

    path: str

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any: ...

    def use(self, weights: Any) -> None: ...

    def forward(self, tokens: torch.Tensor, batch: Ragged, rows: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Prepared:
    version: int
    weights: Any


class NativeEngine:
    """An `EngineCore`. Weights are not read from `model_dir`: they come through `prepare` and `swap`."""

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        """Raises ConfigError for a model that cannot be served, and for a KV budget that holds no sequence."""
        self._device, self._dtype = _device(config.device), getattr(torch, config.serving_dtype)
        self._model = skeleton.read(model_dir, self._dtype, self._device)
        context = min(config.context_length, self._model.context_length or config.context_length)
        shares = budget(self._model.geometry, context, self._dtype, config.kv_gib, config.max_running)
        self._cache = KVCache(self._model.geometry, shares.rows, context, self._dtype, self._device)
        self._schedule = Scheduler(self._cache, shares, config.prefill_chunk)
        self._runner = _runner(self._model, config, context, self._dtype, self._device)
        self._decode = _decoder(model_dir)
        self._eos = np.array(sorted(end_tokens(model_dir, self._model.config)), dtype=np.int64)
        self._ended: list[Finished] = []
        self._version = -1
        self._sampled = self._prompt_tokens = self._steps = 0
        self._busy = 0.0
        self.capabilities = Capabilities(context, stop_strings=self._decode is not None, path=self._runner.path)

    # -- requests -----------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        requests.check(request, self.capabilities.context_length, self._model.vocabulary, self._decode)
        if request.id in self._schedule:
            raise ValueError(f"a request {request.id} is here already; give every request an id of its own")
        sampling = request.sampling
        watched = sampling.stop or sampling.stop_token_ids
        stopper = Stopper(sampling.stop_token_ids, sampling.stop, self._decode) if watched else None
        said_stop = [stopper.push(token) for token in request.prefix] if stopper else []
        if any(said_stop) or self._ends_at_eos(request):
            self._ended.append(Finished(request.id, "stop"))
        elif len(request.prefix) == sampling.max_tokens:
            self._ended.append(Finished(request.id, "length"))
        else:
            self._schedule.add(Sequence(request, request.prompt + request.prefix, stopper))

    def _ends_at_eos(self, request: Request) -> bool:
        """A re-issued request may have sampled its last token before."""
        return not request.sampling.ignore_eos and bool(request.prefix) and request.prefix[-1] in self._eos

    def cancel(self, request_id: str) -> None:
        self._ended = [finished for finished in self._ended if finished.request_id != request_id]
        self._schedule.cancel(request_id)

    def has_work(self) -> bool:
        """False before the first weights: requests wait for them."""
        return self._version >= 0 and (len(self._schedule) > 0 or bool(self._ended))

    # -- weights ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        if update.kind != "full":
            raise ValueError(
                f"the native engine serves full weights, not an update of kind {update.kind}; publish full ones"
            )
        weights.check(self._model.shapes, tensors, self._dtype)
        return Prepared(update.version, self._runner.prepare(weights.on_device(tensors, self._device)))

    def swap(self, prepared: Prepared) -> None:
        assert prepared.version > self._version, "versions never go back"
        self._runner.use(prepared.weights)
        self._version = prepared.version
        self._schedule.prompts.forget()

    # -- the step -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepOutput:
        if self._version < 0:
            raise RuntimeError("the engine has no weights yet: prepare and swap an update before the first step")
        started = time.perf_counter()
        schedule, running = self._schedule, self._schedule.running
        schedule.admit(self._version)
        decoding, plan = len(running), schedule.plan()
        logits = self._forward(decoding, plan) if decoding or plan else None
        fresh = schedule.start()
        finished, self._ended = self._ended, []
        output = StepOutput(self._version, finished=tuple(finished))
        if len(running):
            drawn = sample(_rows(logits, decoding, fresh), running.settings())
            output = self._collect(drawn, decoding, fresh, finished)
        self._steps += 1
        self._busy += time.perf_counter() - started
        return output

    def _forward(self, decoding: int, plan: list[tuple[Entry, Chunk]]) -> torch.Tensor:
        """Logits of every decoding row. Those of prompts that are complete now go to their entries."""
        running = self._schedule.running
        chunks = [chunk for _, chunk in plan]
        prompts = [np.array(entry.tokens[chunk.start : chunk.stop]) for entry, chunk in plan]
        tokens = np.concatenate([running.column("token"), *prompts]).astype(np.int64)
        ends = decoding + np.cumsum([len(prompt) for prompt in prompts])
        complete = [i for i, (entry, chunk) in enumerate(plan) if chunk.stop == len(entry.tokens)]
        rows = np.concatenate([np.arange(decoding), [ends[i] - 1 for i in complete]]).astype(np.int64)
        logits = self._runner.forward(
            self._tensor(tokens),
            Ragged(self._cache, running.column("length"), chunks, self._device, self._dtype),
            self._tensor(rows),
        )
        for entry, chunk in plan:
            self._schedule.prompts.advance(entry, chunk, self._version)
            self._prompt_tokens += chunk.stop - chunk.start
        for place, i in enumerate(complete):
            plan[i][0].logits = logits[decoding + place].clone()
        return logits[:decoding]

    def _collect(self, drawn: Drawn, decoding: int, fresh: list[Entry], finished: list[Finished]) -> StepOutput:
        """Writes down what was drawn, and takes out what ended."""
        running = self._schedule.running
        running.column("length")[:decoding] += 1
        running.column("token")[:] = drawn.tokens
        running.column("counter")[:] += 1
        stopped = self._stopped(drawn)
        full = running.column("counter") >= running.column("limit")
        kept, ended = np.flatnonzero(drawn.finite), np.flatnonzero(stopped | full | ~drawn.finite)
        ids = [sequence.id for sequence in running.sequences]
        finished += [self._finish(ids[row], row, drawn, stopped) for row in ended.tolist()]
        output = StepOutput(
            self._version,
            tuple(ids[row] for row in kept),
            tuple(drawn.tokens[kept].tolist()),
            tuple(drawn.logprobs[kept].tolist()),
            tuple(running.column("kv_version")[kept].tolist()),
            tuple(finished),
        )
        self._sampled += len(kept)
        for entry in (entry for row, entry in enumerate(fresh, start=decoding) if not drawn.finite[row]):
            self._schedule.drop_prompt(entry)
        for row in ended[::-1].tolist():  # from behind: removal moves the last row
            self._schedule.remove(row, clear=not drawn.finite[row])
        return output

    def _stopped(self, drawn: Drawn) -> np.ndarray:
        """[B] rows whose new token ends them by what it says."""
        running = self._schedule.running
        stopped = running.column("ends_at_eos") & np.isin(drawn.tokens, self._eos)
        for row in np.flatnonzero(running.column("watched") & drawn.finite):
            stopper = running.sequences[row].stopper
            assert stopper is not None
            stopped[row] |= stopper.push(int(drawn.tokens[row]))
        return stopped & drawn.finite

    def _finish(self, request_id: str, row: int, drawn: Drawn, stopped: np.ndarray) -> Finished:
        if not drawn.finite[row]:
            return Finished(request_id, "error", f"non-finite logits at version {self._version}")
        stop: Stop = "stop" if stopped[row] else "length"
        return Finished(request_id, stop)

    # -- beside generation --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def score(self, tokens: Tokens[int]) -> list[float]:
        """[T-1] log-probs at temperature 1 under the live weights, in a cache of its own: no running sequence notices."""
        if self._version < 0:
            raise ValueError("the engine has no weights yet; load an update before scoring")
        ids = tuple(tokens)
        requests.check_tokens(ids, self._model.vocabulary)
        if len(ids) > self.capabilities.context_length:
            raise ValueError(
                f"{len(ids)} tokens do not fit the context of {self.capabilities.context_length}; score fewer"
            )
        cache = KVCache(self._model.geometry, 1, max(len(ids), 1), self._dtype, self._device)
        scores: list[float] = []
        for start in range(0, len(ids) - 1, SCORE_CHUNK):
            stop = min(start + SCORE_CHUNK, len(ids) - 1)
            batch = Ragged(cache, np.zeros(0, np.int64), [Chunk(0, start, stop)], self._device, self._dtype)
            rows = self._tensor(np.arange(stop - start))
            logits = self._runner.forward(self._tensor(np.array(ids[start:stop])), batch, rows)
            following = self._tensor(np.array(ids[start + 1 : stop + 1]))
            scores += logits.float().log_softmax(-1).gather(1, following[:, None])[:, 0].tolist()
        return scores

    def stats(self) -> EngineStats:
        admitted = self._schedule.admitted
        return EngineStats(
            running=admitted,
            waiting=len(self._schedule) - admitted,
            kv_used=admitted / self._schedule.running.slots,
            sampled_tokens=self._sampled,
            prompt_tokens=self._prompt_tokens,
            steps=self._steps,
            busy_seconds=self._busy,
            version=self._version,
        )

    def integrity(self) -> None:
        """Asserts that slots, cache rows and requests add up."""
        self._schedule.integrity()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _rows(logits: torch.Tensor | None, decoding: int, fresh: list[Entry]) -> torch.Tensor:
    """[B, V]: decoding rows first, then those that begin."""
    first = [entry.logits for entry in fresh if entry.logits is not None]
    assert len(first) == len(fresh), "a sequence begins when its prompt is computed"
    parts = [logits] if logits is not None and decoding else []
    return torch.cat([*parts, torch.stack(first)]) if first else parts[0]


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('engine.device = "cuda", but torch finds no GPU; use "auto" or "cpu"')
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")


def _runner(
    model: skeleton.Skeleton, config: EngineConfig, context: int, dtype: torch.dtype, device: torch.device
) -> Runner:
    if config.path == "auto" and serves(model):
        return LlamaRunner(model, context, dtype, device)
    return HuggingFaceRunner(model, dtype, device)


def _decoder(model_dir: Path) -> Decode | None:
    """Tokens to text with special tokens in it, so that they can be stop strings. None without a tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception:  # transformers raises OSError, ValueError, TypeError, ... for the same thing: there is none
        return None
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def end_tokens(model_dir: Path, config: Any) -> set[int]:
    """Every end-of-sequence token that the model's generation config or config names."""
    path = model_dir / "generation_config.json"
    named = [json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")] if path.exists() else []
    named.append(getattr(config, "eos_token_id", None))
    lists = [entry if isinstance(entry, list) else [entry] for entry in named if entry is not None]
    return {token for tokens in lists for token in tokens}
