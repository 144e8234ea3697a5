"""The trainer in PyTorch: any Hugging Face causal LM, one optimizer step at a time, placed on one device or over several (`placement/`).

It trains all weights, or adapters of frozen ones (`trainer/model/adapters.py`). Each of these is a `Learner`, and a batch names its own.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import AGGREGATIONS
from headrace.core.batches import Batch, Row
from headrace.core.errors import ConfigError
from headrace.core.protocols import TrainerCore
from headrace.core.reports import Captured, SleepReport, TrainReport, TrialScores
from headrace.core.weights import AdapterSpec, trial_version
from headrace.models.image_embedding import vocabulary_of
from headrace.models.lora import LoraConfig
from headrace.models.resolve import cache_dir, resolve_model
from headrace.models.saved_buffers import saved_buffers
from headrace.native.resources import available
from headrace.trainer.config import TrainConfig, uncompiled
from headrace.trainer.dealing.deal import dealing_of
from headrace.trainer.dealing.share import StepShare, dealt_of
from headrace.trainer.forward.compiled import Compilation, compiled
from headrace.trainer.forward.forward import Forward, ForwardWay, forward_of, packed_hidden
from headrace.trainer.forward.fused.fused_ops import forward_only, reserve
from headrace.trainer.forward.fused_model import fuse, why_none
from headrace.trainer.forward.image_places import images_ahead
from headrace.trainer.forward.lowered import StepCopies, step_copies
from headrace.trainer.forward.routing import RoutingReplay, no_replay
from headrace.trainer.forward.tree_attention import tree_of
from headrace.trainer.model.adapters import ADAPTER_MODEL, Adapters
from headrace.trainer.model.causal_lm import (
    computed_in,
    enable_checkpointing,
    export_model,
    load_model,
    resolve_device,
    resolve_dtype,
    tied_names,
)
from headrace.trainer.model.low_memory import lower_weights
from headrace.trainer.model.outline import is_outline, outline
from headrace.trainer.packing import DealtRows, Pack, PickedNumbers, StepPlan, StepRows, pack_rows, pack_sequence
from headrace.trainer.placement.port import Keep, Placement, Single, chosen_forward, on_host, own_values_of, tried
from headrace.trainer.step import checkpoint
from headrace.trainer.step.bitwise import UnequalLogprobs, shared_arithmetic
from headrace.trainer.step.checkpoint import Contents, all_weights, weights_of
from headrace.trainer.step.gradient import Gradient, Replay, Sums, make_updates
from headrace.trainer.step.host_memory import HostCopy, Resting
from headrace.trainer.step.learner import Assignment, Learner, Update
from headrace.trainer.step.process_reward import ADAPTER, WITHOUT_ADAPTER, ProcessReward, Scoring
from headrace.trainer.step.reference import Reference, reference_of
from headrace.trainer.step.teacher import HeldTeacher, held_teacher
from headrace.trainer.step.trial import WORTH, KnownEffects, Trial, contents_mark
from headrace.trainer.step.value_head import CriticModel, ValueHead
from headrace.trainer.step.whole_step import StepPairs

if TYPE_CHECKING:
    from jaxtyping import Float


class TorchTrainer:
    """`protocols.TrainerCore`. Raises ConfigError when the model or the settings cannot work."""

    def __init__(
        self,
        model_dir: Path,
        config: TrainConfig,
        algo: AlgoConfig,
        seed: int,
        *,
        keep_routing: bool = False,
        adapters: Mapping[str, Assignment] | None = None,
        placement: Placement | None = None,
        beside: int = 1,
    ) -> None:
        """`keep_routing`: force the experts that the sampler chose. `adapters`: by name, what is trained instead of all weights; the one
        with the empty name is published merged into them. `placement`: where the weights lie; one device by default. `beside`: ranks that share this machine's memory, this one
        included."""
        torch.manual_seed(seed)
        self._placement = placement or Single()
        self._model_dir, self._config, self._seed = model_dir, config, seed
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._assignments = adapters or {"": Assignment(config, algo)}
        loras = self._loras(adapters or {})
        self._model = self._placement.load(model_dir, self._device, values=any(lora.dora for lora in loras.values()))
        self.tied = tied_names(self._model)
        self.kept = frozenset(saved_buffers(self._model))
        """Names of published tensors that keep their own dtype."""
        self._forward = chosen_forward(self._placement, self._model, checkpointed=config.gradient_checkpointing)
        self._fused = self._fuse()
        self.arithmetic = self._shared_arithmetic(loras)
        replay_of = self._replays() if keep_routing else (lambda _: no_replay)  # before adapters: an outline is tried
        self._adapters = self._adapted(loras) if loras else None
        self._replay: Replay = replay_of(self._forward)
        algos = [assignment.algo for assignment in self._assignments.values()]
        asked = any(one.reference_in_loss or one.trains_rewards for one in algos)
        # made before a checkpoint is restored, so that it stays the model that the run began with
        moves = any(one.recipe.kl.every for one in algos)
        self._reference = reference_of(self._forward, self._dtype, replay_of, moves=moves) if asked else None
        if config.gradient_checkpointing:
            contexts = self._replay.checkpoint_contexts if isinstance(self._replay, RoutingReplay) else None
            enable_checkpointing(self._model, contexts)
        if config.weights == "bfloat16":
            lower_weights(self._model, self._dtype)
        reference = self._reference  # under LoRA the model itself
        models = [self._model, *([reference.forward.model] if reference and reference.bytes else [])]
        for model in models:
            self._placement.spread(model)
        if self._adapters:
            self._adapters.seal()
        self._copies_of_step = self._lowered_once()
        self._compilation = self._compile()
        self._forward = self._compilation.forward
        self._teacher = self._held_teacher(algos)
        self._learners = {name: self._learner(name, assignment) for name, assignment in self._assignments.items()}
        self._process = self._rewarding() if any(one.trains_rewards for one in algos) else None
        self._trials: dict[str, Trial] = {}
        self._resting = Resting([*models, *self._beside()], self._optimizers, self._device)
        self._copies = {name: HostCopy(lambda: available() // beside) for name in self._learners}
        self._reading = threading.Lock()
        """Held by a thread that reads frozen weights: they stay where they are."""
        self._reserved = False

    def _loras(self, adapters: Mapping[str, Assignment]) -> dict[str, LoraConfig]:
        """The adapters by name, with that of a reward model that is trained beside the only one."""
        loras = {name: assignment.lora for name, assignment in adapters.items()}
        if len(loras) == 1 and any(assignment.algo.trains_rewards for assignment in adapters.values()):
            loras[ADAPTER] = next(iter(loras.values()))
        return loras

    def _adapted(self, loras: Mapping[str, LoraConfig]) -> Adapters:
        there = self._placement
        return Adapters(self._model, loras, self._dtype, self._model_dir, whole=there.whole, of_leader=there.of_leader)

    def _replays(self) -> Callable[[Forward], RoutingReplay]:
        """Makes what forces recorded experts in a model. Raises ConfigError where they cannot be forced."""
        if not is_outline(self._model):
            return lambda forward: RoutingReplay(forward, self._dtype)
        way = ForwardWay(self._forward.packed, self._forward.chunked_head, self._forward.carried)
        kinds = tried(self._placement, self._model, lambda one: RoutingReplay(forward_of(one, way), self._dtype).kinds)
        return lambda forward: RoutingReplay(forward, self._dtype, kinds)

    def _lowered_once(self) -> StepCopies:
        """The weights that are lowered once a step. Those that are gathered anew for every pass have no copy that could serve two, adapters are small, and
        kernels know a weight that they have packed by its place in memory, where the next copy may lie."""
        alone = self._placement.plain and not self._adapters and not self._fused
        return step_copies(self._forward, self._dtype) if alone else StepCopies((), self._dtype)

    def _compile(self) -> Compilation:
        asked = self._config.compile
        if asked is False or (asked == "auto" and self._device.type != "cuda"):
            return Compilation(self._forward)
        if reason := uncompiled(self._config.parallel, asked is True):
            return Compilation(self._forward, f"layers are not compiled: {reason}")
        largest = None if self._placement.plain else self._placement.largest
        return compiled(self._forward, self._dtype, self._copies_of_step, largest=largest)

    def _fuse(self) -> tuple[str, ...]:
        """The kinds of modules that use C++ kernels. Raises ConfigError where kernels are asked for and cannot be used."""
        if self._config.path == "torch" or self._config.compile is True:
            return ()
        if not self._placement.plain:
            if self._config.path == "kernels":
                raise ConfigError(
                    'train.path = "kernels", and they read whole weights, of which each rank holds a part; use "auto" or "torch"'
                )
            return ()
        fused = fuse(self._forward)
        if self._config.path == "kernels" and not fused:
            raise ConfigError(f'train.path = "kernels", and {why_none(self._device)}; use "auto" or "torch"')
        return fused

    def _shared_arithmetic(self, adapters: Mapping[str, LoraConfig]) -> str:
        """Raises ConfigError if `train.parity` asks for the engine's log-probs and equality is not proven."""
        name, unproven = shared_arithmetic(self._forward, self._fused, self._dtype, adapters)
        if self._config.parity == "bitwise" and unproven:
            raise ConfigError(
                f'train.parity = "bitwise" asks for the engine\'s log-probs, and {unproven}; set train.parity = "off"'
            )
        return name

    def _learner(self, name: str, assignment: Assignment) -> Learner:
        adapters = self._adapters
        trained = adapters.parameters(name) if adapters else dict(self._model.named_parameters())
        algo = assignment.algo
        critic = self._critic(algo, assignment.train) if algo.has_critic else None
        return Learner(config=assignment.train, algo=algo, parameters=trained, placement=self._placement, critic=critic)

    def _critic(self, algo: AlgoConfig, train: TrainConfig) -> ValueHead:
        """Raises ConfigError for a model whose hidden states are not to be had."""
        if own := algo.recipe.critic.model:
            directory = resolve_model(own, setting="algo.critic.model")
            return CriticModel(directory, algo, train, self._device, placement=self._placement)
        if not self._forward.chunked_head:
            raise ConfigError(
                f"algo.name = {algo.name} reads values from the last hidden states, and {type(self._model).__name__} shows its logits only; use an "
                'algorithm without a critic, such as algo.name = "grpo"'
            )
        return ValueHead(self._model.get_output_embeddings().weight.shape[1], algo, self._device, train.updates)

    def _held_teacher(self, algos: Sequence[AlgoConfig]) -> HeldTeacher | None:
        """Raises ConfigError for one that cannot be compared with the policy."""
        lies: dict[str, Any] = {"placement": self._placement, "fused": bool(self._fused)}
        return held_teacher(algos, self._forward, self._device, self._dtype, **lies)

    def _beside(self) -> list[ValueHead | HeldTeacher]:
        """The models that read what the policy reads."""
        critics = [learner.critic for learner in self._learners.values() if learner.critic]
        return [*critics, *([self._teacher] if self._teacher else [])]

    def _rewarding(self) -> ProcessReward:
        """Raises ConfigError where there is not one adapter beside which another could be trained."""
        if not self._adapters or len(self._assignments) > 1 or self._reference is None:
            raise ConfigError(WITHOUT_ADAPTER)
        ((name, policy),) = self._assignments.items()
        models = Scoring(self._forward, self._reference, self._replay, self._dtype, self._device)
        return ProcessReward(name, policy, self._adapters, models=models, placement=self._placement)

    @property
    def _moving(self) -> Reference | None:
        """The reference, if it moves."""
        return self._reference if self._reference and self._reference.moves else None

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        of_learners = [one for learner in self._learners.values() for one in learner.optimizers]
        return [*of_learners, *([self._process.optimizer] if self._process else [])]

    @property
    def version(self) -> int:
        """The version of the model's weights; a frozen base stays at 0."""
        return self._version_of("") if "" in self._learners else 0

    def version_of(self, adapter: str) -> int:
        return self._version_of(adapter) if adapter else self.version

    def _version_of(self, adapter: str) -> int:
        version = self._learners[adapter].version
        return trial_version(version) if adapter in self._trials else version

    @property
    def dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @property
    def path(self) -> str:
        """The way that the model is run, in words."""
        fused = f", fused {' '.join(self._fused)}" if self._fused else ""
        return f"{self._forward.path}{fused}, {self.dtype}"

    @property
    def packed(self) -> bool:
        """Whether rows that begin alike share tokens: each model that reads them must be able to."""
        return self._forward.shares and all(model.shares for model in self._beside())

    def step(self, given: Batch | StepShare) -> TrainReport:
        """Makes one step, given the whole of its rows or this rank's share: one update, or several (`train.epochs`, `train.minibatches`). A
        skipped step (`TrainReport.skipped`), of which no update was made, leaves everything as it was."""
        share = self._share(given)
        batch = share.head
        learner = self._activate(batch.adapter)
        assert batch.step == learner.version, f"batch of step {batch.step} for weights of version {learner.version}"
        started = time.perf_counter()
        plans = {number: plan for number, plan in enumerate(self._plans(share)) if plan.packs}
        if not plans:
            seconds, dropped = time.perf_counter() - started, sum(dealt.dropped_tokens for dealt in share.minibatches)
            return TrainReport(batch.step, batch.step, "no_tokens", updates=0, dropped_tokens=dropped, seconds=seconds)
        picked = PickedNumbers(batch.picked)
        lr, policy_waits = learner.lr(batch.steps), learner.trains_critic_alone
        process, before = None, self._process.copy() if self._process else {}
        if self._process:
            plans, process = self._process.rewarded(plans, batch.firsts)
        try:
            gradient = self._gradient(batch.temperature, batch.adapter, picked=picked)
            sums, updates = make_updates(gradient, plans, batch, lr, self._given(share))
        except UnequalLogprobs:
            learner.forget()
            if self._process:
                self._process.restore(before)
            raise
        if learner.version > batch.step and not policy_waits:  # what it is follows from nothing that the factors did
            learner.entropy.after(sums.entropy / sums.tokens)
            learner.kl.after(sums.reference_kl / sums.tokens)
        if self._moving and learner.version > batch.step and learner.version % learner.algo.recipe.kl.every == 0:
            self._moving.follow(self._model, self._placement)
        norms = [update.norm for update in updates if update.made] or [updates[-1].norm]
        skipped = "" if learner.version > batch.step else "all_rejected" if norms[0] == 0 else "nonfinite_gradient"
        if self._process and skipped:
            self._process.restore(before)
        report = _report(sums, batch.step, learner.version, skipped)
        graphs, notice = self._compilation.news()
        left_out = 0 if skipped else sum(not update.made for update in updates)
        if left_out:
            notice = f"{notice} {_said(updates, batch.step)}".strip()
        more = {
            "updates": 0 if skipped else len(updates) - left_out,
            "left_out": left_out,
            "graphs": graphs,
            "notice": notice,
            "grad_norm": fmean(norms),
            "lr": lr,
            "process": process,
            "token_numbers": () if skipped else picked.report(),
        }
        return msgspec.structs.replace(report, seconds=time.perf_counter() - started, **more)

    def reserve(self) -> None:
        """Does in advance, once, what would delay the first steps (`fused_ops.reserve`). It takes seconds, in which rollouts are sampled."""
        if self._fused and not self._reserved:
            config = self._config
            reserve(self._model, 0 if config.gradient_checkpointing else config.microbatch, self._dtype)
        self._reserved = True

    def _activate(self, adapter: str) -> Learner:
        assert not self._resting.asleep, "the trainer is asleep"
        if self._adapters:
            self._adapters.activate(adapter)
        return self._learners[adapter]

    def adapters(self) -> list[AdapterSpec]:
        """The adapters that are published in addition to the base."""
        return [assignment.lora.spec(name) for name, assignment in self._assignments.items() if name]

    def parameters(self, adapter: str = "") -> Iterable[tuple[str, Tensor]]:
        """Returns the tensors to publish, each whole: all weights (with the adapter merged in), the frozen base, or an adapter."""
        if adapter:
            assert self._adapters is not None
            return self._adapters.state(adapter).items()
        weights: Iterator[tuple[str, Tensor]]
        if self._adapters is None:
            weights = ((name, self._placement.whole(one)) for name, one in self._model.named_parameters())
        else:
            weights = self._adapters.merged("") if "" in self._learners else self._adapters.base()
        return chain(weights, ((name, self._placement.whole(buffer)) for name, buffer in self._kept_buffers()))

    def _kept_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields buffers that are published, by the names of the model without adapters."""
        there = saved_buffers(self._model) if self.kept else {}
        infix = ".base_layer"  # in the names of a module that peft has wrapped
        yield from (
            (name.replace(infix, ""), tensor) for name, tensor in there.items() if name.replace(infix, "") in self.kept
        )

    def own_values(self, adapter: str, rank: int, ranks: int) -> Iterator[tuple[str, int, Tensor]]:
        """Yields what one of several ranks publishes of the same tensors: name, number of the first value in row-major order, and values
        [n]. Each rank has the values that it holds; what is not split lies with one rank after another."""
        if self._adapters is None:
            published = chain(self._model.named_parameters(), self._kept_buffers())
            yield from own_values_of(published, rank, ranks, self._placement.whole)
            return
        for number, (name, tensor) in enumerate(self.parameters(adapter)):
            if number % ranks == rank:
                yield name, 0, tensor.flatten()

    def score(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        """[T-1] log-probs at temperature 1 of tokens[1:], in the dtype of training; NaN of features of images, which nobody predicts."""
        self._activate(adapter)
        if len(tokens) < 2:
            return []
        found, words = self.logprobs(pack_sequence(tokens), 1.0), vocabulary_of(self._model)
        return [math.nan if token >= words else value for token, value in zip(tokens[1:], found, strict=True)]

    @torch.no_grad()
    def logprobs(self, pack: Pack, temperature: float) -> list[float]:
        """[M] log-probs of the pack's targets as a step computes them before its update: recorded experts and sampling mask apply."""
        there = pack.to(self._device)
        copies = self._copies_of_step.used()
        with forward_only(), copies, computed_in(self._dtype, self._device), self._replay(there):
            found = self._forward.logprobs(there, temperature, self._dtype).logprob
        return self._placement.of_head(found).tolist()

    def begin_trial(self, adapter: str = "") -> None:
        self._activate(adapter)
        self._trials[adapter] = Trial(self._learners[adapter].parameters)

    def end_trial(self, pieces: Sequence[Sequence[int]], adapter: str = "", most: int = 0) -> TrialScores:
        def scores(some: Sequence[Sequence[int]]) -> list[float]:
            return [value for piece in some for value in self.score(piece, adapter)]

        trial, first = self._trials[adapter], [pieces[0][:most]] if most else pieces
        known, changed = self._known_effects(pieces, adapter, most), scores(pieces)
        kept = known.of(changed) if known else None
        if kept is None:
            kept = {label: scores(first) for label in trial.kept()}
            if known:
                known.keep(TrialScores(changed, kept))
        trial.end()
        del self._trials[adapter]
        return TrialScores(changed, kept)

    def _known_effects(self, pieces: Sequence[Sequence[int]], adapter: str, most: int) -> KnownEffects | None:
        """The effects of the weights as they are. None where they are computed as fast as known: on GPUs, and of small models."""
        held = [*self._model.named_parameters(), *self._model.named_buffers()]
        here = (
            self._placement.plain and self._device.type == "cpu" and not any(parameter.is_meta for _, parameter in held)
        )
        if not here or sum(parameter.numel() for _, parameter in held) < WORTH:
            return None
        return KnownEffects(cache_dir() / "trials", contents_mark(held, pieces, adapter, most, self.path))

    def sleep(self) -> SleepReport:
        with self._reading:
            return self._resting.begin()

    def wake(self) -> SleepReport:
        with self._reading:
            return self._resting.end()

    def save(self, directory: Path, adapter: str = "") -> None:
        """Raises IdentityError if frozen weights have changed."""
        self._captured(adapter, on_host)(directory)

    def capture(self, adapter: str = "") -> tuple[Captured, Callable[[Path], None]]:
        """Copies what a checkpoint holds of this rank to the host's memory. Returns the rest of `save`, which may be done in another thread while the
        model is trained, unless the report says that there is no room for a copy. If one of several ranks has none, no rank makes one."""
        copies, placement = self._copies[adapter], self._placement
        found = checkpoint.tensors(self._contents(adapter), self._learners[adapter].optimizer)
        mine = {name: piece.values for name, piece in placement.pieces(found).items()}
        short = copies.short(mine.items())
        nbytes = sum(tensor.nbytes for tensor in mine.values())
        everyone, _ = placement.each(torch.tensor([nbytes, int(bool(short))]))
        if everyone[:, 1].any():
            short = short or "another rank has no room for a copy of its part"
        write = self._captured(adapter, on_host if short else copies.keep)
        return Captured(int(everyone[:, 0].sum()), short), write

    def _captured(self, adapter: str, keep: Keep) -> Callable[[Path], None]:
        learner, adapters, together = self._learners[adapter], self._adapters, not self._placement.plain
        if adapters and together:  # ranks gather what they compare
            adapters.check_base()
        write_tensors = checkpoint.capture(
            self._contents(adapter),
            learner.optimizer,
            placement=self._placement,
            version=learner.version,
            seed=self._seed,
            entropy=(learner.entropy.coef, learner.entropy.mean),
            kl=learner.kl.coef if learner.kl.rule.target else 0.0,
            keep=keep,
        )

        def write(directory: Path) -> None:
            if adapters and not together:
                with self._reading:
                    adapters.check_base()
            write_tensors(directory)
            if adapters and self._placement.leads:
                adapters.save_config(adapter, directory)

        return write

    def restore(self, directory: Path, adapter: str = "") -> None:
        """Raises CheckpointError, with nothing changed."""
        learner, contents = self._learners[adapter], self._contents(adapter)
        saved, name = checkpoint.beside_of(directory), directory.name
        critic = learner.critic.read(saved, name, self._placement) if learner.critic else {}
        process = self._process.read(saved, name) if self._process else {}
        reference = self._moving.read(saved, self._placement) if self._moving else {}
        if self._teacher:
            self._teacher.check(saved, name)
        learner.version = checkpoint.restore(directory, contents, learner.optimizer, self._placement)
        if learner.critic:
            learner.critic.restore(critic)
        if self._process:
            self._process.restore(process)
        if self._moving:
            self._moving.restore(reference)
        if learner.kl.rule.target:
            learner.kl.coef = checkpoint.kl_of(directory) or learner.kl.coef
        if learner.entropy.rule.target and (entropy := checkpoint.entropy_of(directory)):
            learner.entropy.coef, learner.entropy.mean = entropy

    def _contents(self, adapter: str) -> Contents:
        learner = self._learners[adapter]
        others = (learner.critic, self._process, self._moving, self._teacher)
        beside = {name: tensor for other in others if other for name, tensor in other.state().items()}
        if self._adapters is None:
            return dataclasses.replace(checkpoint.all_weights(self._model), beside=beside)
        state, base = self._adapters.state(adapter), self._adapters.base_mark
        return Contents(ADAPTER_MODEL, state, learner.parameters, base, beside)

    def export(
        self,
        directory: Path,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        adapter: str = "",
        merge: bool = False,
    ) -> None:
        """Writes a directory that `transformers` loads, tokenizer and chat template included; for an adapter, one that peft loads, unless
        it is to be merged into the base weights. Raises OSError where the disk does not take it."""
        try:
            self._export(directory, dtype, adapter, merge)
        except SafetensorError as error:  # its only report of a full disk
            raise OSError(str(error)) from error

    def _export(self, directory: Path, dtype: Literal["bfloat16", "float32"], adapter: str, merge: bool) -> None:
        placement = self._placement
        if self._adapters is None:
            self._exported(self._model, directory, dtype, placement.whole)
        elif merge:
            merged = dict(self._adapters.merged(adapter))  # on every rank: it gathers
            if placement.leads:
                model = load_model(self._model_dir, self._device)
                model.load_state_dict(merged, strict=False)  # tied parameters and buffers are there already
                self._exported(model, directory, dtype, Single().whole)
        elif placement.leads:
            self._adapters.export(adapter, directory)

    def _exported(
        self, model: Any, directory: Path, dtype: Literal["bfloat16", "float32"], whole: Callable[[Tensor], Tensor]
    ) -> None:
        saved, leads = model.state_dict(), self._placement.leads
        export_model(model, self._model_dir, directory, dtype=dtype, whole=lambda name: whole(saved[name]), leads=leads)

    def _share(self, given: Batch | StepShare) -> StepShare:
        """The share of this rank, which the controller sends; of a whole batch it is found here."""
        if isinstance(given, StepShare):
            return given
        config = self._learners[given.adapter].config
        dealing = dealing_of(self._placement.parallel, config.microbatch, self.packed, config.minibatches)
        return dealt_of(given, dealing)[self._placement.share]

    def _plans(self, given: Batch | StepShare) -> list[StepPlan]:
        """The plan of each minibatch."""
        share = self._share(given)
        learner = self._learners[share.head.adapter]
        more = {"constant": learner.algo.length_constant, "step": share.head.step}
        return [self._placement.plan(DealtRows(dealt, learner.aggregation, **more)) for dealt in share.minibatches]

    def _given(self, share: StepShare) -> list[StepPlan]:
        """The plan of the demonstrations beside each minibatch."""
        more = {"constant": 0, "step": share.head.step}
        return [
            self._placement.plan(DealtRows(dealt, AGGREGATIONS["token_mean"], **more)) for dealt in share.demonstrations
        ]

    def _gradient(
        self,
        temperature: float,
        adapter: str = "",
        *,
        picked: PickedNumbers | None = None,
        pairs: StepPairs | None = None,
    ) -> Gradient:
        """`picked`: given for the first update of a step, before which the weights are those that sampled the newest tokens."""
        learner = self._learners[adapter]
        return Gradient(
            forward=self._forward,
            learner=learner,
            placement=self._placement,
            temperature=temperature or 1.0,
            dtype=self._dtype,
            device=self._device,
            reference=self._reference if learner.algo.reference_in_loss else None,
            teacher=self._teacher if learner.algo.recipe.distill.model else None,
            pairs=pairs,
            picked=picked,
            replay=self._replay,
            copies=self._copies_of_step.used,
            bitwise=self._config.parity == "bitwise" and picked is not None,
        )


