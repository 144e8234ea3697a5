"""GRPOTrainer with TRL's own arguments. It translates them into a config, and `train` is `headrace.train`. TRL's other trainers that there are here
are kinds of it (`other_trainers.py`)."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import headrace
from headrace.compat.trl.trl_settings import (
    GRPO,
    GRPOConfig,
    TrainerKind,
    refuse_what_cannot_be,
    settings_from,
    value_of,
    without_meaning,
)
from headrace.core.errors import ConfigError
from headrace.core.printing import echo
from headrace.episodes.scoring.functions import RewardFunction
from headrace.episodes.scoring.job import trl_reward
from headrace.episodes.tasks.rows import plain_row, records_of
from headrace.models.resolve import resolve_model, short_name
from headrace.settings.toml import Tree, merge

# --- The model, adapter and tokenizer of a TRL script, as headrace's settings.


QUIET_KEYS = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage")
"""Keys of model_init_kwargs that do not change the numbers."""
FULL = ("float32", "torch.float32", "auto", "None")
HALF = ("bfloat16", "torch.bfloat16")


def model_settings(model: Any, tokenizer: Any, init: Mapping[str, Any] | None, folder: Path) -> Tree:
    """Returns the sections [model] and [train]. A model in memory will be in `folder` (`save_model_in_memory`).

    Raises ConfigError for what cannot be honoured."""
    train: Tree = {"train": {"weights": "bfloat16"}} if dtype_of(init, "model_init_kwargs") == "bfloat16" else {}
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
    return {"model": {"path": str(folder)}, **train}


def save_model_in_memory(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a transformers model and its tokenizer to `folder`."""
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def dtype_of(init: Mapping[str, Any] | None, name: str) -> str:
    """Returns "bfloat16", "float32", or an empty string where nothing is said. Raises ConfigError for other keys that change the numbers.
    `name`: the argument that has the keys."""
    init = init or {}
    messages = [
        f"{name}[{key!r}]={value!r} cannot be honoured"
        + ("; write it into the model's name: org/name@revision" if key == "revision" else "")
        for key, value in init.items()
        if key not in (*QUIET_KEYS, "dtype", "torch_dtype")
        and value not in (None, False)
        and not (key == "revision" and value == "main")
    ]
    kind = str(init.get("dtype", init.get("torch_dtype")))
    if kind not in (*FULL, *HALF):
        messages.append(f"{name}['dtype']={kind!r} cannot be honoured; there are: float32, bfloat16")
    if messages:
        raise ConfigError("\n".join(messages))
    return "" if kind in ("auto", "None") else kind.removeprefix("torch.")


def _refuse_other_tokenizer(tokenizer: Any, directory: Path) -> None:
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(directory)
    if tokenizer.get_vocab() != own.get_vocab() or tokenizer.chat_template != own.chat_template:
        raise ConfigError(
            "processing_class= has another vocabulary or chat template than the model's directory: save both to one directory, and pass "
            "that as model="
        )


