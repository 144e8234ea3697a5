"""States that sequences keep beside their blocks (a gated delta rule or a state space, in the C++ kernels): found, shared, forked, moved on, and computed again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.core.types import Fork, Request, Sampling
from headrace.engine.native.forward_pass import BLOCK
from headrace.engine.native.kernels import binding
from headrace.engine.native.kernels.runner import KernelRunner
from headrace.engine.native.kv_cache import Blocks
from headrace.engine.native.state_slots import StateSlots
from headrace.run.rehearsal.memory_needs import read_shape
from headrace.testing.makers import request
from support.fake_engine_model import CoreDriver, RecurrentRunner, prompt
from support.few import few
from support.native_calls import Answer, drawn, greedy, make_engine, put, reference, run, saved, step, teacher_forced
from support.native_calls import prompts as texts
from support.tiny_models import RunnerDriver, Stretch, parameters, prompts, skeleton

__all__ = ["saved"]
NAMES = ["qwen3_5_text", "granite4-hybrid", "falcon_h1", "nemotron_h"]
TOLERANCE = 3e-5
"""Of a delta rule transformers itself is as far from sums in float64: what a state says may be small before it is normalised."""

native = pytest.mark.skipif(binding.library() is None, reason="the kernels serve it")


# --- slots -------------------------------------------------------------------------------------------------------------


def slots(count: int) -> tuple[StateSlots, list[int]]:
    """Slots, and blocks that somebody holds."""
    blocks = Blocks(4)
    return StateSlots(count, blocks), [blocks.take() for _ in range(4)]


def test_the_nearest_state_is_the_longest_that_fits():
    states, blocks = slots(6)
    for place, seen in ((0, 32), (2, 5), (2, 9)):
        assert states.keep(blocks[place], states._blocks.serials[blocks[place]], seen) >= 0
    found = [states.nearest(blocks, tokens) for tokens in (0, 31, 32, 68, 69, 72, 73, 128)]
    assert found == [0, 0, 32, 32, 69, 69, 73, 73]
    assert slots(0)[0].nearest(blocks, 77) == 77, "without states, any place is one"


def test_states_that_were_unused_for_longest_make_room_and_those_of_blocks_given_away_before():
    states, blocks = slots(3)
    serials = states._blocks.serials
    for block in blocks[:3]:
        states.keep(block, serials[block], 7)
    row = states.start(blocks, 7)  # of the first block: used now
    states.integrity([row])
    assert [states.nearest([block], 7) for block in blocks[:3]] == [7, 0, 7]
    states._blocks.release(blocks[:1])
    assert states._blocks.take() == blocks[0], "it goes to another"
    assert states.nearest(blocks, 7) == 0
    assert states.start(blocks, 0) >= 0 and states.nearest([blocks[2]], 7) == 7
    assert states.keep(blocks[3], serials[blocks[3]], 1) >= 0 and states.nearest([blocks[2]], 7) == 0
    assert states.keep(blocks[3], serials[blocks[3]] - 1, 2) == -1, "that block is another by now"


def test_copies_are_made_in_the_order_in_which_slots_change_hands():
    states, blocks = slots(2)
    first = states.start(blocks, 0)
    states.keep_copy(first, blocks, 40)
    second = states.start(blocks, 40)  # takes the very slot of what it goes on from
    assert states.copies() == [(first, second)] and states.copies() == []
    states.leave(first, blocks, 50)
    assert states.nearest(blocks, 60) == 50
    states.leave(second, blocks, 0)
    states.integrity([])
    states.clear()
    assert states.nearest(blocks, 60) == 0


# --- the schedule, over a fake model whose states can be read ---------------------------------------------------------------


def test_what_parts_from_a_cached_prompt_leaves_a_state_where_it_parts():
    """The second of three prompts that begin alike computes their beginning again; the third goes on from there."""
    engine = CoreDriver(blocks=40, prefill_chunk=64, runner=RecurrentRunner())
    common = prompt(2 * BLOCK + 3)
    told = []
    for number in range(3):
        engine.run(request(f"r{number}", common + prompt(9, number), 4))
        engine.check(f"r{number}")
        told.append((engine.engine.stats().recomputed_tokens, engine.engine.stats().cached_tokens))
    assert told == [(0, 0), (2 * BLOCK + 3, 0), (2 * BLOCK + 6, 2 * BLOCK)]


def test_two_states_of_one_pass_for_which_there_is_one_slot():
    """Where a prompt parts from a cached one, and its end: the later one has it."""
    engine = CoreDriver(blocks=40, max_running=1, prefill_chunk=128, runner=RecurrentRunner())
    common = prompt(2 * BLOCK + 3)
    asked = [common + prompt(9, 1), common + prompt(9, 2), common + prompt(9, 2)]
    engine.run(*(request(f"r{i}", text, 4, seed=i) for i, text in enumerate(asked)))
    for i in range(3):
        engine.check(f"r{i}")


# --- the kernels -------------------------------------------------------------------------------------------------------


def driver(name: str) -> RunnerDriver:
    runner = KernelRunner(skeleton(name), 256, dtype=torch.float32, device=torch.device("cpu"))
    return RunnerDriver(runner, parameters(name))


def fork(ours: RunnerDriver, source: Stretch, tokens: list[int], cut: int, state: int) -> Stretch:
    """A sequence that shares the first `cut` tokens of another, and goes on from a state of them."""
    whole, other = cut // BLOCK, ours.sequence(tokens)
    other.blocks, other.cached, other.state = [*source.blocks[:whole]], cut, state
    if cut % BLOCK:
        other.blocks.append(ours.free.pop())
        ours.runner.copy_blocks(np.array([source.blocks[whole]]), np.array([other.blocks[whole]]))
    return other


@native
@pytest.mark.parametrize(
    ("name", "cut"), few([pytest.param(name, cut) for cut in (40, 1, 2, 3, 31, 32, 69) for name in NAMES], keep=3)
)
def test_a_state_that_is_kept_on_the_way_is_that_of_its_tokens_to_the_last_bit(name, cut):
    """In chunks whose borders lie before it, behind it, and so near that its convolution sees over them."""
    text, tail = prompts(70, 9)
    ours = driver(name)
    expected = driver(name).logprobs(text[:cut] + tail)
    for chunk in (70, 17, 2):
        source, kept = ours.sequence(text), ours.states.pop()
        while source.cached < len(text):
            count = min(chunk, len(text) - source.cached)
            here = source.cached < cut <= source.cached + count
            batch = ours.batch([(source, count)])
            ours.runner.forward(replace(batch, kept=np.array([[0, cut, kept]], np.int32) if here else None))
            source.cached += count
        other = fork(ours, source, text[:cut] + tail, cut, kept)
        told = ours.step([(other, len(tail))], rows=range(len(tail))).logits.log_softmax(-1)
        assert torch.equal(told, expected[cut:])


@native
@pytest.mark.parametrize("name", NAMES)
def test_a_slot_holds_nothing_of_who_had_it_before_and_a_copy_goes_its_own_way(name):
    first, second, tail = prompts(40, 25, 9)
    ours, other = driver(name), driver(name)
    source = ours.sequence(first)
    ours.step([(source, 40)])
    copy = ours.states.pop()
    ours.runner.copy_state(source.state, copy)
    branch = fork(ours, source, first + tail, 40, copy)
    source.tokens = first + tail[::-1]
    for _ in range(9):  # side by side
        told = ours.step([(source, 1), (branch, 1)]).logits.log_softmax(-1)
    for sequence, row in zip((source, branch), told, strict=True):
        assert torch.equal(row, other.logprobs(sequence.tokens)[-1])
    late = ours.sequence(second)
    late.state = source.state
    for _ in range(25):  # one token in the first pass: what a convolution remembers is nobody's either
        told = ours.step([(late, 1)]).logits.log_softmax(-1)
    assert torch.equal(told[0], other.logprobs(second)[-1])


# --- the engine --------------------------------------------------------------------------------------------------------


def assert_own(model, asked: Request, answer: Answer) -> None:
    """The tokens are the model's greedy ones, with its log-probs."""
    told = teacher_forced(model, asked.prompt, answer.tokens)
    assert answer.tokens == told.argmax(-1).tolist()
    assert torch.tensor(answer.logprobs).sub(told.max(-1).values).abs().max() < TOLERANCE


