"""The routes that environments of Atropos use: the trajectory API, to which they post groups, and those that they sample from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from headrace.core.chat.messages import for_template
from headrace.episodes.environments.atropos.open_rollouts import (
    EnvNumber,
    EnvRegistration,
    GroupFound,
    OpenRollout,
    OpenRollouts,
    PostedGroup,
    Sequences,
    TokensWanted,
    Written,
    digest_of,
    read_posted,
)
from headrace.episodes.environments.gateway.format_routes import ChatAnswer, TextAnswer, models_body, prompt_of, schema
from headrace.episodes.environments.gateway.history_trees import (
    ChatTree,
    GatewayRollout,
    Speaker,
    TextTree,
    TreeReply,
    digests_of,
)
from headrace.episodes.environments.gateway.turn_request import (
    MODEL,
    GatewayRules,
    TurnRequest,
    asked_of,
    check_drawing,
    constraint_of,
    is_cut,
    most_tokens,
)
from headrace.web.bodies import Chat, Completions, Drawing
from headrace.web.errors import Refused
from headrace.web.limits import ServerLimits
from headrace.web.request_fields import offered_tools
from headrace.web.sending import GONE, json_response, read_body, while_there

# --- The properties of a run that environments of Atropos ask its trainer for.


@dataclass(frozen=True)
class TrainerFacts:
    name: str
    steps: int
    group_size: int
    groups_per_step: int
    longest: int
    """The most tokens of a rollout."""

    @property
    def batch_size(self) -> int:
        """Rollouts of a step."""
        return self.groups_per_step * self.group_size


# --- The trajectory API of Atropos, as environments use it
# They register, ask how far training is, and post scored groups.
#
# The routes for trainers (`/register`, `/batch`) are not served: this run is the trainer.


LEAST_WEIGHT = 0.01
"""The smallest share of the inference that an environment is given, as in atroposlib."""


@dataclass(kw_only=True)
class _Env:
    given: EnvRegistration
    name: str
    connected: bool = True

    @property
    def share(self) -> float:
        return self.given.max_token_length * max(0.0, self.given.weight) if self.connected else 0.0


MOST_SEQUENCES = 4096
"""Sequences of one request. Each is looked for among all rollouts that are played."""


class TrajectoryRoutes:
    def __init__(
        self,
        facts: TrainerFacts,
        rollouts: OpenRollouts,
        written: Written,
        decode: Written,
        say: Callable[[str], None],
    ) -> None:
        """`say`: receives a line for each group of which something was refused."""
        self._facts, self._rollouts, self._written, self._decode, self._said = facts, rollouts, written, decode, say
        self._limits = ServerLimits()
        self._envs: list[_Env] = []

    async def root(self, request: HttpRequest) -> Response:
        return json_response({"message": "headrace, trajectory API of Atropos"})

    async def info(self, request: HttpRequest) -> Response:
        # Environments leave out groups with a sequence of max_token_len tokens or more.
        return json_response({"batch_size": self._facts.batch_size, "max_token_len": self._facts.longest + 1})

    async def wandb_info(self, request: HttpRequest) -> Response:
        return json_response({"group": self._facts.name, "project": "headrace"})

    async def status(self, request: HttpRequest) -> Response:
        return json_response({"current_step": self._step(), "queue_size": 0})

    async def register_env(self, request: HttpRequest) -> Response:
        env = await read_posted(request, EnvRegistration, self._limits)
        name = f"{env.desired_name}_{sum(other.given.desired_name == env.desired_name for other in self._envs)}"
        if env.group_size != self._facts.group_size:
            message = (
                f"the environment {name} has groups of {env.group_size}, and the run has rollout.group_size = "
                f"{self._facts.group_size}: set --env.group_size {self._facts.group_size}"
            )
            self._said(message)
            return json_response({"status": message})  # it prints that, and asks again
        self._envs.append(_Env(given=env, name=name))
        self._said(f"the environment {name} has registered")
        return json_response(
            {
                "status": "success",
                "env_id": len(self._envs) - 1,
                "wandb_name": name,
                "checkpoint_dir": "",
                "starting_step": self._step(),
                "checkpoint_interval": -1,
                "num_steps": self._facts.steps,
            }
        )

    async def disconnect_env(self, request: HttpRequest) -> Response:
        env = await self._env(request)
        if env:
            env.connected = False
        return json_response({"status": "success" if env else "failure"})

    async def status_env(self, request: HttpRequest) -> Response:
        env = await self._env(request)
        total = sum(other.share for other in self._envs)
        return json_response(
            {
                "current_step": self._step(),
                "queue_size": 0,  # requests for tokens wait while no ticket is free, so nothing queues
                "self_queue_size": 0,
                "max_group_size": self._facts.group_size,
                "unallocated_fraction": 1.0,
                "env_weight": max(LEAST_WEIGHT, env.share / total) if env and total else 1.0,
            }
        )

    async def scored_data(self, request: HttpRequest) -> Response:
        return await self._scored([await read_posted(request, PostedGroup, self._limits)])

    async def scored_data_list(self, request: HttpRequest) -> Response:
        return await self._scored(await read_posted(request, list[PostedGroup], self._limits))

    async def _env(self, request: HttpRequest) -> _Env | None:
        """The environment of the request; None if it has registered with an earlier process of the run."""
        number = (await read_posted(request, EnvNumber, self._limits)).env_id
        return self._envs[number] if 0 <= number < len(self._envs) else None

    async def _scored(self, groups: list[PostedGroup]) -> Response:
        total, count = GroupFound(0, 0, 0), sum(len(group.tokens) for group in groups)
        if count > MOST_SEQUENCES:
            raise Refused(
                400, f"{count} sequences are posted at once, and may be {MOST_SEQUENCES}; post fewer groups at a time"
            )
        for group in groups:
            problem = group.problem()
            sequences = Sequences(self._rollouts.playing(), self._written, self._decode, self._facts.longest)
            found = await (sequences.refuse(group, problem) if problem else sequences.score(group))
            if problem or found.unknown:
                self._said(f"a posted group was refused: {problem or _unknown(found, len(group.tokens))}")
            total = GroupFound(*(one + other for one, other in zip(total, found, strict=True)))
        answer = {"groups_processed": len(groups), **total._asdict()}
        if not total.scored:
            raise Refused(
                422, f"nothing of the group can be trained: {json.dumps(answer)}; logs/environment.log says why"
            )
        return json_response({"status": "received", **answer})

    def _step(self) -> int:
        return self._rollouts.newest


def _unknown(found: GroupFound, count: int) -> str:
    return (
        f"{found.unknown} of its {count} sequences are of unknown age: they were not sampled from this run, or for rollouts that are over. "
        "Point --openai.base_url at this run, and post the sequences as they were sampled"
    )


# --- The routes that environments of Atropos sample from
# `/generate` (tokens in, tokens out, as atroposlib's client of vLLM asks for it), OpenAI's chats and completions, and `/health`. A request
# with `n` is a rollout for each completion.


Ask = Callable[[Speaker], Coroutine[Any, Any, TreeReply]]
"""Samples a turn of a rollout."""


class InferenceRoutes:
    def __init__(self, rollouts: OpenRollouts, rules: GatewayRules) -> None:
        self._rollouts, self._rules = rollouts, rules

    async def health(self, request: HttpRequest) -> Response:
        return json_response({})

    async def models(self, request: HttpRequest) -> Response:
        return json_response(models_body())

    async def generate(self, request: HttpRequest) -> Response:
        body = await read_body(request, TokensWanted, self._rules.limits)
        count = self._count(body)
        if body.logprobs or body.prompt_logprobs or body.stream:
            raise Refused(400, "logprobs = 0 is served, and no prompt_logprobs, and no stream", "unsupported_parameter")
        prompt, most = tuple(body.prompt.prompt_token_ids), most_tokens("max_tokens", body.max_tokens)
        known = self._of_tokens(prompt)
        answers = await self._sampled(
            request, known, digest_of(prompt), count, lambda speaker: speaker.texts.ask(prompt, most)
        )
        if answers is None:
            return GONE
        done = [answer.completion for answer in answers]
        return json_response(
            {
                "text": [answer.reply.text for answer in answers],
                "prompt": self._rules.encoder.written(prompt),
                "finish_reasons": ["length" if is_cut(answer) else "stop" for answer in answers],
                "logprobs": [
                    [
                        [{str(token): logprob}]
                        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
                    ]
                    if completion
                    else []
                    for completion in done
                ],
            }
        )

    async def chat(self, request: HttpRequest) -> Response:
        body = await read_body(request, Chat, self._rules.limits)
        count = self._count(body)
        _refuse_stream(body.stream)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        most, tools = most_tokens("max_tokens", asked), offered_tools(body)
        shown = [schema(tool) for tool in tools]
        constraint = await constraint_of(
            self._rules,
            tools,
            response_format=body.response_format,
            outputs=body.structured_outputs,
            tool_choice=body.tool_choice,
            several=body.parallel_tool_calls,
        )
        await asyncio.sleep(0)  # a conversation of many millions of characters is gone through twice
        digests = digests_of(body.messages)
        await asyncio.sleep(0)
        known = self._continued(lambda speaker: speaker.chats, digests)
        first = blake2b(msgspec.json.encode([for_template(body.messages), shown]), digest_size=16).digest()
        use = asked_of(body, self._rules)
        answers = await self._sampled(
            request,
            known,
            first,
            count,
            lambda speaker: speaker.chats.ask(body.messages, shown, most, asked=use, constraint=constraint),
        )
        made = ChatAnswer(
            model=body.model or MODEL, logprobs=bool(body.logprobs), token_bytes=self._rules.encoder.token_bytes
        )
        return GONE if answers is None else json_response(_joined([made.whole(answer) for answer in answers]))

    async def completions(self, request: HttpRequest) -> Response:
        body = await read_body(request, Completions, self._rules.limits)
        count = self._count(body)
        _refuse_stream(body.stream)
        prompt, most = prompt_of(body), most_tokens("max_tokens", body.max_tokens)
        known = self._continued(lambda speaker: speaker.texts, prompt)
        first = blake2b(msgspec.json.encode(prompt), digest_size=16).digest()
        constraint = await constraint_of(
            self._rules, response_format=body.response_format, outputs=body.structured_outputs
        )
        answers = await self._sampled(
            request, known, first, count, lambda speaker: speaker.texts.ask(prompt, most, constraint=constraint)
        )
        made = TextAnswer(model=body.model or MODEL, logprobs=body.logprobs is not None, encoder=self._rules.encoder)
        return GONE if answers is None else json_response(_joined([made.whole(answer) for answer in answers]))

    def _count(self, body: Drawing) -> int:
        """Returns the number of completions that are asked for. Raises Refused for what the run does not have."""
        count, body.n = body.n, 1
        check_drawing(body, self._rules)
        return count

    def _continued(self, tree: Callable[[Speaker], ChatTree | TextTree], given: Any) -> list[OpenRollout]:
        """Returns the rollouts that a request continues, by what `continues` of their trees takes: those whose last turn it is, if there are any. Rollouts
        with equal first turns are told apart by that."""
        known = [one for one in self._rollouts.playing() if tree(one.served.speaker()).continues(given)]
        return [one for one in known if tree(one.served.speaker()).continues_last(given)] or known

    def _of_tokens(self, prompt: tuple[int, ...]) -> list[OpenRollout]:
        """Returns the rollouts that the prompt continues: those with the most of its tokens."""
        known = [
            rollout
            for rollout in self._rollouts.playing()
            if rollout.tokens and prompt[: len(rollout.tokens)] == rollout.tokens
        ]
        longest = max((len(rollout.tokens) for rollout in known), default=0)
        return [rollout for rollout in known if len(rollout.tokens) == longest < len(prompt)]

    async def _sampled(
        self,
        request: HttpRequest,
        known: Sequence[OpenRollout],
        first: bytes,
        count: int,
        ask: Ask,
    ) -> Sequence[TreeReply] | None:
        """Samples the turns of a request; None if the client has left. `known`: the rollouts that it may continue; `first`: the digest
        of the request, if it continues none."""
        if known and count > 1:
            message = f"n = {count} completions of a later turn would be alternatives, of which one can be posted"
            raise Refused(400, f"{message}: send a request for each rollout")
        idle = [rollout for rollout in known if not rollout.busy][:1]
        if known and not idle:
            raise Refused(409, "the turn that this request continues is being continued by another request")
        for rollout in idle:
            rollout.busy = True
        try:
            return await while_there(request, self._turns(idle, first, count, ask))
        finally:
            for rollout in idle:
                rollout.busy = False

    async def _turns(
        self,
        found: Sequence[OpenRollout],
        first: bytes,
        count: int,
        ask: Ask,
    ) -> list[TreeReply]:
        rollouts = found or await self._rollouts.take(first, count)
        try:
            ended = await asyncio.gather(*(_turn(rollout.served, ask) for rollout in rollouts), return_exceptions=True)
        except asyncio.CancelledError:
            for rollout in rollouts:
                rollout.fail("agent_failed", "the environment closed the connection before its turn was sampled")
            raise
        answers: list[TreeReply] = []
        for rollout, turn in zip(rollouts, ended, strict=True):
            if isinstance(turn, BaseException):
                for other in rollouts:
                    other.fail("agent_failed", f"its request was refused: {turn}")
                raise turn
            self._rollouts.extended(rollout, turn)
            answers.append(turn)
        return answers


async def _turn(served: GatewayRollout, ask: Ask) -> TreeReply:
    speaker = served.speaker()
    return await TurnRequest(speaker, lambda stream: ask(speaker)).sampled()


def _refuse_stream(stream: bool) -> None:
    if stream:
        raise Refused(400, "stream is not served here; leave it out", "unsupported_parameter")


def _joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins answers with one choice each."""
    first, *_ = answers
    usages = [answer["usage"] for answer in answers]
    sampled = sum(usage["completion_tokens"] for usage in usages)
    prompt = usages[0]["prompt_tokens"]
    return first | {
        "choices": [answer["choices"][0] | {"index": place} for place, answer in enumerate(answers)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }
