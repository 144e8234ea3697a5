"""What one can ask of the engine beside tokens: control, priorities, forks, swaps with and without the cache, adapters, masks,
routing. On the fake model, which shows what was computed when."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.core.steps import Finished, Transcript, write_down
from headrace.core.types import Completion, Fork, Request, Sampling
from headrace.core.weights import AdapterSpec, WeightUpdate
from headrace.engine.request_book import scoring
from headrace.testing.makers import request
from support.fake_engine_model import LAYERS, POISON, CoreDriver, K, draw, logits_of, prompt, routing_of
from support.few import few


def forwarded(driver: CoreDriver, since: int = 0) -> int:
    """Tokens that went through the model."""
    return sum(len(batch.tokens) for batch in driver.runner.forwarded[since:])


def completion(driver: CoreDriver, wanted: Request) -> Completion:
    """What a client makes of what the engine tells."""
    transcript = Transcript(request=wanted)
    driver.add(wanted)
    while True:
        output = driver.step()
        write_down(output, lambda name: transcript if name == wanted.id else None)
        for end in output.finished:
            if end.request_id == wanted.id:
                return transcript.completion(end)


# --- control -----------------------------------------------------------------------------------------------------------


def test_paused_it_computes_nothing_and_keeps_everything():
    driver = CoreDriver()
    driver.add(request("a", prompt(20), 10), request("b", prompt(9), 10))
    for _ in range(4):
        driver.step()
    driver.engine.pause()
    assert not driver.engine.has_work() and driver.engine.stats().running == 2
    driver.swap()  # weights may come meanwhile
    driver.add(request("c", prompt(3), 2))
    passes = len(driver.runner.forwarded)
    driver.step()
    assert len(driver.runner.forwarded) == passes
    driver.engine.resume()
    driver.run()
    for name in "abc":
        driver.check(name)
        assert driver.told[name].stop == "length"


def test_draining_finishes_what_has_begun_and_admits_nobody():
    driver = CoreDriver(max_running=2)
    driver.add(*(request(str(i), prompt(10 + i), 6) for i in range(4)))
    driver.step()
    driver.engine.drain()
    assert not driver.engine.drained
    driver.add(request("late", prompt(5), 3, priority=-9))
    driver.run()
    assert driver.engine.drained and not driver.engine.has_work()
    assert [name for name, told in driver.told.items() if told.stop] == ["0", "1"]
    assert driver.engine.stats().waiting == 3
    driver.engine.cancel("2")
    driver.engine.resume()
    driver.run()
    assert [name for name, told in driver.told.items() if not told.stop] == ["2"]


def test_draining_waits_for_those_that_had_to_make_room():
    driver = generous(CoreDriver(blocks=5, max_running=3))
    driver.add(*(request(str(i), prompt(5 + i), 100) for i in range(3)))
    while not driver.engine.stats().preemptions:
        driver.step()
    driver.engine.drain()
    driver.run()
    begun = [name for name in "012" if driver.told[name].tokens]
    assert driver.engine.drained and len(begun) >= 2
    assert all(driver.told[name].stop == "length" for name in begun)


def generous(driver: CoreDriver) -> CoreDriver:
    """Completions turn out to be short, so that admission takes more in than could end at max_tokens."""
    sampling = Sampling(max_tokens=120, stop_token_ids=tuple(range(0, 40, 2)))
    for i in range(100):
        driver.run(Request(f"short {i}", (i % 30,), sampling))
    return driver


def test_aborting_returns_what_there_is():
    driver = CoreDriver(max_running=2)
    driver.add(*(request(str(i), prompt(10 + i), 20) for i in range(4)))
    for _ in range(5):
        driver.step()
    driver.engine.abort()
    stats = driver.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
    driver.engine.pause()  # what ended is told all the same
    driver.run()
    assert {told.stop for told in driver.told.values()} == {"interrupted"}
    assert [bool(told.tokens) for told in driver.told.values()] == [True, True, False, False]
    for name in "01":
        driver.check(name)
    driver.engine.resume()
    driver.run(request("next", prompt(4), 3))
    assert driver.told["next"].stop == "length"


def test_the_lowest_priority_number_goes_first_then_the_first_to_come():
    driver = CoreDriver(max_running=1)
    for name, priority in (("d", 7), ("a", 0), ("b", 0), ("e", 7), ("c", 3)):
        driver.add(request(name, prompt(6), 2, priority=priority))
    order: list[str] = []
    while driver.engine.has_work():
        order += driver.step().request_ids
    assert order == [name for name in "abcde" for _ in range(2)]


def test_the_last_in_order_makes_room_and_goes_on_later():
    driver = generous(CoreDriver(blocks=5, max_running=3))
    requests = [
        request(name, prompt(5, i), 100, seed=i, priority=p)
        for i, (name, p) in enumerate(zip("abc", (2, 0, 1), strict=True))
    ]
    driver.add(*requests)
    ends = []
    while driver.engine.has_work():
        ends += [end.request_id for end in driver.step().finished]
    stats = driver.engine.stats()
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0 and ends == ["b", "c", "a"]
    for name in "abc":
        driver.check(name)
        assert len(driver.told[name].tokens) == 100


def test_many_requests_through_a_small_budget_all_finish_and_few_are_computed_twice():
    driver = CoreDriver(blocks=40, max_running=20, check=False, prefill_chunk=64)
    requests = [request(str(i), prompt(3 + i % 29, i), 1 + i * 7 % 20, seed=i) for i in range(300)]
    driver.run(*requests)
    assert all(len(driver.told[one.id].tokens) == one.sampling.max_tokens for one in requests)
    stats = driver.engine.stats()
    assert stats.recomputed_tokens < 0.02 * stats.sampled_tokens
    driver.engine.integrity()


# --- what is computed once ---------------------------------------------------------------------------------------------


def test_a_group_forwards_its_prompt_once_and_each_sibling_its_last_token():
    driver = CoreDriver(max_running=8)
    driver.run(*(request(str(i), prompt(64), 5, seed=i) for i in range(8)))
    assert forwarded(driver) == 64 + 7 + 8 * 4
    for name in "01234567":
        driver.check(name)


def test_the_next_turn_of_a_conversation_forwards_what_is_new():
    driver = CoreDriver()
    first = driver.run(request("first", prompt(50), 20))["first"]
    context = (*prompt(50), *first.tokens, 1, 2, 3)
    before = len(driver.runner.forwarded)
    driver.run(request("second", context, 5))
    assert forwarded(driver, before) == 1 + 3 + 4, "the token sampled last, the new ones, and those sampled now"
    driver.check("second")
    stats = driver.engine.stats()
    assert (stats.asked_tokens, stats.cached_tokens) == (50 + 73, 69)


def test_what_was_computed_over_a_kept_cache_of_older_weights_is_cached_for_nobody():
    """Blocks filled by the new weights, behind ones that the old weights filled."""
    driver = CoreDriver()
    driver.add(request("a", prompt(40), 60))
    for _ in range(6):
        driver.step()
    driver.swap()
    driver.run()
    assert set(driver.told["a"].kv_versions) == {0} and set(driver.told["a"].versions) == {0, 1}
    before = driver.engine.stats().cached_tokens
    driver.run(request("b", (*prompt(40), *driver.told["a"].tokens), 4))
    assert driver.engine.stats().cached_tokens == before and driver.told["b"].kv_versions == [1] * 4
    driver.check("b")


# --- swaps -------------------------------------------------------------------------------------------------------------


def test_recompute_builds_the_cache_anew_shared_prompts_once_and_loses_no_token():
    driver = CoreDriver(max_running=4, swap="recompute", prefill_chunk=1000)
    driver.add(*(request(str(i), prompt(64), 30, seed=i) for i in range(4)))
    for _ in range(8):
        driver.step()
    sampled = [len(driver.told[str(i)].tokens) for i in range(4)]
    driver.swap()
    before = len(driver.runner.forwarded)
    while driver.engine.stats().running < 4 or len(driver.told["3"].tokens) == sampled[3]:
        driver.step()
    own = sum(sampled)
    again = forwarded(driver, before) - sum(len(driver.told[str(i)].tokens) - sampled[i] for i in range(4))
    assert again <= 64 + own + 4, "the prompt once, every completion once"
    driver.run()
    for i in range(4):
        told = driver.told[str(i)]
        driver.check(str(i))
        assert len(told.tokens) == 30 and told.kv_versions == told.versions == sorted(told.versions)
    assert driver.engine.stats().recomputed_tokens >= 64 + own - 4


def test_keep_goes_on_at_once_and_says_which_weights_computed_the_cache():
    driver = CoreDriver(swap="keep")
    driver.add(request("a", prompt(20), 10))
    for _ in range(4):
        driver.step()
    driver.swap()
    driver.run()
    told = driver.told["a"]
    assert told.versions == [0] * (told.versions.count(0)) + [1] * told.versions.count(1) and 1 in told.versions
    assert told.kv_versions == [0] * 10 and driver.engine.stats().recomputed_tokens == 0


# --- forks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", few([0, 1, 11, 12, 13, 30], keep=3))
@pytest.mark.parametrize("ended", few([True, False], keep=1))
def test_a_fork_goes_on_from_an_earlier_token_and_forwards_one(at, ended):
    driver = CoreDriver()
    driver.add(request("a", prompt(20), 30 if ended else 80))
    while not driver.told["a"].stop and len(driver.told["a"].tokens) < 31:
        driver.step()
    before = len(driver.runner.forwarded)
    driver.add(Request("fork", (), Sampling(max_tokens=6, seed=5, ignore_eos=True), fork=Fork("a", at)))
    driver.run()
    batches = [b for b in driver.runner.forwarded[before:] if 20 + at - 1 in b.context.tolist()]
    assert batches and all((np.diff(batch.starts) == 1).all() for batch in driver.runner.forwarded[before:])
    driver.check("fork", (*prompt(20), *driver.told["a"].tokens[:at]))
    driver.check("a")


def test_a_fork_after_a_swap_samples_under_the_live_weights_over_the_old_cache():
    driver = CoreDriver()
    driver.run(request("a", prompt(40), 10))
    driver.swap()
    driver.run(Request("fork", (), Sampling(max_tokens=4, seed=5, ignore_eos=True), fork=Fork("a", 7)))
    assert driver.told["fork"].versions == [1] * 4 and driver.told["fork"].kv_versions == [0] * 4
    driver.check("fork", (*prompt(40), *driver.told["a"].tokens[:7]))


def test_forks_of_forks_and_the_next_turn_of_one():
    driver = CoreDriver()
    driver.run(request("a", prompt(40), 30))
    driver.run(Request("b", (), Sampling(max_tokens=30, seed=1, ignore_eos=True), fork=Fork("a", 20)))
    driver.run(Request("c", (), Sampling(max_tokens=5, seed=2, ignore_eos=True), fork=Fork("b", 25)))
    context = (*prompt(40), *driver.told["a"].tokens[:20], *driver.told["b"].tokens)
    driver.check("c", context[:85])
    before = driver.engine.stats().cached_tokens
    driver.run(request("next", (*context, 1), 3))
    driver.check("next")
    assert driver.engine.stats().cached_tokens - before == 89, "what a fork computed is cached like anything else"


def test_forks_that_cannot_be_are_refused_with_the_remedy():
    driver = CoreDriver(blocks=8, max_running=1)
    driver.add(request("a", prompt(40), 10), request("waits", prompt(5), 90))
    driver.step()
    wishes = {
        "not known": Fork("nobody", 0),
        "waits for room": Fork("waits", 0),
        "choose 0 to 0": Fork("a", 3),
        "not computed that far": Fork("a", 0),
    }
    for sentence, fork in wishes.items():
        with pytest.raises(ValueError, match=sentence):
            driver.engine.add(Request("f", (), Sampling(max_tokens=2), fork=fork))
    driver.run()
    with pytest.raises(ValueError, match="choose 0 to 10"):
        driver.engine.add(Request("f", (), Sampling(), fork=Fork("a", 11)))
    driver.run(*(request(str(i), prompt(60, i), 60) for i in range(3)))
    with pytest.raises(ValueError, match="made room for others"):
        driver.engine.add(Request("f", (), Sampling(max_tokens=2), fork=Fork("a", 3)))
    driver.engine.integrity()


def test_a_fork_that_waits_holds_its_cache_until_others_need_it():
    driver = CoreDriver(blocks=5, max_running=1)
    driver.run(request("a", prompt(60), 10))
    driver.add(request("long", prompt(20, 1), 100))
    driver.step()
    driver.add(Request("fork", (), Sampling(max_tokens=5, seed=1, ignore_eos=True), fork=Fork("a", 5)))
    assert driver.engine.stats().kv_used > 0.5
    driver.run()
    assert driver.told["long"].stop == "length"
    assert driver.told["fork"].stop == "error" and "had to make room for others" in driver.told["fork"].error


# --- adapters ----------------------------------------------------------------------------------------------------------


def test_tokens_of_an_adapter_carry_its_versions_beside_those_of_others():
    driver = CoreDriver(max_adapters=2)
    driver.swap_adapter("north")
    driver.swap_adapter("south")
    driver.add(*(request(name, prompt(40), 12, seed=1, adapter=name) for name in ("north", "south")))
    driver.add(request("base", prompt(40), 12, seed=1))
    for _ in range(10):
        driver.step()
    driver.swap_adapter("north")
    driver.run()
    for name in ("north", "south", "base"):
        driver.check(name, adapter="" if name == "base" else name)
    assert set(driver.told["north"].versions) == {0, 1} and set(driver.told["north"].kv_versions) == {0}
    assert driver.told["south"].versions == driver.told["base"].versions == [0] * 12
    assert driver.engine.stats().cached_tokens == 0, "prompts are not shared between adapters"


def test_new_base_weights_under_an_adapter_compute_its_cache_anew():
    driver = CoreDriver(max_adapters=1, swap="keep")
    driver.swap_adapter("north")
    driver.add(request("a", prompt(40), 12, adapter="north"), request("b", prompt(30), 12))
    for _ in range(6):
        driver.step()
    driver.swap()
    driver.run()
    assert driver.engine.stats().recomputed_tokens > 40 and set(driver.told["b"].kv_versions) == {0}
    driver.check("a", adapter="north")


def load_adapter(driver: CoreDriver, name: str, base: str = "") -> None:
    update = WeightUpdate(
        version=0, kind="adapter", fingerprint="", nbytes=0, seconds=0.0, adapter=AdapterSpec(name, 8, 16.0, base=base)
    )
    driver.engine.swap(driver.engine.prepare(update, {"number": 0}))


def test_adapters_that_cannot_be_served_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"engine.max_adapters is 0; raise it"):
        load_adapter(CoreDriver(), "north")
    driver = CoreDriver(max_adapters=1)
    with pytest.raises(ValueError, match="made for base weights with fingerprint other, the engine serves base-0"):
        load_adapter(driver, "north", base="other")
    load_adapter(driver, "north", base="base-0")
    with pytest.raises(ValueError, match="no room for the adapter south"):
        load_adapter(driver, "south")
    with pytest.raises(ValueError, match=r"no adapter south is loaded \(there are: north\)"):
        driver.engine.add(request("a", prompt(3), adapter="south"))
    with pytest.raises(ValueError, match="unload the adapter before new base weights"):
        driver.swap()
    driver.version -= 1
    driver.add(request("a", prompt(3), adapter="north"))
    with pytest.raises(ValueError, match="in use by 1 requests"):
        driver.engine.unload("north")
    driver.run()
    driver.engine.unload("north")
    assert driver.runner.adapters == {}
    driver.swap()
    load_adapter(driver, "south")
    driver.run(request("b", prompt(3), adapter="south"))
    assert driver.told["b"].stop == "length"


# --- what else is told -------------------------------------------------------------------------------------------------


def test_the_mask_is_the_vocabulary_that_was_left_and_top_log_probs_are_of_what_was_sampled_from():
    driver = CoreDriver()
    driver.add(request("other", prompt(7), 20))
    sampling = Sampling(max_tokens=6, top_k=5, temperature=0.7, ignore_eos=True)
    answer = completion(driver, Request("r", prompt(30), sampling, return_mask=True, top_logprobs=2))
    offsets = np.frombuffer(answer.mask.offsets, np.int64)
    ids = np.frombuffer(answer.mask.token_ids, np.int32)
    best = np.frombuffer(answer.top.tokens, np.int32).reshape(-1, 2)
    values = np.frombuffer(answer.top.logprobs, np.float32).reshape(-1, 2)
    text = list(prompt(30))
    for t, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        x = logits_of(text, 0).astype(np.float64) / 0.7
        kept = sorted(np.argsort(-x)[:5].tolist())
        assert ids[offsets[t] : offsets[t + 1]].tolist() == kept and token in kept
        p = x - np.log(np.exp(x[kept]).sum())
        assert abs(logprob - p[token]) < 1e-6
        assert best[t].tolist() == np.argsort(-x)[:2].tolist() and np.abs(values[t] - p[best[t]]).max() < 1e-5
        text.append(token)


def test_routing_is_told_of_every_position_whoever_computed_it():
    driver = CoreDriver(routing=True)
    first = completion(driver, request("first", prompt(50), 20, return_routing=True))
    second = completion(driver, request("second", (*prompt(50), *first.tokens, 5), 4, return_routing=True))
    fork = completion(driver, Request("fork", (), Sampling(max_tokens=3), fork=Fork("first", 9), return_routing=True))
    texts = {
        "first": (first, (*prompt(50), *first.tokens)),
        "second": (second, (*prompt(50), *first.tokens, 5, *second.tokens)),
        "fork": (fork, (*prompt(50), *first.tokens[:9], *fork.tokens)),
    }
    for answer, text in texts.values():
        trace = answer.routing
        found = np.frombuffer(trace.experts, np.uint8).reshape(-1, trace.layers, trace.k)
        assert (trace.layers, trace.k, trace.width) == (LAYERS, K, 1) and len(found) == len(text) - 1
        wanted = np.array([routing_of(token, position, 0) for position, token in enumerate(text[:-1])])
        assert (found == wanted).all()
    assert completion(driver, request("without", prompt(9))).routing is None


def test_scoring_goes_under_one_version_and_beside_generation():
    driver = CoreDriver(prefill_chunk=16)
    driver.add(request("other", prompt(5), 30))
    driver.add(scoring("s", prompt(60)))
    driver.step()
    driver.step()
    driver.swap()
    output = driver.step()
    while not output.scores:
        output = driver.step()
    (scores,) = output.scores
    x = [logits_of(prompt(60)[:i], 1).astype(np.float64) for i in range(1, 60)]
    wanted = [row[token] - np.log(np.exp(row).sum()) for row, token in zip(x, prompt(60)[1:], strict=True)]
    assert scores.version == 1 and np.abs(np.array(scores.logprobs) - wanted).max() < 1e-5
    transcript = Transcript(request=driver.requests["s"], scores=scores)
    answer = transcript.completion(Finished("s", "length"))
    assert answer.spans[0].version == 1 and answer.versions() == [] and answer.prompt_logprobs == scores.logprobs
    driver.run()
    driver.check("other")


def test_with_exact_prompts_are_cut_at_the_same_places_whatever_else_there_is():
    cuts = []
    for others in (0, 5):
        driver = CoreDriver(exact=True, prefill_chunk=32, max_running=8)
        driver.add(*(request(f"o{i}", prompt(20 + i, i), 20) for i in range(others)))
        driver.step()
        driver.add(request("a", prompt(100), 3))
        driver.run()
        segments = [
            (int(context), int(length))
            for batch in driver.runner.forwarded
            for context, length, tokens in zip(
                batch.context, np.diff(batch.starts), np.split(batch.tokens, batch.starts[1:-1]), strict=True
            )
            if tuple(tokens.tolist()) == prompt(100)[context : context + length] and length > 1
        ]
        cuts.append(segments)
    assert cuts[0] == cuts[1] == [(0, 32), (32, 32), (64, 32), (96, 4)]


# --- faults ------------------------------------------------------------------------------------------------------------


def test_a_poisoned_prompt_ends_its_requests_and_leaves_nothing_behind():
    driver = CoreDriver(max_running=4)
    driver.swap(poisoned=True)
    bad = (*prompt(40), POISON, *prompt(30))
    driver.add(request("bad", bad, 5), request("good", prompt(40), 60), request("worse", bad, 5))
    driver.run()
    for name in ("bad", "worse"):
        told = driver.told[name]
        assert told.stop == "error" and not told.tokens
        assert told.error == "non-finite logits at version 1, first after layer 1"
    driver.check("good")
    assert driver.told["good"].stop == "length" and not driver.runner.cache["nan"].any()
    driver.run(scoring("scored", bad))
    assert "version 1" in driver.told["scored"].error
    driver.swap()
    driver.run(request("again", bad, 5))
    driver.check("again")


def test_a_poisoned_token_in_the_middle_of_a_completion_ends_it_with_what_there_was():
    driver = CoreDriver()
    driver.add(*(request(str(i), prompt(20), 40, seed=i) for i in range(4)))
    for _ in range(8):
        driver.step()
    driver.swap(poisoned=True)
    driver.run()
    poisoned = [told for told in driver.told.values() if told.stop == "error"]
    assert poisoned and all(told.tokens[-1] == POISON for told in poisoned)
    for name in driver.told:
        driver.check(name)
    assert not driver.runner.cache["nan"].any()


def test_what_a_cancelled_prompt_left_may_be_no_number_and_is_cleared():
    driver = CoreDriver(blocks=4, prefill_chunk=8)
    driver.swap(poisoned=True)
    driver.add(request("bad", (POISON, *prompt(60)), 5))
    driver.step()
    assert driver.runner.cache["nan"].any()
    driver.engine.cancel("bad")
    driver.swap()
    driver.run(*(request(str(i), prompt(40, i), 5) for i in range(3)))
    assert not driver.runner.cache["nan"].any()


def test_a_budget_that_holds_no_request_and_routing_without_experts_are_refused_at_start():
    with pytest.raises(ConfigError, match=r"raise engine\.kv_gib or lower engine\.context_length"):
        CoreDriver(blocks=3, context_length=128)
    driver = CoreDriver()
    driver.runner.experts = (0, 0)
    with pytest.raises(ConfigError, match="has no experts"):
        type(driver.engine)(driver.engine._model, type(driver.engine._config)(kv_gib=0.01, routing=True))


def test_draws_do_not_depend_on_the_batch():
    """What the tests above hold tokens against is the sampler alone; here it is held against the definition."""
    logits = logits_of(prompt(9), 0)
    token, logprob = draw(logits, Sampling(seed=3), 2)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert abs(logprob - exact[token]) < 1e-6
