"""The trial itself. The other files of this folder are skipped where it finds that something is missing."""

from __future__ import annotations

from typing import get_args

import pytest

from headrace.core.errors import ConfigError
from headrace.episodes.sandbox import sandbox as sandboxes
from headrace.episodes.sandbox.config import Isolation
from headrace.episodes.sandbox.isolation import KINDS, examine_isolation, refuse_missing
from headrace.episodes.sandbox.kernel import seccomp, syscalls
from headrace.episodes.sandbox.sandbox_limits import DEFAULT
from support.few import few

pytestmark = pytest.mark.skipif(
    not (syscalls.landlock_version() and seccomp.known()), reason="the kernel has no Landlock or no filters"
)

LACKING = {
    "no filter": ("seccomp.known = lambda: False", {"network", "filesystem", "processes", "threads", "memory"}),
    "no Landlock": ("syscalls.landlock_version = lambda: 0", {"filesystem"}),
    "no listener": ("seccomp._LISTENER = 1 << 30", {"threads"}),
    "no answer to a listener": ("seccomp._CONTINUE = 2", set()),  # before Linux 5.5: no threads at all
    "no signal scope": ("syscalls.landlock_version = lambda: 5", set()),  # before Linux 6.12: the filter is enough
    "no namespaces": ("zygote.enter_namespaces = lambda trial: False", set()),  # most containers
    "no limits": ("confine._limit = lambda limits: None", {"memory", "cpu"}),
    "nobody looks at the disk": (
        "zygote.enter_namespaces = lambda trial: False; attending.PrivateDirectory.overfull = lambda self: ''", {"disk"}
    ),
}  # fmt: skip
"""What a machine may lack, as a change of the process that makes calls, and the kinds of isolation that are not there then."""


def lack(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Makes the processes that make calls those of a machine that lacks something."""
    program = (
        "import sys; from headrace.episodes.sandbox import attending, zygote; from headrace.episodes.sandbox.inside import confine; "
        f"from headrace.episodes.sandbox.kernel import seccomp, syscalls; {change}; zygote.main(sys.argv[1:])"
    )
    monkeypatch.setattr(sandboxes, "_ZYGOTE", ("-P", "-c", program))


def test_nothing_is_missing_where_the_kernel_has_the_means():
    assert [one for one in examine_isolation() if not one.there] == []


@pytest.mark.parametrize("name", few(LACKING, keep=3))
def test_the_trial_finds_out_what_is_missing(name, monkeypatch):
    change, kinds = LACKING[name]
    lack(monkeypatch, change)
    assert {one.kind for one in examine_isolation() if not one.there} == kinds


def test_a_run_that_asks_for_more_than_there_is_is_refused_and_told_how_to_allow_it(monkeypatch):
    lack(monkeypatch, LACKING["no listener"][0])
    with pytest.raises(ConfigError) as refused:
        refuse_missing(DEFAULT.limits, ("network",), "the reward unit_tests")
    assert "(threads: it can start any number of threads)" in str(refused.value)
    assert 'sandbox.allow = ["network", "threads"]' in str(refused.value)
    refuse_missing(DEFAULT.limits, ("network", "threads"), "the reward unit_tests")


def test_every_kind_can_be_allowed_by_its_name():
    assert set(get_args(Isolation)) == set(KINDS)
