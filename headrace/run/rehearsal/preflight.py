"""The preflight: do a model's config, tokenizer, chat template and weights agree with each other, and with the run that will use them?

Every check has evidence from the files: a rendered conversation, the ids of tokens, the headers of tensors. Nothing is loaded but the
tokenizer. Public checkpoints disagree with themselves in all of these ways, and what follows is silent: completions that run through their end,
rewards that see another text than the model wrote, heads that are not the one that was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.reports import Finding
from headrace.engine.kinds import ENGINES
from headrace.models.chat import ChatEncoder, Message
from headrace.models.lora import LoraConfig
from headrace.models.resolve import Stored, read_header, weight_files
from headrace.models.tokenizer import ANSWER, QUESTION

HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Endings of the names of output heads."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
"""Endings of the names of input embeddings."""
THOUGHT = "Rivers in Saxony."
SYSTEM = "Be brief."
COMPARED = 1 << 20
"""Bytes of two tensors that are compared at each of up to 64 places."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, read as they are needed. Raises ConfigError for a tokenizer that cannot be loaded."""

    encoder: ChatEncoder

    @property
    def directory(self) -> Path:
        return self.encoder.directory

    @cached_property
    def config(self) -> dict[str, Any]:
        """The part of config.json that describes the language model."""
        config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        return {**config, **(config.get("text_config") or {})}

    @cached_property
    def tensors(self) -> dict[str, tuple[Path, Stored]]:
        """Empty where weights are no safetensors."""
        return {
            name: (path, tensor) for path in weight_files(self.directory) for name, tensor in read_header(path).items()
        }

    def first(self, endings: Sequence[str]) -> tuple[str, Path, Stored] | None:
        """The first tensor whose name ends so."""
        found = (
            (name, path, tensor)
            for name, (path, tensor) in self.tensors.items()
            if name.endswith(tuple(endings)) and tensor.shape
        )
        return next(found, None)

    def token(self, number: int | None) -> str:
        """A token by name and number."""
        names = self.names
        return "none" if number is None else f"{names[number]} ({number})" if number in names else str(number)

    @cached_property
    def names(self) -> dict[int, str]:
        return {number: name for name, number in self.encoder.vocabulary().items()}


def preflight(
    encoder: ChatEncoder,
    *,
    chat: bool = True,
    turns: bool = False,
    lora: LoraConfig | None = None,
    engine: str = "native",
    several: bool = False,
    system: bool = False,
) -> list[Finding]:
    """Returns what agrees and what does not. `chat`: whether prompts go through the chat template; `turns`: whether rollouts have several
    turns; `engine`: engine.kind; `several`: whether several adapters are trained at once; `system`: whether prompts begin with task.system."""
    files = ModelFiles(encoder)
    found = [_ends(files), _begin(files, chat), _vocabulary(files), _head(files)]
    if chat and encoder.has_template:
        found += [*_left_out(files, system), *_template(files, turns)]
    found.append(_special(files))
    if lora and lora.rank:
        found += _adapter(files, lora, engine, several)
    return [finding for finding in found if finding]


# --- ends --------------------------------------------------------------------------------------------------------------


def _ends(files: ModelFiles) -> Finding:
    ends = files.encoder.endings
    message = ", ".join(map(files.token, sorted(ends.named))) or "none"
    if not ends.all:
        return Finding(
            "ends",
            "remark",
            "nothing ends a completion: neither config.json nor generation_config.json names an end, and the template writes none. Every "
            'completion runs to rollout.max_tokens; name one ("eos_token_id" in generation_config.json), or set rollout.stop',
        )
    if ends.turn is None:
        return Finding("ends", "agrees", f"{message}, by config.json and generation_config.json")
    turn = files.token(ends.turn)
    if ends.turn in ends.named:
        others = ends.named - {ends.turn}
        more = f"; {', '.join(map(files.token, sorted(others)))} too" if others else ""
        return Finding(
            "ends", "agrees", f"{turn} ends an answer in the template, and a completion by the configs{more}"
        )
    return Finding(
        "ends",
        "remark",
        f"the template ends an answer with {turn}, which neither config.json nor generation_config.json names (they name {message}). A completion "
        "ends at either here, and exports name both; another engine would sample on behind the answer",
    )


# --- beginnings --------------------------------------------------------------------------------------------------------


