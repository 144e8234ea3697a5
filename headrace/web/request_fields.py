"""Fields of requests that are refused, because no server here serves them, or told, because their route has none of that name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.chat.messages import Tool
from headrace.web.bodies import Chat, Completions, Drawing, OpenBody
from headrace.web.errors import Refused
from headrace.web.formats.anthropic_messages import Messages
from headrace.web.formats.responses import Responses

# --- Fields of requests that no server here serves
# Those that would influence sampling are refused by name.


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "include_stop_str_in_output": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
}
"""Fields that are not served, and the values with which they ask for nothing."""

REMEDIES = {
    "functions": "give them as tools",
    "function_call": "give tools and tool_choice",
}


def refuse_unserved(body: Drawing) -> None:
    for name, values in NEUTRAL.items():
        value = getattr(body, name, None)
        if value not in values:
            remedy = f"; {REMEDIES[name]}" if name in REMEDIES else "; leave it out"
            raise Refused(400, f"{name} is not served{remedy}", "unsupported_parameter")


def stops(body: Drawing) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def offered_tools(body: Chat) -> list[Tool]:
    """Returns the tools that the model is shown."""
    return [] if body.tool_choice == "none" else body.tools or []


def continues_last(body: Chat) -> bool:
    """Whether the answer continues the last message. Raises Refused for fields that do not fit together."""
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            message = "add_generation_prompt = false is served with continue_final_message = true only; leave it out"
            raise Refused(400, message, "unsupported_parameter")
        return False
    if body.add_generation_prompt:
        raise Refused(400, "continue_final_message and add_generation_prompt exclude each other; leave one out")
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise Refused(400, "continue_final_message needs a last message of the assistant with text; leave it out")
    return True


# --- Fields of requests that are none of their route's
# Clients of other servers send many: one that would change the answer is refused, and so is one that is written almost like a field of the
# route. Any other is ignored, and the answer says so (`X-Headrace-Ignored`). So it does of a field that is known and has no effect.


HEADER = "X-Headrace-Ignored"
"""The header of an answer that names the fields that were ignored."""

MOST_UNKNOWN = 32
"""Unknown fields of one request, and fields that a server remarks on: clients choose their names."""
LONGEST_NAME = 64
ALIKE = 0.88
"""The likeness of names from which on one is taken for the other, misspelt (`difflib`, without case and underscores)."""

_EMPTY: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {})
_ONE = (*_EMPTY, 1, 1.0)

_HARMLESS = {"model", "user", "metadata", "store", "service_tier", "priority", "request_id", "stream", "stream_options"}
_HARMLESS |= {"skip_special_tokens", "spaces_between_special_tokens", "include", "safety_identifier"}
_HARMLESS |= {"prompt_cache_key", "prompt_cache_retention"}


def _of_other_routes() -> dict[str, tuple[Any, ...]]:
    """Fields of the routes for text, each of which is unknown on other routes, with the values with which they ask for nothing."""
    fields = [field for body in (Responses, Messages, Chat, Completions) for field in msgspec.structs.fields(body)]
    there = {field.name: field.default for field in fields if field.name not in _HARMLESS}
    return {name: (*_EMPTY, default, *NEUTRAL.get(name, ())) for name, default in there.items()} | {
        "top_k": (None, 0, -1),
        "text": (None, {}, {"format": {"type": "text"}}),
        "thinking": (None, {}, {"type": "disabled"}),
        "truncation": (None, "disabled"),
    }


CHANGING: Mapping[str, tuple[Any, ...]] = {
    **_of_other_routes(),
    # constrained decoding: vLLM, SGLang, llama.cpp, TGI, Anthropic
    **dict.fromkeys(("guided", "grammar", "json_schema", "json_object", "regex", "ebnf", "choice"), _EMPTY),
    **dict.fromkeys(("structural_tag", "output_format", "output_config", "custom_logit_processor"), _EMPTY),
    **dict.fromkeys(("logits_processors", "logit_processors", "forced_decoder_ids", "logprob_token_ids"), _EMPTY),
    # the choice of tokens
    **dict.fromkeys(("allowed_token_ids", "allowed_tokens", "suppress_tokens", "begin_suppress_tokens"), _EMPTY),
    **dict.fromkeys(("bad_words_ids", "stop_regex", "stop_sequences", "no_stop_trim", "min_new_tokens", "max_new_tokens"), _EMPTY),
    **dict.fromkeys(("n_predict", "max_completion_length", "no_repeat_ngram_size", "top_a", "top_n_sigma", "penalty_alpha"), _EMPTY),
    **dict.fromkeys(("typical_p", "tfs", "tfs_z", "repeat_penalty", "length_penalty", "diversity_penalty", "num_beams"), _ONE),
    **dict.fromkeys(("use_beam_search", "beam_width", "early_stopping", "epsilon_cutoff", "eta_cutoff", "watermark"), _EMPTY),
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "smoothing_factor", "samplers"), _EMPTY),
    "do_sample": (None, True),
    **dict.fromkeys(("watermarking", "repetition_detection", "vllm_xargs"), _EMPTY),
    "thinking_token_budget": (None, -1),
    # the prompt
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_embeds", "add_special_tokens", "chat_template", "documents"), (None,)),
    **dict.fromkeys(("images", "image_data", "audio", "multi_modal_data", "mm_processor_kwargs", "input_ids"), _EMPTY),
    **dict.fromkeys(("compaction", "previous_message_id", "system_prompt", "system_instruction"), _EMPTY),
    **dict.fromkeys(("prefill", "session_params", "lora_path", "mcp_servers", "web_search_options", "container"), _EMPTY),
    # the answer
    **dict.fromkeys(("prompt_logprobs", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "best"), (None, -1, False)),
    **dict.fromkeys(("separate_reasoning", "include_reasoning", "stream_reasoning"), (None, True)),
    "verbosity": (None, "medium"),
    "return_tokens_as_token_ids": (None, False),
}  # fmt: skip
"""Fields that other routes or servers have and that would change the answer -> the values with which they ask for nothing."""
_CHANGING_FAMILIES = ("guided_", "mirostat_", "xtc_", "dry_", "dynatemp_", "suppress_")
"""Beginnings of such names."""

Remark = Callable[[str, str], None]
"""(name of a field, sentence) -> None"""


def note_unknown(scope: Scope, read: object, body: bytes) -> None:
    """Notes the unknown fields of a body for the answer to its request. `read`: the body as a struct. Raises Refused for one that would
    change the answer, and for too many."""
    if not isinstance(read, OpenBody):
        return
    names: list[str] = []
    for name, value, known in _unknown(read, body):
        if len(names) >= MOST_UNKNOWN:
            raise Refused(400, f"the body has more than {MOST_UNKNOWN} fields that this route does not know")
        own = name.rpartition(".")[2]
        listed = own in CHANGING or own.startswith(_CHANGING_FAMILIES)
        if listed and not _asks_for_nothing(own, value):
            raise Refused(400, f"{_shown(name)} is not served; leave it out", "unsupported_parameter")
        if not listed and (like := _resembling(own, known)):
            message = f"there is no field {_shown(name)}; did you mean {like}?"
            raise Refused(400, message, "unsupported_parameter")
        names.append(_shown(name))
    if shown := next(_beside_texts(read, body), ""):
        raise Refused(400, f"{shown} is not served: the model would not see it; leave it out", "unsupported_parameter")
    if names:
        scope[HEADER] = names


_SHOWN = frozenset(
    [
        "image",
        "images",
        "image_url",
        "image_urls",
        "image_data",
        "input_image",
        "video",
        "videos",
        "video_url",
        "audio_url",
        "input_audio",
        "file",
        "files",
        "attachments",
        "documents",
        "multi_modal_data",
    ]
)
"""Fields beside the text of a message in which clients of other servers give what is no text."""
_Element = dict[str, msgspec.Raw] | list[msgspec.Raw] | str | float | bool | None
_decode_messages = msgspec.json.Decoder(list[_Element]).decode


def _beside_texts(read: OpenBody, body: bytes) -> Iterator[str]:
    """Yields the fields of messages that hold something beside their text: a message is read as its own fields alone."""
    for name in {"messages", "input"} & set(read.__struct_fields__):
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get(name)
        if given is None or not bytes(given).lstrip().startswith(b"["):
            continue
        for place, message in enumerate(_decode_messages(given)):
            fields = message if isinstance(message, dict) else {}
            for field in sorted(_SHOWN & fields.keys()):
                if not _asks_for_nothing(field, fields[field]):
                    yield f"{name}[{place}].{field}"


def note_ignored(scope: Scope, name: str) -> None:
    """Notes a field that is known and that this server cannot follow, for the answer to its request."""
    scope[HEADER] = [*scope.get(HEADER, ()), name]


def _shown(name: str) -> str:
    """A name that a client chose, for a header and a terminal."""
    return quote(name[:LONGEST_NAME], errors="replace")


def _unknown(read: OpenBody, body: bytes) -> Iterator[tuple[str, msgspec.Raw, Collection[str]]]:
    """Yields the unknown fields of a body and of the open ones in it: path, value, and the known ones beside it."""
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = read.__struct_fields__
    for name in given.keys() - set(known):
        yield name, given[name], known
    for name in known:
        if isinstance(inner := getattr(read, name), OpenBody) and name in given:
            for path, value, beside in _unknown(inner, bytes(given[name])):
                yield f"{name}.{path}", value, beside


def _asks_for_nothing(name: str, value: msgspec.Raw) -> bool:
    try:
        read = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return False
    return any(
        type(read) is type(neutral) and read == neutral for neutral in CHANGING.get(name, _EMPTY)
    )  # False is no 0


def _resembling(name: str, known: Collection[str]) -> str:
    """The known field that the name is almost written like; empty if there is none."""
    if len(name) > LONGEST_NAME:
        return ""
    plain = {_plain(known_name): known_name for known_name in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=ALIKE)
    return plain[found[0]] if found else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


class IgnoredFields:
    """Middleware that names the ignored fields of a request in the header of its answer, and remarks on each name once."""

    def __init__(self, app: ASGIApp, remark: Remark) -> None:
        self._app, self._remark = app, remark
        self._said: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and (names := scope.get(HEADER)):
                MutableHeaders(scope=message)[HEADER] = ", ".join(names)
                for name in names:
                    self._say(name)
            await send(message)

        await self._app(scope, receive, named)

    def _say(self, name: str) -> None:
        if name in self._said or len(self._said) >= MOST_UNKNOWN:
            return
        self._said.add(name)
        self._remark(name, f"a request has the field {name}, which has no effect here and is ignored")
