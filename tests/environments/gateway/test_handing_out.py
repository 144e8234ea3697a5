"""Rollouts that are handed out: who may take them, how they end, and what becomes of an agent that vanishes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from yarl import URL

import headrace
from headrace.cli import main
from headrace.core.batches import Failure
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.types import Prompt
from headrace.episodes.environments.agents import outside_agents
from headrace.episodes.environments.agents.handing_out import open_handing_out
from headrace.episodes.environments.agents.outside_agents import OutsideAgents
from headrace.episodes.environments.config import EnvironmentConfig
from headrace.episodes.environments.gateway.history_trees import GatewayRollout
from headrace.episodes.environments.gateway.turn_request import OpenedWith
from headrace.episodes.environments.kinds import ADDRESS_FILE
from headrace.episodes.episodes import roll_out
from headrace.episodes.rollout_session import Played
from headrace.run.config import load_config
from support import tool_chats
from support.gateway.gateway_agent import LONGEST, user
from support.gateway.written_turns import Model, encoder_of

PACKAGE = str(Path(headrace.__file__).parents[1])


class Service:
    """Something that calls agents, and knows the address of the run."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.address, self._session = address, session

    async def post(self, url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """`body`: bytes are sent as they are."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(URL(url, encoded=True), data=data, headers=headers) as answer:
            return answer.status, await answer.json() if answer.content_type == "application/json" else None

    async def take(self, wait: float = LONGEST) -> Any:
        status, lease = await self.post(f"{self.address}/next", {"wait": wait})
        assert status == 200
        return lease

    async def play(self, lease: Any) -> str:
        """The agent: it knows nothing but the variables of its rollout."""
        names = lease["environment"]
        async with openai.AsyncOpenAI(base_url=names["OPENAI_BASE_URL"], api_key=names["OPENAI_API_KEY"]) as client:
            reply = await client.chat.completions.create(model="a", messages=[user(lease["prompt"])])
            return reply.choices[0].message.content or ""


Case = Callable[[Service], Awaitable[None]]


def handed_out(
    place: Path, case: Case, rollouts: int = 1, *, alone: bool = True, **settings: Any
) -> list[Played | Failure]:
    encoder = encoder_of(place / "model", tool_chats.PLAIN)
    model = Model(encoder, ["so<|im_end|>"] * 9)
    config = EnvironmentConfig(kind="gateway", **settings)

    async def whole() -> list[Played | Failure]:
        kind = open_handing_out(OpenedWith(config=config, encoder=encoder, alone=alone, log=place / "log"))
        prompt = Prompt("train/7", "hello", (1,), columns={"answer": "so"})
        playing = asyncio.ensure_future(roll_out(kind, prompt, range(rollouts), ask=model, decode=encoder.decode))
        try:
            async with asyncio.timeout(LONGEST), aiohttp.ClientSession() as session:
                while not (place / ADDRESS_FILE).exists():
                    await asyncio.sleep(0.01)
                await case(Service((place / ADDRESS_FILE).read_text().strip(), session))
                return await playing
        finally:
            playing.cancel()
            await kind.close()

    return asyncio.run(whole())


def test_a_rollout_is_taken_played_and_ended(tmp_path: Path) -> None:
    async def case(service: Service) -> None:
        assert stat.S_IMODE((tmp_path / ADDRESS_FILE).stat().st_mode) == 0o600
        leases = [await service.take() for _ in range(3)]
        assert [lease["seed"] for lease in leases] == [0, 1, 2]
        assert all(
            (lease["id"], lease["prompt"], lease["columns"]) == ("train/7", "hello", {"answer": "so"})
            for lease in leases
        )
        assert not leases[0]["judged"] and leases[0]["seconds"] == 600
        ends = [{"reward": 1.5}, {"rewards": {"right": 1, "short": -0.5}}, {"failed": "its database is gone"}]
        for lease, end in zip(leases, ends, strict=True):
            assert await service.play(lease) == "so"
            assert await service.post(lease["end"], end) == (200, {"ended": True})

    one, two, three = handed_out(tmp_path, case, 3)
    assert isinstance(one, Played) and one.rewards == {"agent": 1.5} and len(one.episode.turns) == 1
    assert isinstance(two, Played) and two.rewards == {"right": 1.0, "short": -0.5}
    assert isinstance(three, Failure) and (three.reason, three.detail) == ("agent_failed", "its database is gone")
    assert not (tmp_path / ADDRESS_FILE).exists(), "it is closed"


def test_an_agent_that_vanishes_is_a_failure_of_its_own_rollout(tmp_path: Path) -> None:
    async def case(service: Service) -> None:
        vanished, silent = await service.take(), await service.take()
        await service.play(vanished)
        while (await service.post(silent["end"], {"reward": [1]}))[0] != 401:  # 400 as long as it is awaited
            await asyncio.sleep(0.05)

    for found in handed_out(tmp_path, case, 2, seconds=3.0):
        assert isinstance(found, Failure) and found.reason == "environment_timeout"
        assert "has not ended it after 3 s between its turns" in found.detail


def test_an_end_that_arrives_when_the_rollout_is_over_is_not_confirmed(tmp_path: Path) -> None:
    """Its first byte comes before the rollout is given up, and its last one after."""

    async def case(service: Service) -> None:
        lease = await service.take()

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"reward"'
            while (await service.post(lease["end"], {"reward": [1]}))[0] != 401:  # 400 as long as it is awaited
                await asyncio.sleep(0.05)
            yield b": 1.0}"

        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession() as slow, slow.post(lease["end"], data=slowly(), headers=headers) as answer:
            assert (answer.status, "the rollout is over" in await answer.text()) == (409, True)

    (found,) = handed_out(tmp_path, case, seconds=1.0)
    assert isinstance(found, Failure) and found.reason == "environment_timeout"


def test_a_rollout_that_is_ended_in_the_last_moment_has_its_reward() -> None:
    """Whoever ended it was told that it counts."""

    async def whole() -> Any:
        loop, rollout = asyncio.get_running_loop(), GatewayRollout(lambda role: pytest.fail("no turn"))
        ended: asyncio.Future[Any] = loop.create_future()
        loop.call_later(0.03, time.sleep, 0.1)  # the limit, and then the end, come in one round of the loop
        loop.call_later(0.06, ended.set_result, {"agent": 1.0})
        return await rollout.until(ended, 0.05, 0)

    assert asyncio.run(whole()) == {"agent": 1.0}


def test_an_end_without_a_turn_is_a_failure(tmp_path: Path) -> None:
    async def case(service: Service) -> None:
        assert (await service.post((await service.take())["end"], {"reward": 1}))[0] == 200

    (found,) = handed_out(tmp_path, case)
    assert isinstance(found, Failure) and found.reason == "environment_turns"


def test_strangers_get_401_and_the_address_takes_rollouts_only(tmp_path: Path) -> None:
    async def case(service: Service) -> None:
        base = service.address.rsplit("/", 1)[0]
        lease = await service.take()
        own = lease["end"].removesuffix("/end")
        for url, status in (
            (f"{base}/next", 401),
            (f"{service.address}x/next", 401),
            (f"{own}/next", 404),
            (f"{service.address}/end", 404),
            (f"{service.address}/v1/chat/completions", 404),
            (f"{base}/end", 401),
        ):
            assert (await service.post(url, {"wait": 0}))[0] == status, url
        assert (await service.post(f"{service.address}/next", {"wait": 0}))[0] == 204, "all are taken"
        assert (await service.post(f"{service.address}/next", {"wait": -1}))[0] == 400
        await service.play(lease)
        await service.post(lease["end"], {"reward": 0})
        while (status := (await service.post(lease["end"], {"reward": 1}))[0]) == 409:
            await asyncio.sleep(0.01)
        assert status == 401, "its secret is worth nothing any more"

    (found,) = handed_out(tmp_path, case)
    assert isinstance(found, Played) and found.rewards == {"agent": 0.0}


def test_what_an_agent_is_given_ends_no_rollout(tmp_path: Path) -> None:
    """Neither its own nor another one, whatever it puts together from its environment variables."""

    async def case(service: Service) -> None:
        leases = [await service.take() for _ in range(2)]
        known = [text for lease in leases for text in lease["environment"].values()]
        secrets = {part for text in known for part in text.split("/") if len(part) > 20}
        root = service.address.rsplit("/", 1)[0]
        for own in leases:
            await service.play(own)
            for secret in secrets:
                assert secret not in own["end"] and secret not in service.address
                for path in ("end", "v1/end", "../end", "next", "%2e%2e/end"):
                    headers = {"Authorization": f"Bearer {own['environment']['OPENAI_API_KEY']}"}
                    status, _ = await service.post(f"{root}/{secret}/{path}", {"reward": 1000.0}, headers)
                    assert status in (400, 401, 404, 405), path
        for lease in leases:
            status, answer = await service.post(lease["end"], {"reward": 1e300})
            assert status == 400 and "at most" in answer["error"]["message"]
            assert await service.post(lease["end"], {"reward": 0.5}) == (200, {"ended": True})

    assert [found.rewards for found in handed_out(tmp_path, case, 2) if isinstance(found, Played)] == [
        {"agent": 0.5}
    ] * 2


@pytest.mark.parametrize(
    ("alone", "end", "words"),
    [
        (True, {}, "no reward is given"),
        (True, {"rewards": {}}, "no reward is given"),
        (True, {"reward": 1, "failed": "no"}, "reward and failed are both given"),
        (True, {"reward": "1"}, "Expected `float | null`"),
        (True, {"score": 1}, "unknown field `score`"),
        (True, {"rewards": {"a.b": 1e300, "a": {"b": 1}}}, "a.b is given twice"),
        (True, b'{"reward": 0, "reward": 1}', "reward is given twice"),
        (True, b'{"rewards": {"a": 0, "a": 1}}', "a is given twice"),
        (False, {"reward": 1}, "reward.function of the run gives the reward; send {}"),
    ],
)
def test_an_end_that_means_nothing_is_refused_and_may_be_sent_again(
    alone: bool, end: Any, words: str, tmp_path: Path
) -> None:
    async def case(service: Service) -> None:
        lease = await service.take()
        assert lease["judged"] is not alone
        await service.play(lease)
        status, answer = await service.post(lease["end"], end)
        assert status == 400 and words in answer["error"]["message"]
        assert (await service.post(lease["end"], {"reward": 2} if alone else {}))[0] == 200

    (found,) = handed_out(tmp_path, case, alone=alone)
    assert isinstance(found, Played) and found.rewards == ({"agent": 2.0} if alone else {})


def test_an_end_with_many_rewards_holds_up_nobody(tmp_path: Path) -> None:
    """They were compared each with each."""

    async def case(service: Service) -> None:
        lease, many = await service.take(), {f"r{number}": 0 for number in range(60_000)}
        await service.play(lease)
        began = time.thread_time()
        status, answer = await service.post(lease["end"], {"rewards": {**many, "a.b": 1, "a": {"b": 1}}})
        assert status == 400 and "a.b is given twice" in answer["error"]["message"]
        status, answer = await service.post(lease["end"], json.dumps({"rewards": many})[:-2].encode() + b', "r9": 1}}')
        assert status == 400 and "r9 is given twice" in answer["error"]["message"]
        assert time.thread_time() - began < 5.0
        assert (await service.post(lease["end"], {"reward": 2}))[0] == 200

    (found,) = handed_out(tmp_path, case)
    assert isinstance(found, Played)


AGENT = """
import json, os, sys
from urllib.request import Request, urlopen
given = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": given["prompt"]}]}).encode()
text = json.load(urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"Content-Type": "application/json"})))
if given["seed"] == 1:
    sys.exit("no such thing")