def _begin(files: ModelFiles, chat: bool) -> Finding | None:
    bos, plain = files.encoder.bos, files.encoder.encode_text("a")
    added = bos is not None and plain[:1] == (bos,)
    if not chat:
        message = f"{files.token(bos)} is put before plain text" if added else "nothing is put before plain text"
        return Finding("begin", "agrees", message)
    if not files.encoder.has_template:
        return None
    _, tokens = _opened(files, [{"role": "user", "content": QUESTION}])
    if bos is not None and tokens[:2] == (bos, bos):
        return Finding("begin", "remark", f"the template writes the start token {files.token(bos)} twice")
    if bos is not None and tokens[:1] == (bos,):
        return Finding("begin", "agrees", f"the template writes {files.token(bos)} once")
    if added:
        return Finding(
            "begin",
            "agrees",
            f"the tokenizer puts {files.token(bos)} before plain text, and the template writes none: prompts begin without it, as in "
            "apply_chat_template of transformers",
        )
    return Finding("begin", "agrees", "no start token, in the template or before plain text")


# --- vocabulary --------------------------------------------------------------------------------------------------------


def _vocabulary(files: ModelFiles) -> Finding | None:
    embedding = files.first(EMBEDDINGS)
    rows = embedding[2].shape[0] if embedding else files.config.get("vocab_size")
    if not isinstance(rows, int):
        return None
    names = files.names
    if without := sorted(number for number in names if number >= rows):
        return Finding(
            "vocabulary",
            "refused",
            f"the tokenizer has {len(names)} tokens, and the embedding {rows} rows: {files.token(without[0])}"
            f"{f' and {len(without) - 1} others have' if len(without) > 1 else ' has'} none. It is the tokenizer of another model, or the "
            "embedding was not enlarged: model.resize_token_embeddings(len(tokenizer)), train, and save_pretrained",
        )
    ids = sorted(number for number in files.encoder.endings.all if number >= rows)
    if ids:
        return Finding(
            "vocabulary",
            "refused",
            f"generation_config.json or config.json names the end {ids[0]}, and the embedding has {rows} rows; correct eos_token_id",
        )
    unused = rows - len(names)
    return Finding("vocabulary", "agrees", f"{len(names)} tokens, {rows} rows{f' ({unused} unused)' if unused else ''}")


# --- the output head ---------------------------------------------------------------------------------------------------


def _head(files: ModelFiles) -> Finding | None:
    embedding, head, tied = files.first(EMBEDDINGS), files.first(HEADS), files.config.get("tie_word_embeddings")
    if not embedding or not isinstance(tied, bool):
        return None
    name = head[0] if head else ""
    if tied and head and not _equal(embedding, head):
        return Finding(
            "head",
            "refused",
            f"config.json says tie_word_embeddings = true, and {name} in the files is not the embedding. Which head was trained, the files do "
            f'not say: write "tie_word_embeddings": false into config.json to use {name}, or remove {name} from the files to use the embedding',
        )
    if tied:
        return Finding("head", "agrees", f"the embedding{f', of which {name} is a copy' if name else ''} (tied)")
    if head:
        return Finding("head", "agrees", f"{name}, of its own")
    heads = [
        tensor_name for tensor_name, (_, stored) in files.tensors.items() if stored.shape[:1] == embedding[2].shape[:1]
    ]
    if len(heads) > 1:  # by another name
        return None
    return Finding(
        "head",
        "refused",
        "config.json says tie_word_embeddings = false, and the files hold no output head: write true into config.json if the head is the "
        "embedding, or save the model again with save_pretrained",
    )


