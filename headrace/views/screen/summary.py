"""The summary of a run, in at most 100 columns; it can be read without colour."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from headrace.facts import run_state
from headrace.facts.group_numbers import DISCARDED
from headrace.facts.health import health
from headrace.facts.run_state import RunState
from headrace.facts.texts import (
    bar,
    clip,
    counted,
    dollars,
    duration,
    number,
    percent,
    plural,
    reward_text,
    short_time,
    sparkline,
)
from headrace.facts.verdicts import (
    Verdict,
    accounting,
    advices,
    bias,
    equation,
    experience_words,
    failings,
    gain_of,
    held_out,
    identity,
    lag,
    measured_on,
    prompts,
    reasons,
    record,
    shares,
    weight_sync,
)
from headrace.views.screen.console import Console
from headrace.views.screen.console import PrintableText as Text
from headrace.views.screen.layout import FAINT, LABEL, distinct, without_marks
from headrace.views.screen.live import BAD, GOOD, TICKS, WARN, absences

WIDTH = 100
"""Columns at most."""
BAR = 36
"""Characters of the bar of a lag, so that it fits into 80 columns with its numbers."""
MARKS = {"good": ("✓", GOOD), "bad": ("✗", BAD), "plain": ("•", ""), "unknown": ("?", FAINT)}


def summary(state: RunState, run_dir: Path | None = None, report: Path | None = None) -> RenderableType:
    """Returns the panel for the end of a run, finished or not. Values that the facts do not contain are `not measured`."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(style=LABEL, min_width=15, no_wrap=True)
    table.add_column(overflow="fold")
    _judged(table, state)
    _learned(table, state)
    _planned(table, state)
    _stale(table, state)
    _spent(table, state)
    _proven(table, state)
    _troubles(table, state)
    _next(table, state, run_dir, report)
    border = "red" if _is_bad(state) else "cyan"
    return Panel(
        Group(_title(state), Text(""), table), width=WIDTH, box=box.ROUNDED, border_style=border, padding=(0, 1)
    )


def print_summary(state: RunState, report: Path | None, console: Console | None = None) -> None:
    """Prints the summary. `report`: the path that `write_report` returned; None if the run's directory no longer exists."""
    (console or Console()).print(summary(state, report.parent if report else None, report))


def _is_bad(state: RunState) -> bool:
    broken = any(verdict.mood == "bad" for verdict in (lag(state), accounting(state), identity(state)))
    return broken or (state.ended is not None and state.ended.reason not in ("finished", "interrupted"))


def _title(state: RunState) -> Text:
    text = Text()
    if state.started is None:
        return text.append("the run did not start", BAD)
    ended = run_state.phase(state) if state.ended else "did not end by itself"
    text.append(state.started.name, "bold").append(f"  {state.started.headline}\n", FAINT)
    text.append(f"{ended} at step {state.step} of {state.started.steps} after {duration(state.now)}")
    if len(state.sessions) > 1:
        text.append(f", {plural(len(state.sessions) - 1, 'resume')}")
    if state.ended and state.ended.reason not in ("finished", "interrupted"):
        text.append(f"\n{clip(state.ended.reason, 400)}", BAD)
    return text


def _row(table: Table, verdict: Verdict, label: str = "") -> None:
    mark, style = MARKS[verdict.mood]
    text = Text(verdict.value, "bold" if verdict.mood != "bad" else BAD).append(f"   {verdict.detail}", "not bold")
    table.add_row(Text(mark, style), label or verdict.title, text)


def _more(table: Table, label: str, text: str | Text) -> None:
    table.add_row("", label, text)


def _judged(table: Table, state: RunState) -> None:
    """Adds the verdict, and the one thing to do."""
    if not state.rows:
        return
    found = health(state)
    mark, style = TICKS[found.mark]
    table.add_row(Text(mark, style), "Verdict", Text(found.sentence, style))
    if found.remedy:
        _more(table, "", Text(f"→ {found.remedy}", "bold"))


