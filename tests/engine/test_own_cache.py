"""Models that only their own cache serves, through transformers' forward pass over states that the engine keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from headrace.core.errors import ConfigError
from headrace.core.types import Fork, Request, Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.kernels import binding
from headrace.engine.native.runners.own_cache import OwnCacheRunner
from headrace.engine.native.served_how import served_how
from headrace.testing.makers import request
from support.fake_engine_model import CoreDriver, prompt
from support.fake_own_cache import FakeOwnCache
from support.few import few
from support.native_calls import Answer, drawn, greedy, make_engine, put, reference, run, saved, step, teacher_forced
from support.native_calls import prompts as texts
from support.tiny_models import OWN_CACHE, RunnerDriver, parameters, prompts, skeleton
from support.tiny_models import reference as plain

__all__ = ["saved"]
CPU = torch.device("cpu")
TOLERANCE = 1e-5


def driver(name: str) -> RunnerDriver:
    return RunnerDriver(OwnCacheRunner(skeleton(name), 256, dtype=torch.float32, device=CPU), parameters(name))


@torch.no_grad()
def wanted(model, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("name", few(["llama", "gemma2", "gpt_oss", *OWN_CACHE], keep=3))
def test_log_probs_equal_the_models_own_however_the_text_is_cut(name):
    ours, text = driver(name), prompts(70)[0]
    for chunk in (70, 17):
        assert (ours.logprobs(text, chunk=chunk) - wanted(plain(name), text)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", few(["gemma2", "gpt_oss", "mamba", "deepseek_v32", "trocr", "qwen3_next"], keep=3))
def test_ragged_batches_choose_the_models_own_tokens(name):
    assert_greedy(driver(name), name)


def assert_greedy(ours: RunnerDriver, name: str) -> None:
    """Of sequences of different lengths, which begin and end at different times, two of them as long as each other."""
    asked, counts, model = prompts(1, 17, 40, 3, 3), (9, 3, 12, 7, 9), plain(name)
    for text, tokens in zip(asked, ours.generate(asked, counts), strict=True):
        assert tokens == wanted(model, text + tokens)[len(text) - 1 : -1].argmax(-1).tolist()


def test_those_that_go_on_by_a_token_share_a_call_and_so_do_new_prompts_of_about_one_length():
    runner = FakeOwnCache("stacked", short=32)
    engine = CoreDriver(blocks=40, max_running=8, prefill_chunk=128, runner=runner)
    engine.run(*(request(f"r{i}", prompt(length, i), 6 + i) for i, length in enumerate((20, 9, 31, 40))))
    # The last token of a prompt follows alone, in the call in which others go on.
    assert runner.model.calls == {"begin 3": 1, "begin 1": 1, "step 4": 6, "step 3": 1, "step 2": 1, "step 1": 1}


def test_sequences_that_nothing_can_join_run_one_after_the_other():
    runner = FakeOwnCache("list")
    engine = CoreDriver(runner=runner)
    engine.run(*(request(f"r{i}", prompt(length, i), 6) for i, length in enumerate((20, 20, 9))))
    assert runner.path == "own cache alone fake" and set(runner.model.calls) == {"begin 1", "step 1"}


def test_siblings_that_begin_in_one_pass_behind_a_full_block_have_a_state_each():
    engine = CoreDriver(blocks=40, max_running=8, prefill_chunk=64, runner=FakeOwnCache("stacked", short=64))
    text = prompt(33, 1)
    engine.run(*(request(f"r{i}", text, 6, seed=i) for i in range(4)))
    for i in range(4):
        engine.check(f"r{i}")
    assert engine.engine.stats().recomputed_tokens == 0


def test_padding_stays_away_where_it_would_be_counted():
    """A text of `trocr` begins at the first column of its call: it runs with those of its length."""
    calls = {name: driver(name).runner._call for name in ("trocr", "deepseek_v32")}
    assert [calls["trocr"].company(7, tokens) for tokens in (6, 7)] == [-6, -7]
    assert [calls["deepseek_v32"].company(7, tokens) for tokens in (6, 7)] == [0, 0]


@pytest.mark.parametrize("name", ["gemma2", "mamba"])
def test_blame_names_the_first_layer_that_is_not_finite(name):
    layer = {"gemma2": "model.layers.1.mlp.down_proj.weight", "mamba": "backbone.layers.1.mixer.out_proj.weight"}[name]
    tensors = {key: tensor.clone() for key, tensor in parameters(name).items()}
    tensors[layer][3] = torch.nan
    ours = driver(name)
    ours.runner.use(ours.runner.prepare(tensors))
    batch = ours.batch([(ours.sequence([5, 7, 9]), 3), (ours.sequence([8, 4]), 2)])
    assert ours.runner.blame(batch).tolist() == [1] * 5


# --- in the engine -----------------------------------------------------------------------------------------------------


def assert_own(model, request: Request, answer: Answer) -> None:
    """The tokens are the model's greedy ones, with its log-probs."""
    told = teacher_forced(model, request.prompt, answer.tokens)
    assert answer.tokens == told.argmax(-1).tolist()
    assert torch.tensor(answer.logprobs).sub(told.max(-1).values).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_a_group_shares_its_prompt_and_a_conversation_what_it_has(name, saved):
    engine, model = make_engine(saved(name), max_running=3, path="cache"), reference(saved(name))
    assert engine.capabilities.path == f"own cache {name}"
    prompt = texts(40)[0]
    group = [greedy("first", prompt, 6), *(drawn(str(i), prompt, seed=i, tokens=5) for i in range(4))]
    answers = run(engine, group)
    assert_own(model, group[0], answers["first"])
    assert engine.stats().prompt_tokens == 40 + 4, "the last token is forwarded for each, for its logits"
    turn = greedy("next", (*prompt, *answers["first"].tokens, 9), 5)
    answers |= run(engine, [turn])
    assert_own(model, turn, answers["next"])
    assert engine.stats().recomputed_tokens == 0, "states were found, none was made twice"


