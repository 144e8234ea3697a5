"""The model, adapter and tokenizer of a TRL script, as headrace's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.models.resolve import resolve_model
from headrace.settings.toml import Tree

QUIET_KEYS = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")
"""Keys of model_init_kwargs that do not change the numbers."""
FULL = ("float32", "torch.float32", "auto", "None")
HALF = ("bfloat16", "torch.bfloat16")


def model_settings(model: Any, tokenizer: Any, init: Mapping[str, Any] | None, folder: Path) -> Tree:
    """Returns the sections [model] and [train]. A model in memory is saved to `folder`, with its tokenizer.

    Raises ConfigError for what cannot be honoured."""
    train = _dtype(init or {})
    if isinstance(model, str):
        if tokenizer is not None:
            _refuse_other_tokenizer(tokenizer, resolve_model(model))
        return {"model": {"path": model}, **train}
    if hasattr(model, "peft_config"):
        raise ConfigError("model= is a PeftModel: pass the base model, and the adapter's settings as peft_config=")
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(f"model= takes a name or a transformers model, not {type(model).__name__}")
    if init:
        raise ConfigError("model_init_kwargs belong to a model that is given by name")
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"model": {"path": str(folder)}, **train}


def _dtype(init: Mapping[str, Any]) -> Tree:
    said = [
        f"model_init_kwargs[{key!r}]={value!r} cannot be honoured"
        for key, value in init.items()
        if key not in (*QUIET_KEYS, "dtype", "torch_dtype")
        and value not in (None, False)
        and not (key == "revision" and value == "main")
    ]
    kind = str(init.get("dtype", init.get("torch_dtype")))
    if kind not in (*FULL, *HALF):
        said.append(f"model_init_kwargs['dtype']={kind!r} cannot be honoured; there are: float32, bfloat16")
    if said:
        raise ConfigError("\n".join(said))
    return {"train": {"weights": "bfloat16"}} if kind in HALF else {}


def _refuse_other_tokenizer(tokenizer: Any, directory: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(directory)
    if tokenizer.get_vocab() != own.get_vocab() or tokenizer.chat_template != own.chat_template:
        raise ConfigError(
            "processing_class= has another vocabulary or chat template than the model's directory: save both to one directory, and pass "
            "that as model="
        )


def adapter_settings(peft_config: Any, model: str) -> Tree:
    """Returns the section [lora]. Raises ConfigError, with all names, for settings of peft that cannot be honoured."""
    if type(peft_config).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config= takes a LoraConfig, not a {type(peft_config).__name__}")
    plain = type(peft_config)()
    taken = (
        "r",
        "lora_alpha",
        "target_modules",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "task_type",
        "peft_type",
    )
    quiet = ("inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "runtime_config", "peft_version")
    strange = [
        name
        for name in vars(plain)
        if name not in (*taken, *quiet) and getattr(peft_config, name, None) != getattr(plain, name)
    ]
    if strange:
        raise ConfigError(
            f"peft_config: {', '.join(sorted(strange))} cannot be honoured; leave {'it' if len(strange) == 1 else 'them'} out"
        )
    return {
        "rank": peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "targets": _targets(peft_config.target_modules, model),
        "rslora": bool(peft_config.use_rslora),
        "dora": bool(peft_config.use_dora),
        "rank_pattern": dict(peft_config.rank_pattern or {}),
        "alpha_pattern": {name: float(value) for name, value in (peft_config.alpha_pattern or {}).items()},
    }


def _targets(given: Any, model: str) -> Any:
    if isinstance(given, str):
        if given != "all-linear":
            raise ConfigError(
                f'peft_config: target_modules={given!r} is a pattern, which cannot be honoured; name modules, or "all-linear"'
            )
        return given
    if given:
        return sorted(given)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known

    kind = json.loads((resolve_model(model) / "config.json").read_text()).get("model_type", "")
    if kind not in known:
        raise ConfigError(f"peft_config: target_modules is left out, and peft knows none for a {kind}; name them")
    return list(known[kind])


def quantised(config: Any) -> str:
    """Returns `lora.quantise` for a BitsAndBytesConfig. Raises ConfigError for one that cannot be honoured."""
    if getattr(config, "load_in_8bit", False):
        return "int8"
    if getattr(config, "load_in_4bit", False) and getattr(config, "bnb_4bit_quant_type", "") == "nf4":
        return "nf4"
    raise ConfigError(
        'quantization_config= cannot be honoured: there are 8 bits, and 4 bits with bnb_4bit_quant_type="nf4"'
    )