def _learned(table: Table, state: RunState) -> None:
    _row(table, held_out(state))
    for name, evals in state.sets.items():
        _more(table, f"  {name}", f"{gain_of(evals)}   {measured_on(evals[-1])}")
    if state.rows:
        rewards = [row.reward_drawn for row in state.spread]
        curve = Text(sparkline(rewards, 40), "green")
        _more(
            table,
            "Reward, drawn",
            curve.append(
                f"  {reward_text(state.rows[0].reward_drawn)} → {reward_text(state.rows[-1].reward_drawn)}", ""
            ),
        )


def _planned(table: Table, state: RunState) -> None:
    """Adds the warm start, the chosen settings, and the changes of the number of steps."""
    if state.warm:
        _more(table, "Warm start", state.warm.words)
    if state.started:
        for name, why in state.started.chosen.items():
            _more(table, name.capitalize(), why)
    for number_, plan in enumerate(state.planned):
        _more(table, "" if number_ else "Later", f"after {duration(plan.t)}: {plan.message}")


def _stale(table: Table, state: RunState) -> None:
    _row(table, lag(state))
    total, apart = state.lags.total(), {lag_stats.name: lag_stats for lag_stats in state.totals.by_lag.stats()}
    for step, count in sorted(state.lags.items())[:8]:
        text = Text(f"{step:>2} ").append(f"{bar(count / total, BAR):<{BAR}} ", "cyan")
        text.append(f"{percent(count / total):>5}")
        if stats := apart.get(str(step)):
            text.append(f"   KL {number(stats.kl)}", FAINT)
        _more(table, "" if step != min(state.lags) else f"{total:,} tokens", text)
    earlier = experience_words(state)
    for label, words in (("Earlier", earlier), ("Versions", _versions(state)), ("Discarded", _thrown(state))):
        if words:
            _more(table, label, words)
    _row(table, bias(state))
    if state.choices.draws:
        _row(table, prompts(state))


def _versions(state: RunState) -> str:
    spread, share = run_state.version_spread(state), run_state.swapped_share(state)
    if spread is None or share is None:
        return ""
    words = f"{number(spread[0] + 1, 2)} in a batch, at most {spread[1] + 1}; {percent(share)} of rollouts met a swap"
    mixed = state.totals.mixed
    return f"{words}; {plural(mixed, 'token')} of mixed weights" if mixed else words


def _thrown(state: RunState) -> str:
    """Returns what was discarded for its age. Groups without contrast are dropped whatever the policy, so they are not included."""
    found = {reason: state.fates.of(reason).groups for reason in DISCARDED if reason in state.fates.by_reason}
    trimmed = run_state.trimmed_tokens(state)
    words = [f"groups {counted(found)}, {plural(run_state.lost_tokens(state), 'token')}"] if found else []
    return "; ".join(words + ([f"{plural(trimmed, 'token')} trimmed"] if trimmed else []))


def _spent(table: Table, state: RunState) -> None:
    engine, trainer = run_state.idle_shares(state)
    rates = state.engine.rate, run_state.trainer_rate(state)
    for name, idle, rate, verb in (("Engine", engine, rates[0], "sampled"), ("Trainer", trainer, rates[1], "trained")):
        text = Text(f"idle {percent(idle)}", "bold")
        if rate is not None:
            text.append(f"   {rate:,.0f} tokens a second {verb}", "not bold")
        _more(table, f"{name} pool", text)
    if costs := run_state.cost_numbers(state):
        total = costs.pop("cost")
        parts = [f"{name.removeprefix('cost ').removeprefix('of ')} {dollars(value)}" for name, value in costs.items()]
        _more(table, "Cost", Text(dollars(total), "bold").append(f"   {', '.join(parts)}", "not bold"))
    if left := absences(state.moves):
        _more(table, "Fleet", left)
    if words := state.naps.words:
        _more(table, "Devices", words)
    if words := state.naps.lent_words:
        _more(table, "Lent", words)
    gap = run_state.mean_swap(state)
    if gap is not None:
        swapped = state.swapped
        publish = short_time(swapped.published / swapped.count)
        mean = f"{swapped.count} swaps   generation was stopped {short_time(gap)} for each; publish {publish}"
        _more(table, "Weight sync", mean)
        if (sync := weight_sync(state)).mood != "unknown":
            _more(table, "", Text(sync.value, "bold").append(f"   {sync.detail}", "not bold"))
        if words := _interruptions(state):
            _more(table, "", words)
    if lost := shares(state.shares.total):
        _more(table, "Shares", ", ".join(lost))
    if words := _talk(state):
        _more(table, "Episodes", words)
    drawn, trained = state.lengths.drawn.mean, state.lengths.trained.mean
    if drawn is not None:
        of_trained = f"{trained:.1f} trained" if trained is not None else "none trained"
        _more(table, "Mean length", f"{drawn:.1f} tokens drawn, {of_trained}")


