"""The native engine against Hugging Face, in float32 on tiny random models: tokens equal, log-probs within 1e-4."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

from headrace.core.errors import ConfigError
from headrace.core.types import Fork, Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.native.core import NativeEngine
from headrace.engine.native.kernels import binding
from headrace.engine.native.runners.skeleton import parameters_from_dir
from headrace.engine.request_book import scoring
from headrace.testing.makers import update
from headrace.weight_sync.packed import lay_out
from headrace.weight_sync.shared_memory import SharedMemory
from support import native_calls
from support.few import few
from support.native_calls import (
    EOS,
    TOKENIZER,
    Answer,
    drawn,
    encode,
    greedy,
    make_engine,
    prompts,
    put,
    reference,
    run,
    save_model,
    score,
    step,
    teacher_forced,
)
from support.tiny_models import SMALL

saved = native_calls.saved

TOLERANCE = 1e-4


MODELS = ["llama", "mistral-sliding", "qwen3", "gemma3_text", "mixtral", "gpt_neox"]
"""The engine over all sorts of them; each family is tested in test_families.py, the others in test_runner_hf.py."""


# --- what the tests stand on -------------------------------------------------------------------------------------------


def assert_greedy(model, request: Request, answer: Answer) -> None:
    wanted = model.generate(
        torch.tensor([request.prompt]),
        attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
        max_new_tokens=request.sampling.max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    assert answer.tokens == wanted[0, len(request.prompt) :].tolist()
    assert_logprobs(model, request, answer)


def assert_logprobs(model, request: Request, answer: Answer, temperature: float = 1.0) -> None:
    wanted = teacher_forced(model, request.prompt, answer.tokens, temperature)
    wanted = wanted.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert (torch.tensor(answer.logprobs) - wanted).abs().max() < TOLERANCE


# --- against Hugging Face ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(MODELS, keep=3))
def test_ragged_batches_with_joins_and_leaves_equal_generate(name, saved):
    """Prompts longer and shorter than a chunk, more requests than slots, some arriving while others decode."""
    engine, model = make_engine(saved(name)), reference(saved(name))
    assert engine.capabilities.path.startswith("hugging face" if name == "gpt_neox" else "fused")
    lengths, counts = (1, 5, 17, 40, 3, 33, 8), (12, 3, 20, 7, 1, 15, 9)
    requests = [
        greedy(str(i), prompt, count) for i, (prompt, count) in enumerate(zip(prompts(*lengths), counts, strict=True))
    ]
    answers: dict[str, Answer] = {}
    for request in requests[:3]:
        engine.add(request)
    for _ in range(4):
        step(engine, answers)
    run(engine, requests[3:], answers)
    for request in requests:
        assert answers[request.id].stop == "length"
        assert_greedy(model, request, answers[request.id])


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_fused_decoder_equals_hugging_faces_forward(name, saved):
    requests = [drawn(str(i), prompt, seed=i, temperature=0.8) for i, prompt in enumerate(prompts(4, 30, 11))]
    fused = run(make_engine(saved(name)), requests)
    plain = run(make_engine(saved(name), path="hf"), requests)
    for request in requests:
        assert fused[request.id].tokens == plain[request.id].tokens
        assert fused[request.id].logprobs == pytest.approx(plain[request.id].logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3"])
def test_sampled_logprobs_are_those_of_the_model_at_the_temperature(name, saved):
    engine, model = make_engine(saved(name)), reference(saved(name))
    requests = [drawn(str(i), prompt, seed=i, temperature=0.5 + i / 2) for i, prompt in enumerate(prompts(3, 20, 9))]
    answers = run(engine, requests)
    for request in requests:
        assert_logprobs(model, request, answers[request.id], request.sampling.temperature)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mistral-sliding"])
def test_scoring_is_teacher_forcing_and_disturbs_nobody(name, saved):
    engine, model = make_engine(saved(name), context_length=250), reference(saved(name))
    text = prompts(200)[0]  # longer than the positions scored in one pass
    requests = [drawn(str(i), prompt, seed=i) for i, prompt in enumerate(prompts(20, 5))]
    alone = run(make_engine(saved(name), context_length=250), requests)
    answers = run(engine, [*requests, scoring("text", text), scoring("one", text[:1])])
    wanted = teacher_forced(model, text[:1], text[1:]).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    scores = answers["text"].scores
    assert (torch.tensor(scores.logprobs) - wanted).abs().max() < TOLERANCE and scores.version == 0
    assert answers["one"].scores.logprobs == ()
    assert answers["text"].stop == answers["one"].stop == "length" and not answers["text"].tokens
    for name_ in alone:
        assert answers[name_].tokens == alone[name_].tokens


def test_a_prompt_is_scored_and_gone_on_from(saved):
    """Log-probs of the prompt, the most probable tokens at every position, and a completion: one request."""
    engine, model, prompt = make_engine(saved()), reference(saved()), prompts(40)[0]
    run(engine, [greedy("before", prompt)])  # the prompt is cached now; its logits are not
    wish = greedy("r", prompt, 5, prompt_logprobs=True, top_logprobs=3)
    answer = run(engine, [wish])["r"]
    assert_greedy(model, wish, answer)
    every = teacher_forced(model, prompt[:1], (*prompt[1:], *answer.tokens))
    following = torch.tensor([*prompt[1:], *answer.tokens])
    chosen = every.gather(1, following[:, None])[:, 0]
    assert (torch.tensor(answer.scores.logprobs) - chosen[:39]).abs().max() < TOLERANCE
    told = [(answer.scores.top.tokens, answer.scores.top.logprobs)]
    told.append((b"".join(d.top_tokens for d in answer.details), b"".join(d.top_logprobs for d in answer.details)))
    tokens = np.concatenate([np.frombuffer(ids, np.int32) for ids, _ in told]).reshape(-1, 3)
    logprobs = np.concatenate([np.frombuffer(values, np.float32) for _, values in told]).reshape(-1, 3)
    best = every.topk(3)
    assert tokens.tolist() == best.indices.tolist()
    assert np.abs(logprobs - best.values.numpy()).max() < TOLERANCE


def test_buffers_made_without_weights_are_those_of_the_real_model(saved):
    """Rotary frequencies, embedding scales: computed here, loaded there."""
    from headrace.engine.native.runners.skeleton import read

    for name in MODELS:
        ours = read(saved(name), torch.float32, torch.device("cpu")).model
        theirs = dict(reference(saved(name)).named_buffers())
        assert dict(ours.named_buffers()).keys() == theirs.keys()
        for key, buffer in ours.named_buffers():
            assert torch.equal(buffer, theirs[key]), f"{name}: {key}"


def test_a_model_is_tried_once_and_another_one_anew(tmp_path):
    """What a pass without values showed of one config is not taken for another config of the class."""
    from headrace.engine.native.runners.skeleton import read

    config = save_model(tmp_path, "llama") / "config.json"
    one, again = (read(tmp_path, torch.float32, torch.device("cpu")) for _ in range(2))
    assert again.paged is one.paged and again.model is not one.model
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "num_hidden_layers": values["num_hidden_layers"] + 1}))
    other = read(tmp_path, torch.float32, torch.device("cpu"))
    assert other.geometry.layers == one.geometry.layers + 1 == len(other.windows)


# --- swaps -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def forward_with_cache(model, tokens, cache: DynamicCache) -> torch.Tensor:
    """[V] log-probs after `tokens`, which the cache then holds."""
    out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return out.logits[0, -1].float().log_softmax(-1)


KERNELS = pytest.mark.skipif(binding.library() is None, reason="the kernels serve it")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen3",
        "gemma3_text",
        "gpt_oss",
        pytest.param("lfm2", marks=KERNELS),
        pytest.param("lfm3", marks=KERNELS),
        pytest.param("qwen3_5_text", marks=KERNELS),
        pytest.param("falcon_h1", marks=KERNELS),
        pytest.param("nemotron_h", marks=KERNELS),
        pytest.param("gemma4_text", marks=KERNELS),
    ],
)
def test_tokens_after_a_swap_come_from_the_new_weights_over_the_kept_cache(name, saved):
    old, new = reference(saved(name)), reference(saved(name, 1))
    engine = make_engine(saved(name))
    requests = [greedy(str(i), prompt, 14) for i, prompt in enumerate(prompts(6, 21))]
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.add(request)
    for _ in range(6):
        step(engine, answers)
    put(engine, saved(name, 1), 1)
    run(engine, (), answers)
    for request in requests:
        answer, cache = answers[request.id], DynamicCache(config=old.config)
        assert answer.versions == sorted(answer.versions) and set(answer.versions) == {0, 1}
        assert set(answer.kv_versions) == {0}
        logprobs = forward_with_cache(old, request.prompt, cache)
        for position, (token, version) in enumerate(zip(answer.tokens, answer.versions, strict=True)):
            if position:  # the token before enters the cache under the weights that sample this one
                logprobs = forward_with_cache(new if version else old, [answer.tokens[position - 1]], cache)
            assert token == int(logprobs.argmax())
            assert answer.logprobs[position] == pytest.approx(float(logprobs[token]), abs=TOLERANCE)


def test_a_prompt_that_straddles_a_swap_keeps_what_it_has_and_says_so(saved):
    old, new = reference(saved()), reference(saved(seed=1))
    prompt = prompts(40)[0]
    engine = make_engine(saved(), prefill_chunk=16)
    engine.add(greedy("straddles", prompt, 4))
    answers: dict[str, Answer] = {}
    step(engine, answers)
    step(engine, answers)  # 32 of 40 tokens
    assert not answers
    put(engine, saved(seed=1), 1)
    engine.add(greedy("fresh", prompt, 4))  # the same prompt, but for it the old part must not be used
    run(engine, (), answers)
    cache = DynamicCache(config=old.config)
    forward_with_cache(old, prompt[:32], cache)
    logprobs = forward_with_cache(new, prompt[32:], cache)
    assert answers["straddles"].logprobs[0] == pytest.approx(float(logprobs.max()), abs=TOLERANCE)
    assert answers["straddles"].versions == [1] * 4 and answers["straddles"].kv_versions == [0] * 4
    assert answers["fresh"].versions == [1] * 4 and answers["fresh"].kv_versions == [1] * 4
    assert_greedy(new, greedy("fresh", prompt, 4), answers["fresh"])


def test_a_prompt_of_older_weights_is_never_reused(saved):
    engine, prompt = make_engine(saved()), prompts(20)[0]
    run(engine, [greedy("before", prompt)])
    put(engine, saved(seed=1), 1)
    answers = run(engine, [greedy("after", prompt)])
    assert_greedy(reference(saved(seed=1)), greedy("after", prompt), answers["after"])
    assert engine.stats().prompt_tokens == 40


def test_a_sibling_does_not_wait_for_a_prompt_of_older_weights(saved):
    """What it waited for is of no use to it any more: it begins to compute its own in the next pass."""
    engine, prompt = make_engine(saved()), prompts(80)[0]
    answers: dict[str, Answer] = {}
    for name in ("first", "second"):
        engine.add(greedy(name, prompt, 4))
        step(engine, answers)
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    put(engine, saved(seed=1), 1)
    step(engine, answers)
    assert (engine.stats().running, engine.stats().waiting) == (2, 0) and not answers
    run(engine, (), answers)
    assert answers["first"].kv_versions == [0] * 4 and answers["second"].kv_versions == [1] * 4
    assert_greedy(reference(saved(seed=1)), greedy("second", prompt, 4), answers["second"])


def test_weights_as_they_are_published_serve_as_those_that_are_not(saved):
    """Packed in shared memory, where neighbours touch; and one by one."""
    parameters = parameters_from_dir(saved(), torch.bfloat16)
    manifest, memory = lay_out(parameters.items(), torch.bfloat16), SharedMemory.open()
    sender, receiver = memory.sender({"": manifest}), memory.receiver({"": manifest})
    views = receiver.receive(sender.send(0, parameters.items()))
    scores = []
    for tensors in (views, parameters):
        engine = make_engine(saved(), live=False, dtype="bfloat16", path="fused")
        engine.swap(engine.prepare(update(0), tensors))
        scores.append(score(engine, prompts(30)[0]))
    assert scores[0] == scores[1]


@pytest.mark.parametrize("path", ["auto", "hf"])
def test_an_update_that_does_not_fit_is_refused_by_name(path, saved):
    engine = make_engine(saved(), path=path)
    good = parameters_from_dir(saved(), torch.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "lacks the parameter " + name: {key: value for key, value in good.items() if key != name},
        "holds extra": {**good, "extra": torch.zeros(2)},
        name + r" came with shape \(3, 2\)": {**good, name: torch.zeros(3, 2)},
        name + " came as torch.bfloat16": {**good, name: good[name].bfloat16()},
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=message):
            engine.prepare(update(1), tensors)
    assert run(engine, [greedy("still serves", prompts(4)[0])])["still serves"].versions == [0] * 12


def test_without_weights_requests_wait_and_a_step_is_refused(saved):
    engine = make_engine(saved(), live=False)
    engine.add(greedy("early", prompts(5)[0]))
    assert not engine.has_work() and engine.stats().version == -1
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.step()
    put(engine, saved(), 3)
    assert run(engine)["early"].versions == [3] * 12


# --- seeds, batches, re-issues -----------------------------------------------------------------------------------------


def test_what_a_request_samples_depends_on_its_seed_alone(saved):
    """Not on batch mates, slots, chunks or order."""
    requests = [drawn(str(i), prompt, seed=i, top_p=0.95) for i, prompt in enumerate(prompts(4, 30, 11, 22, 7, 16))]
    together = run(make_engine(saved()), requests)
    backwards = run(make_engine(saved(), max_running=6, prefill_chunk=64), requests[::-1])
    for request in requests:
        alone = run(make_engine(saved()), [request])
        assert alone[request.id].tokens == together[request.id].tokens == backwards[request.id].tokens
    other = run(make_engine(saved()), [drawn("other", requests[0].prompt, seed=99)])
    assert other["other"].tokens != together["0"].tokens


def test_a_reissued_request_goes_on_where_it_stood(saved):
    prompt = prompts(9)[0]
    whole = run(make_engine(saved()), [drawn("a", prompt, seed=4, tokens=20)])["a"]
    for kept in (1, 7, 19):
        again = Request(
            "a", prompt, Sampling(max_tokens=20, seed=4, ignore_eos=True), prefix=tuple(whole.tokens[:kept])
        )
        answer = run(make_engine(saved()), [again])["a"]
        assert answer.tokens == whole.tokens[kept:]
        assert answer.logprobs == pytest.approx(whole.logprobs[kept:], abs=TOLERANCE)
        assert answer.stop == "length"


def test_a_reissued_request_that_had_ended_ends_at_once(saved):
    engine, prompt = make_engine(saved()), encode("hello")
    ended = {
        "full": Request("full", prompt, Sampling(max_tokens=3), prefix=(1, 2, 3)),
        "eos": Request("eos", prompt, Sampling(max_tokens=9), prefix=(1, EOS)),
        "id": Request("id", prompt, Sampling(max_tokens=9, stop_token_ids=(7,)), prefix=(1, 7)),
        "string": Request("string", prompt, Sampling(max_tokens=9, stop=("end",)), prefix=encode("the end")),
    }
    answers = run(engine, ended.values())
    assert {name: answer.stop for name, answer in answers.items()} == {
        "full": "length",
        "eos": "stop",
        "id": "stop",
        "string": "stop",
    }
    assert not any(answer.tokens for answer in answers.values())


# --- groups, slots, cancellation ---------------------------------------------------------------------------------------


def test_the_prompt_of_a_group_is_computed_once(saved):
    """Also for siblings that wait for a slot, and for one that comes when the first have ended."""
    engine, prompt = make_engine(saved(), max_running=3), prompts(40)[0]
    siblings = [drawn(str(i), prompt, seed=i, tokens=5 + i) for i in range(8)]
    answers = run(engine, siblings)
    late = drawn("late", prompt, seed=3, tokens=8)
    answers |= run(engine, [late])
    stats = engine.stats()
    assert stats.prompt_tokens == 40 + 8, "the last token is computed for each, for its logits"
    assert (stats.asked_tokens, stats.cached_tokens) == (9 * 40, 8 * 39)
    assert answers["late"].tokens == answers["3"].tokens[:8]
    model = reference(saved())
    for request in siblings:
        assert_logprobs(model, request, answers[request.id])


def test_a_sibling_that_comes_while_the_prompt_is_computed_joins_it(saved):
    engine, prompt = make_engine(saved()), prompts(40)[0]
    engine.add(drawn("first", prompt, seed=0))
    answers: dict[str, Answer] = {}
    step(engine, answers)
    run(engine, [drawn("second", prompt, seed=1)], answers)
    assert engine.stats().prompt_tokens == 41
    for name, seed in (("first", 0), ("second", 1)):
        assert_logprobs(reference(saved()), drawn(name, prompt, seed), answers[name])


def test_more_requests_than_slots_all_finish_in_order_of_arrival(saved):
    engine = make_engine(saved(), max_running=3)
    requests = [drawn(str(i), prompt, seed=i, tokens=1 + i % 7) for i, prompt in enumerate(prompts(*range(1, 31)))]
    first: list[str] = []
    for request in requests:
        engine.add(request)
    assert engine.stats().waiting == 30
    while engine.has_work():
        output = engine.step()
        engine.integrity()
        first += [name for name in output.request_ids if name not in first]
        assert engine.stats().running <= 3
    assert sorted(first) == sorted(request.id for request in requests)
    assert all(first.index(str(i)) < first.index(str(i + 6)) for i in range(24)), "nobody is passed by many"
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
    assert stats.sampled_tokens == sum(request.sampling.max_tokens for request in requests)
    assert stats.prompt_tokens == sum(range(1, 31)) - stats.cached_tokens and stats.busy_seconds > 0


def test_a_tight_kv_budget_lowers_what_runs_at_once(saved):
    row = 3 * 2 * 2 * 32 * 2 * 8 * 4 / 2**30  # blocks * layers * (key, value) * tokens * heads * size * bytes
    engine = make_engine(saved(), max_running=50, kv_gib=2.5 * row)
    requests = [greedy(str(i), prompt) for i, prompt in enumerate(prompts(3, 50, 20, 9, 31))]
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        step(engine, answers)
        assert engine.stats().running <= 5 and engine.stats().kv_used <= 1
    for request in requests:
        assert_greedy(reference(saved()), request, answers[request.id])
    with pytest.raises(ConfigError, match=r"raise engine\.kv_gib"):
        make_engine(saved(), kv_gib=0.9 * row)


def test_cancelling_frees_at_once_wherever_the_request_is(saved):
    engine = make_engine(saved(), max_running=3, prefill_chunk=16)
    quick, slow, long, waits, stays = prompts(4, 6, 70, 5, 8)
    engine.add(drawn("decodes", quick, seed=0, tokens=60))
    engine.add(drawn("stays", stays, seed=1, tokens=20))
    engine.add(drawn("prefills", long, seed=2, tokens=20))
    engine.add(drawn("waits", waits, seed=3, tokens=20))
    answers: dict[str, Answer] = {}
    for _ in range(3):
        step(engine, answers)
    assert engine.stats().running == 3 and engine.stats().waiting == 1
    for name in ("decodes", "prefills", "waits", "never seen", "decodes"):
        engine.cancel(name)
        engine.integrity()
    assert engine.stats().running == 1 and engine.stats().waiting == 0
    del answers["decodes"]
    again = drawn("decodes", slow, seed=5, tokens=9)  # a cancelled id may come back
    run(engine, [again], answers)
    assert sorted(answers) == ["decodes", "stays"]
    for request in (again, drawn("stays", stays, seed=1, tokens=20)):
        assert answers[request.id].tokens == run(make_engine(saved()), [request])[request.id].tokens


def test_a_shared_prompt_survives_the_cancellation_of_one(saved):
    engine, prompt = make_engine(saved()), prompts(40)[0]
    for i in range(3):
        engine.add(drawn(str(i), prompt, seed=i))
    answers: dict[str, Answer] = {}
    step(engine, answers)
    engine.cancel("0")
    run(engine, (), answers)
    assert sorted(answers) == ["1", "2"]


# --- options that need a model of their own ----------------------------------------------------------------------------


@pytest.mark.slow
def test_exactly_the_same_bits_alone_in_a_crowd_and_after_making_room(saved):
    row = 3 * 2 * 2 * 32 * 2 * 8 * 4 / 2**30
    texts = prompts(21, 30, 25, 22, 40, 26)
    requests = [drawn(str(i), prompt, seed=i, tokens=55, top_p=0.9) for i, prompt in enumerate(texts)]
    alone = {}
    for request in requests:
        alone |= run(make_engine(saved(), exact=True, prefill_chunk=64), [request])
    crowd = make_engine(saved(), exact=True, max_running=6, kv_gib=3.5 * row)
    short = Sampling(max_tokens=90, stop_token_ids=tuple(range(260)))
    run(crowd, [Request(f"short {i}", (i + 1,), short) for i in range(90)])  # so it lets in more than have room
    together = run(crowd, requests)
    assert crowd.stats().preemptions > 0
    for request in requests:
        assert together[request.id].tokens == alone[request.id].tokens
        assert together[request.id].logprobs == alone[request.id].logprobs, "to the last bit"


@KERNELS
def test_a_model_that_convolves_loses_nothing_in_a_crowd_that_makes_room(saved):
    """Siblings share a prompt, whose inputs of convolutions lie in its blocks, and sequences are pushed out and begin again."""
    texts = prompts(21, 30, 40)
    requests = [drawn(str(i), texts[i // 2], seed=i, tokens=45) for i in range(6)]
    alone = {}
    for request in requests:
        alone |= run(make_engine(saved("lfm2")), [request])
    crowd = make_engine(saved("lfm2"), max_running=6, kv_gib=10 * 12288 / 2**30)
    assert crowd.capabilities.path == "kernels lfm2"
    short = Sampling(max_tokens=90, stop_token_ids=tuple(range(260)))
    run(crowd, [Request(f"short {i}", (i + 1,), short) for i in range(40)])  # so it lets in more than have room
    together = run(crowd, requests)
    assert crowd.stats().preemptions > 0
    for request in requests:
        assert together[request.id].tokens == alone[request.id].tokens
        assert together[request.id].logprobs == alone[request.id].logprobs, "to the last bit"
    assert_logprobs(reference(saved("lfm2")), requests[5], together["5"])


@torch.no_grad()
def test_the_experts_of_every_position_are_those_that_the_model_chooses(saved):
    engine, model = make_engine(saved("mixtral"), routing=True), reference(saved("mixtral"))
    prompt = prompts(45)[0]
    sampling = [Sampling(max_tokens=12, seed=i, ignore_eos=True) for i in range(3)]
    requests = [
        Request(str(i), prompt, one, return_routing=True) for i, one in enumerate(sampling)
    ]  # a prompt they share
    answers = run(engine, [*requests, greedy("without", prompt)])
    assert answers["without"].routing is None
    for request in requests:
        answer = answers[request.id]
        text = (*prompt, *answer.tokens[:-1])
        logits = model(torch.tensor([text]), output_router_logits=True).router_logits
        wanted = torch.stack([layer.topk(2, -1).indices for layer in logits], 1).numpy()
        trace = answer.routing
        told = np.frombuffer(trace.experts, np.uint8).reshape(-1, trace.layers, trace.k)
        assert np.array_equal(told, wanted)


def test_adapters_in_one_batch_equal_weights_that_they_are_merged_into(saved):
    engine, generator = make_engine(saved(), max_adapters=2), torch.Generator().manual_seed(0)
    models = {"": reference(saved())}
    for name in ("north", "south"):
        models[name], tensors = reference(saved()), {}
        for key, weight in models[name].named_parameters():
            if key.endswith(("q_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight")):
                a = torch.randn(4, weight.shape[1], generator=generator) * 0.3
                b = torch.randn(weight.shape[0], 4, generator=generator) * 0.3
                module = f"base_model.model.{key.removesuffix('.weight')}"
                tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
                weight.data += 2.0 * b @ a
        spec = AdapterSpec(name, 4, 8.0)
        engine.swap(
            engine.prepare(
                WeightUpdate(version=0, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=spec), tensors
            )
        )
    requests = [greedy(name or "base", prompts(40)[0], adapter=name) for name in models]
    answers = run(engine, requests)
    for request in requests:
        assert_greedy(models[request.adapter], request, answers[request.id])
    wrong = {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)}
    with pytest.raises(ValueError, match="layers.7"):
        engine.prepare(
            WeightUpdate(
                version=1, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=AdapterSpec("north", 4, 8.0)
            ),
            wrong,
        )


# --- ends --------------------------------------------------------------------------------------------------------------


def constant(directory: Path, text: str, **changes) -> Path:
    """A Llama that says `text` after token 0: attention and MLP add nothing, each embedding points at the token to follow."""
    tokens = [0, *encode(text)]
    assert len(set(tokens)) == len(tokens), "every token must have one successor"
    save_model(directory, "llama", hidden_size=64, num_hidden_layers=1, **changes)
    model = AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        directions = torch.randn(260, 64, generator=generator)
        model.lm_head.weight.copy_(directions)
        for token, following in itertools.pairwise(tokens):
            model.model.embed_tokens.weight[token] = directions[following] * 10
    model.save_pretrained(directory)
    return directory


SAYS = "The café—9 naïve? END."
"""Characters of one, two and three bytes."""


def unique(text: str) -> str:
    """`text` without the characters whose bytes came before: `constant` gives every byte one successor."""
    kept, seen = "", {0}
    for character in text:
        tokens = encode(character)
        if len(set(tokens)) == len(tokens) and not seen & set(tokens):
            kept += character
            seen |= set(tokens)
    return kept


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> tuple[Path, str]:
    text = unique(SAYS)
    assert any(ord(character) > 0x7F for character in text)
    return constant(tmp_path_factory.mktemp("speaker"), text), text


def say(engine: NativeEngine, stop=(), prefix=(), prompt=(0,), **sampling) -> Answer:
    settings = Sampling(max_tokens=20, temperature=0.0, stop=tuple(stop), ignore_eos=True, **sampling)
    return run(engine, [Request("r", prompt, settings, prefix=tuple(prefix))])["r"]


def test_the_speaker_says_its_text(speaker):
    directory, text = speaker
    said = say(make_engine(directory)).tokens
    assert TOKENIZER.decode(said).startswith(text[:8])


def test_stop_strings_end_a_completion_with_the_token_that_completes_them(speaker):
    directory, text = speaker
    engine, tokens = make_engine(directory), encode(text)
    for start in range(len(text)):
        for length in (1, 2, 4):
            stop = text[start : start + length]
            end = len(encode(text[: start + len(stop)]))
            if start + length > len(text) or end > 20:
                continue
            answer = say(engine, stop=["never said", stop])
            assert answer.stop == "stop", stop
            assert answer.tokens == list(tokens[:end]), stop


def test_a_stop_string_in_the_prompt_does_not_stop_and_one_begun_in_the_prefix_does(speaker):
    directory, text = speaker
    engine, tokens = make_engine(directory), encode(text)
    prompt = (*encode("The END"), 0)
    answer = say(engine, stop=["The END"], prompt=prompt)
    assert answer.stop == "length" and len(answer.tokens) == 20
    answer = say(engine, stop=[text[1:4]], prefix=tokens[:3])
    assert answer.stop == "stop" and answer.tokens == [tokens[3]]
    answer = say(engine, stop=["0" + text[0]], prompt=(*encode("0"), 0))  # begun in the prompt
    assert answer.stop == "length"


def test_stop_tokens_and_end_of_sequence(speaker):
    directory, text = speaker
    engine, tokens = make_engine(directory), encode(text)
    assert say(engine, stop_token_ids=(tokens[4],)).tokens == list(tokens[:5])
    settings = json.loads((directory / "generation_config.json").read_text())
    for named in (tokens[2], [EOS, tokens[2]]):  # one, or several
        (directory / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": named}))
        other = make_engine(directory)
        answers = run(
            other,
            [
                Request("obeys", (0,), Sampling(max_tokens=6, temperature=0.0)),
                Request("ignores", (0,), Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)),
            ],
        )
        assert (answers["obeys"].stop, answers["obeys"].tokens) == ("stop", list(tokens[:3]))
        assert (answers["ignores"].stop, answers["ignores"].tokens) == ("length", list(tokens[:6]))
    (directory / "generation_config.json").write_text(json.dumps(settings))


def test_a_special_token_can_be_a_stop_string(speaker):
    from headrace.engine.native.guides import Stopper

    stopper = Stopper((), ("<eos>",), lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=False))
    assert [stopper.push(token) for token in (*encode("hi"), EOS)] == [False, False, True]


def test_text_of_half_characters_hides_nothing_and_costs_no_more_than_other_text():
    """Bytes that never become a character: a stop string after them is found, and windows stay small."""
    from headrace.engine.native.guides import LONGEST_CHARACTER, Stopper

    windows: list[int] = []

    def decode(tokens) -> str:
        windows.append(len(tokens))
        return TOKENIZER.decode(tokens)

    half = encode("é")[0]
    stopper = Stopper((), ("stop",), decode)
    said = [stopper.push(token) for token in (*[half] * 50, *encode("stop"))]
    assert said.index(True) == 53
    assert max(windows) <= 2 * LONGEST_CHARACTER


def test_every_end_token_that_the_model_names_counts(tmp_path):
    from headrace.models.tokenizer import end_tokens

    def config(**fields):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))

    config(eos_token_id=5)
    assert end_tokens(tmp_path) == {5}
    for named, wanted in ((3, {3, 5}), ([3, 4], {3, 4, 5}), (None, {5})):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert end_tokens(tmp_path) == wanted
    config(eos_token_id=None)
    assert end_tokens(tmp_path) == set()
    config()
    assert end_tokens(tmp_path) == {2}, "Llama's own default"
    config(eos_token_id=7, text_config={"eos_token_id": [8, 9]})
    assert end_tokens(tmp_path) == {8, 9}, "the text model's"


def test_logits_that_are_not_finite_end_their_rows_and_nobody_elses(saved):
    """A swap to poisoned weights ends what runs, by name; good weights after it serve as if nothing had been."""
    engine, prompt = make_engine(saved()), prompts(20)[0]
    poisoned = parameters_from_dir(saved(), torch.float32)
    poisoned["model.embed_tokens.weight"][7] = torch.nan  # one token only
    engine.swap(engine.prepare(update(1), poisoned))
    clean = tuple(token for token in prompt if token != 7)
    answers = run(engine, [greedy("bad", (*clean, 7), 3), greedy("worse", (*clean, 7), 3)])
    for name in ("bad", "worse"):
        assert answers[name].stop == "error" and not answers[name].tokens
        assert answers[name].error == "non-finite logits at version 1, first after layer 0"
    good = greedy("good", clean, 12)
    answers = run(engine, [greedy("bad", (*clean, 7), 3), good])
    assert answers["bad"].stop == "error" and answers["good"].stop == "length"
    assert engine.stats().cached_tokens == 0, "a bad prompt is not kept for others"
    put(engine, saved(), 2)
    for _ in range(3):  # through all rows the bad ones had
        answers = run(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts(3, 8, 11, 14))])
        assert all(answer.stop == "length" for answer in answers.values())
    assert_greedy(reference(saved()), good, run(engine, [good])["good"])


# --- what is refused ---------------------------------------------------------------------------------------------------


def test_requests_that_can_never_run_are_refused_with_the_remedy(saved):
    engine = make_engine(saved())
    engine.add(greedy("here", (1, 2)))
    refused = {
        "no tokens": Request("r", (), Sampling()),
        "shorten the prompt": Request("r", (1,) * 90, Sampling(max_tokens=7)),
        "max_tokens = 0 samples nothing": Request("r", (1,), Sampling(max_tokens=0)),
        "max_tokens = -1": Request("r", (1,), Sampling(max_tokens=-1)),
        "temperature = -1": Request("r", (1,), Sampling(temperature=-1.0)),
        "temperature = 1e-30": Request("r", (1,), Sampling(temperature=1e-30)),
        "temperature = nan": Request("r", (1,), Sampling(temperature=float("nan"))),
        "top_p = 0": Request("r", (1,), Sampling(top_p=0.0)),
        "temperature = 1e\\+39 .* at most 1e\\+30": Request("r", (1,), Sampling(temperature=1e39)),
        "top_k = -1": Request("r", (1,), Sampling(top_k=-1)),
        "min_p = 1.5": Request("r", (1,), Sampling(min_p=1.5)),
        "not empty": Request("r", (1,), Sampling(stop=("",))),
        "token 260 is not": Request("r", (1, 260), Sampling()),
        "token -1 is not": Request("r", (1,), Sampling(), prefix=(-1,)),
        "a prefix of 3 tokens exceeds": Request("r", (1,), Sampling(max_tokens=2), prefix=(1, 1, 1)),
        "is here already": greedy("here", (3,)),
        "token 999": scoring("r", (1, 999)),
        "need 97 tokens": scoring("r", (1,) * 97),
        "top_logprobs = 261": greedy("r", (1,), top_logprobs=261),
        "engine.routing = true": greedy("r", (1,), return_routing=True),
        "no adapter north is loaded": greedy("r", (1,), adapter="north"),
        "request nobody is not known": Request("r", (), Sampling(), fork=Fork("nobody", 0)),
    }
    for message, request in refused.items():
        with pytest.raises(ValueError, match=message):
            engine.add(request)
    assert list(run(engine)) == ["here"]
    with pytest.raises(ValueError, match="leave prompt, prefix, prompt_logprobs and adapter empty"):
        engine.add(Request("r", (1,), Sampling(), fork=Fork("here", 0)))


def test_the_context_is_no_longer_than_the_model_was_made_for(saved):
    assert make_engine(saved(), context_length=10_000, live=False).capabilities.context_length == 256


def test_a_model_without_tokenizer_serves_all_but_stop_strings(tmp_path):
    directory = save_model(tmp_path, "llama")
    for file in (*directory.glob("token*"), *directory.glob("special*")):
        file.unlink()
    engine = make_engine(directory)
    assert not engine.capabilities.stop_strings
    with pytest.raises(ValueError, match="use stop_token_ids"):
        engine.add(Request("r", (1,), Sampling(stop=("x",))))
    assert run(engine, [greedy("r", (1, 2, 3))])["r"].stop == "length"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("bloom", {"n_head": 4}, "_supports_attention_backend"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "a dry run of its forward pass over our blocks failed",
        ),
    ],
)
def test_attention_that_cannot_be_had_over_our_blocks_is_left_to_the_models_own_cache(name, changes, reason, tmp_path):
    AutoConfig.for_model(name, **{**SMALL, **changes}).save_pretrained(tmp_path)
    assert make_engine(tmp_path, live=False).capabilities.path == f"own cache {name}"
    with pytest.raises(ConfigError, match=f'engine.path = "hf" does not serve {name} here: .*{reason}.*use "auto"'):
        make_engine(tmp_path, live=False, path="hf")


def test_an_encoder_decoder_is_refused_by_that_name(tmp_path):
    AutoConfig.for_model("t5", **{**SMALL, "d_model": 32}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        make_engine(tmp_path, live=False)


@pytest.mark.slow
def test_the_real_model_in_float32_and_bfloat16():
    """SmolLM2-135M: greedy answers of both paths equal `generate`; in bfloat16, log-probs stay near those of float32."""
    from headrace.models.resolve import resolve_model

    directory = resolve_model("smollm2-135m-instruct")
    model, tokenizer = reference(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    questions = ["What is 17 + 25?", "Name three rivers.", "Write a line about the sea, please, in plain words."]
    requests = [greedy(str(i), tuple(tokenizer(text)["input_ids"]), 24) for i, text in enumerate(questions)]
    for path in ("auto", "hf"):
        engine = make_engine(directory, path=path, kv_gib=1.0, context_length=128)
        answers = run(engine, requests)
        for request in requests:
            assert_greedy(model, request, answers[request.id])
    half = make_engine(directory, live=False, dtype="bfloat16", kv_gib=1.0, context_length=128)
    half.swap(half.prepare(update(0), parameters_from_dir(directory, torch.bfloat16)))
    for request in requests:
        text = (*request.prompt, *answers[request.id].tokens)
        difference = torch.tensor(score(half, text)) - torch.tensor(score(engine, text))
        assert difference.abs().mean() < 0.05
