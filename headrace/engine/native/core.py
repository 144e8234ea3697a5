"""The native engine: continuous batching in one process, weights swapped between two forward passes.

One `step` is one forward pass and one token for every running sequence, with exactly one version of the weights (C4). The
package's own docstring says where everything else is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.core.errors import ConfigError
from headrace.core.reports import EngineStats, SleepReport, capable
from headrace.core.steps import Finished, StepOutput
from headrace.core.types import Request, Sampling, Stop
from headrace.core.weights import WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.forward_pass import BLOCK, Runner
from headrace.engine.native.guides import Guide, Guides, Stopper
from headrace.engine.native.kv_cache import Blocks, RecordedRouting
from headrace.engine.native.live_weights import Served
from headrace.engine.native.model_loading import ServableModel, read_model, room_in_cache
from headrace.engine.native.scheduler import Forks, Scheduler
from headrace.engine.native.sequences import EngineSequence, Planner, Running, SeesAhead
from headrace.engine.native.stepping import Stepper
from headrace.models.grammars import Grammars
from headrace.native.memory import held, trim

# --- Checks of requests. Every refusal gives its reason and names its remedy.


COLDEST = 1e-5
"""Logits divided by less could overflow."""
HOTTEST = 1e30
"""Divided by more than a float32 holds, masked logits are no numbers."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits that requests are checked against."""

    context_length: int
    vocabulary: int
    stop_strings: bool
    routing: bool
    images: int = 0
    """Numbers beyond the vocabulary that prompts may have: features of images."""
    ahead: SeesAhead | None = None
    """None for a model whose tokens see back alone."""

    def check(self, request: Request, context: int) -> None:
        """Raises ValueError if the request can never run. `context`: tokens of its prompt, or of the sequence that it forks."""
        _check_tokens(request.prompt, self.vocabulary + self.images)
        _check_tokens(request.prefix, self.vocabulary)
        self._check_images(request.prompt)
        if not context:
            raise ValueError("the prompt has no tokens; begin it with a start token at least")
        _check_sampling(request.sampling)
        self._check_length(request, context)
        self._check_wishes(request)

    def _check_images(self, tokens: tuple[int, ...]) -> None:
        if self.ahead is None or max(tokens, default=0) < self.vocabulary:
            return
        own = np.array(tokens)
        before, behind = np.concatenate([[-1], own[:-1]]), np.concatenate([own[1:], [-1]])
        lacks_rest = (self.ahead(own) > 0) & (behind != own + 1)
        lacks_begin = (self.ahead(own - 1) > 0) & (before != own - 1)
        if (lacks_rest | lacks_begin).any():
            raise ValueError(
                "the prompt holds a part of an image, whose tokens see each other in this model: give all of them, in order"
            )

    def _check_length(self, request: Request, context: int) -> None:
        most = request.sampling.max_tokens
        if context + most > self.context_length:
            raise ValueError(
                f"a prompt of {context} tokens and max_tokens = {most} need {context + most} tokens, the engine's context "
                f"holds {self.context_length}; shorten the prompt, lower max_tokens or raise engine.context_length"
            )
        if len(request.prefix) > most:
            raise ValueError(f"a prefix of {len(request.prefix)} tokens exceeds max_tokens = {most}; raise max_tokens")
        if not most and not request.prompt_logprobs:
            raise ValueError("max_tokens = 0 samples nothing; raise it, or set prompt_logprobs to score the prompt")

    def _check_wishes(self, request: Request) -> None:
        if biased := request.sampling.logit_bias:
            _check_tokens(tuple(token for token, _ in biased), self.vocabulary)
        if biased and request.return_mask:
            raise ValueError(
                "logit_bias changes the distribution, which no mask can tell a trainer: leave one of them out"
            )
        if request.sampling.stop and not self.stop_strings:
            raise ValueError("stop strings need the model's tokenizer, which its directory lacks; use stop_token_ids")
        if not 0 <= request.top_logprobs <= self.vocabulary:
            raise ValueError(
                f"top_logprobs = {request.top_logprobs} cannot be returned; it must be 0 to {self.vocabulary}, the vocabulary"
            )
        if request.return_routing and not self.routing:
            raise ValueError(
                "return_routing needs engine.routing = true (and a model with experts); set it, or do not ask"
            )
        if request.prompt_logprobs and max(request.prompt, default=0) >= self.vocabulary:
            raise ValueError(
                "features of images have no log-probs: leave prompt_logprobs out where a prompt holds an image"
            )
        if request.fork and (request.prompt or request.prefix or request.prompt_logprobs or request.adapter):
            raise ValueError(
                "a fork has the prompt and the adapter of its source; leave prompt, prefix, prompt_logprobs and adapter empty"
            )


