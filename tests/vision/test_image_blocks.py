"""Images whose tokens see each other in both directions, as in Gemma 3 and 4: transformers' own numbers wherever a sequence is cut, shared or packed."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import ForwardInput
from headrace.engine.native.runners.attention import PagedCache, plan_pass
from headrace.engine.native.runners.skeleton import read
from headrace.engine.native.sequences import Running
from headrace.models.chat import ChatEncoder
from headrace.models.image_blocks import ahead_in, ahead_of, kinds_that_see_ahead
from headrace.models.images import KnownImages
from headrace.models.saved_buffers import saved_buffers
from headrace.testing.makers import update
from headrace.trainer.forward.carried import carried_hidden
from headrace.trainer.forward.forward import own_hidden
from headrace.trainer.forward.tree_attention import ImagesAhead, tree_attention, tree_of
from headrace.trainer.model.causal_lm import load_model
from headrace.trainer.packing import ROOT, Segment
from support import tiny_seeing
from support.native_calls import Answer, drawn, greedy, make_engine, run, step
from support.tiny_seeing import inputs, made, picture, prompt, seeing

CPU = torch.device("cpu")
TOLERANCE = 1e-5
IMAGES = [picture(1), picture(2), picture(3)]
WAYS = [("gemma3", "hf"), ("gemma3", "cache"), pytest.param("gemma4", "cache", marks=pytest.mark.slow)]


@cache
def directory_of(family: str) -> Path:
    return made(family, IMAGES)


@cache
def whole_of(family: str) -> Any:
    return seeing(family)


@torch.no_grad()
def assert_told(family: str, images: list, asked: tuple[int, ...], answer: Answer) -> None:
    ids = torch.tensor([KnownImages(directory_of(family)).in_vocabulary((*asked, *answer.tokens))])
    logits = whole_of(family)(input_ids=ids, **(inputs(family, images, ids) if images else {})).logits[0]
    expected = logits[len(asked) - 1 : -1].log_softmax(-1)
    found = expected[range(len(answer.tokens)), answer.tokens]
    assert (torch.tensor(answer.logprobs) - found).abs().max() < TOLERANCE


def engine_of(family: str, path: str, **options: Any) -> Any:
    return make_engine(directory_of(family), path=path, context_length=256, **options)


# --- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "path"), WAYS)
def test_chunks_that_are_shorter_than_an_image_and_prompts_that_share_it(family, path):
    engine = engine_of(family, path, prefill_chunk=7)
    texts = [prompt(family, directory_of(family), [IMAGES[0]], text) for text in ("How many?", "How much?")]
    both = (*texts[0], *prompt(family, directory_of(family), [IMAGES[1]], "And?"))
    requests = [greedy("one", texts[0], 3), *(drawn(f"other{i}", texts[1], seed=i, tokens=3) for i in range(2))]
    answers = run(engine, [*requests, greedy("both", both, 3)])
    for request in requests:
        assert_told(family, IMAGES[:1], request.prompt, answers[request.id])
    assert_told(family, IMAGES[:2], both, answers["both"])
    before = engine.stats().cached_tokens
    assert before, "a prompt that begins alike is computed once"
    after = (*texts[0][:-1], 5, 6)
    assert_told(family, IMAGES[:1], after, run(engine, [greedy("after", after, 3)])["after"])
    assert engine.stats().cached_tokens >= before + len(texts[0]) - 1


@pytest.mark.parametrize(("family", "path"), WAYS)
def test_a_swap_in_the_middle_of_a_completion_forwards_images_again(family, path):
    engine = engine_of(family, path, swap="recompute")
    asked, answers = prompt(family, directory_of(family), IMAGES[:1]), dict[str, Answer]()
    engine.add(greedy("r", asked, 6))
    while len(answers.get("r", Answer()).tokens) < 3:
        step(engine, answers)
    model = load_model(directory_of(family), CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    saved = (*model.named_parameters(), *saved_buffers(model).items())
    named = {name: tensor.detach().clone() for name, tensor in saved}
    engine.swap(engine.prepare(update(1), named))
    answer = run(engine, (), answers)["r"]
    assert answer.versions == [0] * 3 + [1] * 3 == answer.kv_versions
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*asked, *answer.tokens]])).logits[0, -4:-1]
    expected = logits.log_softmax(-1).max(-1).values
    assert (torch.tensor(answer.logprobs[3:]) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(("family", "path"), WAYS)
def test_a_pass_may_begin_within_an_image(family, path):
    engine, asked = engine_of(family, path), prompt(family, directory_of(family), IMAGES[:1])
    tokens = np.array(asked, dtype=np.int64)
    ahead = ahead_of(read(directory_of(family), torch.float32, CPU).model, torch.from_numpy(tokens)).numpy()

    def logits(context: int, told: bool = True) -> torch.Tensor:
        batch = ForwardInput(
            tokens=tokens[context:],
            starts=np.array([0, len(tokens) - context], dtype=np.int32),
            context=np.array([context], dtype=np.int32),
            tables=np.arange(8, dtype=np.int32)[None],
            rows=np.array([len(tokens) - context - 1]),
            adapters=np.array([-1], dtype=np.int32),
            ahead=ahead[context:] if told else None,
        )
        return engine._runner.forward(batch).logits.clone()

    expected = logits(0)
    for context in (3, 9, len(tokens) - 1):
        assert (logits(context) - expected).abs().max() < TOLERANCE
    if path == "hf":
        assert (logits(0, told=False) - expected).abs().max() > 1e-3, "it matters to the words behind"


@pytest.mark.slow
def test_an_image_behind_a_long_text_is_forwarded_in_one_call():
    """Where a state cannot take several tokens, the words behind it are forwarded one by one."""
    engine = make_engine(directory_of("gemma4"), path="cache", context_length=1600, prefill_chunk=1600, kv_gib=0.2)
    text = tuple(random.Random(1).randrange(95) for _ in range(1300))
    asked = (*text, *prompt("gemma4", directory_of("gemma4"), IMAGES[:1]))
    run(engine, [greedy("before", text, 1)])
    assert_told("gemma4", IMAGES[:1], asked, run(engine, [greedy("after", asked, 2)])["after"])
    assert engine.stats().cached_tokens >= 1299


def test_a_call_that_ends_within_an_image_fails():
    model, tokens = load_model(directory_of("gemma3"), CPU), prompt("gemma3", directory_of("gemma3"), IMAGES[:1], "")
    with pytest.raises(RuntimeError, match="ends within an image"):
        model(input_ids=torch.tensor([tokens[:9]]))


def test_a_prompt_with_a_part_of_an_image_is_refused():
    engine, asked = engine_of("gemma3", "hf"), prompt("gemma3", directory_of("gemma3"), IMAGES[:1])
    known = len(tiny_seeing.tokenizer("gemma3"))
    of_image = [place for place, token in enumerate(asked) if token >= known]
    for left_out in (of_image[0], of_image[5], of_image[-1]):
        with pytest.raises(ValueError, match="holds a part of an image"):
            engine.add(greedy("part", (*asked[:left_out], *asked[left_out + 1 :])))
    for cut in (asked[: of_image[5]], asked[of_image[5] :]):
        with pytest.raises(ValueError, match="holds a part of an image"):
            engine.add(greedy("part", cut))
    run(engine, [greedy("whole", asked[: of_image[-1] + 1], 1)])


@pytest.mark.parametrize(("family", "path"), WAYS)
def test_a_prompt_that_ends_with_an_image(family, path):
    asked = prompt(family, directory_of(family), IMAGES[:1], "")[:-1]
    assert asked[-1] >= len(tiny_seeing.tokenizer(family))
    requests = [greedy(name, asked, 2) for name in "ab"]
    answers = run(engine_of(family, path), requests)
    for request in requests:
        assert_told(family, IMAGES[:1], asked, answers[request.id])


def test_an_exact_engine_refuses_images_that_see_ahead():
    with pytest.raises(ConfigError, match="tokens of an image see later ones, .* set it to false"):
        engine_of("gemma3", "hf", exact=True)
    engine_of("gemma3", "hf", exact=False)


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=60)
def test_no_chunk_ends_within_an_image(seed: int, chunk: int):
    rng = random.Random(seed)
    tokens, ends, words = list[int](), list[int](), 100
    left = {}
    for _ in range(rng.randint(1, 5)):
        tokens += [rng.randrange(words) for _ in range(rng.randint(0, 4))]
        size, first = rng.randint(1, 9), words + len(left)
        left |= {first + place: size - 1 - place for place in range(size)}
        tokens += range(first, first + size)
        ends += [len(tokens)] * size
    running = Running(1, 256, None, lambda given: np.array([left.get(int(token), 0) for token in given]))
    running.history[0, : len(tokens)] = tokens
    start = 0
    while start < len(tokens):
        wanted = min(start + chunk, len(tokens))
        stop = running.end_of_chunk(0, start, wanted)
        assert start < stop <= len(tokens) and not left.get(tokens[stop - 1])
        assert stop == wanted or left.get(tokens[wanted - 1])
        assert stop <= wanted or all(token >= words for token in tokens[start:stop]), "longer for one image alone"
        start = stop
    found = running.ahead([0], [0], [len(tokens)])
    assert (found is None) == (max(left.values()) == 0)
    assert found is None or found.tolist() == [left.get(token, 0) for token in tokens]


class CausalKernel:
    """A kernel for causal attention; called, it fails."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("it knows nothing of images")


