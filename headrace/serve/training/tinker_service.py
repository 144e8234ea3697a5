"""The Tinker API's things behind its routes: sessions, models, samplers, saved weights.

A method that begins work returns its promise at once; what the client sent wrong is refused before (`Refused`). The routes then call
`refuse`, if the client had numbered it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.protocols import Launcher
from headrace.core.weights import WeightUpdate
from headrace.run.clients.process_trainer import ProcessSharedTrainer
from headrace.run.worker.worker_messages import SharedStart
from headrace.serve.config import TrainingConfig, TrainLimits
from headrace.serve.serving import Serving
from headrace.serve.training import samplers
from headrace.serve.training.futures import FutureAnswer, Futures, Promise
from headrace.serve.training.samplers import Sampler, SavedAdapter, Shelf, number_used
from headrace.serve.training.saved_weights import CheckpointFacts, Kind, Store, path_of
from headrace.serve.training.sessions import REMEDY, ClientSession, Model, Sessions, Work
from headrace.serve.training.tinker_messages import (
    LARGEST_NUMBER,
    CreateModel,
    CreateSampler,
    CreateSession,
    LoadWeights,
    LoraBody,
    NumberedRequest,
    Optimizer,
    OptimStep,
    SampleBody,
    SaveForSampler,
    SaveWeights,
    pass_of,
    pass_output,
)
from headrace.trainer.shared.calls import AdamStep, Checkpoint, Publish, SharedLora, TrainingPass
from headrace.web.errors import Refused

# --- The operations on a client's model, and the answers that the API has for them.


@dataclass(frozen=True)
class Operations:
    serving: Serving
    trainer: ProcessSharedTrainer
    store: Store

    async def create(self, model: Model) -> FutureAnswer:
        lora = model.lora
        seed = secrets.randbits(31) if lora.seed is None else lora.seed
        wanted = SharedLora(rank=lora.rank, seed=seed, attention=lora.train_attn, mlp=lora.train_mlp)
        await self.trainer.add(model.id, wanted)
        return FutureAnswer.json({"model_id": model.id, "type": "create_model"})

    async def create_from(self, model: Model, facts: CheckpointFacts, optimizer: bool) -> FutureAnswer:
        if facts.base_model != self.serving.name:
            raise Refused(400, f"{facts.path} belongs to {facts.base_model}, and this server has {self.serving.name}")
        await self.create(model)
        return await self.load(model, facts, optimizer)

    async def load(self, model: Model, facts: CheckpointFacts, optimizer: bool) -> FutureAnswer:
        where = str(self.store.place(facts.path))
        model.version = await self.trainer.restore(Checkpoint(model=model.id, directory=where, optimizer=optimizer))
        return FutureAnswer.json({"path": facts.path, "model_id": model.id, "type": "load_weights"})

    async def spoil(self, model: Model, why: str) -> FutureAnswer:
        await self.trainer.spoil(model.id, why)
        return FutureAnswer.failure(why, "user")

    async def refuse(self, model: Model, why: str) -> FutureAnswer:
        return FutureAnswer.failure(why, "user")

    async def run(self, model: Model, call: TrainingPass) -> FutureAnswer:
        report = await self.trainer.run(call)
        if call.backward:
            model.account.trained_tokens += report.tokens
        else:
            model.account.forward_tokens += report.tokens
        widths = [example.width for example in call.examples]
        return FutureAnswer.protobuf(pass_output(report.logprobs, widths, {"loss:sum": report.loss}))

    async def step(self, model: Model, call: AdamStep) -> FutureAnswer:
        done = await self.trainer.optim_step(call)
        model.version = done.version
        model.account.steps += 1
        return FutureAnswer.json({"metrics": {"grad_norm": done.grad_norm, "version": done.version}})

    async def save(self, model: Model, body: SaveWeights) -> FutureAnswer:
        path = path_of(model.id, "weights", body.path)
        coming = await asyncio.to_thread(self.store.coming, path, body.overwrite)
        await self.trainer.save(Checkpoint(model=model.id, directory=str(coming)))
        facts = self._facts(model, path, "weights", body)
        await asyncio.to_thread(self.store.put, coming, facts, body.ttl_seconds)
        model.account.saves += 1
        return FutureAnswer.json({"path": path, "type": "save_weights"})

    async def save_for_sampler(
        self, session: ClientSession, model: Model, body: SaveForSampler, inflight: SavedAdapter | None
    ) -> FutureAnswer:
        """Saves weights to be sampled from by whoever knows their name, or, without a name, makes a sampler for this session."""
        changes = body.path is None and body.kind == "inflight"
        id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        if body.path is None and (there := session.samplers.get(id)):
            raise Refused(400, number_used(there), "number_used")
        name = body.path or f"{body.kind}-{body.sampling_session_seq_id}"
        path = path_of(model.id, "sampler_weights", name)
        # Weights that are saved anew under a name are another adapter of the engine's: the samples of older ones go on with theirs.
        served_as = f"{model.id}/inflight" if changes else f"{path}@{secrets.token_hex(6)}"
        update = await self._publish(model, path, served_as, body)
        if body.path is not None:
            return FutureAnswer.json({"path": path, "type": "save_weights_for_sampler"})
        session.snapshots.append(path)
        weights = inflight if changes and inflight else SavedAdapter(update)
        weights.update = update
        sampler = Sampler(
            id=id,
            session=session.id,
            path=None if changes else path,
            weights=weights,
        )
        session.samplers[sampler.id] = sampler
        return FutureAnswer.json({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})

    async def _publish(self, model: Model, path: str, served_as: str, body: SaveForSampler) -> WeightUpdate:
        coming = await asyncio.to_thread(self.store.coming, path, False)
        base = self.serving.loaded[""].label.fingerprint
        update = await self.trainer.publish(
            Publish(model=model.id, directory=str(coming), served_as=served_as, dtype=self.serving.dtype, base=base)
        )
        facts = self._facts(model, path, "sampler_weights", body)
        place = await asyncio.to_thread(self.store.put, coming, facts, body.ttl_seconds)
        model.account.saves += 1
        return msgspec.structs.replace(update, where={"path": str(place)})

    def _facts(self, model: Model, path: str, kind: Kind, body: SaveWeights | SaveForSampler) -> CheckpointFacts:
        return CheckpointFacts(
            path=path,
            kind=kind,
            base_model=self.serving.name,
            lora=model.lora,
            version=model.version,
            saved_at=time.time(),
            user_metadata=body.user_metadata,
        )


def report_of(model: Model) -> dict[str, Any]:
    """The state of a model, and its cost so far."""
    return {
        "version": model.version,
        "lora_rank": model.lora.rank,
        "lost": model.lost or None,
        **{name: getattr(model.account, name) for name in model.account.__dataclass_fields__},
    }


# --- The service


UNEMBED = "this server adapts attention and MLP layers, not the output layer: train_unembed, which is on by default, has no effect here"


class TinkerService:
    def __init__(self, serving: Serving, store: Store, limits: TrainLimits, *, directory: Path, places: int) -> None:
        """`directory`: the model's. `places`: adapters that the engine can hold. `trainer` is set before anything is asked."""
        self.serving, self.store, self.limits, self.directory = serving, store, limits, directory
        self.trainer: ProcessSharedTrainer
        self.futures = Futures(limits)
        self.sessions = Sessions(limits.session_seconds, self._free)
        self._shelf = Shelf(serving, places)

    @property
    def _operations(self) -> Operations:
        return Operations(self.serving, self.trainer, self.store)

    def lose_all(self, how: str) -> None:
        """All models are lost with the trainer's process."""
        for model in self.models():
            model.lose(f"the trainer {how}. {REMEDY}")

    def models(self) -> list[Model]:
        return [model for session in self.sessions for model in session.models.values()]

    async def close(self) -> None:
        await self.sessions.close()

    async def _free(self, session: ClientSession) -> None:
        self.futures.end(session.id)
        for model in list(session.models.values()):  # one that is being made takes itself out
            await model.end()
            if not model.lost:
                model.lose(f"the session {session.id} is over")
                await self._remove(model)
        for sampler in session.samplers.values():
            if sampler.weights and (sampler.path is None or sampler.path in session.snapshots):
                with contextlib.suppress(HeadraceError, Refused):  # an engine that is lost has no adapters
                    await self._shelf.forget(sampler.weights)
        for path in session.snapshots:
            await asyncio.to_thread(self.store.remove, path)
        session.models.clear()
        session.samplers.clear()

    # -- sessions -----------------------------------------------------------------------------------------------------------

    def create_session(self, body: CreateSession) -> dict[str, Any]:
        session = self.sessions.begin(body)
        return {"session_id": session.id, "type": "create_session", "warning_message": UNEMBED}

    async def finish(self, name: str, why: str) -> None:
        await self.sessions.finish(name, f"its client has finished it ({why})")

    # -- models -------------------------------------------------------------------------------------------------------------

    def model(self, name: str) -> Model:
        """Raises Refused for a model that is not there."""
        model = self.sessions.of(name).models.get(name)
        if model is None:
            raise Refused(404, f"there is no model {name} here", "not_found")
        return model

    def create_model(self, body: CreateModel) -> Promise:
        self._check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        if body.lora_config is None:
            raise Refused(400, "lora_config is missing, and only LoRA is trained here; use create_lora_training_client")
        _check_lora(body.lora_config, self.limits.rank)
        session = self.sessions.get(body.session_id)
        model = self._new_model(session, body.model_seq_id, body.lora_config)
        return self._create(session, model, body, lambda: self._operations.create(model))

    def load_weights(self, body: LoadWeights) -> Promise:
        """Into a model that is there, or as the first thing of a new one."""
        if body.weights_access_token:
            raise Refused(
                400, "weights_access_token is not served: whoever may call this server may load all weights in it"
            )
        facts = self.store.facts(body.path)
        if facts.kind != "weights":
            raise Refused(400, f"{body.path} holds weights for sampling; load one that save_state returned")
        if body.model_id is not None and body.seq_id is not None:
            model = self.model(body.model_id)
            return self._in_order(model, body.seq_id, body, lambda: self._operations.load(model, facts, body.optimizer))
        if body.session_id is None or body.model_seq_id is None:
            raise Refused(400, "load_weights needs model_id and seq_id, or session_id and model_seq_id")
        self._check_base(body.base_model or self.serving.name)
        _check_optimizer(body.optimizer_config or Optimizer())
        session = self.sessions.get(body.session_id)
        new = self._new_model(session, body.model_seq_id, facts.lora)
        return self._create(session, new, body, lambda: self._operations.create_from(new, facts, body.optimizer))

    def _new_model(self, session: ClientSession, number: int, lora: LoraBody) -> Model:
        return Model(
            id=f"{session.id}:train:{number}",
            session=session.id,
            lora=lora,
            futures=self.futures,
            gap_seconds=self.limits.gap_seconds,
        )

    def _create(self, session: ClientSession, model: Model, asked: Any, work: Work) -> Promise:
        name = f"{model.id}/create"
        return self._promise(
            name, session.id, asked, lambda promise: self.futures.start(promise, self._begin(session, model, work))
        )

    async def _begin(self, session: ClientSession, model: Model, work: Work) -> FutureAnswer:
        if len(self.models()) >= self.limits.models:
            raise Refused(
                400,
                f"{self.limits.models} models are trained here already, and no more fit; finish one of their sessions",
            )
        if model.id in session.models:  # the answer to its own request may have been dropped
            raise Refused(400, f"there is a model {model.id} already; give another model_seq_id to a new one")
        session.models[model.id] = model
        try:
            answer = await work()
        except BaseException:
            session.models.pop(model.id, None)
            await self._remove(model)
            raise
        model.begin()
        return answer

    async def _remove(self, model: Model) -> None:
        """Frees the adapter in the trainer, if there is one."""
        with contextlib.suppress(HeadraceError):
            await self.trainer.remove(model.id)

    def refuse(self, asked: NumberedRequest, why: str) -> None:
        """A request that is refused takes its number all the same, and the gradient that it would have been a part of is dropped. Raises Refused
        (429) where that cannot be noted now: its client sends it again."""
        try:
            model = self.model(asked.model)
        except Refused:  # there is nobody whom it could hold up
            return
        if self.futures.find(f"{model.id}/{asked.number}"):  # it was taken before, by this request or by another one
            return
        if (
            asked.number >= LARGEST_NUMBER
        ):  # those before it never come, and the model would be lost to the wait for them
            return
        work = self._operations.spoil if asked.trains else self._operations.refuse
        self._in_order(model, asked.number, None, lambda: work(model, why))

    def train(self, message: Any) -> Promise:
        """A forward pass, or a forward and backward pass."""
        model, call = self.model(message.model_id), pass_of(message)
        return self._in_order(model, message.seq_id, message, lambda: self._operations.run(model, call))

    def optim_step(self, body: OptimStep) -> Promise:
        model = self.model(body.model_id)
        if body.adam_params is None:
            raise Refused(400, "only adam_params are served as parameters of the optimizer")
        adam = body.adam_params
        call = AdamStep(
            model=model.id,
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=max(adam.grad_clip_norm, 0.0),
        )
        return self._in_order(model, body.seq_id, body, lambda: self._operations.step(model, call))

    def save_weights(self, body: SaveWeights) -> Promise:
        model = self.model(body.model_id)
        return self._in_order(model, body.seq_id, body, lambda: self._operations.save(model, body))

    def save_for_sampler(self, body: SaveForSampler) -> Promise:
        model = self.model(body.model_id)
        session = self.sessions.get(model.session)
        if body.path is None and body.sampling_session_seq_id is None:
            raise Refused(400, "save_weights_for_sampler needs a path or a sampling_session_seq_id")
        # The API's client gives a request that it sends again another number for its sampler; the first one's is the answer to both.
        return self._in_order(
            model,
            body.seq_id,
            msgspec.structs.replace(body, sampling_session_seq_id=None),
            lambda: self._operations.save_for_sampler(session, model, body, self._inflight(session, model)),
        )

    def _inflight(self, session: ClientSession, model: Model) -> SavedAdapter | None:
        """The weights that all samplers of the kind `inflight` of this model share."""
        prefix = f"{model.id}/"
        for sampler in session.samplers.values():
            if sampler.weights and sampler.path is None and sampler.weights.name.startswith(prefix):
                return sampler.weights
        return None

    def info(self, name: str) -> dict[str, Any]:
        model = self.model(name)
        data = {"arch": None, "model_name": self.serving.name, "tokenizer_id": str(self.directory)}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "model_name": self.serving.name,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "optimizer_config": {"type": "adamw"},
        }

    # -- samplers -----------------------------------------------------------------------------------------------------------

    def sampler(self, name: str) -> Sampler:
        sampler = self.sessions.of(name).samplers.get(name)
        if sampler is None:
            raise Refused(404, f"there is no sampler {name} here", "not_found")
        return sampler

    def create_sampler(self, body: CreateSampler) -> Sampler:
        session = self.sessions.get(body.session_id)
        name = f"{session.id}:sample:{body.sampling_session_seq_id}"
        there = session.samplers.get(name)
        if there is None:
            weights = self._weights(body.model_path, body.base_model)
            there = session.samplers[name] = Sampler(id=name, session=session.id, path=body.model_path, weights=weights)
        elif (there.path, there.weights is None) != (body.model_path or None, not body.model_path):
            raise Refused(400, number_used(there), "number_used")
        return there

    def _weights(self, path: str | None, base: str | None) -> SavedAdapter | None:
        if base is not None:
            self._check_base(base)
        return SavedAdapter(self.store.update(path)) if path else None

    def sample(self, body: SampleBody) -> tuple[Promise, str]:
        """Returns the promise, and the mark of the weights. Raises Refused (429) where too many samples are under way."""
        if body.sampling_session_id is not None:
            sampler = self.sampler(body.sampling_session_id)
            number = uuid.uuid4() if body.seq_id is None else body.seq_id
            name, owner = f"{sampler.id}/{number}", sampler.session
        else:
            name, owner = f"direct:{uuid.uuid4()}", ""
            weights = self._weights(body.model_path, body.base_model)
            sampler = Sampler(id=name, session="", path=body.model_path, weights=weights)
        requests = samplers.requests_of(self.serving, sampler, body, name)
        if self.serving.under_way + len(requests) > self.serving.limits.requests:
            raise Refused(429, f"{self.serving.under_way} samples are under way; try again", "busy")

        def begin(promise: Promise) -> None:
            work = samplers.sample(
                self.serving, self._shelf, sampler=sampler, requests=requests, body=body, promise=promise
            )
            self.futures.start(promise, work)

        return self._promise(name, owner, body, begin), sampler.mark

    # -- promises -----------------------------------------------------------------------------------------------------------

    def _promise(self, name: str, owner: str, asked: Any, begin: Callable[[Promise], None]) -> Promise:
        """A request that was sent before is not begun again. `asked`: its message; None where it could not be read."""
        content = _digest_of(asked)
        if there := self.futures.sent_before(name, content):
            return there
        promise = self.futures.open(name, owner, content)
        begin(promise)
        return promise

    def _in_order(self, model: Model, number: int, asked: Any, work: Work) -> Promise:
        name = f"{model.id}/{number}"
        return self._promise(name, model.session, asked, lambda promise: model.submit(number, promise, work))

    def _check_base(self, name: str) -> None:
        if name not in (self.serving.name, str(self.directory)):
            raise Refused(404, f"there is no model {name} here; there is: {self.serving.name}", "model_not_found")