print("done" if given["seed"] == 2 else float(text["choices"][0]["message"]["content"] == given["columns"]["answer"]))
"""


def test_a_command_plays_the_rollouts_of_a_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []

    async def case(service: Service) -> None:
        outside = OutsideAgents(service.address, [sys.executable, "agent.py"], 2, messages.append)
        playing = asyncio.ensure_future(outside.play())
        while len(messages) < 4:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    good, crashed, silent, last = handed_out(tmp_path, case, 4)
    assert isinstance(good, Played) and good.rewards == {"agent": 1.0} and isinstance(last, Played)
    assert isinstance(crashed, Failure) and crashed.reason == "agent_failed"
    assert crashed.detail == "its process ended with exit code 1; it said: no such thing"
    assert isinstance(silent, Failure) and "the last line of its output is not a reward: 'done'" in silent.detail
    assert 'train/7: {"rewards": {"agent": 1.0}}' in messages


def test_a_command_whose_file_has_changed_plays_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    said: list[str] = []

    async def case(service: Service) -> None:
        outside = OutsideAgents(service.address, [sys.executable, "agent.py"], 1, said.append)
        (tmp_path / "agent.py").write_text("print(1.0)")
        playing = asyncio.ensure_future(outside.play())
        while not said:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    (found,) = handed_out(tmp_path, case)
    assert isinstance(found, Failure) and found.reason == "agent_failed"
    assert "agent.py has changed since the run began" in found.detail and found.detail in said[0]


def test_a_connection_that_breaks_costs_no_reward_and_no_player(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other question for a rollout is lost, and the first answer to each end."""
    (tmp_path / "agent.py").write_text(AGENT.replace("== 1", "== 99").replace("== 2", "== 99"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outside_agents, "AGAIN", 0.01)
    said, lost = list[str](), Counter[str]()

    async def case(service: Service) -> None:
        run = URL(service.address, encoded=True)

        async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):
                asked = await reader.readuntil(b"\r\n\r\n")
                (length,) = re.findall(rb"content-length: (\d+)", asked.lower()) or [b"0"]
                asked += await reader.readexactly(int(length))
                kind = asked.split(b" ", 2)[1].decode().rpartition("/")[2]
                lost[kind] += 1
                breaks = lost[kind] % 2 == {"next": 0, "end": 1}.get(kind)
                if kind == "next" and breaks:
                    return
                there, to = await asyncio.open_connection(run.host, run.port)
                with contextlib.closing(to):
                    to.write(asked)
                    answer = await there.read()
                    if not breaks:
                        writer.write(answer)
                        await writer.drain()

        async with await asyncio.start_server(passed_on, "127.0.0.1", 0) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            outside = OutsideAgents(str(run.with_port(port)), [sys.executable, "agent.py"], 1, said.append)
            playing = asyncio.ensure_future(outside.play())
            while len(said) < 3:
                await asyncio.sleep(0.01)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)

    found = handed_out(tmp_path, case, 3)
    assert said == ['train/7: {"rewards": {"agent": 1.0}}'] * 3 and lost["end"] == 6
    assert [one.rewards for one in found if isinstance(one, Played)] == [{"agent": 1.0}] * 3


