"""The table of transports. Each is a frozen value that both ends receive in their start messages, and states its own facts (`kind.py`).

controller   transport = SharedMemory.open()     owns what the ends share, and closes it
trainer      transport.sender(manifests)         writes the bytes, and records in `WeightUpdate.where` where they are
engine       transport.receiver(manifests)       finds the bytes by `where`, and verifies them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from headrace.weight_sync.broadcast import Broadcast
from headrace.weight_sync.cuda_ipc import CudaIpc
from headrace.weight_sync.files import Files
from headrace.weight_sync.http_ranges import Http
from headrace.weight_sync.kind import TransportKind
from headrace.weight_sync.shared_memory import SharedMemory
from headrace.weight_sync.tcp import Tcp

_ALL: tuple[type[TransportKind], ...] = (SharedMemory, Tcp, Http, Files, Broadcast, CudaIpc)
"""All transports, a line each. Sentences recommend the first that fits."""

TRANSPORTS = {str(kind.__struct_config__.tag): kind for kind in _ALL}
"""The transports by the value of `weight_sync.kind`, which is the tag of their messages too."""

if TYPE_CHECKING:
    AnyTransport = TransportKind
else:
    AnyTransport = Union[tuple(TRANSPORTS.values())]  # noqa: UP007
    """The type by which a start message is decoded: each kind has a tag."""
