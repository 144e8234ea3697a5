"""The routes of vLLM's weight transfer, with headrace's engine for it (`weight_sync/in_vllm/transfer_engine.py`), over an engine of headrace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.weights import WeightUpdate
from headrace.serve.serving import Serving
from headrace.web.bodies import Body
from headrace.web.errors import Refused
from headrace.web.sending import json_response, read_body
from headrace.weight_sync.in_vllm.adapter_files import write_adapter
from headrace.weight_sync.in_vllm.receiving import Receiving


class InitTransfer(Body, kw_only=True):
    init_info: dict[str, str]


class TransferInfo(Body, kw_only=True):
    update: WeightUpdate


class UpdateWeights(Body, kw_only=True):
    update_info: TransferInfo


class FakeTransfer:
    """A session is begun, weights arrive, and it is finished; one that fails is over (`v1/worker/gpu_worker.py`, vLLM 0.32)."""

    def __init__(self, serving: Serving, load: Callable[[WeightUpdate], Awaitable[None]], there: bool) -> None:
        """`load`: takes a whole model. `there`: whether the server was started with the engine."""
        self._serving, self._load, self._there = serving, load, there
        self._active = False
        self._receiving = Receiving("cpu")

    async def init(self, request: HttpRequest) -> Response:
        await read_body(request, InitTransfer, self._serving.limits)
        if not self._there:
            raise RuntimeError("Weight transfer not configured. Please set weight_transfer_config.")
        return json_response({"message": "Weight transfer initialized"})

    async def start(self, request: HttpRequest) -> Response:
        self._check(active=False)
        self._active = True
        return json_response({"message": "Weight update started"})

    async def update(self, request: HttpRequest) -> Response:
        update = (await read_body(request, UpdateWeights, self._serving.limits)).update_info.update
        self._check(active=True)
        self._active = False
        receiver = self._receiving.of(update)
        if update.adapter:
            tensors = await asyncio.to_thread(receiver.receive, update)
            manifest = receiver.manifest(update.adapter.name)
            await asyncio.to_thread(write_adapter, Path(update.where["files"]), update, manifest, tensors)
        elif not self._serving.paused:
            raise Refused(400, "weights are replaced while the server is not paused: tokens of both would be mixed")
        else:
            if "handle" in update.where:  # the engine behind this fake cannot open it
                await asyncio.to_thread(receiver.receive, update)
            await self._load(update)
        self._active = True
        return json_response({"message": "Weights updated"})

    async def finish(self, request: HttpRequest) -> Response:
        self._check(active=True)
        self._active = False
        return json_response({"message": "Weight update finished"})

    def _check(self, active: bool) -> None:
        if self._active != active:
            raise RuntimeError(f"a weight update is {'not ' if active else 'already '}active")