def adapter_settings(peft_config: Any, model: Any) -> Tree:
    """Returns the section [lora]. Raises ConfigError, with all names, for settings of peft that cannot be honoured.

    Dropout is left out with a warning: rollouts are sampled without it, so that with it the trainer would compute the ratios of another
    policy than the one that was sampled from. Scripts of TRL ask for 0.05 unless they are told otherwise.
    """
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
    quiet = (
        "lora_dropout",
        "inference_mode",
        "base_model_name_or_path",
        "revision",
        "auto_mapping",
        "runtime_config",
        "peft_version",
    )
    strange = [
        name
        for name in vars(plain)
        if name not in (*taken, *quiet) and getattr(peft_config, name, None) != getattr(plain, name)
    ]
    if strange:
        raise ConfigError(
            f"peft_config: {', '.join(sorted(strange))} cannot be honoured; leave {'it' if len(strange) == 1 else 'them'} out"
        )
    if peft_config.lora_dropout:
        warnings.warn(
            f"lora_dropout={peft_config.lora_dropout:g} is left out: rollouts are sampled without dropout, and are trained as they were sampled",
            stacklevel=4,
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


def _targets(given: Any, model: Any) -> Any:
    if isinstance(given, str):
        if given != "all-linear":
            raise ConfigError(
                f'peft_config: target_modules={given!r} is a pattern, which cannot be honoured; name modules, or "all-linear"'
            )
        return given
    if given:
        return sorted(given)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known

    if isinstance(model, str):
        kind = json.loads((resolve_model(model) / "config.json").read_text()).get("model_type", "")
    else:
        kind = model.config.model_type
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
    "tools": "tools are an environment here (docs/environments.md)",
    "rollout_func": "an environment's function plays a rollout here (docs/environments.md)",
    "environment_factory": "an environment's function plays a rollout here (docs/environments.md)",
    "rollout_worker": "the engine and the workers of environments are headrace's own",
    "weight_transfer": "weights travel as weight_sync.kind says (docs/weight_sync.md)",
    "ref_model": "the reference is the model that training begins with",
    "data_collator": "rows are packed without padding",
    "compute_metrics": "an evaluation measures rewards",
    "preprocess_logits_for_metrics": "an evaluation measures rewards",
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

    kind: ClassVar[TrainerKind] = GRPO
    config: ClassVar[Any] = GRPOConfig
    """The class of `args` for machines without TRL."""

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
        callbacks: Sequence[Any] | None = None,
        headrace_settings: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.args = args = self.config(_usual_place(model, self.kind.title)) if args is None else args
        self.output_dir = Path(value_of(args, "output_dir") or "trainer_output")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._model, self._tokenizer, self._model_folder = model, processing_class, self.output_dir / "headrace-model"
        refusals = Refusals()
        with refusals.part():
            _refuse_others(type(self).__name__, others, optimizers)
        with refusals.part():
            refuse_what_cannot_be(self.kind, args)
        self._rewards: list[Any] = []
        with refusals.part():
            if self.kind.rewarded:
                self._rewards = _rewards(reward_funcs, value_of(args, "reward_weights"))
        self._callbacks = ScriptCallbacks(self)
        for callback in callbacks or ():
            with refusals.part():
                self.add_callback(callback)
        tree = self._translated(refusals, quantization_config, peft_config)
        refusals.complain()
        if words := without_meaning(self.kind, args):
            warnings.warn(words, stacklevel=2)
        self._settings = merge(_fitted(tree), dict(headrace_settings or {}))
        self._write_inputs()
        self.state = SimpleNamespace(global_step=0, log_history=[], is_world_process_zero=True)
        self.accelerator = SimpleNamespace(
            print=print,
            is_main_process=True,
            is_local_main_process=True,
            num_processes=1,
            process_index=0,
            wait_for_everyone=lambda: None,
            unwrap_model=lambda model: model,
        )
        self.run: Path | None = None

    def _translated(self, refusals: Refusals, quantization_config: Any, peft_config: Any) -> Tree:
        """Returns the settings that the arguments become, and adds what cannot be honoured to the refusals. Writes nothing."""
        args, tree = self.args, Tree()
        rows: list[dict[str, Any]] = []
        held_out: list[dict[str, Any]] = []
        self._measured: dict[str, list[dict[str, Any]]] = {}
        with refusals.part():
            rows = _rows(self.train_dataset, "train_dataset")
        with refusals.part():
            self._measured = _data_sets(self.eval_dataset)
            held_out = next(iter(self._measured.values()), [])
        with refusals.part():
            tree = settings_from(self.kind, args, rows=rows, held_out=len(held_out))
        with refusals.part():
            init = value_of(args, "model_init_kwargs")
            tree = merge(tree, model_settings(self._model, self._tokenizer, init, self._model_folder))
        with refusals.part():
            if peft_config is not None:
                tree["lora"] = adapter_settings(peft_config, self._model)
        with refusals.part():
            if quantization_config is not None:
                tree = merge(tree, {"lora": {"quantise": quantised(quantization_config)}})
        with refusals.part():
            if rows:
                held_out = held_out if tree.get("eval", {}).get("prompts") else []
                tree["task"], self._dataset = self._task(rows, held_out)
                if len(self._measured) > 1 and held_out:
                    tree["eval"] |= self._sets()
        return tree

    def _sets(self) -> Tree:
        """Names the first of several data sets, and makes evaluation sets of the others, each with a file of its own."""
        first, *others = self._measured
        tables = []
        for name in others:
            rows = self._measured[name]
            path = self._kept(f"held_out-{name}", rows)
            tables.append({"name": name, "prompts": len(rows), "task": {"path": str(path)}})
        return {"name": first, "sets": tables}

    def _task(self, rows: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> tuple[Tree, Any]:
        """The section [task], and rows to be passed from memory. Rows for evaluation are a file beside the training rows'."""
        chat = not isinstance(rows[0]["prompt"], str)
        task: Tree = {
            "prompt": "prompt",
            "chat": chat,
            "template": dict(value_of(self.args, "chat_template_kwargs") or {}) if chat else {},
            "shuffle": bool(value_of(self.args, "shuffle_dataset")),
        }
        self._tables: dict[Path, str] = {}
        if not held_out:
            return {**task, "held_out": 0}, rows
        places = {"path": str(self._kept("train", rows)), "held_out_path": str(self._kept("held_out", held_out))}
        return {**task, "kind": "jsonl", **places, "held_out": len(held_out)}, None

    def _kept(self, name: str, rows: list[dict[str, Any]]) -> Path:
        """Returns the file that the rows will be in."""
        path = (self.output_dir / "headrace-data" / f"{name}.jsonl").absolute()
        self._tables[path] = "".join(json.dumps(row) + "\n" for row in rows)
        return path

    def _write_inputs(self) -> None:
        """Writes what the run reads from files: rows with an eval_dataset, and a model that was given as an object."""
        for path, text in self._tables.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not isinstance(self._model, str):
            save_model_in_memory(self._model, self._tokenizer, self._model_folder)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Trains until the last step. `resume_from_checkpoint`: True continues the newest run of output_dir, a path that run."""
        resume = None
        if resume_from_checkpoint:
            resume = self._newest() if resume_from_checkpoint is True else Path(resume_from_checkpoint)
        self._callbacks.begin()
        result = headrace.train(
            {**self._settings, "out": str(self.output_dir), "name": self._free_name()},
            self._rewards or None,
            dataset=self._dataset,
            resume=resume,
            on_step=self._callbacks.stepped,
            on_evaluation=self._callbacks.evaluated,
        )
        self.run = result.directory
        self.state.global_step = result.step
        self.state.log_history = _table(result.history)
        losses = [row["loss"] for row in self.state.log_history if "loss" in row]
        mean = sum(losses) / len(losses) if losses else float("nan")
        self._callbacks.tell("on_train_end")
        return TrainOutput(result.step, mean, {"train_steps": result.step, "train_loss": mean})

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

    # -- what scripts do after training

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the trained model, or its adapter, into output_dir, for transformers or peft to load."""
        place = Path(output_dir or self.output_dir)
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".saving-") as scratch:
            self._export(Path(scratch) / "model")
            for path in sorted((Path(scratch) / "model").iterdir()):
                if (place / path.name).is_dir():
                    shutil.rmtree(place / path.name)
                path.replace(place / path.name)

    def _export(self, to: Path) -> Path:
        """Writes the trained model to a new folder. Returns the checkpoint that it was made from."""
        dtype: Literal["float32", "bfloat16"] = "float32" if value_of(self.args, "bf16") is False else "bfloat16"
        return headrace.export(self._trained(), to, dtype)

    def push_to_hub(
        self,
        commit_message: str = "",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> str:
        """Uploads the trained model to hub_model_id (or the name of output_dir, under the user of the token), with a card made from the
        run, and returns the address of the commit when it is there (`blocking` or not). `card`: what TRL writes into its card; ours has it
        from the run's settings. Raises ConfigError for a revision: uploads go to the main branch."""
        from headrace.commands.publishing.export_command import full_name, push_run

        _refuse_no_card(card)
        if revision or value_of(self.args, "hub_revision"):
            raise ConfigError(
                "push_to_hub uploads to the main branch, and revision= cannot be honoured; the model is safe, and save_model writes it"
            )
        token = token or value_of(self.args, "hub_token")
        name = full_name(value_of(self.args, "hub_model_id") or self.output_dir.resolve().name, token)
        with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
            folder = Path(scratch) / "model"
            checkpoint = self._export(folder)
            private = bool(value_of(self.args, "hub_private_repo"))
            return push_run(
                self._trained(), folder, checkpoint, name=name, private=private, message=commit_message, token=token
            )

    def create_model_card(self, model_name: str | None = None, **card: Any) -> None:
        """Writes the model and the card of the run into output_dir, as `push_to_hub` uploads them. `card`: as there."""
        from headrace.commands.publishing.model_card import write_card

        _refuse_no_card(card)
        self.save_model()
        name = model_name or self.output_dir.resolve().name
        write_card(self._trained(), self.output_dir, self.state.global_step, name)

    def log(self, logs: Mapping[str, Any], *more: Any) -> None:
        """Adds a row to `state.log_history`."""
        self.state.log_history.append({**logs, "step": self.state.global_step})

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints the numbers of a split, as transformers does."""
        width = max(map(len, metrics), default=0)
        echo(f"***** {split} metrics *****")
        for name, value in sorted(metrics.items()):
            echo(f"  {name:<{width}} = {value}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes SPLIT_results.json into output_dir, and adds the numbers to all_results.json if `combined`."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        (self.output_dir / f"{split}_results.json").write_text(json.dumps(dict(metrics), indent=4, sort_keys=True))
        if combined:
            path = self.output_dir / "all_results.json"
            together = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**together, **metrics}, indent=4, sort_keys=True))

    def save_state(self) -> None:
        """Writes trainer_state.json into output_dir: the step and the numbers of all steps. The run itself keeps more, in its directory."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        state = {"global_step": self.state.global_step, "log_history": self.state.log_history}
        (self.output_dir / "trainer_state.json").write_text(json.dumps(state, indent=2))

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(resolve_model(self._settings["model"]["path"]))
        return self._tokenizer

    @property
    def model(self) -> Any:
        """A copy of the model: as it was given before training, with the trained weights after it. Changes of it reach no run."""
        if self.run is None:
            return self._model if not isinstance(self._model, str) else _loaded(resolve_model(self._model))
        if self._copied != (self.run, self.state.global_step):
            with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
                self._export(Path(scratch) / "model")
                self._copy = _loaded(Path(scratch) / "model")
            self._copied = self.run, self.state.global_step
        return self._copy

    _copy: Any = None
    _copied: tuple[Path, int] | None = None
    """The run and the step that `_copy` holds."""

    def is_world_process_zero(self) -> bool:
        """True: one process runs the script, and starts the others itself."""
        return True

    is_local_process_zero = is_world_process_zero

    def add_callback(self, callback: Any) -> None:
        """Takes a TrainerCallback, or its class. Raises ConfigError for one that waits for an event that there is not here."""
        self._callbacks.add(callback)

    def remove_callback(self, callback: Any) -> None:
        self._callbacks.remove(callback)

    def evaluate(self) -> dict[str, float]:
        """Measures the reward on the prompts of eval_dataset; of several data sets on each, and puts its name into those of the numbers."""
        found: dict[str, float] = {}
        for number, name in enumerate(self._measured or ("",)):
            measured = headrace.evaluate(
                run=self._trained(), reward=self._rewards, dataset=self._dataset, of=name if number else ""
            )
            before = f"eval_{name}_" if len(self._measured) > 1 else "eval_"
            found |= {f"{before}reward": measured.reward_mean, f"{before}reward_sem": measured.reward_sem}
        return found

    def end(self) -> None:
        """Does nothing: a run's processes end with `train`."""

    def _trained(self) -> Path:
        if self.run is None:
            raise ConfigError("nothing is trained yet: call train() first")
        return self.run

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"headrace's {type(self).__name__} has no {name}: it trains in processes of its own (docs/from_trl.md); the run is in .run"
        )


class Refusals:
    """A collection of what cannot be honoured, so that a script is told all of it at once."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            self._texts.append(str(error))

    def complain(self) -> None:
        """Raises ConfigError, with a line for each."""
        if self._texts:
            raise ConfigError("\n".join(dict.fromkeys(self._texts)))


class ScriptCallbacks:
    """ScriptCallbacks of transformers (`TrainerCallback`), told of a run's steps and evaluations in the thread that called `train`."""

    EVENTS = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end")
    """Events of which a script is told. A checkpoint, an epoch and a part of a step have no moment at which the script's process could act."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer, self._all = trainer, list[Any]()
        self._control = SimpleNamespace(
            should_training_stop=False,
            should_evaluate=False,
            should_save=False,
            should_log=False,
            should_epoch_stop=False,
        )

    def add(self, callback: Any) -> None:
        """Raises ConfigError, with their names, for methods that would never be called."""
        made = callback() if isinstance(callback, type) else callback
        plain = next((kind for kind in type(made).__mro__ if kind.__name__ == "TrainerCallback"), object)
        own = [name for name in dir(made) if name.startswith("on_") and name not in self.EVENTS]
        unheard = [name for name in own if getattr(type(made), name, None) is not getattr(plain, name, None)]
        if not any(hasattr(made, name) for name in self.EVENTS):
            unheard = unheard or ["no event"]
        if unheard:
            raise ConfigError(
                f"the callback {type(made).__name__} has {', '.join(unheard)}, which cannot be honoured; there are: {', '.join(self.EVENTS[1:])}"
            )
        self._all.append(made)

    def remove(self, callback: Any) -> None:
        self._all = [one for one in self._all if one is not callback and type(one) is not callback]

    def begin(self) -> None:
        self._control.should_training_stop = False
        self.tell("on_train_begin")

    def stepped(self, step: headrace.Step) -> None:
        self._trainer.state.global_step = step.step
        self.tell("on_step_end")
        self.tell("on_log", logs=dataclasses.asdict(step))

    def evaluated(self, evaluation: headrace.Evaluation) -> None:
        before = f"eval_{evaluation.name}_" if evaluation.name else "eval_"
        values = dataclasses.asdict(evaluation).items()
        self.tell("on_evaluate", metrics={f"{before}{name}": value for name, value in values if name != "name"})

    def tell(self, event: str, **more: Any) -> None:
        """Raises StopTraining, which ends the run with a checkpoint, where a callback asks for the end."""
        trainer = self._trainer
        for callback in self._all:
            if method := getattr(callback, event, None):
                method(trainer.args, trainer.state, self._control, processing_class=trainer.processing_class, **more)
        if self._control.should_training_stop and event != "on_train_end":
            raise headrace.StopTraining


CARD = (
    "dataset", "dataset_args", "dataset_name", "dataset_tags", "finetuned_from", "language", "license", "model_name", "tags", "tasks",
)  # fmt: skip
"""Words that scripts of TRL and transformers give for a card."""


def _refuse_no_card(given: Mapping[str, Any]) -> None:
    if strange := [name for name in given if name not in CARD]:
        raise TypeError(f"got an unexpected keyword argument {strange[0]!r}")


def _usual_place(model: Any, title: str) -> str:
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
    return f"{short_name(name.rstrip('/'))}-{title}"


def _refuse_others(trainer: str, others: Mapping[str, Any], optimizers: tuple[Any, Any]) -> None:
    for name, value in others.items():
        if name not in NOT_HERE:
            raise TypeError(f"{trainer}() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise ConfigError(f"{name}= cannot be honoured: {NOT_HERE[name]}")
    if any(optimizer is not None for optimizer in optimizers):
        raise ConfigError("optimizers= cannot be honoured: training uses torch's AdamW, with the settings of [train]")


def _rewards(given: Any, weights: Sequence[float] | None) -> list[RewardFunction | tuple[RewardFunction, float]]:
    functions = list(given) if isinstance(given, list | tuple) else [given]
    for function in functions:
        if not callable(function) or hasattr(function, "save_pretrained"):
            what = (
                f"{function!r} is a reward model"
                if isinstance(function, str) or hasattr(function, "save_pretrained")
                else f"{function!r} is no function"
            )
            raise ConfigError(
                f"reward_funcs: {what}, which cannot be honoured; serve it, and name it in reward.services (docs/scoring.md)"
            )
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(functions)} functions")
    marked = [trl_reward(function) for function in functions]
    return (
        [(reward, float(weight)) for reward, weight in zip(marked, weights, strict=True)] if weights else list(marked)
    )


def _data_sets(given: Any) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows for evaluation by the name of their data set, which is empty where there is only one without a name."""
    if not isinstance(given, Mapping):
        return {"": _rows(given, "eval_dataset")} if given else {}
    return {str(name): _rows(rows, f"eval_dataset[{name!r}]") for name, rows in given.items()}


def _loaded(folder: Path) -> Any:
    if (folder / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(folder)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _rows(given: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(given, Mapping) or given is None or not isinstance(given, Iterable):
        raise ConfigError(
            f"{name}= takes rows with a prompt: a datasets.Dataset or a list of dicts, not {type(given).__name__}"
        )
    rows = list(records_of(given))
    if rows and "prompt" not in rows[0] and "messages" in rows[0]:
        raise ConfigError(
            f"{name}= has whole conversations (messages), and a run needs what they begin with: "
            '[{**row, "prompt": row["messages"][:-1]} for row in rows] leaves out the last answer'
        )
    if not rows or "prompt" not in rows[0]:
        raise ConfigError(f"{name}= needs rows with a column prompt, as in TRL; there are {len(rows)} rows")
    if kept := [column for column in ("image", "images") if column in rows[0]]:
        raise ConfigError(f"{name}= has the column {kept[0]}, which cannot be honoured: prompts are text")
    return [plain_row(row, f"{name}=, row {number}") for number, row in enumerate(rows, 1)]


def _fitted(tree: Tree) -> Tree:
    """The settings with the context that the model can read, if it is a directory that says so."""
    try:
        config = json.loads((Path(tree["model"]["path"]) / "config.json").read_text())
    except OSError:
        return tree
    most = config.get("max_position_embeddings") or tree["engine"]["context_length"]
    return merge(tree, {"engine": {"context_length": min(most, tree["engine"]["context_length"])}})


def _table(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
