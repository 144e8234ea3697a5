"""Texts of megabytes from one client: they are refused by work that does not grow with them, and what is long and fits is read in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.protocols import Limits
from headrace.episodes.rollout_session import Played
from headrace.episodes.scoring.extract import answer_tag, code_block, last_number
from headrace.episodes.scoring.services.config import JudgeConfig
from headrace.episodes.scoring.services.endpoint import BadAnswer
from headrace.episodes.scoring.services.judge import check_own_words, read_ranking, read_score, read_verdict
from headrace.models.chat import LONG, ChatEncoder, off_loop
from headrace.models.control_tokens import Written
from headrace.testing.fake_engine import FakeEngine
from support import tool_chats
from support.gateway.gateway_agent import Asks, played, user
from support.gateway.written_turns import MERGED, Model
from support.served import faked

CONTEXT, LONGEST = 400, 120
WORDS = "tool dollar " * 50_000
"""600,000 characters. A token stands for 24 at most: it is refused by its characters."""
MANY = " " * 9 * CONTEXT
"""Its characters might be few tokens. They are counted."""


class Counting(ChatEncoder):
    """Counts the characters that become tokens, and remembers where."""

    read = 0

    def __init__(self, where: Path) -> None:
        tool_chats.save_tokenizer(where, tool_chats.PLAIN)
        super().__init__(where)
        self._tokenizer.add_tokens([*MERGED, "a" * 24])
        self.threads: set[int] = set()

    def _tokens(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        self.read += len(text)
        self.threads.add(threading.get_ident())
        return super()._tokens(text, add_special_tokens)


def serving(where: Path, case: Callable[[openai.AsyncOpenAI, Counting], Awaitable[None]]) -> None:
    async def go() -> None:
        encoder = Counting(where)
        engine = FakeEngine(seconds_per_token=0.0005, context_length=CONTEXT)
        async with asyncio.timeout(LONGEST), faked(where, engine) as (client, served):
            served.encoder = encoder
            asks = openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0)
            await case(asks, encoder)
            assert served.under_way == 0

    asyncio.run(go())


@pytest.mark.parametrize("text", [WORDS, MANY])
def test_a_text_that_cannot_fit_is_refused_by_a_server(text: str, tmp_path: Path) -> None:
    async def case(client: openai.AsyncOpenAI, encoder: Counting) -> None:
        calls: list[Any] = [
            client.completions.create(model="tiny", prompt=text),
            client.chat.completions.create(model="tiny", messages=[user(text)]),
        ]
        for call in calls:
            with pytest.raises(openai.BadRequestError, match="maximum context length is .* characters ha(s|ve) more"):
                await call
        assert encoder.read <= (0 if text is WORDS else 2 * (len(text) + 100))

    serving(tmp_path, case)


def test_a_hundred_thousand_prompts_are_counted_before_one_of_them_is_read(tmp_path: Path) -> None:
    async def case(client: openai.AsyncOpenAI, encoder: Counting) -> None:
        with pytest.raises(
            openai.BadRequestError, match="one request may ask for 128 completions, this one asks for 100000"
        ):
            await client.completions.create(model="tiny", prompt=[""] * 100_000)
        assert encoder.read == 0

    serving(tmp_path, case)


def test_log_probs_of_a_whole_vocabulary_are_refused(tmp_path: Path) -> None:
    """And with the number that the message names, they are had."""

    async def case(client: openai.AsyncOpenAI, encoder: Counting) -> None:
        with pytest.raises(
            openai.BadRequestError, match="49152 most probable tokens of a position are too many; ask for at most 1024"
        ):
            await client.chat.completions.create(model="tiny", messages=[user("?")], logprobs=True, top_logprobs=49152)
        await client.chat.completions.create(
            model="tiny", messages=[user("?")], logprobs=True, top_logprobs=1024, max_tokens=2
        )

    serving(tmp_path, case)


@pytest.mark.parametrize("text", [WORDS, MANY])
def test_a_message_that_no_path_can_hold_cuts_off_its_own_rollout(text: str, tmp_path: Path) -> None:
    encoder = Counting(tmp_path)
    model = Model(encoder, ["so<|im_end|>"] * 3)

    async def case(asks: Asks) -> None:
        first = await asks.said(user("?"))
        before = encoder.read
        reply = (await asks.chat(user("?"), first, user(text))).choices[0]
        assert (reply.message.content, reply.finish_reason) == ("", "length")
        assert encoder.read - before <= (0 if text is WORDS else len(text) + 100)
        completion = await asks.client.completions.create(model="gpt-5", prompt=text)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("", "length")
        assert encoder.read - before <= (0 if text is WORDS else 2 * (len(text) + 100))

    found = played(model, case, limits=Limits(turns=9, tokens=CONTEXT))
    assert isinstance(found, Played) and found.episode.cut == "tokens" and len(found.episode.turns) == 1


def test_a_long_text_that_fits_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    text = "1 + 2 = 3. " * (LONG // 10)
    encoder = Counting(tmp_path)
    model = Model(encoder, ["so<|im_end|>"])

    async def case(asks: Asks) -> None:
        assert (await asks.said(user(text))).content == "so"

    assert isinstance(played(model, case), Played) and threading.get_ident() not in encoder.threads

    async def waits() -> str:
        """The work ends only if the loop goes on."""
        goes_on = threading.Event()
        asyncio.get_running_loop().call_later(0.01, goes_on.set)
        return await off_loop(LONG, lambda: "done" if goes_on.wait(LONGEST) else "stood still")

    assert asyncio.run(waits()) == "done"


@cache
def one_encoder() -> Counting:
    return Counting(Path(mkdtemp()))


@given(
    st.lists(
        st.tuples(st.sampled_from(["a" * 24, "a", "tool ", "é", " ", "<|im_end|>", "1"]), st.integers(1, 6000)),
        max_size=6,
    )
)
@settings(max_examples=40)
def test_a_text_that_fits_is_never_called_too_long(pieces: list[tuple[str, int]]) -> None:
    encoder = one_encoder()
    text = "".join(word * times for word, times in pieces)
    exact = len(encoder.encode(Written(text)))
    assert not encoder.surely_longer(text, exact)
    most, doubt = exact // 2, 128 * (1 + len(text) // (1 << 16))  # tokens that cuts between pieces might add
    assert encoder.surely_longer(text, most) or len(text) <= 8 * most or exact - doubt <= most


# --- texts that a model repeats ----------------------------------------------------------------------------------------

JUDGE = JudgeConfig(name="style", url="http://judge/v1", model="m", criterion="short")
READERS: dict[str, Callable[[str], object]] = {
    "last_number": last_number,
    "answer_tag": answer_tag,
    "code_block": code_block,
    "a score": lambda text: read_score(text, JUDGE),
    "a ranking": lambda text: read_ranking(text, 2),
    "a verdict": read_verdict,
    "what is judged": lambda text: check_own_words("SCORE: 7", text),
    "what a judge says": lambda text: check_own_words(text, "SCORE: 7"),
}
REPEATED = ["\n", " ", "(", ">", "1,", "A > ", "```\n", "<answer>", "</answer>", "SCORE: 7\n", "VERDICT: A "]


@pytest.mark.parametrize("reader", READERS)
def test_a_text_that_repeats_itself_is_read_by_work_that_grows_with_it(reader: str) -> None:
    """These read what models write, in the event loop. Where each part looks at all that follows, 50,000 characters take seconds to minutes."""
    for begin, part in itertools.product(("", "SCORE: 7", "RANKING: A > B", "VERDICT: A"), REPEATED):
        began = time.thread_time()
        with contextlib.suppress(BadAnswer):
            READERS[reader](begin + part * (50_000 // len(part)))
        assert time.thread_time() - began < 1.0, (begin, part)
