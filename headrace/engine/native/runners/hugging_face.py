"""Any other causal LM: Hugging Face's own forward, flat over the ragged batch, with our attention inside.

The model sees one sequence [1, N] with explicit positions; its attention layers call back here, where keys and values go
into our cache. So it gets continuous batching, chunked prefill and shared prompts without knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from headrace.core.errors import ConfigError
from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.attention import Pass
from headrace.engine.native.runners.module_adapters import blamed_in_slots, in_slots
from headrace.engine.native.runners.module_weights import LayerWatch, ModuleRunner, decoder_layers
from headrace.engine.native.runners.paged import EXACT_ROWS, PagedRunner
from headrace.engine.native.runners.pages import Softmax
from headrace.engine.native.runners.recorded import TRIED, ExpertRecorder
from headrace.engine.native.runners.skeleton import Skeleton, attention, dry_run
from headrace.models.image_blocks import ahead_in, kind_of


class HuggingFaceRunner(ModuleRunner, PagedRunner):
    """Raises ConfigError for exactness of mixtures of experts and of images that see ahead, which it does not support."""

    def __init__(
        self,
        model: Skeleton,
        context_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        max_adapters: int = 0,
    ) -> None:
        path = f"hugging face {model.model_type}"
        ModuleRunner.__init__(self, path, model.model, max_adapters, dtype=dtype, device=device)
        self._model = model.model
        if exact and model.model._can_set_experts_implementation():
            raise ConfigError(
                f"engine.exact = true, but in {self.path} how an expert adds depends on how many tokens chose it; serve "
                "qwen3_moe, mixtral or olmoe through the fused path, or set it to false"
            )
        self._ahead_in = ahead_in(model.model)
        if exact and self._ahead_in:
            raise ConfigError(
                f"engine.exact = true, but in {self.path} the tokens of an image see later ones, and exact passes are cut at fixed lengths; set it "
                "to false"
            )
        PagedRunner.__init__(self, model.geometry, dtype, device, exact)
        self._layers = decoder_layers(model.model, model.geometry.layers)

    @cached_property
    def experts(self) -> tuple[int, int]:
        """Found before the first weights. Raises ConfigError for a mixture whose choice cannot be recorded."""
        return self._recorder.experts

    @cached_property
    def _recorder(self) -> ExpertRecorder:
        return ExpertRecorder(self.path, self._model, lambda: dry_run(self._model, TRIED))

    def free(self) -> None:
        super().free()
        self._weights.clear()

    # -- the pass -----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> ForwardOutput:
        def of_one(slot: int, part: ForwardInput) -> ForwardOutput:
            with self._adapters.used(slot):
                return PagedRunner.forward(self, part)

        return in_slots(batch, of_one)

    def _forward(self, batch: ForwardInput) -> ForwardOutput:
        if self.device.type == "cuda":
            self.passes.count("a model without a decoder of headrace's own")
        rows = self._tensor(batch.rows)
        wanted = pad(rows, (0, EXACT_ROWS - len(rows))) if self.exact else rows
        if not batch.routing:
            return ForwardOutput(self._run(batch, wanted)[: len(rows)])
        with self._recorder.watching() as chosen:
            logits = self._run(batch, wanted)[: len(rows)]
        return ForwardOutput(logits, chosen.array())

    @torch.inference_mode()
    def blame(self, batch: ForwardInput) -> np.ndarray:
        return blamed_in_slots(batch, self._blame)

    def _blame(self, slot: int, batch: ForwardInput) -> np.ndarray:
        rows = self._tensor(batch.rows)
        with self._adapters.used(slot), LayerWatch(self._layers, len(batch.tokens), self.device) as watch:
            broken = ~self._run(batch, rows).isfinite().all(-1)
        blamed, layers = watch.blamed, self._cache.geometry.layers
        blamed[rows] = torch.where((blamed[rows] < 0) & broken, layers, blamed[rows])
        return blamed.cpu().numpy()

    def _run(self, batch: ForwardInput, rows: torch.Tensor) -> torch.Tensor:
        """Logits [len(rows), V]."""
        assert self._weights.loaded, "forward before the first weights"
        plan = self._plan(batch)
        places = plan.positions if batch.moved is None else plan.positions - self._tensor(batch.moved)
        with attention(_attend_with(plan, self._ahead_in)):
            out = self._model(
                input_ids=self._tensor(batch.tokens)[None],
                position_ids=places[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        return out.logits[0]


def _attend_with(plan: Pass, ahead_in: Collection[str]) -> Callable[..., torch.Tensor]:
    """`ahead_in`: the kinds of layers in which tokens of an image see ahead."""

    def attend(
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (states[0].transpose(0, 1) for states in (q, k, v))
        ahead = kind_of(sliding_window) in ahead_in
        return plan.attend(
            module.layer_idx,
            q,
            k,
            v,
            scale=scale,
            window=sliding_window,
            ahead=ahead,
            softmax=Softmax(softcap, s_aux),
        )[None]

    return attend
