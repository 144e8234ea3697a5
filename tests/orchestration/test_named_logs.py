"""Directories for logs that are removed in the end, but for what the error that ended them names."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.run.run_directory import temporary_logs


def filled(logs: Path) -> Path:
    (logs / "tiny-weights").mkdir()
    for name in ("engine.log", "trainer.log", "engine.token", "tiny-weights/model.safetensors"):
        (logs / name).write_text("something")
    return logs / "engine.log"


@pytest.mark.parametrize("noted", [False, True])
def test_the_log_that_an_error_names_is_left_alone(noted: bool) -> None:
    with pytest.raises(ConfigError) as refused, temporary_logs() as logs:
        error = ConfigError("did not come up" if noted else f"did not come up (its output is in {filled(logs)})")
        if noted:
            error.add_note(f"its output is in {filled(logs)}")
        raise error
    assert [path.name for path in logs.rglob("*")] == ["engine.log"] and refused.value is error
    (logs / "engine.log").unlink()
    logs.rmdir()


def test_nothing_is_left_without_an_error_or_where_it_names_no_log() -> None:
    with temporary_logs() as logs:
        filled(logs)
    assert not logs.exists()
    for error in (ConfigError("no such layer"), KeyboardInterrupt()):
        with pytest.raises(type(error)), temporary_logs() as logs:
            filled(logs)
            raise error
        assert not logs.exists()