@pytest.mark.parametrize("heard", [False, True])
def test_an_end_that_nobody_can_have_heard_is_not_said_to_have_arrived(
    heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run dies before it, or with it, and another run of the same port does not know the rollout."""
    monkeypatch.setattr(outside_agents, "AGAIN", 0.01)
    asked = list[bool]()

    async def other_run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            asked.append(True)
            if not heard or len(asked) > 1:
                writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()

    async def case() -> str:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        outside = OutsideAgents(f"http://127.0.0.1:{port}/secret", [sys.executable], 1, print)
        delivering = asyncio.ensure_future(outside._delivered(f"http://127.0.0.1:{port}/end", {}))
        if not heard:
            await asyncio.sleep(0.05)
        async with await asyncio.start_server(other_run, "127.0.0.1", port):
            return await delivering

    said = asyncio.run(case())
    assert said == "" if heard else said.startswith(" came too late")


def test_a_player_says_why_there_are_no_more_rollouts_and_which_end_did_not_arrive(tmp_path: Path) -> None:
    async def case() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        outside = OutsideAgents(f"{address}/secret", [sys.executable], 1, print, patience=0.0)
        assert await outside._plays(None) == 0 and "refused" in outside.why
        assert "did not arrive: " in await outside._delivered(f"{address}/end", {})

    asyncio.run(case())


SERVICE = """
from urllib.request import Request as Asked
class MyServiceFailed(Exception):
    pass
def my_service(prompt, base_url):
    body = {"messages": [{"role": "user", "content": prompt}]}
    text = post(base_url + "/chat/completions", body)["choices"][0]["message"]["content"]
    my_service.calls += 1
    if my_service.calls == 2:
        raise MyServiceFailed("no such thing")
    return text
my_service.calls = 0
"""


def test_the_program_of_the_documentation_takes_rollouts(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    (program,) = [block.partition("```")[0] for block in page.split("```python\n") if "/next" in block]
    (tmp_path / "service.py").write_text(SERVICE + program.replace("runs/NAME", str(tmp_path)))
    (tmp_path / "logs").mkdir()

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    names = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(headrace.__file__).parents[1])}
    started: list[subprocess.Popen[bytes]] = []

    async def case(service: Service) -> None:
        started.append(subprocess.Popen([sys.executable, str(tmp_path / "service.py")], env=names))

    good, failed, last = handed_out(tmp_path / "logs", case, 3)
    (process,) = started
    assert process.wait(LONGEST) == 1, "the connection is refused when the run is over"
    assert isinstance(good, Played) and good.rewards == {"agent": 1.0} and isinstance(last, Played)
    assert isinstance(failed, Failure) and (failed.reason, failed.detail) == ("agent_failed", "no such thing")


def test_a_command_at_a_wrong_address_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    outside = OutsideAgents(f"http://127.0.0.1:{port}/secret", [sys.executable], 1, print)
    with pytest.raises(HeadraceError, match=f"http://127.0.0.1:{port} hands out no rollouts: .*refused"):
        asyncio.run(outside.play())


SPIES = """
import json, os, sys, pathlib
{agent}
pathlib.Path({found!r}).write_text(json.dumps(sorted(os.environ)))
"""


@pytest.mark.waits
def test_the_address_is_no_argument_of_any_process_and_no_agent_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal of an address among the arguments names a remedy, which is followed."""
    found = tmp_path / "names.json"
    (tmp_path / "agent.py").write_text(SPIES.format(agent=AGENT, found=str(found)))
    monkeypatch.chdir(tmp_path)
    started: list[subprocess.Popen[bytes]] = []
    seen: list[bytes] = []

    async def case(service: Service) -> None:
        assert main(["gateway", service.address, "--", sys.executable, "agent.py"]) == 2
        (name,) = set(re.findall(r"HEADRACE_\w+", capsys.readouterr().err))
        secrets = {name: service.address, "HEADRACE_TOKEN": "x", "HEADRACE_WEBHOOK": "http://x/secret"}
        names = {**os.environ, **secrets, "PYTHONPATH": PACKAGE}
        words = [sys.executable, "-m", "headrace", "gateway", "--at-once", "1", "--", sys.executable, "agent.py"]
        started.append(await asyncio.to_thread(subprocess.Popen, words, env=names))
        while not found.exists():
            seen.extend(
                command_line
                for command_line in command_lines()
                if service.address.rpartition("/")[2].encode() in command_line
            )
            await asyncio.sleep(0.02)

    (good,) = handed_out(tmp_path, case)
    assert started[0].wait(LONGEST) == 0
    assert isinstance(good, Played) and good.rewards == {"agent": 1.0} and seen == []
    inherited = json.loads(found.read_text())
    assert "OPENAI_BASE_URL" in inherited
    assert not {"HEADRACE_GATEWAY", "HEADRACE_TOKEN", "HEADRACE_WEBHOOK"} & set(inherited)


def command_lines() -> Iterator[bytes]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes()


def test_without_a_run_and_without_an_address_the_command_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("", "somewhere"):
        monkeypatch.setenv("HEADRACE_GATEWAY", value)
        assert main(["gateway", "--", "true"]) == 2
        assert "HEADRACE_GATEWAY" in capsys.readouterr().err


def test_the_command_line_shows_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    assert main(["gateway", str(tmp_path)]) == 2
    assert "hands out no rollouts: it does not run" in capsys.readouterr().err
    (tmp_path / "logs" / ADDRESS_FILE).write_text("http://127.0.0.1:1/secret\n")
    assert main(["gateway", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "http://127.0.0.1:1/secret\n"
    assert main(["gateway", str(tmp_path), "--", "no-such-agent"]) == 2
    for words in (["--at-once", "0", str(tmp_path)], [str(tmp_path), "--at-once", "0"]):
        assert main(["gateway", *words, "--", "python3", "--at-once", "2"]) == 2
    output = capsys.readouterr().err
    assert "no-such-agent is not a program" in output and output.count("--at-once 0 plays nothing") == 2


MINIMAL = {"model": {"path": "m"}, "task": {"kind": "jsonl", "path": "rows.jsonl"}}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"kind": "gateway", "seconds": 0}, "would wait for ever for an agent that has vanished"),
        ({"kind": "gateway", "command": ["a"]}, 'environment.command belongs to environment.kind = "process"'),
        ({"kind": "gateway", "workers": 3}, "environment.workers belongs to another kind"),
        (
            {"kind": "process", "command": ["a"], "port": 8000},
            'environment.port belongs to environment.kind = "gateway"',
        ),
        ({"port": 8000}, 'environment.port belongs to environment.kind = "gateway"'),
        ({"function": "a.py:f", "host": "0.0.0.0"}, 'environment.host belongs to environment.kind = "gateway"'),
    ],
)
def test_settings_that_cannot_work_are_refused(environment: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**MINIMAL, "environment": environment})


def test_a_port_that_is_taken_is_refused_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = EnvironmentConfig(kind="gateway", port=taken.getsockname()[1])
        encoder = encoder_of(tmp_path, tool_chats.PLAIN)
        with pytest.raises(ConfigError, match="environment.host 127.0.0.1 environment.port .* cannot be had"):
            open_handing_out(OpenedWith(config=config, encoder=encoder, log=tmp_path / "log"))
