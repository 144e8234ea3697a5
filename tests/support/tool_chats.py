"""Chat templates in the manner of the families that call tools, a tokenizer of characters for them, and models whose replies are written
down. Each template writes what its family writes where a call is concerned; the rest is short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.batches import Failure
from headrace.core.protocols import EnvironmentKind
from headrace.core.types import Completion, Prompt, VersionSpan
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.function import open_function
from headrace.episodes.environments.workers.player import arguments
from headrace.episodes.environments.workers.step_driver import check_columns, is_end
from headrace.episodes.environments.workers.talk import AgentReply, BlockingAgent, messages_of
from headrace.episodes.episodes import Played, roll_out
from headrace.episodes.rollout_session import TurnAsked
from headrace.models.chat import ChatEncoder

_TURN = "{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
_CHATML_TOOLS = (
    '{% if tools %}<|im_start|>system\n# Tools: write <tool_call>{"name": <name>, "arguments": <object>}</tool_call>\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES = (
    _CHATML_TOOLS + "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.name }}: {{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}" + _TURN + "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}" + _OPENED
)

MISTRAL_LIST = (
    "<s>{% for message in messages %}{% if message.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]{% elif message.tool_calls is defined %}[TOOL_CALLS] ["
    "{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ \', \' if not loop.last }}{% endfor %}]</s>'
    '{% elif message.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": '
    '"{{ message.tool_call_id }}"}[/TOOL_RESULTS]{% else %} {{ message.content }}</s>{% endif %}{% endfor %}'
)

MISTRAL_NAMED = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]{% elif message.role == 'tool' %}[TOOL_RESULTS]"
    "{{ message.content }}[/TOOL_RESULTS]{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}[TOOL_CALLS]"
    "{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
)

_HEADER = "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
LLAMA = (
    "<|begin_of_text|>{% for message in messages %}" + _HEADER + "{% if 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    '{% else %}{% if loop.first and tools is not none %}Respond with {"name": name, "parameters": object}.\n'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ message.content }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_VALUE = (
    "{% macro value(it) %}{% if it is string %}MARK{{ it }}MARK{% elif it is boolean %}{{ it | lower }}{% elif it is mapping %}"
    "{{ '{' }}{% for key, one in it | dictsort %}{{ key }}:{{ value(one) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif it is iterable %}[{% for one in it %}{{ value(one) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ it }}{% endif %}"
    "{% endmacro %}"
)
_GEMMA = (
    _VALUE
    + "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    + "{% for message in messages %}"
    + _TURN
    + "{% for call in message.tool_calls or [] %}OPENINGcall:{{ call.function.name }}{{ value(call.function.arguments) }}CLOSING{% endfor %}"
    + "<|im_end|>\n{% endfor %}"
    + _OPENED
)
GEMMA = _GEMMA.replace("MARK", '<|"|>').replace("OPENING", "<|tool_call>").replace("CLOSING", "<tool_call|>")
FUNCTION_GEMMA = (
    _GEMMA.replace("MARK", "<escape>")
    .replace("OPENING", "<start_function_call>")
    .replace("CLOSING", "<end_function_call>")
)

XML = (
    _CHATML_TOOLS
    + "{% for message in messages %}"
    + _TURN
    + "{% for call in message.tool_calls or [] %}<tool_call><function="
    "{{ call.function.name }}></function></tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + _OPENED
)
"""Shows tools, and writes calls as no format reads them."""

PLAIN = "{% for message in messages %}" + _TURN + "<|im_end|>\n{% endfor %}" + _OPENED
"""Knows no tools."""

QWEN_CODER = (
    _CHATML_TOOLS + "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>\n<|im_end|>\n"
    "{% else %}"
    + _TURN
    + "{% for call in message.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + _OPENED
)

TEMPLATES = {"hermes": HERMES, "mistral-list": MISTRAL_LIST, "mistral-named": MISTRAL_NAMED, "llama3": LLAMA}
TEMPLATES |= {"gemma": GEMMA, "function-gemma": FUNCTION_GEMMA, "qwen3-coder": QWEN_CODER}

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>", "<|python_tag|>"]
SPECIAL += ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]"]
SPECIAL += ["<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"]
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n\xe9"


def save_tokenizer(directory: Path, template: str) -> Path:
    """One token for each character and each special text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "bos_token": "<s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    (directory / "chat_template.jinja").write_text(template)
    return directory


