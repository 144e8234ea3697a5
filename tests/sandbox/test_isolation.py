"""The trial itself. The other files of this folder are skipped where it finds that something is missing."""

from __future__ import annotations

import pytest

from headrace.sandbox.isolation import examine_isolation
from headrace.sandbox.kernel import landlock, seccomp


@pytest.mark.skipif(not (landlock.version() and seccomp.known()), reason="the kernel has no Landlock or no filters")
def test_nothing_is_missing_where_the_kernel_has_the_means():
    assert [one for one in examine_isolation() if not one.there] == []
