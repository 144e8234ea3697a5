"""The death of the engine under the official client of the Tinker API: samples go on in the next process, and where none follows, they end
with a sentence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tinker
from tinker import types
from tinker_server import ENGINE, Running, running

PROMPT = types.ModelInput.from_ints([1, 5, 9])
LONG = types.SamplingParams(max_tokens=150, temperature=0.0, stop=[])
LONGEST = 300
"""Seconds for what takes a few."""


@pytest.fixture
def server(tiny_llama: Path, tmp_path: Path) -> Iterator[Running]:
    """Its engine may die once."""
    with running(tiny_llama, tmp_path, engine=replace(ENGINE, max_deaths=1)) as found:
        yield found


def engine_of(server: Running) -> int:
    return server.serving.engine._keeper._worker.pid  # type: ignore[attr-defined]


@pytest.mark.slow
def test_samples_outlive_the_engine_and_end_with_a_sentence_when_it_is_lost_for_good(server: Running) -> None:
    with server.client() as client:
        model = client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        datum = types.Datum(
            model_input=PROMPT, loss_fn_inputs={"target_tokens": [5, 9, 13], "weights": [1.0, 1.0, 1.0]}
        )
        model.forward_backward([datum], "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=0.05)).result(LONGEST)
        tuned = model.save_weights_and_get_sampling_client().result()
        base = client.create_sampling_client(base_model="tiny").result()
        expected = [sampler.sample(PROMPT, 1, LONG).result(LONGEST).sequences[0] for sampler in (tuned, base)]
        assert expected[0].tokens != expected[1].tokens

        def killed(*samplers: tinker.SamplingClient) -> list[object]:
            """Asks each, and kills the engine before it answers."""
            pid = engine_of(server)
            os.kill(pid, signal.SIGSTOP)
            pending = [sampler.sample(PROMPT, 1, LONG) for sampler in samplers]
            while server.service.futures.pending < len(pending):
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            return pending

        for future, before in zip(killed(tuned, base), expected, strict=True):
            after = future.result(LONGEST).sequences[0]
            assert after.tokens == before.tokens, "the adapter is there again"
        for future in killed(tuned, base):
            with pytest.raises(tinker.RequestFailedError, match="engine.*was killed by SIGKILL.*death no. 2") as failed:
                future.result(LONGEST)
            assert failed.value.category == "server"
        with pytest.raises(tinker.RequestFailedError, match="death no. 2"):
            base.sample(PROMPT, 1, LONG).result(LONGEST)
        assert model.save_state("kept").result(LONGEST).path, "what was learned can be saved"
        assert server.call("/health")[0] == 503