def _said(updates: Sequence[Update], step: int) -> str:
    """A sentence about the updates of a step that were left out."""
    out = [update.norm for update in updates if not update.made]
    cut = sum(norm == 0 for norm in out)
    reasons = [f"{cut} because rules and bounds left nothing of the policy loss"] if cut else []
    reasons += [f"{len(out) - cut} because the gradient was not finite"] if cut < len(out) else []
    was = "was" if len(out) == 1 else "were"
    return f"{len(out)} of {len(updates)} updates of step {step + 1} {was} left out, {' and '.join(reasons)}"


def _report(sums: Sums, step: int, version: int, skipped: str) -> TrainReport:
    return TrainReport(
        step=step,
        version=version,
        skipped=skipped,
        loss=sums.loss,
        entropy=sums.entropy / sums.tokens,
        ratio_mean=sums.ratio / sums.tokens,
        ratio_max=sums.ratio_max,
        clip_fraction=sums.clipped / sums.tokens,
        kl=sums.kl / sums.tokens,
        loss_tokens=sums.tokens // sums.passes,
        forward_tokens=sums.forward_tokens,
        dropped_tokens=sums.dropped_tokens // sums.passes,
        microbatches=sums.microbatches,
        lags=sums.diagnostics.report(sums.passes),
        outside_tokens=sums.outside // sums.passes,
        missing_routes=sums.missing_routes // sums.passes,
        routing_conflicts=sums.routing_conflicts // sums.passes,
        reference_kl=sums.reference_kl / sums.tokens,
        bitwise_tokens=sums.bitwise,
        teacher_kl=sums.teacher_kl / max(sums.taught, 1),
        divergence=sums.divergence / sums.tokens,
        noise=sums.diagnostics.noise(),
        pairs=sums.pairs.pairs,
        pairs_agreed=sums.pairs.agreed,
        pair_margin=sums.pairs.margin,
        critic=sums.critic,
        demonstration_tokens=sums.given // sums.passes,
        demonstration_loss=-sums.given_logprob / sums.given if sums.given else 0.0,
        demonstration_share=sums.given_share,
    )