def _equal(one: tuple[str, Path, Stored], other: tuple[str, Path, Stored]) -> bool:
    """Compares 64 pieces of the data, which is enough to tell a copy from a head that was trained."""
    (_, path, stored), (_, other_path, other_stored) = one, other
    size = stored.end - stored.begin
    if (stored.dtype, stored.shape) != (other_stored.dtype, other_stored.shape):
        return False
    step = max(COMPARED, size // 64)
    with path.open("rb") as file, other_path.open("rb") as against:
        for start in range(0, size, step):
            file.seek(stored.begin + start)
            against.seek(other_stored.begin + start)
            count = min(COMPARED, size - start)
            if file.read(count) != against.read(count):
                return False
    return True


# --- the template ------------------------------------------------------------------------------------------------------


def _opened(files: ModelFiles, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
    return files.encoder.encode_messages(messages)


def _accepts(files: ModelFiles, *roles: str) -> bool:
    try:
        _opened(files, [{"role": role, "content": QUESTION} for role in roles])
    except ConfigError:
        return False
    return True


def _left_out(files: ModelFiles, system: bool) -> Iterator[Finding]:
    """Yields what the template accepts and writes nothing of."""
    asked = [{"role": "user", "content": QUESTION}]
    with suppress(ConfigError):
        if QUESTION not in _opened(files, asked)[0]:
            yield Finding(
                "texts",
                "refused",
                "the chat template writes nothing of a question, so that all prompts would be alike; choose another model, or another template "
                "(chat_template.jinja beside the model), or set task.chat = false",
            )
            return
        if SYSTEM not in _opened(files, [{"role": "system", "content": SYSTEM}, *asked])[0]:
            yield Finding(
                "texts",
                "refused" if system else "remark",
                "the chat template writes nothing of a system message, so that the model sees neither task.system nor those of rows; write them into "
                "the questions",
            )


def _template(files: ModelFiles, turns: bool) -> Iterator[Finding]:
    refused = [
        words
        for words, roles in (
            ("a system message", ("system", "user")),
            ("two user messages in a row", ("user", "user")),
            ("a conversation that an assistant begins", ("assistant", "user")),
        )
        if not _accepts(files, *roles)
    ]
    if "strftime_now" in files.encoder.template and "date_string" not in files.encoder.arguments:
        message = "the template writes the date of the day into prompts, so that a run that goes on tomorrow has other prompts"
        known = "date_string" in files.encoder.variables
        yield Finding(
            "date", "remark", message + ('; task.template = { date_string = "1 Jan 2026" } fixes it' if known else "")
        )
    yield Finding("roles", "agrees", f"the template refuses {', '.join(refused)}" if refused else "all are accepted")
    first = [{"role": "user", "content": QUESTION}]
    next_turn = [{"role": "user", "content": QUESTION}]
    try:
        before, _ = _opened(files, first)
        after, _ = _opened(files, [*first, {"role": "assistant", "content": ANSWER}, *next_turn])
        thought = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
        thinking, _ = _opened(files, [*first, {"role": "assistant", "content": thought}, *next_turn])
    except ConfigError as error:
        yield Finding("turns", "remark" if turns else "agrees", f"the template refuses a second turn: {error}")
        return
    drops = " It leaves out what an earlier turn thought." if THOUGHT not in thinking else ""
    if after.startswith(before + ANSWER):
        yield Finding("turns", "agrees", f"a longer conversation begins with the text of the shorter one.{drops}")
        return
    at = next((i for i, (one, other) in enumerate(zip(before + ANSWER, after, strict=False)) if one != other), 0)
    yield Finding(
        "turns",
        "remark" if turns else "agrees",
        f"the template writes earlier turns anew (from {after[max(0, at - 12) : at + 20]!r}): each turn of a rollout becomes a row of its own, "
        f"which takes longer and is right all the same.{drops}",
    )


def _special(files: ModelFiles) -> Finding:
    encoder, ends = files.encoder, files.encoder.endings.all
    asides = {files.encoder.bos, *ends}
    hidden = [name for number, name in encoder.special.items() if number not in asides and not encoder.decode([number])]
    shown = [name for number, name in encoder.special.items() if number not in asides and encoder.decode([number])]
    if hidden:
        return Finding("rewards", "agrees", f"do not see {_some(hidden)} (reward.special_tokens = hide)")
    return Finding(
        "rewards", "agrees", f"see special tokens as text{f': {_some(shown)}' if shown else ''}; never the end"
    )


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} others" if len(names) > most else "")


# --- adapters ----------------------------------------------------------------------------------------------------------


def _adapter(files: ModelFiles, lora: LoraConfig, engine: str, several: bool) -> Iterator[Finding]:
    names = [
        name.removesuffix(".weight")
        for name, (_, tensor) in files.tensors.items()
        if len(tensor.shape) == 2
        and min(tensor.shape) > 1
        and not name.endswith((*HEADS, *EMBEDDINGS, "wpe.weight"))
        and (lora.experts or ".experts." not in name)
    ]
    if lora.targets == "all-linear":
        reached = {name.rpartition(".")[2] for name in names}
    else:
        for target in lora.targets:
            if names and not any(name == target or name.endswith(f".{target}") for name in names):
                there = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
                yield Finding(
                    "adapter",
                    "refused",
                    f"lora.targets names {target}, which is not a linear layer of this model (the output head is never adapted); there are {there}",
                )
                return
        reached = set(lora.targets)
    count = sum(name.rpartition(".")[2] in {module.rpartition(".")[2] for module in reached} for name in names)
    kind = str(files.config.get("model_type"))
    core = ENGINES.get(engine)
    if core and lora.experts and not lora.merged and kind not in core.families:
        remedy = 'set lora.publish = "merged": the adapter is trained as it is, and the engine is sent whole weights'
        if several:
            remedy = "train one at a time ([lora] instead of [[adapters]]), which is published merged, or choose one of these"
        yield Finding(
            "adapter",
            "refused",
            f"the {engine} engine serves no adapters of experts beside {kind}, only beside {', '.join(core.families)}; {remedy}, or set lora.experts = false",
        )
        return
    yield Finding("adapter", "agrees", f"reaches {count} layers: {', '.join(sorted(reached))}")
