"""The bodies of requests that SGLang documents (`managers/io_struct.py`, `sampling/sampling_params.py`), with the fields that a client of
ours may send. Any other field is refused."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.web.bodies import Body, Token

Limit = Annotated[int, Meta(ge=0)]


class SglangSamplingParams(Body, kw_only=True):
    """Fields of SGLang's `SamplingParams` that a client of ours may send."""

    max_new_tokens: Limit = 128
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool = False
    json_schema: str | None = None
    regex: str | None = None


class SglangGenerate(Body, kw_only=True):
    input_ids: Annotated[list[Token], Meta(min_length=1)]
    sampling_params: SglangSamplingParams
    rid: Annotated[str, Meta(min_length=1)]
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Meta(ge=-1)] = -1
    return_sampling_mask: bool = False
    stream: bool = False
    lora_path: str | None = None
    priority: int | None = None


class SglangPause(Body, kw_only=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class SglangContinue(Body, kw_only=True):
    torch_empty_cache: bool = True


class SglangUpdateFromDisk(Body, kw_only=True):
    model_path: str
    load_format: Literal["safetensors"] | None = None
    weight_version: str | None = None
    flush_cache: bool = True


class SglangNewVersion(Body, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class SglangLoadLora(Body, kw_only=True):
    lora_name: str
    lora_path: str


class SglangUnloadLora(Body, kw_only=True):
    lora_name: str


class SglangAbort(Body, kw_only=True):
    rid: str = ""
    abort_all: bool = False
