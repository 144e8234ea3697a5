"""An episode as people, reward functions and metrics see it."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from headrace.algo.advantage.training_rows import rows_of
from headrace.durable.journal import JournalStep
from headrace.observe.numbers.rollout_view import view_rollout
from headrace.observe.report.rollouts import rollouts
from headrace.observe.screen.inspect_view import rollout
from headrace.orchestration.loops.outcomes import Rolled, talk_of
from headrace.reports import TrainReport
from headrace.scoring.job import ScoringJob, call, transcript_of
from headrace.types import Completion, Episode, Group, Prompt, Scored, Turn, VersionSpan

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


def view(one: Scored) -> Any:
    rows = tuple(row for _, row in rows_of(PROMPT, one, 0.5))
    step = JournalStep(5, 1.0, 6, (Group(0, PROMPT, (one,), rows),), TrainReport(5, 6))
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
    assert 'class="between"' in html and "<li>add returned: 12</li>" in html and "between turns, not sampled" in html


def test_where_the_template_rewrote_history_the_last_path_is_shown_and_it_is_said() -> None:
    one = view(Scored(episode(parents=(), cut="turns"), 1.0, {"play": 1.0}))
    assert one.tokens == (20, 21) and one.left_out == ("", "")
    assert "turn 2, on a path of its own: the chat template rewrites earlier messages: It is 12." in one.story
    assert one.story[-1] == "cut off at its limit of turns"


def test_reward_functions_see_all_messages() -> None:
    told: list[Any] = []

    def tidy(transcripts: list[Any], completions: list[str]) -> list[float]:
        told.extend(transcripts)
        return [1.0] * len(completions)

    messages = transcript_of(episode())
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "assistant"]
    job = ScoringJob(
        prompt="?", completions=("It is 12.",), completion_tokens=((20,),), columns={}, transcripts=(messages,)
    )
    assert call(tidy, job) == [1.0] and told == [messages]
    single = Episode((Turn((1, 2), completion(10, version=0, text="a")),))
    assert transcript_of(single) == []


def test_turns_tools_and_forks_are_counted() -> None:
    episodes = [episode(), episode(parents=(), result=WRONG)]
    assert talk_of(episodes) == {"turns": 4, "forked": 1, "calls": 2, "calls: unknown_tool": 1}
    assert talk_of([Episode((Turn((1, 2), completion(10, version=0, text="a")),))]) == {}
    scored = tuple(Scored(one, 1.0, {"play": 1.0}) for one in [*episodes, episode(cut="tokens")])
    fact = Rolled(ticket=0, prompt=PROMPT, scored=scored).ended(0.0, "ready")
    assert fact.talk["turns"] == 6 and fact.truncated == 1
