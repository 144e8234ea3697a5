"""An episode as people, reward functions and metrics see it."""

from __future__ import annotations

import io
from typing import Any

from headrace.algo.training_rows import rows_of
from headrace.core.batches import Group
from headrace.core.reports import TrainReport
from headrace.core.types import Completion, Episode, Prompt, Scored, Turn, VersionSpan
from headrace.durable.journal import JournalStep
from headrace.episodes.scoring.job import ScoringJob, call, transcript_of
from headrace.facts.rollout_view import view_rollout
from headrace.loop.ledger import Rolled, talk_of
from headrace.views.report.rollouts import rollouts
from headrace.views.screen.console import Console
from headrace.views.screen.inspect_view import rollout

PROMPT = Prompt("p", "5 and 7?", (1, 2), {"answer": "12"})
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 5, "b": 7}}}
RESULT = {"role": "tool", "content": "12", "tool_call_id": "call00001", "name": "add"}
WRONG = {
    "role": "tool",
    "content": "error: there is no tool",
    "tool_call_id": "call00002",
    "name": "x",
    "problem": "unknown_tool",
}


def completion(*tokens: int, version: int, text: str) -> Completion:
    return Completion(tokens, (-0.5,) * len(tokens), (VersionSpan(0, version, version),), "stop", text)


def episode(parents: tuple[int, ...] = (0,), result: dict[str, Any] = RESULT, cut: str = "") -> Episode:
    asks: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    first = Turn(
        (1, 2),
        completion(10, 11, version=3, text=""),
        (),
        messages=({"role": "user", "content": "5 and 7?"},),
        reply=asks,
    )
    context = (30, 31) if parents else (1, 2, 10, 30, 31)
    says = {"role": "assistant", "content": "It is 12."}
    second = Turn(context, completion(20, 21, version=4, text="It is 12."), parents, messages=(result,), reply=says)
    return Episode((first, second), cut)


def view(scored_rollout: Scored) -> Any:
    rows = tuple(row for _, row in rows_of(PROMPT, scored_rollout, 0.5))
    step = JournalStep(5, 1.0, 6, (Group(0, PROMPT, (scored_rollout,), rows),), TrainReport(5, 6))
    return view_rollout(step, step.groups[0], 0, pieces=lambda tokens: [f"<{token}>" for token in tokens])


