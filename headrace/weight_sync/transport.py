"""The transports there are. Each is one file with a frozen value (protocol `Transport`) that travels to both ends in their start
messages, and makes the sender there, and the receiver here.

    controller   transport = SharedMemory.open()     it owns what the ends share, and closes it
    trainer      transport.sender(manifests)         writes, and says in `WeightUpdate.where` where the bytes are
    engine       transport.receiver(manifests)       finds them by `where`, and verifies them
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from headrace.protocols import Transport
from headrace.weight_sync.files import Files
from headrace.weight_sync.shared_memory import SharedMemory

TRANSPORTS: dict[str, type[Transport]] = {
    "shared_memory": SharedMemory,
    "files": Files,
}

if TYPE_CHECKING:
    AnyTransport = Transport
else:
    AnyTransport = Union[tuple(TRANSPORTS.values())]  # noqa: UP007
    """A start message is decoded by it: each kind has a tag."""