@pytest.mark.parametrize("kind", ["kernel", "ragged"])
def test_kernels_for_causal_attention_are_left_out_of_passes_with_images(kind):
    geometry = read(directory_of("gemma3"), torch.float32, CPU).geometry
    cache_ = PagedCache(geometry, torch.float32, CPU)
    cache_.allocate(4)
    setattr(cache_, kind, CausalKernel())
    ints = {"starts": np.array([0, 5], dtype=np.int32), "context": np.zeros(1, dtype=np.int32)}
    tables, adapters = np.arange(4, dtype=np.int32)[None], np.array([-1], dtype=np.int32)
    batch = ForwardInput(
        tokens=np.arange(5),
        rows=np.array([4]),
        tables=tables,
        adapters=adapters,
        ahead=np.array([0, 2, 1, 0, 0]),
        **ints,
    )
    planned = plan_pass(batch, cache_)
    q, k, v = (torch.randn(5, heads, geometry.head_dim) for heads in (geometry.heads, *[geometry.kv_heads] * 2))
    found = planned.attend(0, q, k, v, scale=0.3, window=2, ahead=True)
    seen = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


# --- the trainer -------------------------------------------------------------------------------------------------------


def with_images(rng: random.Random, count: int) -> tuple[tuple[Segment, ...], torch.Tensor]:
    """Trees in preorder, and how far their tokens see ahead: images that lie anywhere within segments."""
    segments, chain, ahead = list[Segment](), list[int](), list[int]()
    for number in range(count):
        chain = chain[: rng.randint(0, len(chain))]
        own = list[int]()
        for _ in range(rng.randint(1, 3)):
            own += [*[0] * rng.randint(0, 2), *range(rng.randint(0, 5), -1, -1)]
        segments.append(Segment(len(ahead), len(own), chain[-1] if chain else ROOT))
        ahead += own
        chain.append(number)
    return tuple(segments), torch.tensor(ahead)