def _check_tokens(tokens: tuple[int, ...], vocabulary: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise ValueError(
            f"token {wrong} is not in the model's vocabulary of {vocabulary}; use the model's own tokenizer"
        )


def _is_temperature(value: float) -> bool:
    return math.isfinite(value) and (value == 0 or value >= COLDEST)


def _check_sampling(sampling: Sampling) -> None:
    rules = [
        (sampling.max_tokens >= 0, "max_tokens", "at least 0"),
        (_is_temperature(sampling.temperature), "temperature", f"0 (greedy) or at least {COLDEST}"),
        (sampling.temperature <= HOTTEST, "temperature", f"at most {HOTTEST:g}"),
        (0 < sampling.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps all tokens)"),
        (sampling.top_k >= 0, "top_k", "0 (keeps all tokens) or more"),
        (0 <= sampling.min_p <= 1, "min_p", "from 0 (keeps all tokens) to 1"),
        ("" not in sampling.stop, "stop", "strings that are not empty"),
        (all(math.isfinite(bias) for _, bias in sampling.logit_bias), "logit_bias", "of finite numbers"),
    ]
    for ok, name, wanted in rules:
        if not ok:
            raise ValueError(f"{name} = {getattr(sampling, name)} cannot be sampled with; it must be {wanted}")


# --- Requests with a constraint, between their arrival and the schedule
# Threads compile the constraints meanwhile.


PATIENCE = 0.02
"""Seconds for which a step without other work waits for a constraint."""


class Compiling:
    def __init__(self, guides: Guides) -> None:
        self._guides = guides
        self._waiting: dict[str, tuple[EngineSequence, Future[Guide]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter([sequence for sequence, _ in self._waiting.values()])

    @property
    def begun(self) -> bool:
        """Whether one of them has tokens already."""
        return any(sequence.begun for sequence in self)

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError for a constraint that no request can have here."""
        self._guides.check(sampling)

    def add(self, sequence: EngineSequence) -> None:
        constraint = sequence.request.sampling.constraint
        assert constraint is not None
        self._waiting[sequence.id] = sequence, self._guides.begin(constraint, sequence.said)

    def now(self, sampling: Sampling, tokens: tuple[int, ...]) -> Guide | None:
        """Returns the guide of a completion that has these tokens; None without a constraint. Raises ValueError."""
        return self._guides.begin(sampling.constraint, tokens).result() if sampling.constraint else None

    def cancel(self, request_id: str) -> None:
        if found := self._waiting.pop(request_id, None):
            found[1].cancel()

    def clear(self) -> list[EngineSequence]:
        """Returns those that were there."""
        there = list(self)
        for sequence in there:
            self.cancel(sequence.id)
        return there

    def enter(self, schedule: Scheduler) -> list[Finished]:
        """Puts those that are ready into the schedule. Returns the ends of those whose constraint cannot be followed."""
        if not schedule.has_work():
            wait([future for _, future in self._waiting.values()], PATIENCE, FIRST_COMPLETED)
        failed = []
        for request_id, (sequence, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            try:
                sequence.guide = future.result()
            except ValueError as error:
                failed.append(Finished(request_id, "error", str(error)))
            else:
                schedule.add(sequence)
        return failed


# --- An engine asleep
# Its weights and its KV cache are given back while a trainer uses the same device, and taken again.
#
#     awake ──sleep: blocks that sequences hold are copied to the host, or dropped──▶ asleep ──wake──▶ awake, without weights ──swap──▶
#
# Sequences stay where they are: those that run keep their rows and tokens, and with their blocks the versions that computed them. Dropped
# blocks are computed again under the weights that come next, as after a preemption.


class Sleeping:
    """The memory of an engine on a device, which it has only while it is awake."""

    def __init__(self, runner: Runner, schedule: Scheduler, device: torch.device, asleep: bool) -> None:
        """`asleep`: whether it begins without any."""
        self._runner, self._schedule, self._device = runner, schedule, device
        self._kept: tuple[np.ndarray, torch.Tensor] | None = None
        """Numbers and content of the blocks that are on the host."""
        self.asleep = asleep
        if not asleep:
            runner.allocate(schedule.blocks.count, schedule.states.count)

    @torch.no_grad()
    def begin(self, keep: bool) -> SleepReport:
        """Frees weights and cache. `keep`: blocks that sequences hold go to the host. Nothing happens while it is asleep."""
        if self.asleep:
            return SleepReport()
        started, before = time.perf_counter(), held(self._device)
        self._schedule.fall_asleep(keep)
        blocks, moved = self._schedule.blocks.in_use(), 0
        if len(blocks):
            content = self._runner.take_out(blocks)
            self._kept, moved = (blocks, content), content.nbytes
        self._runner.free()
        self.asleep = True
        _give_back(self._device)
        return SleepReport(time.perf_counter() - started, max(0, before - held(self._device)), moved)

    @torch.no_grad()
    def end(self) -> SleepReport:
        """Takes memory for the cache again, and puts the kept blocks back. Nothing happens while it is awake."""
        if not self.asleep:
            return SleepReport()
        started, before, moved = time.perf_counter(), held(self._device), 0
        self._runner.allocate(self._schedule.blocks.count, self._schedule.states.count)
        if self._kept:
            self._runner.put_back(*self._kept)
            moved, self._kept = self._kept[1].nbytes, None
        self.asleep = False
        return SleepReport(time.perf_counter() - started, max(0, held(self._device) - before), moved)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim()


# --- core ------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    update: WeightUpdate
    weights: Any
    mixed: bool = False


class Core:
    """An `EngineCore` over any model. Weights come through `prepare` and `swap`."""

    def __init__(self, model: ServableModel, config: EngineConfig, asleep: bool = False) -> None:
        """`asleep`: it takes no memory of the device before `wake`. Raises ConfigError for a KV budget that holds no sequence."""
        self._model, self._runner, self._config = model, model.runner, config
        sizes = model.sizes or config.sizes
        room = room_in_cache(model, sizes.kv_gib, sizes.max_running)
        blocks = Blocks(room.blocks)
        running = Running(room.rows, model.context_length, model.moves, model.ahead)
        self._served = Served(config.max_adapters)
        self._schedule = Scheduler(blocks, running, self._served, room.states)
        self._sleeping = Sleeping(self._runner, self._schedule, model.device, asleep)
        self._forks = Forks(self._schedule, running, blocks)
        routing = _routing(model, config, blocks.count)
        self._limits = RequestLimits(
            context_length=model.context_length,
            vocabulary=model.vocabulary,
            stop_strings=model.decode is not None,
            routing=config.routing,
            images=model.images,
            ahead=model.ahead,
        )
        guides = Guides(_grammars(model), model.decode, model.vocabulary, model.ends)
        self._compiling = Compiling(guides)
        ends = np.isin(np.arange(model.vocabulary), list(model.ends))
        planner = Planner(room.rows, sizes.prefill_chunk, config.exact, config.routing)
        self._step = Stepper(
            runner=self._runner,
            schedule=self._schedule,
            planner=planner,
            served=self._served,
            forks=self._forks,
            routing=routing,
            guides=guides,
            ends=ends,
        )
        self._ended: list[Finished] = []
        """Ends that the next step reports."""
        self._paused = False
        self._arrivals = self._steps = self._swaps = 0
        self._busy = 0.0
        self.capabilities = capable(
            model.context_length,
            self._runner.path,
            adapters=config.max_adapters,
            routing=routing is not None,
            stop_strings=model.decode is not None,
            constraints=model.tokenizer is not None,
            exact=self._runner.exact,
            arithmetic=self._runner.arithmetic,
            rows=room.rows,
            kv_tokens=blocks.count * BLOCK,
        )

    # -- requests -----------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        if request.id in self._schedule or request.id in self._compiling:
            raise ValueError(f"a request {request.id} is here already; give every request an id of its own")
        sequence = self._forked(request) if request.fork else self._fresh(request)
        sampling = request.sampling
        if sampling.stop or sampling.stop_token_ids:
            sequence.stopper = Stopper(sampling.stop_token_ids, sampling.stop, self._model.decode)
        if stop := _ended_before(sequence, self._model.ends):
            self._ended.append(Finished(request.id, stop))
        else:
            self._arrivals += 1
            if sampling.constraint and sequence.guide is None:
                self._compiling.add(sequence)
            else:
                self._schedule.add(sequence)

    def _fresh(self, request: Request) -> EngineSequence:
        self._compiling.check(request.sampling)
        self._limits.check(request, len(request.prompt))
        self._served.require(request.adapter)
        return EngineSequence(
            request=request,
            tokens=request.prompt + request.prefix,
            prompt=len(request.prompt),
            arrival=self._arrivals,
            adapter=request.adapter,
            scored=request.prompt_logprobs,
            begun=bool(request.prefix),
            said=request.prefix,
        )

    def _forked(self, request: Request) -> EngineSequence:
        assert request.fork is not None
        self._compiling.check(request.sampling)
        past = self._forks.source(request.fork)
        tokens = past.tokens[: past.prompt + request.fork.at_token]
        self._limits.check(request, len(tokens))
        self._served.require(past.adapter)
        sampled = tokens[past.prompt :]
        guide = self._compiling.now(request.sampling, sampled)  # before it holds blocks
        pinned = self._forks.pin(request.fork, past)
        return EngineSequence(
            request=request,
            tokens=tokens,
            prompt=len(tokens),
            arrival=self._arrivals,
            adapter=past.adapter,
            pinned=pinned,
            said=sampled,
            guide=guide,
        )

    def cancel(self, request_id: str) -> None:
        self._ended = [finished for finished in self._ended if finished.request_id != request_id]
        self._compiling.cancel(request_id)
        if sequence := self._schedule.get(request_id):
            self._schedule.end(sequence)

    def has_work(self) -> bool:
        """False before the first weights, and while it has given its weights back: requests wait for them."""
        waits = self._schedule.has_work() or bool(self._compiling)
        return bool(self._ended) or (self._served.there and not self._paused and waits)

    # -- control ------------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """No forward pass until `resume`; everything is kept."""
        self._paused = True

    def drain(self) -> None:
        """Admits no new request until `resume`; those that have begun run to their ends."""
        self._paused = False
        self._schedule.queue.drain()

    def resume(self) -> None:
        self._paused = False
        self._schedule.queue.resume()

    @property
    def drained(self) -> bool:
        """Whether all requests that have begun are done, or draining was ended."""
        waits = self._schedule.has_work() or self._compiling.begun
        return not self._schedule.queue.draining or not (waits or self._ended)

    def abort(self) -> None:
        """Ends all requests now, as interrupted; the next step reports them."""
        for sequence in list(self._schedule):
            self._ended.append(self._step.finished(sequence, "interrupted"))
            self._schedule.end(sequence)
        self._ended += [Finished(sequence.id, "interrupted") for sequence in self._compiling.clear()]

    def sleep(self, keep: bool) -> SleepReport:
        """Gives the memory of the device back until `wake`: weights, and the KV cache. `keep`: entries that requests hold go to the host,
        else they are computed again. Requests stay, and others are taken. Does nothing while it is asleep."""
        self._served.there = False
        self._step.forget()
        return self._sleeping.begin(keep)

    def wake(self) -> SleepReport:
        """Takes the memory again. Passes go on when weights are swapped in: those that it had, or newer ones."""
        return self._sleeping.end()

    # -- weights ------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor], mixed: bool = False) -> Prepared:
        if update.adapter is not None:
            if not self._config.max_adapters:
                raise ValueError(
                    f"the adapter {update.adapter.name} cannot be loaded: engine.max_adapters is 0; raise it, and start again"
                )
            self._served.check_adapter(update.adapter)
            return Prepared(update, self._runner.prepare_adapter(update.adapter, tensors))
        if update.kind != "full":
            raise ValueError(f"an update of kind {update.kind} must say which adapter it is for: set its `adapter`")
        self._served.check_base(update)
        return Prepared(update, self._model.prepare(tensors), mixed)

    def swap(self, prepared: Prepared) -> Any:
        """Returns the base weights that were replaced: their memory is given back where the caller lets go of them, and that takes longer
        than the swap. Raises ValueError if it does not fit weights that were loaded meanwhile."""
        update, spec = prepared.update, prepared.update.adapter
        self._step.forget()
        if spec is None:
            self._served.check_base(update)
            assert not self._sleeping.asleep, "weights were swapped in while the engine was asleep"
            same = not self._served.there and update.version == self._served.base
            replaced = self._runner.use(prepared.weights)
            if same:  # what it gave back when it fell asleep
                assert update.fingerprint == self._served.fingerprint, "one version has one fingerprint"
                self._served.set_base(update)
                return replaced
            self._forks.forget(None)
            if prepared.mixed:
                self._served.mixed = True
                self._schedule.swapped(None, recompute=False)  # cuts off shared entries: mixed ones are never reused
                return replaced
            self._served.set_base(update)
        else:
            replaced = None
            self._served.check_adapter(spec)
            self._runner.use_adapter(self._served.set_adapter(spec, update.version), prepared.weights)
        self._schedule.swapped(spec.name if spec else None, self._config.swap == "recompute")
        self._swaps += 1
        return replaced

    def unload(self, adapter: str) -> None:
        self._served.require(adapter)
        users = [sequence.id for sequence in (*self._schedule, *self._compiling) if sequence.adapter == adapter]
        if users:
            raise ValueError(
                f"the adapter {adapter} is in use by {len(users)} requests ({users[0]}, ...); end them first"
            )
        self._schedule.sharing.cut(adapter)
        self._forks.forget(adapter)
        self._runner.use_adapter(self._served.drop_adapter(adapter), None)

    # -- the step -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> StepOutput:
        live = self._served.there
        if not live and not self._ended:
            raise RuntimeError("the engine has no weights yet: prepare and swap an update before the first step")
        started = time.perf_counter()
        if self._compiling and not self._paused:
            self._ended += self._compiling.enter(self._schedule)
        output = self._step() if live and not self._paused else StepOutput(self._served.base)
        if self._ended:
            output = msgspec.structs.replace(output, finished=(*self._ended, *output.finished))
            self._ended = []
        if self._config.check:
            self.integrity()
        self._steps += 1
        self._busy += time.perf_counter() - started
        return output

    def stats(self) -> EngineStats:
        schedule, counters, passes = self._schedule, self._step.counters, self._runner.passes
        return EngineStats(
            running=len(schedule.running),
            waiting=len(schedule) - len(schedule.running) + len(self._compiling),
            kv_used=schedule.blocks.held / schedule.blocks.count,
            sampled_tokens=counters.sampled,
            prompt_tokens=counters.prompt,
            steps=self._steps,
            busy_seconds=self._busy,
            version=self._served.base,
            asked_tokens=schedule.asked,
            cached_tokens=schedule.cached,
            recomputed_tokens=counters.recomputed,
            swaps=self._swaps,
            preemptions=schedule.preemptions,
            graphed_passes=passes.graphed,
            eager_passes=passes.eager.total(),
        )

    def integrity(self) -> None:
        """Asserts that rows, blocks and requests add up."""
        self._schedule.integrity()


class NativeEngine(Core):
    """The engine of the model in a directory. It reads the config and the tokenizer, but no weights: those are loaded by updates."""

    def __init__(self, model_dir: Path, config: EngineConfig, asleep: bool = False) -> None:
        """Raises ConfigError for a model that cannot be served as configured."""
        super().__init__(read_model(model_dir, config, asleep), config, asleep)


def _grammars(model: ServableModel) -> Callable[[], Grammars] | None:
    """None for a model without a tokenizer."""
    if model.tokenizer is None:
        return None
    return lambda: Grammars(model.tokenizer, model.vocabulary, model.ends)


def _routing(model: ServableModel, config: EngineConfig, blocks: int) -> RecordedRouting | None:
    if not config.routing:
        return None
    layers, k = model.runner.experts
    if not layers:
        raise ConfigError(
            f"engine.routing = true, but {model.runner.path} has no experts whose choice is seen; set it and rollout.keep_routing to false"
        )
    return RecordedRouting(blocks, layers, k)


def _ended_before(sequence: EngineSequence, ends: frozenset[int]) -> Stop | None:
    """A re-issued request may have sampled its last token before."""
    request, stopper = sequence.request, sequence.stopper
    said_stop = [stopper.push(token) for token in request.prefix] if stopper else []
    if any(said_stop) or (request.prefix and request.prefix[-1] in ends and not request.sampling.ignore_eos):
        return "stop"
    return "length" if request.prefix and len(request.prefix) == request.sampling.max_tokens else None
