"""A checkpoint that is written while the model is trained holds the moment at which it was captured, bit for bit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.algo.config import AlgoConfig
from headrace.core.errors import CheckpointError
from headrace.core.reports import Captured
from headrace.models.lora import LoraConfig
from headrace.native.resources import GIB
from headrace.processes.wire import Frame, pack_payload
from headrace.run.worker.worker import Saver
from headrace.trainer.config import TrainConfig
from headrace.trainer.step.host_memory import RESERVE, HostCopy
from headrace.trainer.step.learner import Assignment
from headrace.trainer.step.trainer import TorchTrainer
from support.trainer_calls import batch, model_dir, trainer  # noqa: F401


def adapted(directory: Path) -> TorchTrainer:
    train, algo = TrainConfig(steps=10, learning_rate=1e-2, dtype="float32"), AlgoConfig()
    one = Assignment(train, algo, LoraConfig(rank=4))
    return TorchTrainer(directory, train, algo, seed=0, adapters={"": one})


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("make", [trainer, adapted], ids=["weights", "adapter"])
def test_a_capture_is_of_its_moment_whatever_is_trained_before_it_is_written(
    make: Callable[..., Any],
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    one = make(model_dir("llama"))
    one.step(batch(1))
    one.save(tmp_path / "now")
    report, write = one.capture()
    for step in range(1, 4):
        one.step(batch(step, step))
        torch.rand(3)
    write(tmp_path / "later")
    assert contents(tmp_path / "later") == contents(tmp_path / "now")
    assert not report.short and 0 < report.nbytes < sum(map(len, contents(tmp_path / "now").values()))
    again = make(model_dir("llama"))
    again.restore(tmp_path / "later")
    assert again.version == 1


def test_a_second_capture_takes_no_memory_more(
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    one = trainer(model_dir("llama"))
    one.step(batch(1))
    one.capture()[1](tmp_path / "first")
    one._copies[""]._free = lambda: 0
    one.step(batch(2, 1))
    report, write = one.capture()
    one.save(tmp_path / "now")
    one.step(batch(3, 2))
    write(tmp_path / "second")
    assert not report.short and contents(tmp_path / "second") == contents(tmp_path / "now")


def test_without_room_for_a_copy_the_checkpoint_is_of_the_live_weights_and_says_so(
    model_dir: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    one = trainer(model_dir("llama"))
    one.step(batch(1))
    free = 0
    one._copies[""]._free = lambda: free
    report, write = one.capture()
    assert report.short.endswith("of memory more, and 0.00 GiB are free") and "a copy of it takes" in report.short
    write(tmp_path / "at-once")
    one.save(tmp_path / "now")
    assert contents(tmp_path / "at-once") == contents(tmp_path / "now")
    free = GIB  # the remedy
    assert not one.capture()[0].short


def test_room_is_what_is_needed_more_and_a_reserve() -> None:
    tensors = [("a", torch.ones(1000)), ("b", torch.ones(500))]
    copies = HostCopy(lambda: RESERVE + 6000)
    assert copies.short(tensors) == ""
    assert HostCopy(lambda: RESERVE + 5999).short(tensors)
    first = copies.keep("a", tensors[0][1])
    copies._free = lambda: RESERVE + 2000
    assert copies.short(tensors) == "", "one of them is there"
    assert copies.keep("a", torch.zeros(1000)).data_ptr() == first.data_ptr() and not first.any()
    assert copies.keep("a", torch.zeros(7)).shape == (7,), "of another shape"


# -- in the worker ----------------------------------------------------------------------------------------------------------------


class Core:
    """Writes when it is let."""

    def __init__(self, short: str = "") -> None:
        self.version, self.short, self.let = 0, short, threading.Event()

    def capture(self, adapter: str = "") -> tuple[Captured, Callable[[Path], None]]:
        version = self.version

        def write(directory: Path) -> None:
            assert self.let.wait(600)
            (directory / "version").write_text(str(version))

        return Captured(8, self.short), write

    def save(self, directory: Path, adapter: str = "") -> None:
        (directory / "version").write_text(f"{self.version} at once")


class End:
    """The worker's end of its connection."""

    def __init__(self) -> None:
        self.replies: queue.Queue[Any] = queue.Queue()

    def reply(self, to: Frame, payload: Any) -> None:
        self.replies.put(payload)

    def fail(self, to: Frame, error: str, message: str) -> None:
        self.replies.put((error, message))


def asked_to_save(directory: Path) -> Frame:
    directory.mkdir()
    return Frame(1, "save", pack_payload((str(directory), "")))


def test_the_next_call_is_served_while_a_checkpoint_is_written_and_a_second_one_is_refused_by_name(
    tmp_path: Path,
) -> None:
    core, end = Core(), End()
    saver = Saver(core, None)  # type: ignore[arg-type]
    assert saver.capture("") == Captured(8)
    saver.save(end, asked_to_save(tmp_path / ".writing-step-000004"))  # type: ignore[arg-type]
    core.version = 5
    assert end.replies.empty(), "it is not there yet"
    with pytest.raises(CheckpointError, match=r"two checkpoints at once: \.writing-step-000004 is still being written"):
        saver.capture("")
    core.let.set()
    assert end.replies.get(timeout=600) is None
    assert (tmp_path / ".writing-step-000004" / "version").read_text() == "0"
    assert saver.capture("") == Captured(8), "the remedy: it was waited for"


def test_one_without_a_copy_and_one_that_was_not_captured_are_written_before_the_next_call(tmp_path: Path) -> None:
    core, end = Core(short="no room"), End()
    saver = Saver(core, None)  # type: ignore[arg-type]
    core.let.set()
    saver.capture("")
    saver.save(end, asked_to_save(tmp_path / "a"))  # type: ignore[arg-type]
    saver.save(end, asked_to_save(tmp_path / "b"))  # type: ignore[arg-type]
    assert end.replies.qsize() == 2
    assert [(tmp_path / name / "version").read_text() for name in "ab"] == ["0", "0 at once"]


def test_a_shadow_is_captured_with_its_student_and_one_without_room_makes_both_stand_still(tmp_path: Path) -> None:
    def shadow(short: str) -> Any:
        return SimpleNamespace(
            capture=lambda: (Captured(4, short), lambda directory: (directory / "shadow").write_text(""))
        )

    core, end = Core(), End()
    core.let.set()
    saver = Saver(core, shadow(""))  # type: ignore[arg-type]
    assert saver.capture("") == Captured(12)
    saver.save(end, asked_to_save(tmp_path / "a"))  # type: ignore[arg-type]
    assert end.replies.get(timeout=600) is None and (tmp_path / "a" / "shadow").exists()
    assert Saver(core, shadow("no room")).capture("").short == "no room"  # type: ignore[arg-type]