def told_by_rows(segments: tuple[Segment, ...], ahead: torch.Tensor, window: int) -> torch.Tensor:
    """[N, N] bool, by walking from each segment to its root, with transformers' rule: within the window, what is before or in the same image."""
    seen = torch.zeros(len(ahead), len(ahead), dtype=torch.bool)
    for segment in segments:
        path, at = list(range(segment.start, segment.end)), segment.parent
        while at != ROOT:
            path = [*range(segments[at].start, segments[at].end), *path]
            at = segments[at].parent
        image = [index + int(ahead[place]) for index, place in enumerate(path)]
        for q in range(len(path) - segment.length, len(path)):
            for k in range(len(path)):
                if (k <= q or image[k] == image[q]) and (not window or k > q - window):
                    seen[path[q], path[k]] = True
    return seen


@given(st.integers(0, 10**6), st.sampled_from([0, 0, 1, 3, 6]), st.sampled_from([-(10**9), 0, 10**9]))
@settings(max_examples=25)
def test_every_cut_of_a_tree_sees_what_its_rows_see(seed: int, window: int, call_price: int):
    rng = random.Random(seed)
    segments, counts = with_images(rng, rng.randint(1, 6))
    expected = told_by_rows(segments, counts, window)
    ahead = ImagesAhead(counts, frozenset({"sliding_attention" if window else "full_attention"}))
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, heads, len(counts), 8, dtype=torch.float64) for heads in (4, 2, 2))
    attend = torch.nn.functional.scaled_dot_product_attention
    for tree, mask in (
        (tree_of(segments, CPU, call_price, ahead=ahead), expected),
        (
            tree_of(segments, CPU, call_price, ahead=ImagesAhead(counts, frozenset())),
            told_by_rows(segments, counts * 0, window),
        ),
    ):
        found, _ = tree_attention(torch.nn.Module(), q, k, v, None, sliding_window=window or None, tree=tree)
        dense = attend(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(found, dense, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("seed", "window"), [(1, 0), (2, 3)])
def test_the_mask_of_a_tree_is_that_of_its_rows(seed: int, window: int):
    segments, counts = with_images(random.Random(seed), 5)
    kinds = frozenset({"sliding_attention" if window else "full_attention"})
    mask = tree_of(segments, CPU, ahead=ImagesAhead(counts, kinds)).mask(window, CPU)
    found = create_mask(mask.mask_mod, 1, 1, len(counts), len(counts), device="cpu")[0, 0]
    assert torch.equal(found, told_by_rows(segments, counts, window)) and int(found.triu(1).sum())


def test_blocks_of_queries_see_images_that_end_in_the_next_block():
    """Lists of blocks, not only what is within them."""
    counts = torch.cat(
        [torch.zeros(100, dtype=torch.long), torch.arange(199, -1, -1), torch.zeros(84, dtype=torch.long)]
    )
    tree = tree_of((Segment(0, 384),), CPU, ahead=ImagesAhead(counts, frozenset({"full_attention"})))
    mask = tree.mask(None, CPU)
    assert mask.full_kv_num_blocks is not None
    seen = {
        (q, int(k))
        for many, which in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
        for q in range(3)
        for k in which[0, 0, q, : int(many[0, 0, q])]
    }
    assert seen == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)}


