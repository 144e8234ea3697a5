"""GRPOTrainer with TRL's own arguments. It translates them into a config, and `train` is `headrace.train`."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import headrace
from headrace.compat.trl.trl_settings import GRPOConfig, refuse_what_cannot_be, settings_from, value_of, without_meaning
from headrace.core.errors import ConfigError
from headrace.episodes.scoring.functions import RewardFunction
from headrace.episodes.scoring.job import trl_reward
from headrace.models.resolve import resolve_model
from headrace.settings.toml import Tree, merge

# --- The model, adapter and tokenizer of a TRL script, as headrace's settings.


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


# --- grpo trainer ------------------------------------------------------------


RUN = "headrace"
"""The run's directory within output_dir."""
NOT_HERE = {
    "reward_processing_classes": "reward models are services here (docs/scoring.md)",
    "callbacks": "use headrace.train(on_step=, on_evaluation=)",
    "tools": "tools are an environment here (docs/environments.md)",
    "rollout_func": "an environment's function plays a rollout here (docs/environments.md)",
    "environment_factory": "an environment's function plays a rollout here (docs/environments.md)",
}


class TrainOutput(NamedTuple):
    """The result of `GRPOTrainer.train`, with the names of transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class GRPOTrainer:
    """TRL's GRPOTrainer, trained asynchronously.

    Arguments are TRL's; `headrace_settings` has settings of headrace on top, such as {"staleness": {"max_lag": 0}}, which trains
    synchronously. An argument that cannot be honoured raises ConfigError (a ValueError) with its name; those without a meaning here are
    named in one warning. docs/from_trl.md has the table of all.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        processing_class: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        headrace_settings: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.args = args = GRPOConfig(_usual_place(model)) if args is None else args
        _refuse_others(others, optimizers)
        refuse_what_cannot_be(args)
        if words := without_meaning(args):
            warnings.warn(words, stacklevel=2)
        self.output_dir = Path(value_of(args, "output_dir") or "trainer_output")
        self._rewards = _rewards(reward_funcs, value_of(args, "reward_weights"))
        rows, held_out = (
            _rows(train_dataset, "train_dataset"),
            _rows(eval_dataset, "eval_dataset") if eval_dataset else [],
        )
        tree = settings_from(args, rows=rows, held_out=len(held_out))
        loaded = model_settings(
            model, processing_class, value_of(args, "model_init_kwargs"), self.output_dir / "headrace-model"
        )
        tree = merge(tree, loaded)
        if peft_config is not None:
            tree["lora"] = adapter_settings(peft_config, loaded["model"]["path"])
        if quantization_config is not None:
            tree = merge(tree, {"lora": {"quantise": quantised(quantization_config)}})
        tree["task"], self._dataset = self._task(rows, held_out if tree["eval"]["prompts"] else [])
        self._settings = merge(_fitted(tree), dict(headrace_settings or {}))
        self.state = SimpleNamespace(global_step=0, log_history=[])
        self.accelerator = SimpleNamespace(print=print, is_main_process=True, num_processes=1)
        self.run: Path | None = None

    def _task(self, rows: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> tuple[Tree, Any]:
        """The section [task], and rows to be passed from memory. Rows for evaluation are a file beside the training rows'."""
        chat = not isinstance(rows[0]["prompt"], str)
        task: Tree = {
            "prompt": "prompt",
            "chat": chat,
            "template": dict(value_of(self.args, "chat_template_kwargs") or {}) if chat else {},
            "shuffle": bool(value_of(self.args, "shuffle_dataset")),
        }
        if not held_out:
            return {**task, "held_out": 0}, rows
        folder = self.output_dir / "headrace-data"
        folder.mkdir(parents=True, exist_ok=True)
        paths = {}
        for name, table in (("train", rows), ("held_out", held_out)):
            paths[name] = folder / f"{name}.jsonl"
            try:
                paths[name].write_text("".join(json.dumps(row) + "\n" for row in table))
            except TypeError as error:
                raise ConfigError(f"eval_dataset= needs rows that JSON can hold: {error}") from None
        places = {"path": str(paths["train"].absolute()), "held_out_path": str(paths["held_out"].absolute())}
        return {**task, "kind": "jsonl", **places, "held_out": len(held_out)}, None

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains until the last step. `resume_from_checkpoint`: True continues the newest run of output_dir, a path that run."""
        resume = None
        if resume_from_checkpoint:
            resume = self._newest() if resume_from_checkpoint is True else Path(resume_from_checkpoint)
        result = headrace.train(
            {**self._settings, "out": str(self.output_dir), "name": self._free_name()},
            self._rewards,
            dataset=self._dataset,
            resume=resume,
        )
        self.run = result.directory
        self.state.global_step = result.step
        self.state.log_history = _table(result.history)
        losses = [row["loss"] for row in self.state.log_history if "loss" in row]
        return TrainOutput(
            result.step, sum(losses) / len(losses) if losses else float("nan"), {"train_steps": result.step}
        )

    def _runs(self) -> list[Path]:
        found = [path for path in self.output_dir.glob(f"{RUN}*") if (path / "config.toml").is_file()]
        return sorted(found, key=lambda path: (len(path.name), path.name))

    def _newest(self) -> Path:
        if not (runs := self._runs()):
            raise ConfigError(f"resume_from_checkpoint=True, and {self.output_dir} holds no run yet; leave it out")
        return runs[-1]

    def _free_name(self) -> str:
        """`headrace`, `headrace-2`, ...: no run is written over."""
        count = len(self._runs())
        return f"{RUN}-{count + 1}" if count else RUN

    def save_model(self, output_dir: str | None = None) -> None:
        """Writes the trained model, or its adapter, into output_dir, for transformers or peft to load."""
        place = Path(output_dir or self.output_dir)
        dtype = "float32" if value_of(self.args, "bf16") is False else "bfloat16"
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".saving-") as scratch:
            headrace.export(self._trained(), Path(scratch) / "model", dtype)  # type: ignore[arg-type]
            for path in sorted((Path(scratch) / "model").iterdir()):
                if (place / path.name).is_dir():
                    shutil.rmtree(place / path.name)
                path.replace(place / path.name)

    def evaluate(self) -> dict[str, float]:
        """Measures the reward on the prompts of eval_dataset."""
        measured = headrace.evaluate(run=self._trained(), reward=self._rewards, dataset=self._dataset)
        return {"eval_reward": measured.reward_mean, "eval_reward_sem": measured.reward_sem}

    def end(self) -> None:
        """Does nothing: a run's processes end with `train`."""

    def _trained(self) -> Path:
        if self.run is None:
            raise ConfigError("nothing is trained yet: call train() first")
        return self.run

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"headrace's GRPOTrainer has no {name}: it trains in processes of its own (docs/from_trl.md); the run is in .run"
        )


