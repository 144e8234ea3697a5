"""A model of transformers' shape whose own cache can be read: every entry holds the token and the version that made it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from transformers import LlamaConfig
from transformers.cache_utils import Cache, DynamicLayer

from headrace.engine.native.forward_pass import ForwardInput, ForwardOutput
from headrace.engine.native.runners.own_cache import OwnCacheRunner
from headrace.engine.native.runners.skeleton import Skeleton
from headrace.engine.native.runners.states import States
from support.fake_engine_model import POISON, VOCABULARY, logits_of

NAN = 0.5
"""Added to the version of an entry that is not a number."""
LONGEST = 160
"""Entries that a stacked state has room for."""

Kind = Literal["attention", "stacked", "list"]
"""A key and a value by position; a state of fixed size, changed in place, that nobody can cut; such a state in a form of the model's own, which cannot
be joined with others."""


class FakeModel(torch.nn.Module):
    """Logits are a hash of the tokens in its cache and of the live version. Behind them is the oldest version among the entries."""

    _supports_sdpa = True

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        for name in ("version", "poisoned", "part"):
            setattr(self, name, torch.nn.Parameter(torch.zeros((), device="meta"), requires_grad=False))
        self._kind, self._is_stateful = kind, kind != "attention"
        self.calls: Counter[str] = Counter()
        """By `begin` or `step`, and how many rows: `step 3`."""

    def _supports_default_dynamic_cache(self) -> bool:
        return self._kind != "list"

    def _can_set_experts_implementation(self) -> bool:
        return False

    def get_input_embeddings(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, next_sequence_length: int, **rest: Any) -> Any:
        rest["position_ids"] = rest["position_ids"][:, -next_sequence_length:]
        return {**rest, "input_ids": input_ids[:, -next_sequence_length:]}

    def _update_model_kwargs_for_generation(self, out: Any, kept: dict[str, Any], num_new_tokens: int) -> Any:
        return {**kept, **out.kept}

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: Any = 0,
        cache: Any = None,
        state: Any = None,
        **_: Any,
    ) -> Any:
        count, fresh = input_ids.shape
        tokens = input_ids.double()
        entries = torch.stack(
            [tokens, self.version.item() + NAN * self.poisoned.item() * (tokens == POISON)], -1
        )  # [n, fresh, 2]
        mine = torch.ones(count, fresh) if attention_mask is None else attention_mask[:, -fresh:]
        if cache is None:
            assert not state or fresh == 1, "a state is gone on from token by token"
            state = [*(state or []), *entries[0]]
            before, kept = [torch.stack(state)], {"state": state}
        else:
            before, kept = self._cached(cache, entries, mine.bool(), attention_mask), {"cache": cache}
        self.calls[f"{'step' if len(before[0]) > fresh else 'begin'} {count}"] += 1
        for row, place in enumerate(position_ids.tolist()):
            assert place[-1] == len(before[row]) - 1, "a token's position counts no padding"
        rows = [fresh - 1] if isinstance(logits_to_keep, int) else logits_to_keep.tolist()
        logits = [[self._logits(own[: len(own) - fresh + row + 1]) for row in rows] for own in before]
        found = torch.from_numpy(np.array(logits, dtype=np.float32).reshape(count, -1, VOCABULARY + 1))
        return SimpleNamespace(logits=found, kept=kept)

    def _cached(self, cache: Cache, entries: Any, mine: Any, mask: Any) -> list[torch.Tensor]:
        """[T, 2] of each row, without padding, the fresh ones among them."""
        layer = cache.layers[0]
        if isinstance(layer, DynamicLayer):
            keys, values = cache.update(entries[:, None, :, :1], entries[:, None, :, 1:], 0)
            whole = torch.cat([keys, values], -1)[:, 0]
            seen = torch.ones(whole.shape[:2]) if mask is None else mask
            assert seen.shape == whole.shape[:2]
            return [row[own.bool()] for row, own in zip(whole, seen, strict=True)]
        states: Any = layer.recurrent_states[0]
        assert states is None or entries.shape[1] == 1, "a state is gone on from token by token"
        if states is None:
            states = torch.full((len(entries), LONGEST, 2), torch.nan, dtype=torch.float64)
        found = [
            torch.cat([row[~row[:, 0].isnan()], new[own]]) for row, new, own in zip(states, entries, mine, strict=True)
        ]
        after = torch.full_like(states, torch.nan)
        for row, filled in zip(after, found, strict=True):
            row[: len(filled)] = filled
        cast(Any, layer).update_recurrent_state(after)
        return found

    def _logits(self, entries: torch.Tensor) -> np.ndarray:
        tokens, versions = entries.numpy().T
        logits = np.full(VOCABULARY, np.nan, dtype=np.float32)
        if (versions == np.floor(versions)).all():
            logits = logits_of(tokens.astype(int).tolist(), int(self.version), -1, int(self.part))
        return np.append(logits, np.floor(versions).min())


class FakeOwnCache(OwnCacheRunner):
    """The runner under test over `FakeModel`, told about as `CoreDriver` asks."""

    def __init__(self, kind: Kind, memory: int | None = None, short: int = 8) -> None:
        """`memory`: bytes of states that may be kept; None: as many as the blocks count for. `short`: the length up to which all sequences share
        calls."""
        self.model = FakeModel(kind)
        layers = ["linear_attention" if kind == "stacked" else "full_attention"]
        config = LlamaConfig(num_hidden_layers=1, hidden_size=32, layer_types=layers)
        found = SimpleNamespace(model=self.model, config=config, model_type="fake", paged=None)
        super().__init__(cast(Skeleton, found), 128, dtype=torch.float32, device=torch.device("cpu"))
        self._call.short_prompt, self._call.short_text = short, 4 * short
        self.block_nbytes = 1024
        self._memory = memory
        self.forwarded: list[ForwardInput] = []
        self.oldest = np.zeros(0)
        """Of each row of the last pass: the oldest version among its entries."""

    def allocate(self, blocks: int, states: int = 0) -> None:
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
        out = super().forward(batch)
        self.oldest = out.logits[:, -1].numpy().astype(int)
        return ForwardOutput(out.logits[:, :-1], again=out.again)