def _digest_of(asked: Any) -> bytes:
    """Tells requests apart that have one number: a JSON body, or a message of protobuf."""
    if asked is None:
        return b""
    json = isinstance(asked, msgspec.Struct)
    whole = msgspec.json.encode(asked) if json else asked.SerializeToString(deterministic=True)
    return blake2b(whole, digest_size=16).digest()


def _check_optimizer(optimizer: Optimizer) -> None:
    if optimizer.type != "adamw":
        raise Refused(
            400, f"the optimizer {optimizer.type} is not served; leave it out: AdamW", "unsupported_parameter"
        )


def _check_lora(lora: LoraBody, most: int) -> None:
    if lora.rank > most:
        raise Refused(400, f"a rank of {lora.rank} is above {most}, the largest that is served")
    if not (lora.train_attn or lora.train_mlp):
        raise Refused(400, "train_unembed alone is not served; set train_attn or train_mlp", "unsupported_parameter")


# --- The start and the end of the trainer beside a server's engine.


@contextlib.asynccontextmanager
async def opened_service(
    config: TrainingConfig,
    serving: Serving,
    *,
    launcher: Launcher,
    directory: Path,
    places: int,
    max_deaths: int,
) -> AsyncIterator[TinkerService]:
    """`directory`: the model's. `places`: adapters that the engine can hold. Raises ConfigError for a model that cannot be trained."""
    service = TinkerService(serving, Store(config.directory), config.limits, directory=directory, places=places)
    service.trainer = ProcessSharedTrainer(launcher, max_deaths, service.lose_all)
    try:
        serving.trained = True
        mark = serving.loaded[""].label.fingerprint
        await service.trainer.launch()
        await service.trainer.open(SharedStart(str(directory), dataclasses.asdict(config.train), mark))
        yield service
    finally:
        await service.close()
        await service.trainer.close()
