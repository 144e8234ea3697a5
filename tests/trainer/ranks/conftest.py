"""Processes that are ranks, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_processes import RankProcesses

pytest.register_assert_rewrite("comparisons", "sharded_case")


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    ranks = RankProcesses(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    ranks = RankProcesses(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    ranks = RankProcesses(8, tmp_path_factory.mktemp("eight"))
    yield ranks
    ranks.close()