def test_an_image_in_two_segments_is_refused():
    ahead = ImagesAhead(torch.tensor([0, 1, 0, 0]), frozenset({"full_attention"}))
    with pytest.raises(ValueError, match="lies in two segments"):
        tree_of((Segment(0, 2), Segment(2, 2, 0)), CPU, ahead=ahead)


@pytest.mark.parametrize("family", tiny_seeing.GEMMA)
def test_rows_alone_and_carried_states_have_the_numbers_of_the_whole(family):
    model, shown = load_model(directory_of(family), CPU), prompt(family, directory_of(family), IMAGES[:1])
    tokens = torch.tensor([*shown, 5, 6, 7, 8, 9])
    segments = (Segment(0, len(shown)), Segment(len(shown), 2, 0), Segment(len(shown) + 2, 3, 0))
    rows = [range(len(shown) + 2), [*range(len(shown)), *range(len(shown) + 2, len(tokens))]]
    with torch.no_grad():
        carried = carried_hidden(model.base_model, tokens, segments)
        for row in rows:
            ids = torch.tensor([KnownImages(directory_of(family)).in_vocabulary(tokens[row].tolist())])
            given = inputs(family, IMAGES[:1], ids)
            expected = whole_of(family)(input_ids=ids, **given, output_hidden_states=True).hidden_states[-1][0]
            assert (own_hidden(model, tokens[row]) - expected).abs().max() < TOLERANCE
            assert (carried[row] - expected).abs().max() < TOLERANCE


