"""JSON bodies of the Tinker API as msgspec structs. An unknown field, a wrong type and a value out of range are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.web.bodies import MOST_STOPS, Body, Count, Few, Seed, Token, TopK

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""The name of a checkpoint, which becomes that of a directory."""
Sequence = Annotated[int, Meta(ge=0, lt=1 << 62)]
Rate = Annotated[float, Meta(ge=0, le=1e6)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Metadata = dict[str, Any] | None
Lifetime = Annotated[int, Meta(ge=3600, le=10 * 366 * 86400)]


class ClientConfig(Body, kw_only=True):
    sdk_version: str


class CreateSession(Body, kw_only=True):
    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class Heartbeat(Body, kw_only=True):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Finish(Body, kw_only=True):
    reason: dict[str, Any] = {}
    detail: str | None = None


class LoraBody(Body, kw_only=True):
    rank: Annotated[int, Meta(ge=1)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: str = "adamw"
    version: int | None = None


class CreateModel(Body, kw_only=True):
    session_id: str
    model_seq_id: Sequence
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraBody | None = None
    optimizer_config: Optimizer = Optimizer()
    type: Literal["create_model"] = "create_model"


class ModelId(Body, kw_only=True):
    model_id: str
    type: Literal["get_info"] = "get_info"


class Adam(Body, kw_only=True):
    """The API's defaults are those of `AdamStep`."""

    learning_rate: Rate = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Rate = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body, kw_only=True):
    model_id: str
    seq_id: Sequence
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Body, kw_only=True):
    model_id: str
    seq_id: Sequence
    path: Name
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: Metadata = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(Body, kw_only=True):
    model_id: str
    seq_id: Sequence
    path: Name | None = None
    sampling_session_seq_id: Sequence | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Lifetime | None = None
    user_metadata: Metadata = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeights(Body, kw_only=True):
    """Either into a model (`model_id`, `seq_id`), or as the first request of a new one (`session_id`, `model_seq_id`)."""

    model_id: str | None = None
    seq_id: Sequence | None = None
    session_id: str | None = None
    model_seq_id: Sequence | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSampler(Body, kw_only=True):
    session_id: str
    sampling_session_seq_id: Sequence
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSampler(Body, kw_only=True):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class PromptChunk(Body, kw_only=True):
    type: str = "encoded_text"
    tokens: list[Token] = []
    data: Any = None
    format: Any = None
    location: Any = None
    dmel: Any = None
    expected_tokens: Any = None


class SamplePrompt(Body, kw_only=True):
    chunks: list[PromptChunk]


class Params(Body, kw_only=True):
    max_tokens: Count | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str | Token], Meta(max_length=MOST_STOPS)] | None = None
    """Left out: the model's own end token stops. An empty list: nothing does."""
    temperature: float = 1.0
    top_k: TopK = -1
    top_p: float = 1.0


class SampleBody(Body, kw_only=True):
    prompt: SamplePrompt
    sampling_params: Params
    num_samples: Few = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Sequence | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class Retrieve(Body, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False
    """Accepted and without effect: every result is sent whole."""


class CancelFuture(Body, kw_only=True):
    request_id: str


class WeightsInfo(Body, kw_only=True):
    tinker_path: str


class Anything(msgspec.Struct):
    """Telemetry of the client, which is neither read nor kept."""
