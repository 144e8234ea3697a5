"""vLLM as a contender of engine.py: `engine_vllm.py MODEL_DIR compiled|eager DTYPE`, run by the Python of .venv-bench.

The environment (threads, KV space, preloaded libraries) is set by engine.py. Settings are those that were fastest: see
docs/benchmarks.md. Requests carry no seeds, which vLLM's CPU sampler cannot take.
"""

from __future__ import annotations

from engine_loads import Ask, Load, run_closed_loop
from engine_serve import Done, Run, done, serve
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind


def start(arguments: list[str]) -> Run:
    model_dir, mode, dtype = arguments
    engine = LLM(
        model_dir,
        dtype=dtype,
        enforce_eager=mode == "eager",
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=16384,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    ).llm_engine
    count = 0

    def run(load: Load) -> Done:
        nonlocal count
        outputs: list[RequestOutput] = []
        first, count = count, count + len(load.asks)

        def add(index: int, ask: Ask) -> None:
            engine.add_request(str(first + index), {"prompt_token_ids": ask.prompt}, sampling(ask.tokens))

        def step() -> int:
            ended = [output for output in engine.step() if output.finished]
            outputs.extend(ended)
            return len(ended)

        seconds = run_closed_loop(load, add, step)
        return done(load, seconds, [logprobs(output) for output in outputs])

    return run


def sampling(tokens: int) -> SamplingParams:
    """Adds requests as `LLM.generate` does: one output per request, at its end, without text."""
    return SamplingParams(
        temperature=1.0,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def logprobs(output: RequestOutput) -> list[float]:
    sampled = output.outputs[0]
    return [there[token].logprob for there, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]


if __name__ == "__main__":
    serve(start)
