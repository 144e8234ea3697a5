"""Rewards over HTTP: what a service is asked, every way in which it can fail, and that a group without a score is data with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.core.batches import Failure
from headrace.core.errors import ConfigError
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.engine.remote.connection import Connection
from headrace.episodes.scoring.config import RewardConfig, RewardSpec
from headrace.episodes.scoring.job import Effort, ScoringJob
from headrace.episodes.scoring.parts import SCORES, ScoreLog
from headrace.episodes.scoring.reward_scorer import RewardScorer
from headrace.episodes.scoring.services.config import ServiceConfig
from headrace.episodes.scoring.services.endpoint import FIRST_PAUSE, HttpPoster, HttpService
from headrace.facts.facts import ScorerAsked
from headrace.facts.telemetry import Telemetry
from headrace.facts.waits import Waits
from headrace.loop.world import virtual_time
from headrace.loop.world.world import FactList
from headrace.run.config import check, load_config
from headrace.testing.fake_service import FakeService, ScriptedPost

PROMPT = Prompt("train/0", "2 + 2 =", (7, 8), {"answer": "4"})


def service(**given: Any) -> ServiceConfig:
    return ServiceConfig(**{"name": "checked", "url": "http://service/score", "retries": 2, **given})


def episode(text: str, tokens: Sequence[int] = (1, 2)) -> Episode:
    done = Completion(tuple(tokens), (-1.0,) * len(tokens), (VersionSpan(0, 0, 0),), "stop", text)
    return Episode((Turn(PROMPT.tokens, done),))


def lengths(body: Mapping[str, Any]) -> list[Any]:
    return [float(len(text)) for text in body["completions"]]


def scored_by(config: RewardConfig, post: ScriptedPost | None, *texts: str, **more: Any) -> list[Scored | Failure]:
    """In virtual time: pauses and deadlines take none of ours."""

    async def main() -> list[Scored | Failure]:
        scorer = RewardScorer(config, poster=post, **more)
        try:
            return await scorer.score(PROMPT, [episode(text) for text in texts])
        finally:
            await scorer.close()

    return virtual_time.run(main())


def rewards(found: Iterable[Scored | Failure]) -> list[float]:
    return [one.reward for one in found if isinstance(one, Scored)]


def failures(found: Iterable[Scored | Failure]) -> list[str]:
    return [one.reason for one in found if isinstance(one, Failure)]


# -- what is asked, and what comes back --------------------------------------------------------------------------------------


def test_a_service_is_asked_once_for_a_group_and_its_scores_are_rewards():
    post = ScriptedPost(lengths)
    found = scored_by(RewardConfig(services=(service(weight=0.5),)), post, "4", "four")
    assert rewards(found) == [0.5, 2.0]
    assert [one.rewards for one in found if isinstance(one, Scored)] == [{"checked": 1.0}, {"checked": 4.0}]
    ((url, headers, body),) = post.asked
    assert url == "http://service/score" and headers["Content-Type"] == "application/json"
    assert body == {
        "scorer": "checked",
        "prompts": ["2 + 2 ="] * 2,
        "completions": ["4", "four"],
        "completion_tokens": [[1, 2]] * 2,
        "answer": ["4", "4"],
    }


def test_services_and_functions_are_one_sum(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def exact(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    config = RewardConfig(functions=(RewardSpec(f"{tmp_path}/mine.py:exact", 2.0),), services=(service(),))

    async def main() -> list[Scored | Failure]:
        scorer = RewardScorer(config, poster=ScriptedPost(lengths))
        try:
            return await scorer.score(PROMPT, [episode("4"), episode("five")])
        finally:
            await scorer.close()

    found = asyncio.run(main())
    assert rewards(found) == [3.0, 4.0]
    assert config.weights == {"exact": 2.0, "checked": 1.0}


def test_what_a_service_extracts_is_what_it_gets():
    post = ScriptedPost(lengths)
    found = scored_by(RewardConfig(services=(service(extract="last_number"),)), post, "so it is 42", "none")
    assert post.asked[0][2]["completions"] == ["42", ""]
    assert [one.extracted for one in found if isinstance(one, Scored)] == [{"checked": "42"}, {"checked": ""}]


def test_a_service_may_refuse_one_completion():
    post = ScriptedPost(lambda body: [1.0, {"error": "not a program"}])
    found = scored_by(RewardConfig(services=(service(),)), post, "a", "b")
    assert rewards(found) == [1.0] and failures(found) == ["reward_failed"] and len(post.asked) == 1
    assert isinstance(found[1], Failure) and found[1].detail == "checked: not a program"


# -- failures ----------------------------------------------------------------------------------------------------------------

LASTING = {
    "down": ("reward_unreachable", "Connection refused", 3),
    "hang": ("reward_timeout", "no answer within 60 s", 3),
    "500": ("reward_unreachable", "answers 500", 3),
    "busy": ("reward_unreachable", "answers 503", 3),
    "html": ("reward_bad_answer", "not JSON: '<html>", 3),
    "nan": ("reward_bad_answer", "not JSON", 3),
    "twice": ("reward_bad_answer", "two values of 'scores'", 3),
    "short": ("reward_wrong_count", "0 rewards came back for 2 completions", 3),
    "half": ("reward_unreachable", "in the middle", 3),
    "unauthorised": ("reward_refused", "token_file or token_env", 1),
    "redirect": ("reward_refused", "redirects to http://elsewhere/", 1),
}


@pytest.mark.parametrize("fault", sorted(LASTING))
def test_a_service_that_keeps_failing_is_a_reason_after_its_attempts(fault):
    reason, words, attempts = LASTING[fault]
    post = ScriptedPost(lengths, faults=[fault] * 9)
    found = scored_by(RewardConfig(services=(service(),)), post, "a", "b")
    assert failures(found) == [reason] * 2 and len(post.asked) == attempts
    failed = found[0]
    assert isinstance(failed, Failure) and failed.detail.startswith("checked: ") and words in failed.detail
    assert failed.outage == (reason == "reward_unreachable")


@pytest.mark.parametrize("fault", sorted(one for one, (*_, attempts) in LASTING.items() if attempts > 1))
def test_a_fault_that_passes_costs_an_attempt_and_no_reward(fault):
    post = ScriptedPost(lengths, faults=[fault])
    assert rewards(scored_by(RewardConfig(services=(service(),)), post, "a", "bc")) == [1.0, 2.0]
    assert len(post.asked) == 2
    assert len({headers["Idempotency-Key"] for _, headers, _ in post.asked}) == 1, "the same request, asked again"


BAD: list[tuple[Any, str]] = [
    ({"scores": [1.0, None]}, "reward_none"),
    ({"scores": [1.0, "2"]}, "reward_wrong_type"),
    ({"scores": [1.0, [2.0]]}, "reward_wrong_type"),
    ({"scores": 3}, "reward_wrong_type"),
    ({"scores": None}, "reward_none"),
    ({"rewards": [1.0, 2.0]}, "reward_bad_answer"),
    ([1.0, 2.0], "reward_bad_answer"),
    ({"scores": [1.0, 2.0, 3.0]}, "reward_wrong_count"),
    ({"scores": [1.0, {"error": "a", "more": 1}]}, "reward_wrong_type"),
]


@pytest.mark.parametrize(("answer", "reason"), BAD)
def test_an_answer_that_is_none_is_never_a_zero(answer, reason):
    class Post(ScriptedPost):
        async def post(self, *given: Any) -> Any:
            import msgspec

            from headrace.episodes.scoring.services.endpoint import HttpAnswer

            await super().post(*given)
            return HttpAnswer(200, {}, msgspec.json.encode(answer))

    post = Post(lengths)
    found = scored_by(RewardConfig(services=(service(retries=1),)), post, "a", "b")
    assert failures(found) == [reason] * 2 and len(post.asked) == 2


def ask(config: ServiceConfig, post: ScriptedPost) -> tuple[Any, Effort, float]:
    async def main() -> tuple[Any, Effort, float]:
        effort, loop = Effort(), asyncio.get_running_loop()
        job = ScoringJob("?", ("a",), ((1,),), {})
        began = loop.time()
        return await HttpService(config, post).call(job, effort), effort, loop.time() - began

    return virtual_time.run(main())


def test_pauses_grow_and_retry_after_is_kept():
    _, effort, seconds = ask(service(retries=3), ScriptedPost(lengths, faults=["500"] * 3))
    assert (effort.attempts, effort.retries) == (4, 3)
    assert FIRST_PAUSE * 3.5 <= seconds <= FIRST_PAUSE * 7
    _, _, seconds = ask(service(retries=3), ScriptedPost(lengths, faults=["busy"] * 3))
    assert seconds == pytest.approx(6.0, abs=1.5), (
        "twice two seconds that the server asked for, or its own pause where that is longer"
    )
    again = ask(service(retries=3), ScriptedPost(lengths, faults=["500"] * 3))[2]
    assert again == ask(service(retries=3), ScriptedPost(lengths, faults=["500"] * 3))[2], (
        "no chance that a replay has not"
    )


def test_a_deadline_ends_what_retries_would_not():
    values, effort, seconds = ask(
        service(retries=100, timeout=50.0, deadline=120.0), ScriptedPost(faults=["hang"] * 99)
    )
    assert [value.reason for value in values] == ["reward_timeout"] and seconds <= 120.0 and effort.attempts == 3
    values, effort, seconds = ask(service(retries=100, deadline=61.0), ScriptedPost(faults=["busy"] * 99))
    assert "no usable answer within 61 s" in values[0].detail and "503" in values[0].detail and seconds < 61.0


def test_the_time_in_which_the_process_was_stopped_is_no_part_of_the_deadline():
    async def main() -> tuple[Any, int]:
        loop, effort = asyncio.get_running_loop(), Effort()
        assert isinstance(loop, virtual_time.VirtualTimeLoop)
        post = ScriptedPost(lengths, faults=["500", "down"])
        scoring = asyncio.ensure_future(HttpService(service(), post).call(ScoringJob("?", ("a",), ((1,),), {}), effort))
        loop.call_later(0.1, loop.jump, 1000.0)
        return await scoring, effort.attempts

    assert virtual_time.run(main()) == ([1.0], 3)


def test_requests_wait_for_their_turn_which_is_no_part_of_the_deadline():
    post = ScriptedPost(lengths, seconds=40.0)
    config = RewardConfig(services=(service(concurrency=2, timeout=60.0, deadline=60.0),))

    async def main() -> list[list[Scored | Failure]]:
        scorer = RewardScorer(config, poster=post)
        return await asyncio.gather(*(scorer.score(PROMPT, [episode("a")]) for _ in range(6)))

    found = virtual_time.run(main())
    assert [rewards(one) for one in found] == [[1.0]] * 6 and post.most == 2


@given(st.lists(st.sampled_from([None, *sorted(LASTING)]), max_size=6), st.integers(0, 4))
@settings(max_examples=60)
def test_whatever_goes_wrong_a_group_gets_its_scores_or_a_reason(faults, retries):
    post = ScriptedPost(lengths, faults=faults)
    found = scored_by(RewardConfig(services=(service(retries=retries),)), post, "a", "bcd")
    assert len(post.asked) <= retries + 1
    first = next((i for i, fault in enumerate([*faults, None]) if fault in (None, "unauthorised", "redirect")), 0)
    works = first <= retries and [*faults, None][first] is None
    assert (rewards(found) == [1.0, 3.0]) == works and len(failures(found)) == (0 if works else 2)


# -- a real server -----------------------------------------------------------------------------------------------------------


def over_http(work: Callable[[FakeService], Awaitable[Any]], **given: Any) -> Any:
    async def main() -> Any:
        async with FakeService(lengths, **given) as server:
            return await work(server)

    return asyncio.run(main())


def test_over_a_real_connection(tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("secret-word\n")
    token.chmod(0o600)
    faults = ["down", "html", "half", None]  # the others differ in what comes back, which needs no connection

    async def work(server: FakeService) -> list[Scored | Failure]:
        config = service(url=f"{server.url}/score", retries=9, token_file=str(token))
        scorer = RewardScorer(RewardConfig(services=(config,)))
        try:
            found = await scorer.score(PROMPT, [episode("abc")])
        finally:
            await scorer.close()
        assert len(server.keys) == len(faults) and len(set(server.keys)) == 1
        return found

    assert rewards(over_http(work, faults=faults, token="secret-word")) == [3.0]


@pytest.mark.parametrize(
    ("given", "more", "reason"),
    [
        ({"faults": ["hang"]}, {"timeout": 0.2, "retries": 0}, "reward_timeout"),
        ({"token": "other"}, {}, "reward_refused"),
    ],
)
def test_a_server_that_hangs_or_refuses_over_a_real_connection(given, more, reason):
    async def work(server: FakeService) -> list[str]:
        scorer = RewardScorer(RewardConfig(services=(service(url=f"{server.url}/score", **more),)))
        found = failures(await scorer.score(PROMPT, [episode("a")]))
        await scorer.close()
        assert len(server.keys) == 1
        return found

    assert over_http(work, **given) == [reason]


@pytest.mark.parametrize("client", ["scorer", "engine"])
def test_a_second_answer_to_one_request_is_not_that_to_the_next(client: str):
    """As of a proxy that retries. It comes when the first has been read, and the connection could be used again."""
    doubled = []

    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                asked = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(asked), asked)
                writer.write(answer)
                await asyncio.sleep(0.05)
                writer.write(answer)
                doubled.append(asked)
        writer.close()

    async def main() -> list[Any]:
        server = await asyncio.start_server(twice, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        poster, engine, found = HttpPoster(), Connection(url), list[Any]()
        for number in range(3):
            if client == "scorer":
                found.append(json.loads((await poster.post(url, b"%d" % number, {}, 9.0)).body))
            else:
                found.append(await engine.post("/x", number, 9.0))
            await asyncio.sleep(0.15)
        await poster.close()
        await engine.close()
        server.close()
        return found

    assert asyncio.run(main()) == [0, 1, 2] and len(doubled) == 3


def test_nobody_listens():
    async def main() -> list[Scored | Failure]:
        async with FakeService(lengths) as server:
            url = server.url
        scorer = RewardScorer(RewardConfig(services=(service(url=url, retries=0),)))
        try:
            return await scorer.score(PROMPT, [episode("a")])
        finally:
            await scorer.close()

    assert failures(asyncio.run(main())) == ["reward_unreachable"]


# -- settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": "service/score"}, "is not an address"),
        ({"url": "http://me:secret@service"}, "token_file or token_env"),
        ({"token_file": "a", "token_env": "B"}, "keep one"),
        ({"timeout": 10.0, "deadline": 5.0}, "ends before one attempt"),
        ({"form": "min"}, "needs segments"),
        ({"segments": "\n", "compares": True}, "compares has no meaning"),
        ({"segments": "\n", "extract": "last_number"}, "extract has no meaning"),
        ({"concurrency": 0}, "greater than 0"),
        ({"name": "a b"}, "pattern"),
    ],
)
def test_settings_that_cannot_work_are_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        service(**given)


def test_names_of_parts_are_distinct():
    with pytest.raises(ValidationError, match="are called checked"):
        RewardConfig(services=(service(), service()))
    with pytest.raises(ValidationError, match="are called exact"):
        RewardConfig(function="mine.py:exact", services=(service(name="exact"),))
    with pytest.raises(ValidationError, match="both score steps"):
        RewardConfig(services=(service(segments="\n"), service(name="other", segments="\n")))


MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "task": {"kind": "reasoning_gym", "name": "chain_sum"}}


def test_a_deadline_beyond_the_end_of_waits_is_refused_with_the_run():
    tree = {**MINIMAL, "reward": {"services": [{"name": "slow", "url": "http://a", "deadline": 4000.0}]}}
    with pytest.raises(ConfigError, match=r"slow may take deadline = 4000 s, and a wait of watch.stop_after = 1800 s"):
        load_config(tree)


def test_segments_need_something_that_scores_them():
    tree = {**MINIMAL, "reward": {"services": [{"name": "one", "url": "http://a"}]}, "algo": {"credit": "segment"}}
    with pytest.raises(ConfigError, match="needs scores of steps"):
        load_config(tree)
    tree["reward"] = {"services": [{"name": "one", "url": "http://a", "segments": "\n\n"}]}
    assert check(load_config(tree)) == []


def test_tokens_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "open").write_text("x")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "mine").write_text("word\n")
    (tmp_path / "mine").chmod(0o600)
    assert service(token_file=str(tmp_path / "mine")).token() == "word"
    with pytest.raises(ConfigError, match="may be read by others"):
        service(token_file=str(tmp_path / "open")).token()
    monkeypatch.delenv("HEADRACE_TEST_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="HEADRACE_TEST_TOKEN, which is not set"):
        RewardScorer(RewardConfig(services=(service(token_env="HEADRACE_TEST_TOKEN"),)), poster=ScriptedPost())
    monkeypatch.setenv("HEADRACE_TEST_TOKEN", "two words")
    with pytest.raises(ConfigError, match="must hold one token") as refused:
        service(token_env="HEADRACE_TEST_TOKEN").token()
    assert "two words" not in str(refused.value)
    monkeypatch.setenv("HEADRACE_TEST_TOKEN", "word")
    post = ScriptedPost(lengths)
    scored_by(RewardConfig(services=(service(token_env="HEADRACE_TEST_TOKEN"),)), post, "a")
    assert post.asked[0][1]["Authorization"] == "Bearer word"


def test_a_relative_token_file_lies_beside_the_config(tmp_path: Path):
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[task]\nkind = "reasoning_gym"\nname = "chain_sum"\n'
        '[[reward.services]]\nname = "one"\nurl = "http://a/"\ntoken_file = "key"\n'
    )
    (one,) = load_config(tmp_path / "run.toml").reward.services
    assert one.token_file == str(tmp_path / "key") and one.url == "http://a"


# -- what is recorded --------------------------------------------------------------------------------------------------------


def test_each_call_is_a_fact_and_each_wait_is_named():
    facts = FactList()

    async def main() -> list[str]:
        clock = asyncio.get_running_loop().time
        waits = Waits(facts.record, clock, 10.0, 10_000.0)
        post = ScriptedPost(lengths, faults=["500"], seconds=3.0)
        scorer = RewardScorer(
            RewardConfig(services=(service(),)), poster=post, telemetry=Telemetry(facts.record, clock, waits)
        )
        scoring = asyncio.ensure_future(scorer.score(PROMPT, [episode("a"), episode("b")]))
        await asyncio.sleep(1.0)
        seen = [str(one) for one in waits.lasting()]
        await scoring
        return seen

    assert virtual_time.run(main()) == ["scoring has waited 1 s for the service checked"]
    (fact,) = [fact for fact in facts.facts if isinstance(fact, ScorerAsked)]
    assert (fact.scorer, fact.what, fact.completions, fact.attempts, fact.retries) == ("checked", "service", 2, 2, 1)
    assert 6.0 < fact.seconds < 7.0 and fact.failures == {}


def test_scores_that_were_received_are_not_asked_for_again_after_a_kill(tmp_path: Path):
    """A group waits for its second scorer when the run is killed: the first one is not asked again."""
    config = RewardConfig(services=(service(), service(name="second", url="http://second/score")))
    marks = {one.name: one.url for one in config.services}

    async def life(post: ScriptedPost, kill: bool) -> list[Scored | Failure]:
        log = ScoreLog(marks)
        log.open(tmp_path, pytest.fail)
        scorer = RewardScorer(config, poster=post, scores=log)
        scoring = asyncio.ensure_future(scorer.score(PROMPT, [episode("ab")]))
        if kill:
            await asyncio.sleep(1.0)
            scoring.cancel()
            return []
        return await scoring

    class Stuck(ScriptedPost):
        async def post(self, url: str, *given: Any) -> Any:
            if "second" in url:
                await asyncio.sleep(1e9)
            return await super().post(url, *given)

    virtual_time.run(life(Stuck(lengths), kill=True))
    post = ScriptedPost(lengths)
    assert rewards(virtual_time.run(life(post, kill=False))) == [4.0]
    assert [url for url, _, _ in post.asked] == ["http://second/score"]
    marks["checked"] = "http://elsewhere"  # other settings: the old score is not theirs
    changed = ScriptedPost(lengths)
    virtual_time.run(life(changed, kill=False))
    assert "http://service/score" in [url for url, _, _ in changed.asked]


def opened(directory: Path, warn: Any = pytest.fail) -> ScoreLog:
    log = ScoreLog({})
    log.open(directory, warn)
    return log


def test_failures_are_not_recorded_and_damage_costs_a_request(tmp_path: Path):
    job, said = ScoringJob("?", ("a",), ((1,),), {}), list[str]()
    log = opened(tmp_path)
    log.keep("one", job, [Failure("reward_timeout")])
    log.keep("two", job, [1.5])
    log.keep("three", job, [(0.5, 1.0)])
    log.close()
    lines = (tmp_path / SCORES).read_bytes().splitlines()
    assert len(lines) == 2
    (tmp_path / SCORES).write_bytes(lines[0] + b"\nnonsense\n" + lines[1] + b"\n" + lines[1][:20])
    again = opened(tmp_path, said.append)
    assert said == [f"{tmp_path / SCORES}: line 2 is damaged: these scores are not used; their groups are scored again"]
    assert again.find("one", job) is None
    assert again.find("two", job) == [1.5] and again.find("three", job) == [(0.5, 1.0)]
    assert again.find("two", job) is None, "once: what comes again is asked again"


def test_no_changed_byte_changes_a_score(tmp_path: Path):
    job = ScoringJob("?", ("a",), ((1,),), {})
    log = opened(tmp_path)
    log.keep("one", job, [0.5])
    log.close()
    whole = (tmp_path / SCORES).read_bytes()
    for place in range(len(whole) - 1):  # without the last newline a line is one that a kill cut off
        for byte in {*b'05"}1', whole[place] ^ 1} - {whole[place]}:
            messages: list[str] = []
            (tmp_path / SCORES).write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            log = opened(tmp_path, messages.append)
            assert log.find("one", job) is None and len(messages) == 1, f"byte {place} is {bytes([byte])!r}"
            log.close()
            opened(tmp_path).close()  # which says it no more


def test_a_log_that_cannot_be_written_warns_and_goes_on(tmp_path: Path):
    messages: list[str] = []
    log = ScoreLog({})
    log.open(tmp_path / "gone", messages.append)
    log.keep("one", ScoringJob("?", ("a",), ((1,),), {}), [1.0])
    assert len(messages) == 1 and "not recorded any more" in messages[0] and os.listdir(tmp_path) == []
