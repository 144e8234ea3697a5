"""Hugging Face transformers as two contenders of engine.py: `engine_transformers.py MODEL_DIR generate|batching`.

`generate`: `model.generate` on left-padded batches; a batch is done when its longest request is. `batching`: transformers' own
continuous batching, over paged SDPA on a CPU.
"""

from __future__ import annotations

import time

import torch
from engine_loads import Ask, Load, run_closed_loop
from engine_serve import Done, Run, done, serve
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

PAGE = 32
"""Tokens per page: the default of 256 could not share prompts of 200 tokens."""


def start(arguments: list[str]) -> Run:
    model_dir, way = arguments
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
    ).eval()
    # A configuration of our own: the model's may name other settings, and the library's top_k is 50.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
    return {"generate": generate, "batching": batching}[way](model)


class Sampled(LogitsProcessor):
    """Collects log-probs of the sampled tokens. `generate` can only return whole logits, which would take gigabytes
    here; so each is looked up one step later, when the token is known."""

    def __init__(self) -> None:
        self._scores: torch.Tensor | None = None
        self.columns: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.take(input_ids[:, -1])
        self._scores = scores
        return scores

    def take(self, tokens: torch.Tensor) -> None:
        if self._scores is not None:
            chosen = self._scores.gather(1, tokens[:, None])[:, 0]
            self.columns.append(chosen - self._scores.logsumexp(-1))


def generate(model: PreTrainedModel) -> Run:
    def batch(asks: list[Ask]) -> list[list[float]]:
        width = max(len(ask.prompt) for ask in asks)
        rows = [[0] * (width - len(ask.prompt)) + ask.prompt for ask in asks]
        mask = [[0] * (width - len(ask.prompt)) + [1] * len(ask.prompt) for ask in asks]
        sampled = Sampled()
        tokens = model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(ask.tokens for ask in asks),
            logits_processor=LogitsProcessorList([sampled]),
        )
        sampled.take(tokens[:, -1])
        columns = torch.stack(sampled.columns, dim=1).tolist()
        return [row[: ask.tokens] for row, ask in zip(columns, asks, strict=True)]

    def run(load: Load) -> Done:
        started = time.perf_counter()
        batches = [load.asks[at : at + load.in_flight] for at in range(0, len(load.asks), load.in_flight)]
        logprobs = [row for asks in batches for row in batch(asks)]
        return done(load, time.perf_counter() - started, logprobs)

    return run


def batching(model: PreTrainedModel) -> Run:
    def run(load: Load) -> Done:
        pages = load.in_flight * (-(-load.context // PAGE) + 1)
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages,
            max_batch_tokens=8192,
            max_requests_per_batch=load.in_flight,
            return_logprobs=True,
        )
        logprobs: list[list[float]] = []
        with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:

            def add(index: int, ask: Ask) -> None:
                manager.add_request(ask.prompt, max_new_tokens=ask.tokens, eos_token_id=-1)

            def step() -> int:
                output = manager.get_result(timeout=600)
                if output is None or output.error:
                    raise RuntimeError(
                        output.error if output else "continuous batching returned nothing for 10 minutes"
                    )
                logprobs.append(output.logprobs)
                return 1

            seconds = run_closed_loop(load, add, step)
        return done(load, seconds, logprobs)

    return run


if __name__ == "__main__":
    serve(start)