@native
@pytest.mark.parametrize("name", few(NAMES, keep=1))
def test_a_group_shares_its_prompt_and_a_conversation_what_it_has(name, saved):
    engine, model = make_engine(saved(name)), reference(saved(name))
    assert engine.capabilities.path == f"kernels {model.config.model_type}" and engine.capabilities.exact
    text = texts(40)[0]
    group = [greedy("first", text, 6), *(drawn(str(i), text, seed=i, tokens=5) for i in range(4))]
    answers = run(engine, group)
    assert_own(model, group[0], answers["first"])
    assert engine.stats().prompt_tokens == 40 + 4, "the last token is forwarded for each, for its logits"
    turn = greedy("next", (*text, *answers["first"].tokens, 9), 5)
    answers |= run(engine, [turn])
    assert_own(model, turn, answers["next"])
    assert engine.stats().recomputed_tokens == 0 and engine.stats().prompt_tokens == 40 + 4 + 2


@native
@pytest.mark.parametrize("name", few(NAMES[::-1], keep=1))
def test_forks_go_on_from_a_copy_where_their_source_is_and_compute_again_from_the_nearest(name, saved):
    engine, model = make_engine(saved(name), context_length=128), reference(saved(name))
    source, answers = greedy("source", texts(20)[0], 12), dict[str, Answer]()
    engine.add(source)
    while len(answers.get("source", Answer()).tokens) < 8:
        step(engine, answers)
    said = list(answers["source"].tokens)

    def forked(name: str, at: int) -> Request:
        asked = Request(name, (), Sampling(max_tokens=6, temperature=0.0, ignore_eos=True), fork=Fork("source", at))
        engine.add(asked)
        return Request(name, (*source.prompt, *said[:at]), asked.sampling)

    asked = [forked("here", 8)]
    run(engine, (), answers)
    assert engine.stats().recomputed_tokens == 0, "from a copy of the source's state as it was then"
    asked.append(forked("before", 5))
    run(engine, (), answers)
    assert engine.stats().recomputed_tokens == 5, "from the state before the last token of the prompt"
    for one in asked:
        assert_own(model, one, answers[one.id])