@pytest.mark.parametrize("name", few(["gemma2", "qwen3_next", "gpt_oss"], keep=1))
def test_equal_passes_give_equal_bits_and_other_company_other_last_places(name, saved):
    """Why two runs over such a cache differ in their last places: which sequences share a pass follows from the clock."""
    asked = [drawn(str(number), text, seed=number) for number, text in enumerate(texts(12, 12, 30, 7))]

    def answered(*passes: list[Request]) -> list[Answer]:
        engine, answers = make_engine(saved(name), path="cache"), dict[str, Answer]()
        for together in passes:
            answers |= run(engine, together)
        return [answers[request.id] for request in asked]

    together, alone = answered(asked), answered(*([request] for request in asked))
    assert together == answered(asked), "a pass itself has one result"
    assert together != alone and [one.tokens for one in together] == [one.tokens for one in alone]
    for one, other in zip(together, alone, strict=True):
        assert torch.tensor(one.logprobs).sub(torch.tensor(other.logprobs)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", few(["gemma2", "mamba"], keep=1))
@pytest.mark.parametrize("swap", ["keep", "recompute"])
def test_a_swap_in_the_middle_of_a_completion_keeps_or_recomputes_its_state(name, swap, saved):
    old, new = saved(name), saved(name, 1)
    engine, request, answers = make_engine(old, swap=swap, path="cache"), greedy("r", texts(20)[0], 12), {}
    engine.add(request)
    while len(answers.get("r", Answer()).tokens) < 5:
        step(engine, answers)
    put(engine, new, 1)
    run(engine, (), answers)
    answer = answers["r"]
    assert answer.versions == [0] * 5 + [1] * 7
    before = replace(answer, tokens=answer.tokens[:5], logprobs=answer.logprobs[:5])
    assert_own(reference(old), request, before)
    after = Request("rest", (*request.prompt, *answer.tokens[:5]), request.sampling)
    rest = Answer(answer.tokens[5:], answer.logprobs[5:])
    if swap == "recompute":
        assert answer.kv_versions == answer.versions and engine.stats().recomputed_tokens == 25
        assert_own(reference(new), after, rest)
    else:
        assert answer.kv_versions == [0] * 12 and engine.stats().recomputed_tokens == 0
        with pytest.raises(AssertionError):
            assert_own(reference(new), after, rest)


@pytest.mark.parametrize(("name", "again"), [("bloom", 0), ("mamba", 24)])
def test_forks_continue_from_a_copy_or_compute_what_cannot_be_cut(name, again, saved):
    """What a recurrent layer keeps is of the last token alone; the fork's state is made again, and its version says so."""
    engine, model = make_engine(saved(name), context_length=128), reference(saved(name))
    source = greedy("source", texts(20)[0], 8)
    answers = run(engine, [source])
    put_again = answers["source"].tokens[:5]
    fork = Request("fork", (), Sampling(max_tokens=6, temperature=0.0, ignore_eos=True), fork=Fork("source", 5))
    run(engine, [fork], answers)
    assert_own(model, Request("fork", (*source.prompt, *put_again), fork.sampling), answers["fork"])
    assert engine.stats().recomputed_tokens == again
    assert answers["fork"].tokens[:3] == answers["source"].tokens[5:], "greedy, it says what its source said"


def test_asleep_it_keeps_its_requests_and_computes_their_states_again(saved):
    engine, request, answers = make_engine(saved("qwen3_next")), greedy("r", texts(20)[0], 10), {}
    engine.add(request)
    while len(answers.get("r", Answer()).tokens) < 4:
        step(engine, answers)
    engine.sleep(keep=True)
    engine.wake()
    put(engine, saved("qwen3_next", 1), 1)
    run(engine, (), answers)
    answer = answers["r"]
    assert answer.kv_versions == answer.versions == [0] * 4 + [1] * 6 and engine.stats().recomputed_tokens == 23
    after = Request("rest", (*request.prompt, *answer.tokens[:4]), request.sampling)
    assert_own(reference(saved("qwen3_next", 1)), after, Answer(answer.tokens[4:], answer.logprobs[4:]))


def test_what_it_cannot_do_is_refused_with_the_remedy(saved):
    for setting, remedy in (
        ({"exact": True}, "set it to false"),
        ({"routing": True}, "set it and rollout.keep_routing to false"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            make_engine(saved("mamba"), live=False, **setting)


@pytest.mark.slow
def test_before_anything_is_loaded_a_model_s_way_and_speed_are_named(saved, tmp_path):
    config = EngineConfig(device="cpu", context_length=96)
    assert served_how(saved("llama"), config) == "", "there is nothing to find out"
    assert served_how(saved("gpt_neox"), config).startswith("hugging face gpt_neox: slower")
    way = "kernels lfm2: fast" if binding.library() else "own cache lfm2: slower"
    assert served_how(saved("lfm2"), replace(config, dtype="float32")).startswith(way)
    cache = EngineConfig(device="cpu", context_length=96, path="cache")
    assert served_how(saved("gpt_neox"), cache).startswith(
        "own cache gpt_neox: slower, steps of all sequences in one pass"
    )
    with pytest.raises(ConfigError, match="engine.exact = true, but own cache gpt_neox .*set it to false"):
        served_how(saved("gpt_neox"), replace(cache, exact=True))
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        served_how(tmp_path, config)