# --- A checkpoint of the trainer as a directory that `transformers` or peft loads.


def export_weights(
    model_dir: Path,
    trained: Assignment,
    *,
    seed: int,
    checkpoint: Path,
    to: Path,
    dtype: Literal["bfloat16", "float32"],
    merge: bool,
) -> None:
    """Writes the checkpoint's weights, and the model's tokenizer and templates. `trained`: what the run trained, of which only the dtype of
    the kept weights and the adapter matter here. The directory of an adapter is for peft, unless `merge` adds the adapter to the base
    weights (in float32)."""
    train = trained.train
    masters = train.weights == "float32" or train.offload_optimizer
    kept: Literal["float32", "bfloat16"] = "float32" if masters else "bfloat16"
    train = dataclasses.replace(train, dtype=kept, weights=kept, offload_optimizer=False, compile=False)
    to.parent.mkdir(parents=True, exist_ok=True)
    if not trained.lora.rank and (model := outline(model_dir)) is not None:  # needs no trainer, and a layer's memory
        if kept == "bfloat16":
            lower_weights(model, torch.bfloat16)
        export_model(model, model_dir, to, dtype=dtype, whole=weights_of(checkpoint, all_weights(model)).read)
        return
    alone = trained.algo.has_critic or trained.algo.recipe.distill.model  # another model may be gone
    algo = AlgoConfig() if alone else trained.algo
    adapters = {"": dataclasses.replace(trained, train=train, algo=algo)} if trained.lora.rank else {}
    trainer = TorchTrainer(model_dir, train, algo, seed, adapters=adapters)
    trainer.restore(checkpoint)
    trainer.export(to, dtype, merge=merge)