@native
@pytest.mark.parametrize(
    ("name", "swap"),
    few([pytest.param(name, swap) for name in NAMES for swap in ("keep", "recompute")], keep=2),
)
def test_a_swap_in_the_middle_of_a_completion_keeps_or_recomputes_its_state(name, swap, saved):
    old, new = saved(name), saved(name, 1)
    engine, asked, answers = make_engine(old, swap=swap), greedy("r", texts(20)[0], 12), dict[str, Answer]()
    engine.add(asked)
    while len(answers.get("r", Answer()).tokens) < 5:
        step(engine, answers)
    put(engine, new, 1)
    late = greedy("late", asked.prompt, 6)  # what older weights kept is not for it
    run(engine, [late], answers)
    assert_own(reference(new), late, answers["late"])
    answer = answers["r"]
    assert answer.versions == [0] * 5 + [1] * 7
    assert_own(reference(old), asked, replace(answer, tokens=answer.tokens[:5], logprobs=answer.logprobs[:5]))
    after = Request("rest", (*asked.prompt, *answer.tokens[:5]), asked.sampling)
    rest = Answer(answer.tokens[5:], answer.logprobs[5:])
    if swap == "recompute":
        assert answer.kv_versions == answer.versions and engine.stats().recomputed_tokens >= 24
        assert_own(reference(new), after, rest)
    else:
        assert answer.kv_versions == [0] * 12 and engine.stats().recomputed_tokens == 0
        with pytest.raises(AssertionError):
            assert_own(reference(new), after, rest)


@native
@pytest.mark.parametrize("name", few(NAMES[::-1], keep=1))
def test_asleep_it_keeps_its_requests_and_computes_their_states_again(name, saved):
    engine, asked, answers = make_engine(saved(name)), greedy("r", texts(20)[0], 10), dict[str, Answer]()
    engine.add(asked)
    while len(answers.get("r", Answer()).tokens) < 4:
        step(engine, answers)
    engine.sleep(keep=True)
    engine.wake()
    put(engine, saved(name, 1), 1)
    run(engine, (), answers)
    answer = answers["r"]
    assert answer.kv_versions == answer.versions == [0] * 4 + [1] * 6 and engine.stats().recomputed_tokens == 24
    after = Request("rest", (*asked.prompt, *answer.tokens[:4]), asked.sampling)
    assert_own(reference(saved(name, 1)), after, Answer(answer.tokens[4:], answer.logprobs[4:]))


