"""Images in the messages of a rollout: what its function and its tools show, the tokens that stand for it, and the numbers that these have."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.algo.advantages import states_of
from headrace.algo.training_rows import rows_of
from headrace.core.batches import Batch, Failure, Group, Row
from headrace.core.types import Completion, Prompt, Scored, VersionSpan
from headrace.durable.journal import read_steps
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.function import open_function
from headrace.episodes.environments.workers.talk import messages_of
from headrace.episodes.environments.workers.tools import Toolbox
from headrace.episodes.episodes import Played, roll_out
from headrace.episodes.rollout_session import TurnAsked
from headrace.episodes.tasks.config import TaskConfig
from headrace.episodes.tasks.rows import RowsTask
from headrace.facts.facts import GroupEnded
from headrace.models.chat import ChatEncoder
from headrace.models.images import KnownImages
from headrace.models.vision import language_part
from headrace.views.report import write_report
from support import tiny_seeing
from support.few import few
from support.native_calls import greedy, make_engine, run
from support.tiny_run import HOLD, hold, kill_when, of, release, tiny_config
from support.tiny_seeing import inputs, made, picture, prompt, seeing, tokenizer
from support.trainer_calls import gradients, near, trainer

PICTURES = [picture(number) for number in range(3)]
ENV = (
    HOLD
    + '''
import asyncio

def shows(path, *texts):
    before, after = texts
    return [{"type": "text", "text": before}, {"type": "image", "image": path}, after]

async def play(agent, prompt, image, answer="", **columns):
    def look(number: int):
        """Shows an image.

        Args:
            number: which one
        """
        return shows(image[number], "no. ", "!")

    reply = await agent.chat(prompt, tools=[look])
    while reply.tool_calls:
        reply = await agent.chat(await agent.call(reply))
    reply = await agent.chat({"role": "user", "content": [{"type": "image", "image": image[0]}]})
    return float(len(reply.text))

async def twice(agent, prompt, image, answer=""):
    reply = await agent.chat("many?")
    while is_held():
        (HERE / "middle").touch()
        await asyncio.sleep(0.02)
    reply = await agent.chat({"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "now?"}]})
    return float(reply.text.count("e"))

async def passed_on(agent, prompt, image):
    return float(len((await agent.chat(prompt)).text))

async def foreign(agent, prompt, image):
    await agent.chat({"role": "user", "content": [{"type": "image", "image": __file__}]})
'''
)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("env") / "env.py"
    path.write_text(ENV)
    return path


@pytest.fixture(scope="module")
def model() -> Path:
    return made("smolvlm", PICTURES)


class Says:
    """Says what is written down for each turn."""

    def __init__(self, *says: str) -> None:
        self._says = says

    async def __call__(self, asked: TurnAsked) -> Completion:
        tokens = tuple(tokenizer("smolvlm")(self._says[asked.turn], add_special_tokens=False)["input_ids"])
        return Completion(tokens, (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop")


def row_prompt(directory: Path, model: Path, images: Sequence[int], asked: Any = "see?") -> Prompt:
    """The prompt of a row with these images in a column."""
    names = []
    for number in images:
        (directory / f"{number}.png").write_bytes(PICTURES[number].data)
        names.append(f"{number}.png")
    (directory / "rows.jsonl").write_text(json.dumps({"prompt": asked, "image": names}))
    config = TaskConfig(kind="jsonl", path=str(directory / "rows.jsonl"), images=("image",), held_out=0)
    return RowsTask(config, 0, ChatEncoder(model)).draw()


def played(env: Path, function: str, encoder: ChatEncoder, asked: Prompt, *says: str) -> Played | Failure:
    async def main() -> Played | Failure:
        settings = EnvironmentConfig(function=f"{env}:{function}", workers=1, tools="hermes")
        kind = open_function(settings, encoder, system="", log=None)
        try:
            (one,) = await roll_out(kind, asked, [0], ask=Says(*says), decode=encoder.decode)
            return one
        finally:
            await kind.close()

    return asyncio.run(main())


CALL = '<tool_call>{"name": "look", "arguments": {"number": 1}}</tool_call><end>'


def expected_tokens(model: Path, messages: list[dict[str, Any]], images: Sequence[int]) -> list[int]:
    """The tokens of a conversation by transformers' own call, with the numbers of its images where the template has marked them."""
    text = tokenizer("smolvlm").apply_chat_template(messages, tokenize=False)
    known, given = KnownImages(model), iter(images)
    return [
        number
        for token in tokenizer("smolvlm")(text, add_special_tokens=False)["input_ids"]
        for number in (known.tokens(PICTURES[next(given)].digest) if token == known.placeholder else (token,))
    ]


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_tools_and_later_messages_show_images_of_the_row(env: Path, model: Path, tmp_path: Path):
    encoder = ChatEncoder(model)
    asked = row_prompt(tmp_path, model, [0, 1])
    one = played(env, "play", encoder, asked, CALL, "two<end>", "none<end>")
    assert isinstance(one, Played)
    first, second, _ = one.episode.turns
    assert [turn.parents for turn in one.episode.turns] == [(), (0,), (1,)], "one path"
    result = second.messages[0]
    assert (result["content"], result["image_places"]) == ("no. !", [4])
    assert [Path(file).name for file in result["images"]] == [PICTURES[1].digest]
    assert first.messages[-1]["image_places"] == [0, 0] and len(first.messages[-1]["images"]) == 2
    sees = {"type": "image"}
    conversation = [
        {"role": "user", "content": [sees, sees, text_part("see?")]},
        {"role": "assistant", "content": [text_part(CALL.removesuffix("<end>"))]},
        {"role": "tool", "content": [text_part("no. "), sees, text_part("!")]},
        {"role": "assistant", "content": [text_part("two")]},
        {"role": "user", "content": [sees]},
        {"role": "assistant", "content": [text_part("none")]},
    ]
    ((path, row),) = rows_of(asked, Scored(one.episode, 0.0, {}), 1.0)
    assert path == (0, 1, 2)
    behind = expected_tokens(model, conversation, [0, 1, 1, 0])[:-1]  # but the line end behind the last reply
    assert [*row.prompt, *row.tokens][-len(behind) :] == behind
    assert [token for token, kept in zip(row.tokens, row.mask, strict=True) if kept] == [
        token for turn in one.episode.turns for token in turn.completion.tokens
    ]
    words = len(tokenizer("smolvlm"))
    assert {token for token in row.tokens if token >= words} == {
        token for image in PICTURES[:2] for token in KnownImages(model).tokens(image.digest) if token >= words
    }
    assert "<image>" in encoder.written(row.tokens), "what reads tokens reads those of images"
    states = states_of(one.episode)
    assert len(set(states)) == 3 and KnownImages(model).path(PICTURES[0].digest).name in repr(states[2])


