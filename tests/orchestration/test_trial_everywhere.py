"""The trial with every engine and every way of weights: whichever kind of parameter an engine leaves at its old values, it is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import save_tokenizer, save_weights
from support.few import few
from support.stale_kinds import check_named, findings
from support.tiny_run import tiny_config

PLACES: dict[str, dict[str, Any]] = {
    "shared memory": {"weight_sync": {"kind": "shared_memory"}},
    "TCP": {"weight_sync": {"kind": "tcp"}},
    "differences over TCP": {"weight_sync": {"kind": "tcp", "encoding": "delta"}},
    "HTTP": {"weight_sync": {"kind": "http"}},
    "files": {"weight_sync": {"kind": "files"}},
    "broadcast": {"weight_sync": {"kind": "broadcast"}},
    "headrace serve, files": {"engine": {"kind": "headrace", "patience": 300.0}, "weight_sync": {"kind": "files"}},
    "headrace serve, HTTP": {
        "engine": {"kind": "headrace", "patience": 300.0},
        "weight_sync": {"kind": "http", "encoding": "delta"},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama whose attention looks somewhere: of the usual random weights, queries and keys change next to nothing."""
    return save_weights(save_tokenizer(tmp_path_factory.mktemp("model")), spread=0.2)


TRIED = [*((place, "bfloat16") for place in PLACES), ("shared memory", "float32"), ("headrace serve, HTTP", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "dtype"), TRIED)
def test_each_kind_that_stays_is_named(model: Path, tmp_path: Path, place: str, dtype: str) -> None:
    config = tiny_config(tmp_path, model, **PLACES[place])
    config["engine"] |= {"dtype": dtype, "context_length": 128}
    check_named(findings(config, model, tmp_path))


@pytest.mark.parametrize("member", few([0, 1], keep=1))
def test_one_member_of_a_fleet(model: Path, tmp_path: Path, member: int) -> None:
    engine = {"replicas": 2, "context_length": 128}
    config = tiny_config(tmp_path, model, engine=engine, weight_sync={"kind": "tcp"})
    check_named(findings(config, model, tmp_path, member))