def tokens_of(text: str) -> list[int]:
    """As the tokenizer encodes it, with the special texts as their tokens."""
    tokens = []
    while text:
        word = next((one for one in SPECIAL if text.startswith(one)), text[0])
        tokens.append((SPECIAL.index(word)) if word in SPECIAL else len(SPECIAL) + CHARACTERS.index(word))
        text = text[len(word) :]
    return tokens


class WrittenEngine:
    """Says what is written down for each turn. A turn that it was asked for before is not sampled again, as in a run."""

    def __init__(self, *says: str) -> None:
        self._says = says
        self.sampled: dict[TurnAsked, Completion] = {}
        self.asked: list[TurnAsked] = []

    async def __call__(self, asked: TurnAsked) -> Completion:
        self.asked.append(asked)
        await asyncio.sleep(0)
        if asked not in self.sampled:
            tokens = tuple(tokens_of(self._says[min(asked.turn, len(self._says) - 1)]))
            self.sampled[asked] = Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")
        return self.sampled[asked]


class WrittenAgent(BlockingAgent):
    """Replies in the same thread. It is at its limit after `limit` turns."""

    def __init__(self, *says: str, seed: int = 0, limit: int | None = None, **roles: WrittenAgent) -> None:
        """`roles`: its other agents, by their names with `_` for a blank."""
        self.seed, self._written = seed, roles
        self._says, self._limit = iter(says), len(says) if limit is None else limit
        self.heard: list[list[dict[str, Any]]] = []
        """The messages of each turn that was asked for."""
        self.rewards: list[tuple[str, float]] = []

    def chat(self, messages: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], tools: Any = None) -> AgentReply:
        self.heard.append(messages_of(messages))
        if len(self.heard) > self._limit:
            return AgentReply("", (), "limit", 0)
        return AgentReply(next(self._says), (), "stop", 1)

    def role(self, name: str) -> WrittenAgent:
        return self._written[name.replace(" ", "_")]

    def reward(self, name: str, value: float) -> None:
        self.rewards.append((name, value))


def play_steps(made: type, agent: WrittenAgent, **columns: Any) -> Any:
    """Plays a rollout with a class whose steps block. Returns the rewards."""
    check_columns(made, columns)
    one, reply = made(**arguments(made, {"seed": agent.seed, **columns}, agent=False)), None
    try:
        while not is_end(said := one.step(agent, reply)):
            role, messages = said if isinstance(said, tuple) else ("", said)
            reply = (agent.role(role) if role else agent).chat(messages)
        return said
    finally:
        if hasattr(one, "close"):
            one.close()


CALL = '<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call><|im_end|>'
PROMPT = Prompt("p", "6 and 6?", (1,))


def play_all(
    env: Path,
    encoder: ChatEncoder,
    rollouts: Sequence[tuple[dict[str, Any], WrittenEngine]],
    *,
    function: str = "play",
    pids: list[int] | None = None,
    **config: Any,
) -> list[Played | Failure]:
    """Rollouts of prompts with these columns, at once in one process (and more, where one is alone). `pids` gets the processes at the end."""
    settings = EnvironmentConfig(**{"function": f"{env}:{function}", "workers": 1, **config})
    return play_kind(settings, encoder, rollouts, pids)


def play_kind(
    config: EnvironmentConfig,
    encoder: ChatEncoder,
    rollouts: Sequence[tuple[dict[str, Any], WrittenEngine]],
    pids: list[int] | None = None,
) -> list[Played | Failure]:
    """The same with any environment that is played in processes."""

    async def main() -> list[Played | Failure]:
        kind = open_function(config, encoder, system="", log=None)
        try:
            each = await asyncio.gather(
                *(
                    roll_out(kind, Prompt(f"p{i}", "6 and 6?", (1,), given), [i], ask=engine, decode=encoder.decode)
                    for i, (given, engine) in enumerate(rollouts)
                )
            )
            if pids is not None:
                pids.extend(pool_of(kind).pids)
            return [one for (one,) in each]
        finally:
            await kind.close()

    return asyncio.run(main())


def play_said(
    encoder: ChatEncoder, config: EnvironmentConfig, rollouts: Sequence[tuple[dict[str, Any], tuple[str, ...]]]
) -> list[Played | Failure]:
    """Rollouts of prompts with these columns and replies."""
    return play_kind(config, encoder, [(given, WrittenEngine(*says)) for given, says in rollouts])


def pool_of(kind: EnvironmentKind) -> Any:
    return kind.close.__self__  # type: ignore[attr-defined]
