"""The routes of the Tinker API, as its client `tinker` 0.38 calls them, and headrace's own report of what was trained.

Most answers are the id of a request, whose result `retrieve_future` has. It waits for the result for a while, and then answers 408 with
the state of the queue: the client asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from headrace.serve.training import tinker_messages as bodies
from headrace.serve.training.futures import Promise
from headrace.serve.training.saved_weights import KINDS, CheckpointFacts
from headrace.serve.training.tinker_messages import PROTOBUF, NumberedRequest, of_json, of_protobuf, read_message
from headrace.serve.training.tinker_service import TinkerService, report_of
from headrace.web.errors import Refused, refusal_of
from headrace.web.sending import JSON, decoded, first_bytes, json_response, read_body, read_bytes

T = TypeVar("T", bodies.OptimStep, bodies.SaveWeights, bodies.LoadWeights, bodies.SaveForSampler)

FLAGS = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
"""Features of the server that the client asks about. Custom losses run in the client, which then sends their gradients as weights."""
LIVE_FLAGS = {"sample_cancel_enabled": True}


def routes(service: TinkerService) -> list[Route]:
    here = Routes(service)
    posts = {
        "client/config": here.config,
        "client/dynamic_config": here.live_config,
        "telemetry": here.telemetry,
        "create_session": here.create_session,
        "session_heartbeat": here.heartbeat,
        "sessions/{name}/finish": here.finish,
        "create_model": here.create_model,
        "get_info": here.info,
        "forward_backward": here.train,
        "optim_step": here.optim_step,
        "save_weights": here.save_weights,
        "load_weights": here.load_weights,
        "save_weights_for_sampler": here.save_for_sampler,
        "weights_info": here.weights_info,
        "create_sampling_session": here.create_sampler,
        "join_sampling_session": here.join_sampler,
        "asample": here.sample,
        "retrieve_future": here.retrieve,
        "cancel_future": here.cancel,
    }
    gets = {
        "healthz": here.health,
        "get_server_capabilities": here.capabilities,
        "samplers/{name}": here.sampler,
        "training_runs/{name}/checkpoints": here.checkpoints,
    }
    return [
        *(Route(f"/api/v1/{path}", route, methods=["POST"]) for path, route in posts.items()),
        *(Route(f"/api/v1/{path}", route) for path, route in gets.items()),
        Route("/api/v1/{path:path}", unserved, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        Route("/headrace/training", here.report),
    ]


async def unserved(request: HttpRequest) -> Response:
    raise Refused(
        404,
        f"{request.method} /api/v1/{request.path_params['path']} is not served; docs/tinker.md lists what is",
        "unsupported",
    )


SENT_AGAIN = (408, 429, 503)
"""The statuses after which a client sends a request again, with its number."""


def _json(kind: type[T], begin: Callable[[T], Promise]) -> Callable[[bytes], tuple[Promise, str | None]]:
    def begun(body: bytes) -> tuple[Promise, str | None]:
        asked = decoded(body, kind)
        return begin(asked), asked.model_id

    return begun


def _promised(promise: Promise, model: str | None = None, **more: Any) -> Response:
    return json_response({"request_id": promise.id, "model_id": model, **more})


class Routes:
    def __init__(self, service: TinkerService) -> None:
        self.service, self._limits = service, service.serving.limits

    # -- sessions -----------------------------------------------------------------------------------------------------------

    async def config(self, request: HttpRequest) -> Response:
        await read_body(request, bodies.ClientConfig, self._limits)
        return json_response(FLAGS)

    async def live_config(self, request: HttpRequest) -> Response:
        await read_body(request, bodies.ClientConfig, self._limits)
        return json_response(LIVE_FLAGS)

    async def telemetry(self, request: HttpRequest) -> Response:
        await read_body(request, bodies.Anything, self._limits)
        return json_response({"status": "accepted"})

    async def health(self, request: HttpRequest) -> Response:
        await self.service.serving.engine.stats()
        return json_response({"status": "ok"})

    async def capabilities(self, request: HttpRequest) -> Response:
        serving = self.service.serving
        model = {
            "model_name": serving.name,
            "max_context_length": serving.engine.capabilities.context_length,
            "trainable": True,
            "sampleable": True,
        }
        return json_response({"supported_models": [model]})

    async def create_session(self, request: HttpRequest) -> Response:
        return json_response(self.service.create_session(await read_body(request, bodies.CreateSession, self._limits)))

    async def heartbeat(self, request: HttpRequest) -> Response:
        self.service.sessions.heard((await read_body(request, bodies.Heartbeat, self._limits)).session_id)
        return json_response({"type": "session_heartbeat"})

    async def finish(self, request: HttpRequest) -> Response:
        body = await read_body(request, bodies.Finish, self._limits)
        await self.service.finish(request.path_params["name"], str(body.reason.get("type", "no reason")))
        return json_response({})

    # -- models -------------------------------------------------------------------------------------------------------------

    async def create_model(self, request: HttpRequest) -> Response:
        return _promised(self.service.create_model(await read_body(request, bodies.CreateModel, self._limits)))

    async def info(self, request: HttpRequest) -> Response:
        return json_response(self.service.info((await read_body(request, bodies.ModelId, self._limits)).model_id))

    async def train(self, request: HttpRequest) -> Response:
        return await self._numbered(request, PROTOBUF, self._train)

    def _train(self, body: bytes) -> tuple[Promise, str]:
        message = read_message("ForwardBackwardRequest", body)
        try:
            return self.service.train(message), message.model_id
        except Refused as refused:
            asked = NumberedRequest(message.model_id, message.seq_id, trains=not message.forward_only)
            self.service.refuse(asked, refused.message)
            raise

    async def optim_step(self, request: HttpRequest) -> Response:
        return await self._numbered(request, JSON, _json(bodies.OptimStep, self.service.optim_step))

    async def save_weights(self, request: HttpRequest) -> Response:
        return await self._numbered(request, JSON, _json(bodies.SaveWeights, self.service.save_weights))

    async def load_weights(self, request: HttpRequest) -> Response:
        return await self._numbered(request, JSON, _json(bodies.LoadWeights, self.service.load_weights))

    async def save_for_sampler(self, request: HttpRequest) -> Response:
        return await self._numbered(request, JSON, _json(bodies.SaveForSampler, self.service.save_for_sampler))

    async def _numbered(
        self, request: HttpRequest, media: str, begin: Callable[[bytes], tuple[Promise, str | None]]
    ) -> Response:
        """Begins a request that its client has numbered. However it is refused, it takes its number: those behind it would wait for it until
        the model is given up. Not where the client sends it again."""
        body = b""
        try:
            body = await read_bytes(request, media, self._limits)
            promise, model = begin(body)
        except Exception as error:
            refusal = refusal_of(error)
            if isinstance(error, ClientDisconnect) or refusal.status in SENT_AGAIN:
                raise
            head = body or await first_bytes(request, self._limits)
            if asked := of_protobuf(head) or of_json(head):
                self.service.refuse(asked, refusal.message)
            raise
        return _promised(promise, model)

    async def weights_info(self, request: HttpRequest) -> Response:
        facts = self.service.store.facts((await read_body(request, bodies.WeightsInfo, self._limits)).tinker_path)
        return json_response(
            {
                "base_model": facts.base_model,
                "is_lora": True,
                "lora_rank": facts.lora.rank,
                "train_unembed": False,
                "train_mlp": facts.lora.train_mlp,
                "train_attn": facts.lora.train_attn,
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def checkpoints(self, request: HttpRequest) -> Response:
        store = self.service.store
        found = [_checkpoint(facts, store.expires_at(facts)) for facts in store.of_model(request.path_params["name"])]
        return json_response({"checkpoints": found, "cursor": None})

    # -- samplers -----------------------------------------------------------------------------------------------------------

    async def create_sampler(self, request: HttpRequest) -> Response:
        sampler = self.service.create_sampler(await read_body(request, bodies.CreateSampler, self._limits))
        return json_response({"sampling_session_id": sampler.id, "type": "create_sampling_session"})

    async def join_sampler(self, request: HttpRequest) -> Response:
        sampler = self.service.sampler((await read_body(request, bodies.JoinSampler, self._limits)).sampling_session_id)
        sampler.clones += 1
        return json_response({"client_counter": sampler.clones, "type": "join_sampling_session"})

    async def sampler(self, request: HttpRequest) -> Response:
        sampler = self.service.sampler(request.path_params["name"])
        name = self.service.serving.name
        return json_response({"sampler_id": sampler.id, "base_model": name, "model_path": sampler.path})

    async def sample(self, request: HttpRequest) -> Response:
        body = await read_body(request, bodies.SampleBody, self._limits)
        promise, mark = self.service.sample(body)
        ids = [f"{promise.id}/{index}@{mark}" for index in range(body.num_samples)]
        return _promised(promise, sample_sequence_ids=ids)

    # -- results ------------------------------------------------------------------------------------------------------------

    async def retrieve(self, request: HttpRequest) -> Response:
        name = (await read_body(request, bodies.Retrieve, self._limits)).request_id
        if answer := await self.service.futures.wait(name):
            return Response(answer.body, media_type=answer.media)
        promise = self.service.futures.find(name)
        reason = promise.waiting_for if promise else ""
        state = {"queue_state": "paused_capacity" if reason else "active", "queue_state_reason": reason or None}
        return json_response({"type": "try_again", "request_id": name, **state}, 408)

    async def cancel(self, request: HttpRequest) -> Response:
        self.service.futures.cancel((await read_body(request, bodies.CancelFuture, self._limits)).request_id)
        return json_response({})

    async def report(self, request: HttpRequest) -> Response:
        """Reports what was trained and sampled, by session, model and sampler."""
        return json_response(
            {
                "pending": self.service.futures.pending,
                "sessions": {
                    session.id: {
                        "name": session.wishes.display_name,
                        "models": {model.id: report_of(model) for model in session.models.values()},
                        "samplers": {sampler.id: sampler.report() for sampler in session.samplers.values()},
                    }
                    for session in self.service.sessions
                },
            }
        )


def _checkpoint(facts: CheckpointFacts, expires_at: float | None) -> dict[str, Any]:
    return {
        "checkpoint_id": "/".join(facts.path.split("/")[-2:]),
        "checkpoint_type": KINDS[facts.kind],
        "time": _time(facts.saved_at),
        "tinker_path": facts.path,
        "size_bytes": facts.nbytes,
        "public": False,
        "user_metadata": facts.user_metadata,
        "expires_at": None if expires_at is None else _time(expires_at),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
