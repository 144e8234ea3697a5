"""`lora.publish = "auto"` publishes whole weights where transformers computes in the native engine, and says so; what was asked for stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.run.choosing import resumed_settings, settle_adapter
from headrace.run.config import RunConfig, dump_config, load_config

TASK = {"task": {"kind": "jsonl", "path": "rows.jsonl"}, "reward": {"function": "reward.py:reward"}}


def settled(directory: Path, family: str, **tables: Any) -> RunConfig:
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    return settle_adapter(load_config({**TASK, "model": {"path": str(directory)}, **tables}), directory)


@pytest.mark.parametrize(("family", "path"), [("glm4_moe", "auto"), ("qwen3_next", "cache"), ("llama", "hf")])
def test_it_is_published_merged_where_transformers_computes(tmp_path: Path, family: str, path: str) -> None:
    found = settled(tmp_path, family, lora={"rank": 8}, engine={"path": path})
    assert found.lora.publish == "merged" and found.adapters_served == 0
    assert family in found.chosen.why["adapter"] and "by transformers" in found.chosen.why["adapter"]
    (tmp_path / "config.toml").write_text(dump_config(found))
    asked = {**TASK, "model": {"path": str(tmp_path)}, "lora": {"rank": 8}, "engine": {"path": path}}
    assert load_config(resumed_settings(asked, tmp_path)).lora.publish == "merged", "a resume chooses nothing"


@pytest.mark.parametrize(
    ("family", "tables", "publish"),
    [
        ("llama", {"lora": {"rank": 8}}, "auto"),
        ("qwen3_5", {"lora": {"rank": 8}}, "auto"),
        ("glm4_moe", {"lora": {"rank": 8, "publish": "adapter"}}, "adapter"),
        ("glm4_moe", {"lora": {"rank": 8}, "engine": {"urls": ["http://127.0.0.1:1"], "kind": "vllm"}}, "auto"),
        ("glm4_moe", {"lora": {"rank": 8}, "adapters": [{"name": "a"}, {"name": "b"}]}, "auto"),
        ("glm4_moe", {}, "auto"),
    ],
)
def test_what_was_asked_for_stays_and_so_does_what_works(
    tmp_path: Path, family: str, tables: dict[str, Any], publish: str
) -> None:
    found = settled(tmp_path, family, **tables)
    assert found.lora.publish == publish and "adapter" not in found.chosen.why


def test_settings_that_need_the_adapter_beside_the_model_get_it_or_are_refused(tmp_path: Path) -> None:
    tables = {"lora": {"rank": 8, "quantise": "int8"}, "algo": {"kl": {"coef": 0.1, "place": "reward"}}}
    beside = settled(tmp_path, "glm4_moe", **tables)
    assert beside.lora.publish == "auto" and beside.adapters_served == 1
    tables["lora"]["experts"] = True
    why = r"serves no adapters of experts beside glm4_moe, and algo.kl.place = reward .* use algo"
    with pytest.raises(ConfigError, match=why):
        settled(tmp_path, "glm4_moe", **tables)
    tables["algo"]["kl"]["place"] = "loss"
    assert settled(tmp_path, "glm4_moe", **tables).lora.merged