PARTS = [{"type": "image"}, text_part(" or "), {"type": "image"}]


@pytest.mark.parametrize("given", few([[{"role": "user", "content": PARTS}], "see?"], keep=1))
def test_a_prompt_that_is_passed_on_has_the_tokens_of_the_task(given: Any, env: Path, model: Path, tmp_path: Path):
    asked = row_prompt(tmp_path, model, [2, 0], given)
    one = played(env, "passed_on", ChatEncoder(model), asked, "two<end>")
    assert isinstance(one, Played) and one.episode.turns[0].context == asked.tokens


@pytest.mark.slow
def test_a_template_that_writes_history_anew_gets_all_images_again(env: Path, model: Path, tmp_path: Path):
    encoder = ChatEncoder(model)
    encoder._tokenizer.chat_template = "{{ messages | length }}" + tokenizer("smolvlm").chat_template
    one = played(env, "play", encoder, row_prompt(tmp_path, model, [0, 1]), CALL, "two<end>", "none<end>")
    assert isinstance(one, Played) and [turn.parents for turn in one.episode.turns] == [(), (), ()]
    known = KnownImages(model)
    for turn, shown in zip(one.episode.turns, ([0, 1], [0, 1, 1], [0, 1, 1, 0]), strict=True):
        given = iter(turn.context)
        for number in shown:
            assert all(token in given for token in known.tokens(PICTURES[number].digest)), "in this order"


