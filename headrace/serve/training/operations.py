"""The operations on a client's model, and the answers that the API has for them."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.core.weights import WeightUpdate
from headrace.run.clients.process_shared import ProcessSharedTrainer
from headrace.serve.serving import Serving
from headrace.serve.training.futures import FutureAnswer
from headrace.serve.training.messages.json_bodies import SaveForSampler, SaveWeights
from headrace.serve.training.messages.protobuf import pass_output
from headrace.serve.training.models import Model
from headrace.serve.training.samplers import Sampler, number_used
from headrace.serve.training.sessions import ClientSession
from headrace.serve.training.shelf import SavedAdapter
from headrace.serve.training.store import CheckpointFacts, Kind, Store, path_of
from headrace.trainer.shared.calls import AdamStep, Checkpoint, Publish, SharedLora, TrainingPass
from headrace.web.errors import Refused


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
        await asyncio.to_thread(self.store.put, coming, facts)
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
        update = await self._publish(model, path, f"{model.id}/inflight" if changes else path, body)
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
        place = await asyncio.to_thread(self.store.put, coming, facts)
        model.account.saves += 1
        return msgspec.structs.replace(update, where={"path": str(place)})

    def _facts(self, model: Model, path: str, kind: Kind, body: SaveWeights | SaveForSampler) -> CheckpointFacts:
        now = time.time()
        return CheckpointFacts(
            path=path,
            kind=kind,
            base_model=self.serving.name,
            lora=model.lora,
            version=model.version,
            saved_at=now,
            expires_at=now + body.ttl_seconds if body.ttl_seconds else None,
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
