"""What is chosen of what was measured, and what fits into `train.minutes`: all with measurements that are given, in virtual time."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.config import EngineConfig
from headrace.loop.run_limits import MARGIN, Allowance
from headrace.run.auto import measurer
from headrace.run.auto.candidates import CANDIDATES, Candidate, Figures, candidates, choose, choose_threads
from headrace.run.auto.fit import (
    LEAST_GROUPS,
    LEAST_PROMPTS,
    LEAST_STEPS,
    Speeds,
    Wish,
    evaluation_seconds,
    fit,
    step_seconds,
)
from headrace.run.auto.measurer import ProbeMeasurer, fingerprint, share_of
from headrace.run.auto.slices import LEAST_VOCABULARY, slice_of
from headrace.trainer.config import TrainConfig

SMOLLM = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "eos_token_id": [2, 49000],
}  # fmt: skip
OLD_XEON = {
    "engine bfloat16 kernels": 40.0, "engine bfloat16 fused": 17.0, "engine float32 fused": 61.0,
    "trainer bfloat16 kernels": 30.0, "trainer float32 kernels": 55.0, "trainer float32 torch": 54.0,
}  # fmt: skip
AMX = {
    "engine bfloat16 kernels": 900.0, "engine bfloat16 fused": 300.0, "engine float32 fused": 120.0,
    "trainer bfloat16 kernels": 700.0, "trainer float32 kernels": 90.0, "trainer bfloat16 torch": 400.0,
}  # fmt: skip


def chosen(tokens: dict[str, float], engine: EngineConfig | None = None, train: TrainConfig | None = None, **more: Any):
    """(dtype, path) of engine and trainer."""
    engine, train = engine or EngineConfig(), train or TrainConfig()
    figures = Figures(tokens, rows=32)
    allowed = candidates(engine, train, **more)
    made = [choose("engine", engine, allowed, figures, 2), choose("trainer", train, allowed, figures, 2)]
    return [(one.dtype, one.path) for one in made]


# --- the choice --------------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_what_auto_takes_by_itself_stays_auto():
    assert chosen(AMX) == [("bfloat16", "auto"), ("bfloat16", "auto")]
    assert chosen(OLD_XEON) == [("float32", "auto"), ("float32", "auto")]  # the kernels do not serve float32 here
    beaten = {**AMX, "engine bfloat16 fused": 1000.0, "trainer bfloat16 torch": 800.0}
    assert chosen(beaten) == [("bfloat16", "fused"), ("bfloat16", "torch")]


def test_among_equals_the_first_of_the_table_is_chosen():
    near = {"trainer bfloat16 kernels": 96.0, "trainer float32 kernels": 100.0, "trainer bfloat16 torch": 100.0}
    assert chosen({**AMX, **near})[1] == ("bfloat16", "auto")
    assert chosen({**AMX, **near, "trainer bfloat16 kernels": 91.0})[1] == ("bfloat16", "auto")
    assert chosen({**AMX, **near, "trainer bfloat16 kernels": 89.0})[1] == ("float32", "auto")


def test_settings_that_say_something_are_left_alone():
    assert chosen(OLD_XEON, EngineConfig(dtype="bfloat16"))[0] == ("bfloat16", "auto")
    assert chosen(AMX, EngineConfig(path="fused"))[0] == ("bfloat16", "fused")
    assert chosen(OLD_XEON, train=TrainConfig(weights="bfloat16"))[1] == ("bfloat16", "auto")
    pinned = choose("engine", EngineConfig(cores=(0,)), CANDIDATES, Figures(AMX), 2)
    assert pinned.threads == 0 and choose("engine", EngineConfig(), CANDIDATES, Figures(AMX), 2).threads == 2


def test_float32_is_not_served_where_the_memory_does_not_hold_it():
    assert chosen(OLD_XEON, wide=False)[0] == ("bfloat16", "auto")


def test_without_figures_nothing_is_chosen_and_it_is_said_why():
    choice = choose("engine", EngineConfig(), CANDIDATES, Figures(problem="no processor"), 0)
    assert (choice.dtype, choice.path, choice.rate) == ("auto", "auto", 0.0)
    assert choice.why == "not measured: no processor"


def test_the_reason_holds_the_figures_of_what_was_not_chosen():
    why = choose("engine", EngineConfig(), CANDIDATES, Figures(OLD_XEON, rows=32), 0).why
    assert why == (
        "float32 PyTorch: 61 tokens a second of one core at 32 sequences (bfloat16 kernels 40, bfloat16 PyTorch 17)"
    )


def test_threads_are_compared_by_the_clock_and_few_are_enough_where_many_bring_nothing():
    assert choose_threads((1, 2), Figures(threads={1: 1.0, 2: 0.6})) == 2
    assert choose_threads((1, 2), Figures(threads={1: 0.61, 2: 0.6})) == 1
    assert choose_threads((4,), Figures()) == 4


@given(st.dictionaries(st.sampled_from([candidate.name for candidate in CANDIDATES]), st.floats(1, 1e6)))
def test_no_choice_is_much_slower_than_the_best_and_all_of_them_were_measured(tokens: dict[str, float]):
    for part, config in (("engine", EngineConfig()), ("trainer", TrainConfig())):
        mine = {name: rate for name, rate in tokens.items() if name.startswith(part)}
        choice = choose(part, config, CANDIDATES, Figures(tokens), 0)
        if mine:
            assert choice.rate >= {"engine": 0.95, "trainer": 0.9}[part] * max(mine.values())
            path = choice.path if choice.path != "auto" else None
            assert any(
                Candidate(part, choice.dtype, candidate.path).name in mine
                for candidate in CANDIDATES
                if candidate.part == part and path in (None, candidate.path)
            )
        else:
            assert choice.rate == 0


# --- the piece that is measured ------------------------------------------------------------------------------------------


def test_a_piece_has_the_shapes_of_the_model_and_costs_its_share():
    piece = slice_of(SMOLLM)
    assert piece is not None
    layers, rows = piece.config["num_hidden_layers"], piece.config["vocab_size"]
    assert (piece.config["hidden_size"], piece.config["intermediate_size"]) == (576, 1536)
    assert piece.scale == 30 / layers and abs(rows / 49152 - layers / 30) < 0.01
    assert max(piece.config["eos_token_id"]) < rows and 100e6 < piece.parameters < 140e6


def test_lists_by_layer_are_cut_and_small_models_are_whole():
    kinds = ["sliding_attention", "full_attention"] * 15
    piece = slice_of({**SMOLLM, "layer_types": kinds, "mlp_only_layers": [0, 29]})
    assert piece is not None and piece.config["layer_types"] == kinds[: piece.config["num_hidden_layers"]]
    assert piece.config["mlp_only_layers"] == [0]
    small = slice_of({**SMOLLM, "num_hidden_layers": 1, "vocab_size": 96})
    assert small is not None and small.scale == 1 and small.config["vocab_size"] == 96 < LEAST_VOCABULARY
    assert slice_of({"model_type": "other"}) is None


def test_figures_are_kept_by_what_they_depend_on(monkeypatch):
    one = fingerprint(SMOLLM)
    assert one == fingerprint(dict(SMOLLM)) != fingerprint({**SMOLLM, "hidden_size": 640})
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert one != fingerprint(SMOLLM)


def test_other_cores_measure_only_the_threads_and_each_set_once(tmp_path, monkeypatch):
    asked: list[tuple[int, tuple[int, ...]]] = []

    def ask(config, candidates, threads):
        asked.append((len(candidates), tuple(threads)))
        tokens = {candidate.name: 100.0 - number for number, candidate in enumerate(candidates)}
        return Figures(tokens, threads={count: 1 / count for count in threads})

    monkeypatch.setattr(measurer, "_ask", ask)
    monkeypatch.setattr(measurer, "cache_dir", lambda: tmp_path)
    one, everything = ProbeMeasurer(), len(CANDIDATES)
    first = one.measure(SMOLLM, (1,))
    assert asked == [(everything, ())] and not first.threads
    both = one.measure(SMOLLM, (1, 2))
    assert asked[1:] == [(1, (1, 2))] and both.threads == {1: 1.0, 2: 0.5} and both.tokens == first.tokens
    assert one.measure(SMOLLM, (2, 4)).threads == {2: 0.5, 4: 0.25} and asked[2:] == [(1, (2, 4))]
    for counts in ((1,), (1, 2), (2, 4)):
        one.measure(SMOLLM, counts)
    assert len(asked) == 3


def test_our_own_children_are_no_others(monkeypatch):
    """The libraries of the workers are loaded while the share is measured."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        pids = [one.pid for one in busy]
        assert set(pids) <= set(measurer._descendants(os.getpid()))
        until = time.monotonic() + 60
        while sum(map(measurer._running_threads, pids)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        before = sum(map(measurer._running_threads, pids))
        monkeypatch.setattr(measurer, "_descendants", lambda pid: pids)
        monkeypatch.setattr(measurer, "_running_threads", lambda pid: 1)
        monkeypatch.setattr(measurer.Path, "read_text", lambda self: "procs_running 6\n")
        assert before == 3 and measurer._runnable() == 2
    finally:
        for one in busy:
            one.kill()
            one.wait()


# --- what others leave ---------------------------------------------------------------------------------------------------


def test_the_share_of_a_busy_machine():
    assert share_of(2, 0, 0).cores == 2 and share_of(2, 0, 0).words == ""
    assert share_of(2, 2, 0).cores == 1 and "about 1 core free" in share_of(2, 2, 0).words
    assert share_of(2, 0, 0.5).of_each == 0.5 and share_of(2, 1000, 0.9).of_each == 0.05


# --- what fits -----------------------------------------------------------------------------------------------------------

DEMO = Wish(
    steps=60, groups=8, rollouts=8, prompts=64, samples=4, max_tokens=24, prompt_tokens=46, save_every=30, warmup=5
)
wishes = st.builds(
    Wish, steps=st.integers(1, 300), groups=st.integers(1, 64), rollouts=st.integers(2, 16), prompts=st.integers(0, 200),
    samples=st.integers(1, 8), max_tokens=st.integers(1, 4000), prompt_tokens=st.integers(1, 4000),
    evaluate_every=st.integers(0, 50), save_every=st.integers(0, 50), warmup=st.integers(0, 300), least_groups=st.integers(1, 4),
)  # fmt: skip
speeds = st.builds(
    Speeds, sampled=st.floats(1e-6, 1), trained=st.floats(1e-6, 1), update=st.floats(0, 10), start=st.floats(0, 300),
    save=st.floats(0, 100),
)  # fmt: skip


@settings(max_examples=300)
@given(wishes, speeds, st.floats(10, 36000))
def test_a_fit_is_within_its_time_and_between_the_least_and_the_wish(wish: Wish, one: Speeds, seconds: float):
    found = fit(wish, one, seconds)
    assert found.fits == (found.seconds <= 0.9 * seconds)
    assert min(wish.steps, LEAST_STEPS) <= found.steps <= wish.steps
    assert min(wish.groups, max(LEAST_GROUPS, wish.least_groups)) <= found.groups <= wish.groups
    assert min(wish.prompts, LEAST_PROMPTS) <= found.prompts <= wish.prompts
    assert 0 <= found.warmup < max(found.steps, 1)
    assert found.step_seconds == step_seconds(wish, one, found.groups)
    assert found.evaluation_seconds == evaluation_seconds(wish, one, found.prompts)
    if not found.fits:
        assert (found.steps, found.groups) == (
            min(wish.steps, LEAST_STEPS), min(wish.groups, max(LEAST_GROUPS, wish.least_groups)),
        )  # fmt: skip


def at(engine: float, trainer: float, cores: float = 2.0) -> Speeds:
    """Tokens a second of one core."""
    return Speeds(1 / (engine * cores), 1 / (trainer * cores), 0.4, 20.0, 8.0)


def test_a_fast_machine_does_all_of_it_and_a_slow_one_gives_up_evaluations_then_groups_then_steps():
    fast, middle, slow = (fit(DEMO, one, 360) for one in (at(800, 700), at(300, 150), at(61, 55)))
    assert (fast.steps, fast.groups, fast.prompts, fast.warmup) == (60, 8, 64, 5)
    assert middle.steps >= 40 and 2 <= middle.groups < 8 and middle.fits
    assert slow.groups == 2 and LEAST_STEPS < slow.steps < 60 and slow.prompts < 64 and slow.fits
    assert not fit(DEMO, at(6, 5), 360).fits


def test_a_longer_time_never_does_less():
    counts = [fit(DEMO, at(100, 80), 60 * minutes) for minutes in range(3, 60)]
    work = [count.steps * count.groups for count in counts]
    assert all(after >= before - 8 for before, after in itertools.pairwise(work)) and counts[-1].steps == 60


# --- while it goes on ------------------------------------------------------------------------------------------------------


def allowance(**changes: Any) -> Allowance:
    made = {"end": 360.0, "steps": 20, "most": 60, "evaluation": 10.0, "save": 8.0, "step": 10.0}
    return Allowance(**{**made, **changes})


def test_after_three_steps_and_each_doubling_the_number_is_fitted():
    one = allowance()
    one.begin(40.0)
    changed = [one.stepped(step, 40.0 + 20.0 * step) for step in range(1, 7)]
    room = (360 - 100 - MARGIN * 18) // 20
    assert changed == [None, None, 3 + room, None, None, None] and one.steps == 3 + room == 14
    assert [one.stepped(step, 160.0 + 5.0 * (step - 6)) for step in range(7, 13)] == [None] * 5 + [12 + 29], (
        "faster now"
    )


def test_the_first_step_which_fills_the_pipeline_is_not_the_pace():
    one = allowance()
    one.begin(0.0)
    assert [one.stepped(step, 30.0 + 6.0 * (step - 1)) for step in (1, 2, 3)][-1] == 3 + (360 - 42 - 22.5) // 6
    fast = allowance()
    fast.begin(40.0)
    assert [fast.stepped(step, 40.0 + step) for step in (1, 2, 3)][-1] == 60
    as_planned = allowance()
    as_planned.begin(40.0)
    assert [as_planned.stepped(step, 40.0 + 14 * step) for step in (1, 2, 3)] == [None, None, None]


def test_the_last_evaluation_and_the_checkpoint_are_kept_free():
    one = allowance()
    one.begin(40.0)
    one.stepped(1, 50.0)
    assert one.another(360 - MARGIN * 18 - MARGIN * 10) and not one.another(360 - MARGIN * 18 - MARGIN * 10 + 1)
    one.measured(evaluation=40.0)
    assert not one.another(300.0) and one.another(280.0)


def test_a_config_that_leaves_the_kinds_of_its_layers_open_is_cut() -> None:
    shape = {"num_hidden_layers": 24, "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536}
    assert slice_of({**shape, "layer_types": None}).config["layer_types"] is None
    assert len(slice_of({**shape, "layer_types": ["full"] * 24}).config["layer_types"]) < 24
