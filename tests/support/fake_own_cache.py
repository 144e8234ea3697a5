"""A model of transformers' shape whose own cache can be read: every entry holds the token and the version that made it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.own_cache import OwnCacheRunner
from headrace.engine.native.runners.skeleton import Skeleton
from headrace.engine.native.runners.states import States
from support.fake_engine_model import POISON, VOCABULARY, logits_of

NAN = 0.5
"""Added to the version of an entry that is not a number."""


class FakeModel(torch.nn.Module):
    """Logits are a hash of the tokens in its cache and of the live version."""

    _supports_sdpa = True

    def __init__(self, recurrent: bool) -> None:
        """`recurrent`: it keeps a list that it changes in place and that nobody can cut; else a key and a value by position."""
        super().__init__()
        for name in ("version", "poisoned", "part"):
            setattr(self, name, torch.nn.Parameter(torch.zeros((), device="meta"), requires_grad=False))
        self._is_stateful = recurrent
        self.seen: list[np.ndarray] = []
        """[T] versions of the entries behind each row of logits."""

    def _supports_default_dynamic_cache(self) -> bool:
        return not self._is_stateful

    def _can_set_experts_implementation(self) -> bool:
        return False

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, next_sequence_length: int, **rest: Any) -> Any:
        return {**rest, "input_ids": input_ids[:, -next_sequence_length:]}

    def _update_model_kwargs_for_generation(self, out: Any, kept: dict[str, Any], num_new_tokens: int) -> Any:
        return {**kept, **out.kept}

    def forward(self, input_ids: Any, logits_to_keep: Any = 0, cache: Any = None, state: Any = None, **_: Any) -> Any:
        tokens = input_ids[0].double()
        versions = self.version.item() + NAN * self.poisoned.item() * (tokens == POISON)
        if cache is None:
            state = [] if state is None else state
            assert not state or len(tokens) == 1, "a state is gone on from token by token"
            state += torch.stack([tokens, versions], 1)
            entries, kept = torch.stack(state).numpy(), {"state": state}
        else:
            assert isinstance(cache, DynamicCache)
            keys, values = cache.update(tokens[None, None, :, None], versions[None, None, :, None], 0)
            entries, kept = torch.cat([keys, values], -1)[0, 0].numpy(), {"cache": cache}
        rows = [] if isinstance(logits_to_keep, int) else logits_to_keep.tolist()
        logits = [self._logits(entries[: len(entries) - len(tokens) + row + 1]) for row in rows]
        found = torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, VOCABULARY))
        return SimpleNamespace(logits=found[None], kept=kept)

    def _logits(self, entries: np.ndarray) -> np.ndarray:
        tokens, versions = entries.T
        self.seen.append(np.floor(versions))
        if (versions != np.floor(versions)).any():
            return np.full(VOCABULARY, np.nan, dtype=np.float32)
        return logits_of(tokens.astype(int).tolist(), int(self.version), -1, int(self.part))


class FakeOwnCache(OwnCacheRunner):
    """The runner under test over `FakeModel`, told about as `CoreDriver` asks."""

    def __init__(self, recurrent: bool, memory: int | None = None) -> None:
        """`memory`: bytes of states that may be kept; None: as many as the blocks count for."""
        self.model = FakeModel(recurrent)
        config = LlamaConfig(num_hidden_layers=1, hidden_size=32)
        found = SimpleNamespace(model=self.model, config=config, model_type="fake", paged=None)
        super().__init__(cast(Skeleton, found), 128, dtype=torch.float32, device=torch.device("cpu"))
        self.block_nbytes = 1024
        self._memory = memory
        self.forwarded: list[ForwardInput] = []
        self.oldest = np.zeros(0)
        """Of each row of the last pass: the oldest version among its entries."""

    def allocate(self, blocks: int) -> None:
        super().allocate(blocks)
        if self._memory is not None:
            self._states = States(self._memory)

    @property
    def version(self) -> int:
        return int(self.model.version)

    @property
    def part(self) -> int:
        return int(self.model.part)

    def forward(self, batch: ForwardInput) -> ForwardOutput:
        self.forwarded.append(batch)
        self.model.seen = []
        out = super().forward(batch)
        self.oldest = np.array([int(seen.min()) for seen in self.model.seen])
        return out