def test_the_kinds_of_layers_are_those_of_transformers():
    kinds = {"gemma3": {"full_attention", "sliding_attention"}, "gemma4": {"sliding_attention"}}
    for family, expected in kinds.items():
        assert set(kinds_that_see_ahead(whole_of(family).model.get_decoder())) == expected
        assert ahead_in(load_model(directory_of(family), CPU)) == expected
    assert not ahead_in(load_model(made("llava", IMAGES[:1]), CPU))


# --- prompts -----------------------------------------------------------------------------------------------------------


def parts(*texts: str) -> list[dict[str, Any]]:
    """A message with an image between each two texts."""
    content = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return [{"role": "user", "content": [part for part in content if part.get("text") != ""]}]


@pytest.mark.parametrize("texts", [("", "How many?"), ("See:\n", "\nand\n\n", " ?"), ("", "", "\n")])
def test_prompts_of_gemma_3_have_the_tokens_of_its_own_processor(texts):
    """Empty lines around an image join with the line ends of the text beside it."""
    words, encoder = tiny_seeing.tokenizer("gemma3"), ChatEncoder(directory_of("gemma3"))
    own = transformers.Gemma3Processor(tiny_seeing.processor("gemma3"), words, image_seq_length=16)
    shown = IMAGES[: len(texts) - 1]
    text, tokens = encoder.encode_messages(parts(*texts))
    known = KnownImages(directory_of("gemma3"))
    placed = known.placed(tokens, [image.digest for image in shown])
    opened = list(map(tiny_seeing.opened, shown))
    expected = own(text=text, images=opened, return_tensors="pt", add_special_tokens=False)
    assert known.in_vocabulary(placed) == expected["input_ids"][0].tolist()
    assert torch.equal(expected["token_type_ids"], inputs("gemma3", shown, expected["input_ids"])["token_type_ids"])


def test_the_text_of_a_mark_in_a_question_stays_text():
    encoder, known = ChatEncoder(directory_of("gemma3")), KnownImages(directory_of("gemma3"))
    _, tokens = encoder.encode_messages(parts("see <start_of_image>\n", "<start_of_image>?"))
    shown = known.placed(tokens, [IMAGES[0].digest])
    image = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
    assert encoder.written(shown) == f"user: see <start_of_image>\n{image}<start_of_image>?<end>\nassistant: "
    assert sum(token >= len(tiny_seeing.tokenizer("gemma3")) for token in shown) == 16


def test_images_in_parts_are_refused_and_the_remedy_helps(tmp_path, monkeypatch):
    for asks in (True, False):
        directory = tmp_path / str(asks)
        seeing("gemma3").save_pretrained(directory)
        tiny_seeing.tokenizer("gemma3").save_pretrained(directory)
        tiny_seeing.processor("gemma3", do_pan_and_scan=asks).save_pretrained(directory)
        monkeypatch.setattr(tiny_seeing, "saved", lambda family, found=directory: found)
        if asks:
            with pytest.raises(
                ConfigError, match=r"preprocessor_config.json .*\(do_pan_and_scan\).* set that to false there"
            ):
                made("gemma3", IMAGES[:1])
        else:
            made("gemma3", IMAGES[:1])


def test_the_smaller_models_of_gemma_4_are_causal(tmp_path, monkeypatch):
    whole = seeing("gemma4")
    whole.config.text_config.use_bidirectional_attention = None
    whole.save_pretrained(tmp_path)
    tiny_seeing.tokenizer("gemma4").save_pretrained(tmp_path)
    tiny_seeing.processor("gemma4").save_pretrained(tmp_path)
    monkeypatch.setattr(tiny_seeing, "saved", lambda family: tmp_path)
    model = load_model(made("gemma4", IMAGES[:1]), CPU)
    assert not ahead_in(model) and model.get_input_embeddings().images.width == 48
