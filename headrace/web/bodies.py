"""Bodies of requests as msgspec structs. A wrong type and a value out of range are refused by name.

A `Body` refuses an unknown field too. An `OpenBody`, of a route that many kinds of clients use, leaves it to `request_fields.py`. A known
field without influence on the sampled tokens (`user`, `detokenize`, ...) is accepted and ignored; an unsupported one that would influence
them is refused unless it has its neutral value (`request_fields.py`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.core.chat.messages import Message, Tool
from headrace.core.types import Constraint

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Few = Annotated[int, Meta(ge=1, le=1024)]
TopK = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
MOST_STOPS = 256
Stops = str | Annotated[list[str], Meta(max_length=MOST_STOPS)] | None
StopTokens = Annotated[list[Token], Meta(max_length=4096)] | None
"""Each is looked for at every token."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class OpenBody(msgspec.Struct, kw_only=True):
    """A body that may have fields that nobody knows here."""


class Drawing(OpenBody, kw_only=True):
    """The sampling fields, which all three routes share."""

    n: Few = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    """0 and -1 keep the whole vocabulary."""
    min_p: float | None = None
    seed: Seed | None = None
    stop: Stops = None
    stop_token_ids: StopTokens = None
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    """Numbers by token, as text. They change the distribution, so that completions with them cannot be trained on."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's form of a constraint, with json, regex, choice or grammar."""
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    """False: texts show special tokens, but for the one that ends them."""
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class SamplingParams(Drawing, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Count | None = None
    logprobs: Count | None = None
    """Number of most probable tokens returned for each position, in addition to the sampled one."""
    prompt_logprobs: Count | None = None
    detokenize: bool | None = None
    output_kind: Any = None
    routed_experts_prompt_start: Count | None = None
    """Accepted and ignored: where experts are returned, those of all positions are."""


class StreamOptions(OpenBody, kw_only=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False


class Generate(Body, kw_only=True):
    """`/inference/v1/generate`: tokens in, tokens out. Below the line are headrace's own fields. An unknown field is refused: trainers ask
    here, and one that is left out would train on something else without a word."""

    token_ids: list[Token]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Accepted and ignored: KV of older weights is never reused, with or without a salt."""
    priority: Priority = 0
    # -----------------------------------------------------------------------------------------------------------------------
    prefix_token_ids: list[Token] = []
    """Sampled before for this very request: they are forwarded, count towards max_tokens, and are not in the answer."""
    constraint: Constraint | None = None
    """The form that a run's own engines get; `structured_outputs` is vLLM's form."""
    return_sampling_mask: bool | None = None
    """Left out: where a constraint, top_p, top_k or min_p cut something off."""
    return_routed_experts: bool | None = None
    """Left out: where the server keeps them."""


class Completions(Drawing, kw_only=True):
    """`/v1/completions`"""

    model: str | None = None
    prompt: str | list[str | Token | list[Token]] = ""
    """One text, several, one list of tokens, or several."""
    max_tokens: Count | None = None
    logprobs: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    """Whether the answer begins with the prompt, and its log-probs with those of the prompt."""
    best_of: int | None = None
    suffix: str | None = None
    user: str | None = None
    priority: Priority = 0
    request_id: str | None = None


class Chat(Drawing, kw_only=True):
    """`/v1/chat/completions`"""

    model: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Any = None
    """`auto`; `none`: the model is shown no tools; `required`, or a function by its name: the answer is a call."""
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    """Given to a chat template that knows it; `none` turns thinking off in one that has enable_thinking."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, as vLLM and SGLang have them."""
    continue_final_message: bool = False
    """Whether the answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """Left out: unless the answer continues the last message."""
    modalities: list[str] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    priority: Priority = 0
    request_id: str | None = None


class LoadAdapter(Body, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapter(Body, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None


class Abort(Body, kw_only=True):
    request_ids: list[str] | None = None
    """Left out: all."""