# --- The numbers that a training step would compute before its update
# For the parity report, and to find where an engine's differ.


def rescore(trainer: TrainerCore, rows: Sequence[Row], temperature: float) -> list[list[float]]:
    """[T] log-probs of the tokens of each row at its temperature (`temperature` if it does not say it), under its sampling mask and recorded experts where it has them.

    Every row has a microbatch of its own: the report must not depend on which rows share one.
    """
    assert isinstance(trainer, TorchTrainer)
    return [_of_row(trainer, row, temperature) for row in rows]


def _of_row(trainer: TorchTrainer, row: Row, temperature: float) -> list[float]:
    budget = len(row.prompt) + len(row.tokens)
    (pack,) = pack_rows(
        StepRows([row], lambda counts, _: [1.0] * len(counts), constant=0, budget=budget, step=0, share=False)
    ).packs
    return trainer.logprobs(pack, pack.temperature or temperature)


@torch.no_grad()
def residual_stream(trainer: TrainerCore, tokens: Sequence[int]) -> Float[Tensor, "L T H"]:
    """[L, T, H] float32 of one sequence, L one more than the layers: its embeddings, then the result of each layer."""
    assert isinstance(trainer, TorchTrainer)
    model, device, dtype = trainer._model, trainer._device, trainer._dtype
    found: list[Tensor] = []
    modules = [model.get_input_embeddings(), *model.base_model.layers]
    hooks = [module.register_forward_hook(lambda _, __, result: found.append(_states(result))) for module in modules]
    pack = pack_sequence((*tokens, tokens[-1])).to(device)  # the last one is only predicted
    try:
        with computed_in(dtype, device):
            tree = tree_of(pack.segments, device, ahead=images_ahead(model, pack.tokens))
            packed_hidden(model, pack.tokens, pack.positions, tree)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def _states(result: Any) -> Float[Tensor, "T H"]:
    return (result[0] if isinstance(result, tuple) else result)[0].float()
