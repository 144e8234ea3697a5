"""Deaths of a process that count, and those that are forgiven."""

from __future__ import annotations

from headrace.processes.process_end import FORGIVEN, Deaths


def after(*worked: float, most: int = 2) -> Deaths:
    deaths = Deaths(most)
    for seconds in worked:
        deaths.after(seconds)
        deaths.add()
    return deaths


def test_deaths_in_a_row_are_too_many_and_those_before_an_hour_of_work_do_not_count() -> None:
    assert not after(1.0, 1.0).too_many
    assert after(1.0, 1.0, 1.0).too_many
    assert after(1.0, 1.0, 1.0).said("train.max_deaths") == "it was its death no. 3 (train.max_deaths allows 2)"
    weeks = after(*[FORGIVEN + 1] * 50)
    assert (weeks.total, weeks.counted, weeks.too_many) == (50, 1, False)
    assert after(1.0, 1.0, FORGIVEN, 1.0).counted == 4, "an hour is not yet more than an hour"


def test_a_single_death_can_be_forgiven_before_it_is_counted() -> None:
    deaths = Deaths(0)
    forgive = deaths.after(1.0)
    forgive()
    deaths.add()
    assert (deaths.total, deaths.counted) == (1, 0)