def _usual_place(model: Any) -> str:
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
    return f"{name.rstrip('/').rpartition('/')[2]}-GRPO"


def _refuse_others(others: Mapping[str, Any], optimizers: tuple[Any, Any]) -> None:
    for name, value in others.items():
        if name not in NOT_HERE:
            raise TypeError(f"GRPOTrainer() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ConfigError(f"{name}= cannot be honoured: {NOT_HERE[name]}")
    if any(one is not None for one in optimizers):
        raise ConfigError("optimizers= cannot be honoured: training uses torch's AdamW, with the settings of [train]")


def _rewards(given: Any, weights: Sequence[float] | None) -> list[RewardFunction | tuple[RewardFunction, float]]:
    functions = list(given) if isinstance(given, list | tuple) else [given]
    for one in functions:
        if not callable(one) or hasattr(one, "save_pretrained"):
            what = (
                f"{one!r} is a reward model"
                if isinstance(one, str) or hasattr(one, "save_pretrained")
                else f"{one!r} is no function"
            )
            raise ConfigError(
                f"reward_funcs: {what}, which cannot be honoured; serve it, and name it in reward.services (docs/scoring.md)"
            )
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(functions)} functions")
    marked = [trl_reward(one) for one in functions]
    return [(one, float(weight)) for one, weight in zip(marked, weights, strict=True)] if weights else list(marked)


def _rows(given: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(given, Mapping) or given is None or not isinstance(given, Iterable):
        raise ConfigError(
            f"{name}= takes rows with a prompt: a datasets.Dataset or a list of dicts, not {type(given).__name__}"
        )
    rows = [dict(row) for row in given]
    if not rows or "prompt" not in rows[0]:
        raise ConfigError(f"{name}= needs rows with a column prompt, as in TRL; there are {len(rows)} rows")
    if kept := [column for column in ("image", "images") if column in rows[0]]:
        raise ConfigError(f"{name}= has the column {kept[0]}, which cannot be honoured: prompts are text")
    return rows


def _fitted(tree: Tree) -> Tree:
    """The settings with the context that the model can read, if it is a directory that says so."""
    try:
        said = json.loads((Path(tree["model"]["path"]) / "config.json").read_text())
    except OSError:
        return tree
    most = said.get("max_position_embeddings") or tree["engine"]["context_length"]
    return merge(tree, {"engine": {"context_length": min(most, tree["engine"]["context_length"])}})


def _table(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
