"""Constraints in the native engine. What may follow is checked against sets that are worked out from the texts themselves, byte by byte."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from headrace.core.sampling_masks import decode_set
from headrace.core.steps import Finished, Transcript, write_down
from headrace.core.types import Completion, Constraint, Fork, Request, Sampling, SamplingMask
from support.few import few
from support.native_calls import (
    EOS,
    TOKENIZER,
    Answer,
    encode,
    make_engine,
    prompts,
    put,
    reference,
    run,
    save_model,
    step,
    teacher_forced,
)

TEXTS = ["ab", "abc", "b", "é", "è!", "日本語", "日本", "😀", '"quoted\\n"', "a" * 20]
CHOICES = Constraint("choice", json.dumps(TEXTS))
SCHEMA = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "grün"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["colour", "n"],
            "additionalProperties": False,
        }
    ),
)
PATHS = ["kernels", "fused", "hf"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama", head_dim=16)


def constrained(
    name: str, constraint: Constraint, seed: int = 0, prompt: tuple[int, ...] = (), **sampling: Any
) -> Request:
    given = {"max_tokens": 40, "seed": seed, "constraint": constraint, **sampling}
    return Request(name, prompt or prompts(5)[0], Sampling(**given), return_mask=True)


def completions(engine, requests) -> dict[str, Completion]:
    """By request, through transcripts as a run keeps them."""
    transcripts = {request.id: Transcript(request=request) for request in requests}
    done = {}
    for request in requests:
        engine.add(request)
    for _ in range(5000):
        if not engine.has_work():
            return done
        output = engine.step()
        engine.integrity()
        write_down(output, transcripts.get)
        done |= {end.request_id: transcripts[end.request_id].completion(end) for end in output.finished}
    raise AssertionError("the engine does not come to an end")


def allowed(mask: SamplingMask, position: int) -> set[int]:
    """The tokens that were recorded as left; all of them where nothing was cut."""
    start, stop = np.frombuffer(mask.offsets, np.int64)[position : position + 2]
    if stop > start:
        return set(np.frombuffer(mask.token_ids, np.int32)[start:stop].tolist())
    number = np.frombuffer(mask.set_of, np.int32)[position] if mask.sets else -1
    if number < 0:
        return set(range(260))
    return set(np.flatnonzero(np.unpackbits(decode_set(mask.sets[number]), bitorder="little")).tolist())


def may_follow(said: list[int], texts: list[str]) -> set[int]:
    """The next byte of every text that begins so, and the end of a text that has been said."""
    spelled = [encode(text) for text in texts]
    going_on = {one[len(said)] for one in spelled if len(one) > len(said) and list(one[: len(said)]) == said}
    return going_on | ({EOS} if tuple(said) in spelled else set())


@pytest.mark.parametrize("path", few(PATHS, keep=1))
def test_exactly_the_tokens_with_which_a_text_can_still_become_a_choice_are_left(path, saved):
    engine = make_engine(saved, path=path)
    done = completions(engine, [constrained(f"r{seed}", CHOICES, seed) for seed in range(24)])
    model, said = reference(saved), set()
    for one in done.values():
        assert one.stop == "stop" and one.tokens[-1] == EOS
        said.add(TOKENIZER.decode(one.tokens[:-1]))
        scored = teacher_forced(model, prompts(5)[0], list(one.tokens))
        for position, token in enumerate(one.tokens):
            expected = may_follow(list(one.tokens[:position]), TEXTS)
            assert allowed(one.mask, position) == expected
            own = scored[position, sorted(expected)].log_softmax(-1)[sorted(expected).index(token)]
            assert one.logprobs[position] == pytest.approx(float(own), abs=1e-4)
    assert said <= set(TEXTS) and len(said) > 3


def test_a_schema_is_satisfied_and_an_end_cut_off_at_max_tokens_is_as_usual(saved):
    engine = make_engine(saved)
    requests = [constrained(f"r{seed}", SCHEMA, seed, temperature=0.7) for seed in range(8)]
    done = completions(engine, [*requests, constrained("short", SCHEMA, max_tokens=3)])
    assert done.pop("short").stop == "length"
    for one in done.values():
        said = json.loads(TOKENIZER.decode(one.tokens, skip_special_tokens=True)) if one.stop == "stop" else {}
        assert one.stop == "length" or (said["colour"] in ("red", "grün") and 0 <= said["n"] <= 99)
    assert any(one.stop == "stop" for one in done.values())


@pytest.mark.parametrize(
    ("filters", "cut"),
    [({"top_k": 2}, 2), ({"top_p": 0.3}, None), ({"min_p": 0.9}, None), ({"temperature": 0.0}, None)],
)
def test_filters_see_what_the_constraint_has_left(filters, cut, saved):
    engine = make_engine(saved)
    done = completions(engine, [constrained(f"r{seed}", CHOICES, seed, **filters) for seed in range(6)])
    model, narrower = reference(saved), 0
    for one in done.values():
        scored = teacher_forced(model, prompts(5)[0], list(one.tokens))
        for position, token in enumerate(one.tokens):
            left, possible = allowed(one.mask, position), may_follow(list(one.tokens[:position]), TEXTS)
            assert token in left <= possible and len(left) == min(cut or len(left), len(possible))
            narrower += left < possible
            own = scored[position, sorted(left)].log_softmax(-1)[sorted(left).index(token)]
            assert one.logprobs[position] == pytest.approx(float(own), abs=1e-4)
            if filters == {"temperature": 0.0}:
                assert token == max(possible, key=lambda one: scored[position, one])
    assert narrower or "temperature" in filters


def test_a_forced_token_has_log_prob_zero_and_others_in_the_batch_are_left_alone(saved):
    free = [
        Request(f"free{n}", prompt, Sampling(max_tokens=12, seed=n, ignore_eos=True))
        for n, prompt in enumerate(prompts(3, 9))
    ]
    alone = run(make_engine(saved, exact=True), free)
    beside = run(make_engine(saved, exact=True), [*free, constrained("forced", Constraint("choice", '["only this"]'))])
    forced = beside.pop("forced")
    assert TOKENIZER.decode(forced.tokens, skip_special_tokens=True) == "only this"
    assert forced.logprobs == [0.0] * len(forced.tokens)
    assert {name: one.tokens for name, one in beside.items()} == {name: one.tokens for name, one in alone.items()}


# --- the state is that of the tokens -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_that_goes_on_from_a_prefix_has_the_tokens_and_masks_of_one_that_was_not_interrupted(saved):
    request = constrained("r", SCHEMA, seed=3)
    (whole,) = completions(make_engine(saved, exact=True), [request]).values()
    for cut in range(1, len(whole.tokens)):
        rest = completions(make_engine(saved, exact=True), [replace(request, prefix=whole.tokens[:cut])])["r"]
        assert rest.tokens == whole.tokens[cut:] and rest.stop == whole.stop and rest.logprobs == whole.logprobs[cut:]
        for position in range(len(rest.tokens)):
            assert allowed(rest.mask, position) == allowed(whole.mask, cut + position)


def test_weights_that_are_swapped_in_the_middle_leave_the_place_in_the_language(saved, tmp_path):
    other = save_model(tmp_path / "other", "llama", seed=1, head_dim=16)
    for swap in ("keep", "recompute"):
        engine, answers = make_engine(saved, swap=swap), {}
        engine.add(replace(constrained("r", CHOICES, seed=5), return_mask=False))
        while len(answers.get("r", Answer()).tokens) < 1:
            step(engine, answers)
        put(engine, other, 1)
        run(engine, answers=answers)
        assert answers["r"].stop == "stop" and TOKENIZER.decode(answers["r"].tokens[:-1]) in TEXTS
        assert set(answers["r"].versions) in ({0, 1}, {0})


def test_sequences_that_make_room_come_back_to_their_place(saved):
    row = 3 * 2 * 2 * 32 * 2 * 16 * 4 / 2**30  # blocks * layers * (key, value) * tokens * heads * size * bytes
    engine = make_engine(saved, max_running=6, kv_gib=3.5 * row)
    short = Sampling(max_tokens=90, stop_token_ids=tuple(range(260)))
    run(engine, [Request(f"short {i}", (i + 1,), short) for i in range(90)])  # so it lets in more than have room
    long = Constraint("regex", "(ab){25}")
    texts = prompts(21, 30, 25, 22, 40, 26)
    done = completions(engine, [constrained(f"r{n}", long, n, text, max_tokens=55) for n, text in enumerate(texts)])
    assert engine.stats().preemptions > 0
    assert {TOKENIZER.decode(one.tokens, skip_special_tokens=True) for one in done.values()} == {"ab" * 25}


def test_a_fork_goes_on_in_the_language_from_what_it_keeps(saved):
    engine = make_engine(saved)
    source = completions(engine, [constrained("source", CHOICES, seed=1)])["source"]
    for at in range(len(source.tokens)):
        fork = replace(constrained(f"fork{at}", CHOICES, seed=at + 9), prompt=(), fork=Fork("source", at))
        (done,) = completions(engine, [fork]).values()
        text = TOKENIZER.decode([*source.tokens[:at], *done.tokens], skip_special_tokens=True)
        assert done.stop == "stop" and text in TEXTS
    strange = replace(constrained("strange", Constraint("regex", "[0-9]+")), prompt=(), fork=Fork("source", 1))
    with pytest.raises(ValueError, match="tokens before do not fit the constraint"):
        engine.add(strange)
    engine.integrity()


def test_it_holds_only_behind_the_thinking_that_it_waits_for(saved):
    after = replace(CHOICES, after="</t>")
    request = constrained("r", after, seed=2, max_tokens=60)
    (free,) = completions(make_engine(saved), [request]).values()
    assert EOS not in free.tokens and all(allowed(free.mask, one) == set(range(260)) - {EOS} for one in range(60))
    thought = encode("so </t>")
    (rest,) = completions(make_engine(saved), [replace(request, prefix=thought)]).values()
    assert rest.stop == "stop" and TOKENIZER.decode(rest.tokens[:-1]) in TEXTS


def test_what_a_pass_says_of_a_set_is_said_once(saved):
    request = constrained("r", Constraint("regex", "[a-z]{20}"), max_tokens=40)
    engine, details = make_engine(saved), []
    engine.add(request)
    while engine.has_work():
        details += engine.step().details
    assert (
        len(details) == 21
        and sum(bool(detail.set) for detail in details) == len({detail.set_name for detail in details}) == 2
    )


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (
            Constraint("json_schema", '{"type": "object", "properties": {"a": false}, "required": ["a"]}'),
            "nsatisfiable",
        ),
        (Constraint("json_schema", '{"not": {"type": "string"}}'), "Unimplemented keys"),
        (Constraint("json_schema", '{"$ref": "#"}'), "not satisfied by any text"),
        (Constraint("regex", "["), "the regular expression cannot be followed"),
        (Constraint("grammar", "start: nothing"), "unknown name"),
        (Constraint("json_schema", json.dumps({"enum": ["x" * 200_000]})), "too long"),
    ],
)
def test_what_nothing_can_follow_ends_its_request_alone(constraint, reason, saved):
    engine = make_engine(saved)
    answers = run(
        engine,
        [
            replace(constrained("bad", constraint), return_mask=False),
            replace(constrained("good", CHOICES), return_mask=False),
        ],
    )
    assert answers["bad"].stop == "error" and reason in answers["bad"].error
    assert answers["good"].stop == "stop"


def test_combinations_that_cannot_be_are_refused(saved, tmp_path):
    engine = make_engine(saved)
    with pytest.raises(ValueError, match="leave ignore_eos out"):
        engine.add(constrained("r", CHOICES, ignore_eos=True))
    with pytest.raises(ValueError, match="logit_bias changes the distribution"):
        engine.add(constrained("r", CHOICES, logit_bias=((3, 1.0),)))
    with pytest.raises(ValueError, match="not in the model's vocabulary"):
        engine.add(Request("r", (1,), Sampling(logit_bias=((9999, 1.0),))))
    bare = save_model(tmp_path / "bare", "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (bare / file).unlink()
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        make_engine(bare).add(constrained("r", CHOICES))


def test_cancelled_and_aborted_requests_leave_nothing_behind(saved):
    engine = make_engine(saved)
    for name in ("a", "b", "c"):
        engine.add(constrained(name, CHOICES))
    with pytest.raises(ValueError, match="is here already"):
        engine.add(constrained("a", CHOICES))
    engine.cancel("a")
    assert engine.stats().waiting == 2 and engine.has_work()
    engine.abort()
    assert engine.step().finished == (Finished("b", "interrupted"), Finished("c", "interrupted"))
    assert not engine.has_work()


# --- logit_bias ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_log_probs_of_biased_requests_are_those_of_what_was_sampled_from(path, saved):
    bias = ((10, 5.0), (11, -100.0), (EOS, -100.0))
    request = Request("r", prompts(5)[0], Sampling(max_tokens=30, seed=1, temperature=0.8, logit_bias=bias))
    answer = run(make_engine(saved, path=path), [request])["r"]
    scored = (
        reference(saved)(torch.tensor([[*request.prompt, *answer.tokens]]))
        .logits[0, len(request.prompt) - 1 : -1]
        .float()
    )
    for token, number in bias:
        scored[:, token] += number
    own = (scored / 0.8).log_softmax(-1)[torch.arange(30), torch.tensor(answer.tokens)]
    assert answer.logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert 10 in answer.tokens and 11 not in answer.tokens


# --- any list of texts ----------------------------------------------------------------------------------------------------


def test_random_lists_of_texts(saved):
    numbers, engine = random.Random(0), make_engine(saved, max_running=8)
    characters = 'ab"\\\n é日😀{}'
    for case in range(12):
        texts = ["".join(numbers.choices(characters, k=numbers.randint(1, 6))) for _ in range(numbers.randint(1, 8))]
        constraint = Constraint("choice", json.dumps(texts))
        done = completions(engine, [constrained(f"{case}/{seed}", constraint, seed) for seed in range(4)])
        for one in done.values():
            assert one.stop == "stop"
            for position in range(len(one.tokens)):
                assert allowed(one.mask, position) == may_follow(list(one.tokens[:position]), texts)
