"""The table of transports. Each is one file with a frozen value (protocol `Transport`) that both ends receive in their start messages.

controller   transport = SharedMemory.open()     owns what the ends share, and closes it
trainer      transport.sender(manifests)         writes the bytes, and records in `WeightUpdate.where` where they are
engine       transport.receiver(manifests)       finds the bytes by `where`, and verifies them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from headrace.core.protocols import Transport
from headrace.weight_sync.files import Files
from headrace.weight_sync.over_http.http_ranges import Http
from headrace.weight_sync.over_tcp.tcp import Tcp
from headrace.weight_sync.push.broadcast import Broadcast
from headrace.weight_sync.push.cuda_ipc import CudaIpc
from headrace.weight_sync.shared_memory import SharedMemory

TRANSPORTS: dict[str, type[Transport]] = {
    "shared_memory": SharedMemory,
    "files": Files,
    "tcp": Tcp,
    "http": Http,
    "broadcast": Broadcast,
    "cuda_ipc": CudaIpc,
}

if TYPE_CHECKING:
    AnyTransport = Transport
else:
    AnyTransport = Union[tuple(TRANSPORTS.values())]  # noqa: UP007
    """The type by which a start message is decoded: each kind has a tag."""
