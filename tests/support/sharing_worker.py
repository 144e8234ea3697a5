"""A worker of vLLM, as far as it receives weights, in a process of its own, which a test ends while it fetches."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec

from headrace.core.weights import WeightUpdate
from headrace.weight_sync import tcp_engine
from headrace.weight_sync.machine_memory import MachineMemory
from headrace.weight_sync.unprepared import UnpreparedReceiver


def main() -> None:
    directory, halts = sys.argv[1:]
    receiver, receive = UnpreparedReceiver(MachineMemory(Path(directory))), tcp_engine.receive_into

    def halted(connection: object, into: memoryview) -> None:
        receive(connection, into[: len(into) // 2])  # type: ignore[arg-type]
        os.write(1, b"fetches\n")
        threading.Event().wait()

    for line in sys.stdin:
        update = msgspec.json.decode(line, type=WeightUpdate)
        if halts == str(update.version):
            tcp_engine.receive_into = halted  # type: ignore[assignment]
        before = receiver.received
        tensors = receiver.receive(update)
        total = sum(tensor.double().sum().item() for tensor in tensors.values())
        os.write(1, f"{receiver.received - before} {total}\n".encode())


if __name__ == "__main__":
    main()