def test_an_image_of_no_row_is_refused_with_what_to_give(env: Path, model: Path, tmp_path: Path):
    failed = played(env, "foreign", ChatEncoder(model), row_prompt(tmp_path, model, [0, 1]), "two<end>")
    assert isinstance(failed, Failure) and failed.reason == "environment_raised"
    assert (
        "env.py, which is none of this run's: give the path that the row has in a column of task.images"
        in failed.detail
    )


@pytest.mark.parametrize(
    ("role", "part", "said"),
    [
        (
            "user",
            {"type": "image", "image": b"png"},
            "an image of type bytes; give the path that the row's column holds",
        ),
        ("tool", {"type": "image"}, "an image of type NoneType; give the path"),
        ("user", {"type": "image_url", "image_url": {"url": "data:,"}}, "a part of a message is of type image_url"),
        (
            "assistant",
            {"type": "image", "image": "/a"},
            "the role assistant; images are shown by messages of user and tool",
        ),
        ("user", "text", "a message has the texts role and content"),
    ],
)
def test_parts_that_are_no_images_of_a_row_are_refused(role: str, part: Any, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        messages_of({"role": role, "content": [part]})


@pytest.mark.slow
def test_a_model_that_is_shown_no_images_is_refused_them(env: Path, tmp_path: Path):
    shown = row_prompt(tmp_path, made("smolvlm", PICTURES[:2]), [0, 1])
    failed = played(env, "play", ChatEncoder(tiny_seeing.saved("smolvlm")), shown, "two<end>")
    assert isinstance(failed, Failure) and "name the column of the images in task.images" in failed.detail


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"type": "image", "image": "/a"}, ("", [0], ["/a"])),
        (["abc", {"type": "image", "image": "/a"}, text_part("def")], ("abcd ... (2 characters more)", [3], ["/a"])),
        ((text_part("abcdef"), {"type": "image", "image": "/a"}), ("abcd ... (2 characters more)", [4], ["/a"])),
        ([1, 2], ("[1, ", [], [])),
        ({"type": "image"}, ("erro", [], [])),
        (["a", {"type": "image", "image": "/a"}, 3], ("erro", [], [])),
    ],
)
def test_the_result_of_a_tool_is_text_or_parts(result: Any, shown: tuple[str, list[int], list[str]]):
    def look() -> Any:
        """Looks."""
        return result

    async def used() -> dict[str, Any]:
        box = Toolbox(5.0, 4)
        await box.offer([look])
        return await box.use("look", {})

    answer = asyncio.run(used())
    assert answer["content"].startswith(shown[0])
    assert (answer.get("image_places", []), answer.get("images", [])) == shown[1:]
    assert answer.get("problem") == ("raised" if shown[0].startswith("erro") else None)


# --- the numbers -------------------------------------------------------------------------------------------------------


FAMILIES = [*few(["smolvlm", "gemma3", "qwen2_5_vl", "gemma4", "qwen3_5"], keep=1)]