def shown(one: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(rollout(one))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_an_episode_is_shown_whole_with_what_was_not_sampled() -> None:
    scored = Scored(episode(), 1.25, {"play": 1.0, "form": 0.25}, turn_rewards=({"form": 0.25}, {}))
    one = view(scored)
    assert one.tokens == (10, 11, 30, 31, 20, 21) and one.sampled == [0, 1, 4, 5]
    assert one.left_out == ("", "", "context", "context", "", "") and one.lags == (2, 2, 1, 1, 1, 1)
    assert [(span.start, span.version) for span in one.spans] == [(0, 3), (4, 4)] and one.advantage == 0.5
    assert one.story == (
        'turn 1: calls add({"a": 5, "b": 7}) · reward form 0.25',
        "add returned: 12",
        "turn 2: It is 12.",
    )
    text = shown(one)
    assert (
        "2 turns" in text and "add returned: 12" in text and "<10><11><30><31><20><21>" in text and "context 2" in text
    )
    html = rollouts([one])
    assert 'class="between"' in html and "2 turns as a graph" in html and "between turns, not sampled" in html


def test_where_the_template_rewrote_history_the_last_path_is_shown_and_it_is_said() -> None:
    one = view(Scored(episode(parents=(), cut="turns"), 1.0, {"play": 1.0}))
    assert one.tokens == (20, 21) and one.left_out == ("", "")
    assert "turn 2, on a path of its own: the chat template rewrites earlier messages: It is 12." in one.story
    assert one.story[-1] == "cut off at its limit of turns"


def turn(parents: tuple[int, ...], text: str, agent: str = "", version: int = 3, **rest: Any) -> Turn:
    said = {"role": "assistant", "content": text}
    return Turn((7,), completion(20, 21, version=version, text=text), parents, agent, reply=said, **rest)


def test_an_episode_is_drawn_as_a_graph() -> None:
    """Two agents, a branch, a tool that fails, a swap in the middle of a turn, text that is not to be trusted."""
    swapped = Completion((20, 21, 22), (-0.5,) * 3, (VersionSpan(0, 3, 3), VersionSpan(1, 5, 3, True)), "length", "<b>")
    turns = (
        turn((), "white begins", "white"),
        turn((), "black begins", "black"),
        turn((0,), "white goes on", "white", messages=(RESULT, WRONG)),
        turn((0,), "white does something else", "white", version=4),
        Turn((7,), swapped, (1,), "black", reply={"role": "assistant", "content": "<b>", "tool_calls": [CALL]}),
        turn((), "white anew", "white"),
    )
    rewards = ({}, {}, {"white.won": 1.0}, {"white.won": -1.0}, {"black.won": 0.0}, {})
    one = view(Scored(Episode(turns, "turns"), 0.0, {"white.won": 0.0, "black.won": 0.0}, turn_rewards=rewards))
    graph = one.graph
    assert [seen.lane for seen in graph] == [0, 1, 0, 2, 1, 3], "who continues a turn first stays in its lane"
    assert [seen.rewritten for seen in graph] == [False] * 5 + [True]
    assert [(part.count, part.version, part.lag, part.mixed) for part in graph[4].tokens] == [
        (1, 3, 2, False),
        (2, 5, 0, True),
    ]
    assert [seen.advantage for seen in graph] == [0.5] * 6 and [h.problem for h in graph[2].heard] == [
        "",
        "unknown_tool",
    ]
    html = rollouts([one])
    drawn = html[html.index('<ol class="graph"') :]
    assert drawn.count("<li>") == 6 and "--lanes:4" in drawn and "cut off at its limit of turns" in drawn
    rows = drawn.split("<li>")[1:]
    assert 'class="down c1" style="--at:0"' in rows[0] and 'class="dot c2" style="--at:1"' in rows[1]
    assert 'class="through c1" style="--at:0"' in rows[2] and 'class="up c1" style="--at:0"' in rows[2]
    assert 'class="across c1" style="--at:0;--to:2"' in rows[3], "a branch leaves the lane of its parent"
    assert "✓ add</b> 12" in rows[2] and "✗ x (unknown tool)" in rows[2] and 'chip good">white.won 1' in rows[2]
    assert "&lt;b&gt;" in rows[4] and "<b></div>" not in rows[4] and "versions 3 to 5" in rows[4]
    assert "2 tokens of version 5, lag 0, mixed weights" in rows[4] and "cut off" in rows[4]
    assert "begins anew" in rows[5] and "begins anew" not in rows[1]


def test_advantages_are_those_of_the_turns_own_rows() -> None:
    """The rows of two rollouts with two paths each lie behind each other."""
    both = Scored(Episode((turn((), "a"), turn((0,), "b"), turn((0,), "c"))), 0.0, {})
    rows = tuple(row for n in (0, 1) for _, row in rows_of(PROMPT, both, [n + 0.25, n + 0.5, n + 0.75]))
    step = JournalStep(5, 1.0, 6, (Group(0, PROMPT, (both, both), rows),), TrainReport(5, 6))
    seen = [one.advantage for one in view_rollout(step, step.groups[0], 1).graph]
    assert seen == [1.25, 1.5, 1.75]


def test_reward_functions_see_all_messages() -> None:
    told: list[Any] = []

    def tidy(transcripts: list[Any], completions: list[str]) -> list[float]:
        told.extend(transcripts)
        return [1.0] * len(completions)

    messages = transcript_of(episode())
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    job = ScoringJob(
        prompt="?", completions=("It is 12.",), completion_tokens=((20,),), columns={}, transcripts=(messages,)
    )
    assert call(tidy, job) == [1.0] and told == [messages]
    single = Episode((Turn((1, 2), completion(10, version=0, text="a")),))
    assert transcript_of(single) == []


def test_turns_tools_and_forks_are_counted() -> None:
    episodes = [episode(), episode(parents=(), result=WRONG)]
    assert talk_of(episodes) == {"turns": 4, "forked": 1, "calls": 2, "later": 2, "met": 0, "calls: unknown_tool": 1}
    assert talk_of([Episode((Turn((1, 2), completion(10, version=0, text="a")),))]) == {}
    scored = tuple(Scored(one, 1.0, {"play": 1.0}) for one in [*episodes, episode(cut="tokens")])
    fact = Rolled(ticket=0, prompt=PROMPT, scored=scored).ended(0.0, "ready")
    assert fact.talk["turns"] == 6 and fact.truncated == 1
