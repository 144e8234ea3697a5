"""From scored episodes to training rows: paths, context, masks, routes and teachers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from headrace.algo.training_rows import Overlong, paths_of, reference_of, row_of, rows_of
from headrace.core.batches import Row
from headrace.core.types import (
    Completion,
    Episode,
    Prompt,
    RoutingTrace,
    SamplingMask,
    Scored,
    TeacherTrace,
    TopLogprobs,
    Turn,
    VersionSpan,
)

PROMPT = Prompt("p", "?", (1, 2))


def completion(*tokens: int, version: int = 0, stop: str = "stop", **more) -> Completion:
    spans = (VersionSpan(0, version, version),) if tokens else ()
    return Completion(tokens, tuple(-0.1 * t for t in tokens), spans, stop, **more)


def scored(*turns: Turn, **more) -> Scored:
    return Scored(Episode(turns), 1.0, {}, **more)


def rows(prompt: Prompt, group: list[Scored], advantages: list[float], overlong: Overlong = "train") -> list[Row]:
    pairs = zip(group, advantages, strict=True)
    return [row for one, advantage in pairs for _, row in rows_of(prompt, one, advantage, overlong)]


def test_a_single_turn_is_a_row():
    both = [scored(Turn((1, 2), completion(5, 6, version=3))), scored(Turn((), completion(7)))]
    made = rows(PROMPT, both, [0.5, -1])
    assert [row.prompt for row in made] == [(1, 2), (1, 2)]
    assert made[0].tokens == (5, 6) and made[0].logprobs == pytest.approx((-0.5, -0.6))
    assert made[0].advantages == (0.5, 0.5) and made[0].mask == (True, True) and made[0].versions == (3, 3)
    assert made[1].tokens == (7,) and made[1].advantages == (-1.0,)
    assert made[0].sampling_mask is made[0].routing is made[0].teacher is None


def test_overlong_completions_are_trained_or_masked_by_choice():
    both = [scored(Turn((1, 2), completion(5, 6, stop="length"))), scored(Turn((1, 2), completion(7)))]
    assert [row.mask for row in rows(PROMPT, both, [1, -1], "mask")] == [(False, False), (True,)]
    assert [row.mask for row in rows(PROMPT, both, [1, -1], "train")] == [(True, True), (True,)]


def test_a_second_turn_keeps_what_lies_between_as_context():
    episode = scored(Turn((1, 2), completion(5, 6, version=1)), Turn((8, 9), completion(7, version=2), parents=(0,)))
    (row,) = rows(PROMPT, [episode], [2.0])
    assert row.tokens == (5, 6, 8, 9, 7)
    assert row.mask == (True, True, False, False, True)
    assert row.logprobs == pytest.approx((-0.5, -0.6, 0, 0, -0.7))
    assert row.versions == (1, 1, 2, 2, 2)


def test_a_fork_trains_its_shared_completion_once():
    episode = scored(
        Turn((1, 2), completion(5)), Turn((8,), completion(6), parents=(0,)), Turn((9,), completion(7), parents=(0,))
    )
    assert list(paths_of(episode.episode)) == [(0, 1), (0, 2)]
    first, second = rows(PROMPT, [episode], [1.0])
    assert (first.tokens, first.mask) == ((5, 8, 6), (True, False, True))
    assert (second.tokens, second.mask) == ((5, 9, 7), (False, False, True))


def test_turns_of_an_agent_that_is_left_out_are_context():
    """On a path with trained turns, on one of their own, and before a fork, where the first path would train them."""
    others = {"agent": "judge", "trained": False}
    talk = scored(Turn((1, 2), completion(5)), Turn((8,), completion(6), parents=(0,), **others))
    (row,) = rows(PROMPT, [talk], [1.0])
    assert (row.tokens, row.mask) == ((5, 8, 6), (True, False, False))
    first, second = rows(PROMPT, [scored(Turn((1, 2), completion(5)), Turn((3,), completion(6, 7), **others))], [1.0])
    assert (first.mask, second.tokens, second.mask) == ((True,), (6, 7), (False, False))
    fork = scored(
        Turn((1, 2), completion(5), **others),
        Turn((8,), completion(6), parents=(0,)),
        Turn((9,), completion(7), parents=(0,)),
    )
    assert [row.mask for row in rows(PROMPT, [fork], [1.0])] == [(False, False, True)] * 2


def test_an_empty_completion_gives_an_empty_row():
    (row,) = rows(PROMPT, [scored(Turn((1, 2), completion()))], [1.0])
    assert row.tokens == () and row.mask == ()


def kept(*rows: tuple[int, ...]) -> SamplingMask:
    ids = np.array([i for row in rows for i in row], np.int32)
    return SamplingMask(ids.tobytes(), np.cumsum([0, *map(len, rows)]).astype(np.int64).tobytes())


def unpacked(mask: SamplingMask) -> list[list[int]]:
    ids, offsets = np.frombuffer(mask.token_ids, np.int32), np.frombuffer(mask.offsets, np.int64)
    return [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def test_sampling_masks_are_laid_end_to_end_with_nothing_cut_in_between():
    turns = (
        Turn((1, 2), completion(5, 6, mask=kept((3, 5), (6,)))),
        Turn((8, 9), completion(7, mask=kept((1, 7))), parents=(0,)),
        Turn((4,), completion(3), parents=(1,)),
    )
    (row,) = rows(PROMPT, [scored(*turns)], [1.0])
    assert row.sampling_mask is not None
    assert unpacked(row.sampling_mask) == [[3, 5], [6], [], [], [1, 7], [], []]
    assert len(unpacked(row.sampling_mask)) == len(row.tokens)


def traced(*experts: int) -> RoutingTrace:
    return RoutingTrace(1, 2, 1, bytes(number for expert in experts for number in (expert, expert + 100)))


def test_each_position_has_the_experts_of_the_request_that_forwarded_it_first():
    """Two tokens of prompt and two sampled: the first request forwards three. Then one of context, and one sampled: the second forwards
    the last token of the first turn and the context, and computes the others again, by other experts."""
    first, last = traced(1, 2, 3), traced(11, 12, 13, 14, 15)
    turns = (Turn((1, 2), completion(5, 6, routing=first)), Turn((8,), completion(7, routing=last), parents=(0,)))
    (row,) = rows(PROMPT, [scored(*turns)], [1.0])
    assert row.routing == traced(1, 2, 3, 14, 15)


def test_positions_that_a_request_did_not_record_are_those_of_a_later_one():
    later = traced(11, 12, 13, 14, 15, 16)
    for first, joined in ((traced(1), traced(1, 12, 13, 14, 15)), (None, later), (traced(), later)):
        turns = (Turn((1, 2), completion(5, 6, routing=first)), Turn((8,), completion(7, routing=later), parents=(0,)))
        (row,) = rows(PROMPT, [scored(*turns)], [1.0])
        assert row.routing is not None and row.routing.experts == joined.experts[:10]
    unknown = (Turn((1, 2), completion(5, 6, routing=traced(1))), Turn((8,), completion(7), parents=(0,)))
    (row,) = rows(PROMPT, [scored(*unknown)], [1.0])
    assert row.routing == traced(1), "nothing is invented for what follows"


def test_branches_share_the_experts_of_what_they_share():
    turns = (
        Turn((1, 2), completion(5, routing=traced(1, 2))),
        Turn((8,), completion(6, routing=traced(21, 22, 23, 24)), parents=(0,)),
        Turn((9,), completion(7, routing=traced(31, 32, 33, 34)), parents=(0,)),
    )
    one, other = rows(PROMPT, [scored(*turns)], [1.0])
    assert (one.routing, other.routing) == (traced(1, 2, 23, 24), traced(1, 2, 33, 34))


def trace(version: int, *logprobs: float, top: TopLogprobs | None = None) -> TeacherTrace:
    return TeacherTrace("t", (version,) * len(logprobs), logprobs, top)


def top(k: int, tokens: list[list[int]], logprobs: list[list[float]]) -> TopLogprobs:
    return TopLogprobs(k, np.array(tokens, np.int32).tobytes(), np.array(logprobs, np.float32).tobytes())


def test_a_teachers_columns_follow_the_tokens_and_are_missing_for_context():
    turns = (Turn((1, 2), completion(5, 6)), Turn((8,), completion(7), parents=(0,)))
    teachers = (
        trace(3, -0.25, -0.5, top=top(1, [[5], [6]], [[-0.25], [-0.5]])),
        trace(4, -0.75, top=top(2, [[7, 9]], [[-0.75, -1.0]])),
    )
    (row,) = rows(PROMPT, [scored(*turns, teachers=teachers)], [1.0])
    teacher = row.teacher
    assert teacher is not None and teacher.name == "t" and teacher.versions == (3, 3, 0, 4)
    np.testing.assert_array_equal(teacher.logprobs, [-0.25, -0.5, math.nan, -0.75])
    assert teacher.top is not None and teacher.top.k == 2
    inf = math.inf
    tops = np.frombuffer(teacher.top.logprobs, np.float32).reshape(4, 2)
    np.testing.assert_array_equal(tops, [[-0.25, -inf], [-0.5, -inf], [-inf, -inf], [-0.75, -1.0]])
    ids = np.frombuffer(teacher.top.tokens, np.int32).reshape(4, 2)
    assert ids[0, 0] == 5 and ids[1, 0] == 6 and ids[3].tolist() == [7, 9]


def test_a_fork_has_the_teacher_of_its_own_turns():
    turns = (
        Turn((1, 2), completion(5)),
        Turn((8,), completion(6), parents=(0,)),
        Turn((9,), completion(7), parents=(0,)),
    )
    one = scored(*turns, teachers=(trace(0, -1.0), trace(0, -2.0), trace(0, -3.0)))
    first, second = rows(PROMPT, [one], [1.0])
    np.testing.assert_array_equal(first.teacher.logprobs, [-1.0, math.nan, -2.0])
    np.testing.assert_array_equal(second.teacher.logprobs, [-1.0, math.nan, -3.0])


def test_a_references_columns_follow_the_tokens():
    turns = (Turn((1, 2), completion(5)), Turn((8,), completion(6), parents=(0,)))
    one = scored(*turns, references=((-1.0,), (-2.0,)))
    np.testing.assert_array_equal(reference_of(one, (0, 1)), [-1.0, math.nan, -2.0])
    assert row_of(PROMPT, one, path=(0, 1), trained=set(), advantage=1.0, overlong="train").tokens == (5, 8, 6)