def words_of(family: str, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(family)(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_have_the_numbers_of_the_whole_model_behind_an_image_of_a_later_turn(family: str):
    """Two rollouts of a prompt with an image, which are shown different ones after their first replies."""
    directory = made(family, PICTURES)
    engine = make_engine(directory, context_length=256)
    asked = prompt(family, directory, PICTURES[:1])
    known = KnownImages(directory)
    rows, numbers = [], []
    for second in (1, 2):
        one = run(engine, [greedy(f"{second}", asked, 3)])[f"{second}"]
        told = (*words_of(family, "\nlook: "), *prompt(family, directory, [PICTURES[second]], " so?"))
        before = engine.stats().cached_tokens
        other = run(engine, [greedy(f"{second}+", (*asked, *one.tokens, *told), 4)])[f"{second}+"]
        assert engine.stats().cached_tokens > before, "what was there is not forwarded again"
        count = len(told)
        rows.append(
            Row(
                asked,
                (*one.tokens, *told, *other.tokens),
                (*one.logprobs, *(0.0,) * count, *other.logprobs),
                (second / 2,) * (7 + count),
                (*(True,) * 3, *(False,) * count, *(True,) * 4),
                (0,) * (7 + count),
            )
        )
        numbers.append([0, second])
    whole = seeing(family)
    losses = []
    for row, shown in zip(rows, numbers, strict=True):
        ids = torch.tensor([known.in_vocabulary(row.prompt + row.tokens)])
        given = inputs(family, [PICTURES[number] for number in shown], ids)
        logprobs = whole(input_ids=ids, **given).logits[0][len(row.prompt) - 1 : -1].log_softmax(-1)
        for place in (place for place, kept in enumerate(row.mask) if kept):
            own = logprobs[place, row.tokens[place]]
            assert abs(float(own.detach()) - row.logprobs[place]) < 1e-5
            losses.append(-torch.exp(own - row.logprobs[place]) * row.advantages[place])
    torch.stack(losses).mean().backward()
    trained = {parameter.data_ptr(): parameter.grad for parameter in whole.parameters()}
    part = language_part(whole)
    expected = {name: trained[parameter.data_ptr()] for name, parameter in part.named_parameters()}
    groups = (Group(0, Prompt("p", "", asked), (), tuple(rows)),)
    _, found = gradients(trainer(directory), Batch(0, groups, 1.0))
    assert found.keys() == expected.keys()
    near(found, expected, {"qwen3_5": 1e-4, "gemma4": 1e-5}.get(family, 3e-6))


# --- a whole run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_killed_between_turns_shows_the_same_images_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "env.py").write_text(ENV)
    config = tiny_config(
        tmp_path,
        tiny_seeing.saved("smolvlm"),
        task={"images": ["image"]},
        reward={"function": ""},
        environment={"function": f"{tmp_path / 'env.py'}:twice", "workers": 1},
        train={"steps": 3},
        engine={"context_length": 128},
    )
    rows = []
    for number in range(24):
        (tmp_path / f"{number}.png").write_bytes(picture(number).data)
        rows.append({"prompt": "see?", "answer": "", "image": f"{number}.png"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    hold(tmp_path, 1)
    kill_when(config, (tmp_path / "middle").exists)
    release(tmp_path, 1)
    directory = tmp_path / "runs" / "tiny"
    assert headrace.train(resume=directory).reason == "finished"
    steps = list(read_steps(directory))
    assert len(steps) == 3 and not any(fact.lost_tokens or fact.failures for fact in of(directory, GroupEnded))
    words = len(tokenizer("smolvlm"))
    for group in (group for step in steps for group in step.groups):
        own = {token for token in group.prompt.tokens if token >= words}
        for row, rollout in zip(group.rows, group.scored, strict=True):
            first, second = rollout.episode.turns
            assert own and own == {token for token in second.context if token >= words} and max(row.prompt) < words
            assert row.tokens == first.completion.tokens + second.context + second.completion.tokens
            assert row.mask[len(first.completion.tokens) :].count(False) == len(second.context)
            assert second.messages[0]["images"] == list(group.prompt.images)
    page = write_report(directory).read_text()
    shown = {Path(group.prompt.images[0]).name[:12] for step in steps for group in step.groups}
    assert any(f"image {name}" in page for name in shown) and '<img src="data:image/png;base64,' in page