@native
@pytest.mark.parametrize("name", few(NAMES, keep=1))
def test_exactly_the_same_bits_alone_and_in_a_crowd_that_makes_room(name, saved):
    """Siblings share a prompt, sequences are pushed out and begin again, some from a state that was kept and some without."""
    shared = texts(21, 30, 40)
    requests = [drawn(str(i), shared[i // 2], seed=i, tokens=45) for i in range(6)]
    alone = {}
    for one in requests:
        alone |= run(make_engine(saved(name)), [one])
    runner = KernelRunner(skeleton(name), 96, dtype=torch.float32, device=torch.device("cpu"))
    crowd = make_engine(
        saved(name),
        exact=True,
        max_running=6,
        kv_gib=(10 * runner.block_nbytes + 12 * runner.state_nbytes) / 2**30,
    )
    assert crowd.capabilities.rows == 6
    short = Sampling(max_tokens=90, stop_token_ids=tuple(range(260)))
    run(crowd, [Request(f"short {i}", (i + 1,), short) for i in range(40)])  # so it lets in more than have room
    together = run(crowd, requests)
    assert crowd.stats().preemptions > 0
    for one in requests:
        assert together[one.id].tokens == alone[one.id].tokens
        assert together[one.id].logprobs == alone[one.id].logprobs, "to the last bit"


@native
@pytest.mark.parametrize("name", few(NAMES, keep=1))
def test_states_have_their_part_of_the_cache_and_fewer_sequences_run_where_it_is_small(name, saved):
    runner = KernelRunner(skeleton(name), 96, dtype=torch.float32, device=torch.device("cpu"))
    three = (3 * runner.block_nbytes + 2 * runner.state_nbytes) / 2**30
    engine = make_engine(saved(name), kv_gib=three)
    assert engine.capabilities.rows == 1
    assert run(engine, [greedy(str(i), text, 60) for i, text in enumerate(texts(30, 9))])["1"].stop == "length"
    with pytest.raises(ConfigError, match=r"does not hold one sequence .*raise engine\.kv_gib"):
        make_engine(saved(name), kv_gib=0.9 * three)


@pytest.mark.parametrize("name", NAMES)
def test_a_rehearsal_counts_what_the_engine_holds_of_a_sequence(name, saved):
    runner = KernelRunner(skeleton(name), 96, dtype=torch.float32, device=torch.device("cpu"))
    shape, spec = read_shape(saved(name)), runner.spec
    assert shape.state == runner.state_nbytes > 0
    attending = sum(layer.attends for layer in spec.layers)
    assert shape.cached == attending * 2 * spec.kv_heads * spec.head_dim and attending == (
        2 if name == "falcon_h1" else 1
    )


def test_a_rehearsal_reads_kinds_of_layers_that_are_letters(saved, tmp_path):
    """As checkpoints of Nemotron-H have them."""
    directory = shutil.copytree(saved("nemotron_h"), tmp_path / "lettered")
    config = json.loads((directory / "config.json").read_text())
    (kinds,) = {name for name in ("layer_types", "layers_block_type") if config.pop(name, None)}
    (directory / "config.json").write_text(json.dumps({**config, "hybrid_override_pattern": "ME*-"}))
    lettered, listed = read_shape(directory), read_shape(saved("nemotron_h"))
    assert lettered == listed and listed.layers == 4, kinds


@native
def test_a_rehearsal_counts_the_keys_of_layers_that_differ_and_none_of_those_that_read_others(saved):
    layers = KernelRunner(skeleton("gemma4_text"), 96, dtype=torch.float32, device=torch.device("cpu")).spec.layers
    own = [layer for layer in layers if layer.borrows is None]
    assert [layer.borrows for layer in layers] == [None] * 4 + [2, 3] and len({layer.head_dim for layer in own}) == 2
    assert read_shape(saved("gemma4_text")).cached == 2 * sum(layer.kv_heads * layer.head_dim for layer in own)


@native
@pytest.mark.parametrize("name", few(NAMES[::-1], keep=1))
def test_what_is_issued_again_goes_on_from_its_prefix(name, saved):
    engine, model, text = make_engine(saved(name)), reference(saved(name)), texts(35)[0]
    whole = run(engine, [greedy("whole", text, 12)])["whole"]
    engine.add(greedy("cut", text, 12))
    answers: dict[str, Answer] = {}
    while len(answers.get("cut", Answer()).tokens) < 7:
        step(engine, answers)
    engine.abort()
    run(engine, (), answers)
    again = greedy("again", text, 12, prefix=tuple(answers["cut"].tokens))
    answers |= run(engine, [again])
    assert [*answers["cut"].tokens, *answers["again"].tokens] == whole.tokens
    assert [*answers["cut"].logprobs, *answers["again"].logprobs] == whole.logprobs
    assert_own(model, greedy("whole", text, 12), whole)
