"""Bodies of the requests of atroposlib 0.4: of its trajectory API (`atroposlib/api/server.py`), and of its client of vLLM servers
(`atroposlib/envs/server_handling/vllm_server.py`). Unknown fields of the trajectory API are ignored, as its own server does."""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from headrace.web.bodies import Body, Count, Drawing, Token
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.sending import decoded, read_bytes

T = TypeVar("T")

MASKED = -100
"""The number in a mask at tokens that are not to be trained."""


class EnvRegistration(msgspec.Struct, kw_only=True):
    """`/register-env`"""

    max_token_length: int
    desired_name: str | None = None
    weight: float = 1.0
    group_size: int
    min_batch_allocation: float | None = None


class EnvNumber(msgspec.Struct, kw_only=True):
    """`/status-env` and `/disconnect-env`"""

    env_id: int


class PostedGroup(msgspec.Struct, kw_only=True):
    """`/scored_data`, and an item of `/scored_data_list`: one group."""

    tokens: list[list[int]]
    """The sequences, prompts included."""
    masks: list[list[int]]
    """`MASKED` or the token, for each token."""
    scores: list[float]
    advantages: list[Any] | None = None
    overrides: list[Any] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    distill_token_ids: list[Any] | None = None
    distill_logprobs: list[Any] | None = None

    def problem(self) -> str:
        """Returns why nothing of it can be trained; empty if it can be."""
        if not self.tokens or not len(self.tokens) == len(self.masks) == len(self.scores):
            return f"{len(self.tokens)} sequences, {len(self.masks)} masks and {len(self.scores)} scores are no group"
        overrides = [name for name in self.group_overrides or () if name != "group_size"]
        given = {
            "advantages": any(map(bool, self.advantages or ())),
            "overrides": any(map(bool, self.overrides or ())),
            "group_overrides": bool(overrides),
            "images": any(map(bool, self.images or ())),
            "distill_token_ids": bool(self.distill_token_ids),
            "distill_logprobs": bool(self.distill_logprobs),
        }
        if found := [name for name, there in given.items() if there]:
            return f"{found[0]} are given, and this trainer has its own: leave them out"
        return ""


class PromptTokens(Body, kw_only=True):
    prompt_token_ids: list[Token]


class TokensWanted(Drawing, kw_only=True, forbid_unknown_fields=True):
    """`/generate`: the completions of a prompt in tokens."""

    prompt: PromptTokens
    max_tokens: Count | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    stream: bool = False


async def read_posted(request: HttpRequest, kind: type[T], limits: ServerLimits) -> T:
    """Returns a body, which may be compressed with gzip. Raises Refused."""
    body = await read_bytes(request, "application/json", limits)
    if "gzip" in request.headers.get("content-encoding", "").lower():
        unpacking = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            body = unpacking.decompress(body, limits.body_bytes + 1)
        except zlib.error:
            raise Refused(400, "the body says that it is gzip, and is not") from None
        if len(body) > limits.body_bytes:
            raise Refused(413, f"a body may have {limits.body_bytes} bytes when it is unpacked")
    return decoded(body, kind)