def _talk(state: RunState) -> str:
    """`2.1 turns a rollout, 3 % on a path of their own; 310 tool calls (malformed 12, unknown_tool 3)`"""
    total = state.shares.total
    if not total.talk["turns"]:
        return ""
    forked, calls = total.talk["forked"], total.talk["calls"]
    words = f"{total.talk['turns'] / max(total.scored, 1):.1f} turns a rollout"
    if forked:
        words += f", {percent(forked / total.talk['turns'])} on a path of their own (the agent or the chat template rewrites history)"
    if later := total.talk["later"]:
        words += f"; {percent(total.talk['met'] / later)} of the later turns in a state in which another turn of their group began"
    wrong = {name.removeprefix("calls: "): count for name, count in total.talk.items() if ": " in name and count}
    if calls:
        words += f"; {plural(calls, 'tool call')}{f' ({counted(wrong)})' if wrong else ''}"
    if held := total.talk["specials"]:
        words += f"; {plural(held, 'message')} with the text of special tokens, read as text"
    return words


def _interruptions(state: RunState) -> str:
    pause = run_state.mean_pause(state)
    if pause is None or not state.swapped.held:
        return ""
    return (
        f"generation held back {short_time(pause)} for each; {plural(state.swapped.interrupted, 'rollout')} interrupted"
    )


def _proven(table: Table, state: RunState) -> None:
    verdict = accounting(state)
    mark, style = MARKS[verdict.mood]
    counts = state.accounting
    table.add_row(Text(mark, style), verdict.title, Text(equation(counts), BAD if verdict.mood == "bad" else ""))
    if verdict.mood == "bad":
        _more(table, "", Text(f"THE IDENTITY DOES NOT HOLD: {verdict.detail}", BAD))
    for line in reasons(counts):
        _more(table, "", Text(line, FAINT))
    _row(table, identity(state))
    if (kept := record(state)).mood == "plain":
        _row(table, kept)


def _troubles(table: Table, state: RunState) -> None:
    if state.deaths:
        last = state.deaths[-1]
        words = f"{plural(len(state.deaths), 'worker')} died; the last: the {last.who} process {last.how}"
        table.add_row(Text("!", WARN), "Deaths", Text(words, WARN))
    for place, failing in enumerate(failings(state)[:3]):
        words = f"{failing.kind}, {plural(failing.rollouts, 'rollout')}"
        words += f"; the first: {clip(failing.first.detail, 200)}" if failing.first else ""
        table.add_row(Text("!", WARN), "Failed", Text(words, WARN))
        if place == 0 and failing.first and failing.first.traceback:
            _more(table, "", Text(without_marks(failing.first.traceback), FAINT))
    for advice in advices(state):
        table.add_row(Text("→", WARN), advice.name.capitalize(), Text(advice.sentence, WARN))
    true = run_state.open_warnings(state)
    for index, warning in enumerate(distinct([warned.message for warned in true], 3)):
        label = plural(len(true), "warning") if index == 0 else ""
        table.add_row(Text("!" if index == 0 else "", WARN), label, Text(clip(warning, 600), WARN))


def _next(table: Table, state: RunState, run_dir: Path | None, report: Path | None) -> None:
    _more(table, "", "")
    if report:
        _more(table, "Report", str(report))
    if run_dir and state.started:
        saved = run_state.saved_step(state)
        whole = saved == state.step or (state.ended is not None and state.ended.reason == "finished")
        if state.step < state.started.steps or not whole:
            _more(table, "Resume with", f"headrace train --resume {run_dir}")
        if saved is not None:
            older = "" if whole else f" --step {saved}"
            _more(table, "Export with", f"headrace export {run_dir} --to DIR{older}")
