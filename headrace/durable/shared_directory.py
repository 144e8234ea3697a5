"""Whether ranks on other machines see the run's directory, in which rank 0 writes checkpoints and all ranks read them."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.types import Struct

REMEDY = "mount that directory under the same path on all machines (NFS, say), or set `out` to one that all of them see"


class DirectoryProbe(Struct, frozen=True):
    """A file that the controller has written into the run's directory."""

    path: str
    content: str


def _answer(probe: DirectoryProbe) -> Path:
    """The file that rank 0 writes beside it."""
    return Path(f"{probe.path}-seen")


@contextmanager
def probing(directory: Path) -> Iterator[DirectoryProbe]:
    """Writes a probe into the directory, and removes it with its answer."""
    probe = DirectoryProbe(str(directory.absolute() / f".shared-{secrets.token_hex(8)}"), secrets.token_hex(16))
    Path(probe.path).write_text(probe.content)
    try:
        yield probe
    finally:
        for path in (Path(probe.path), _answer(probe)):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def see(probe: DirectoryProbe, rank: int) -> None:
    """Reads the probe on the machine of a rank; rank 0 answers it. Raises ConfigError if this machine has another directory there."""
    path, host = Path(probe.path), socket.gethostname()
    with suppress(OSError):
        if path.read_text() == probe.content:
            if rank:
                return
            try:
                _answer(probe).write_text(probe.content)
                return
            except OSError as error:
                raise ConfigError(
                    f"rank 0 on {host} cannot write into {path.parent} ({error.strerror}), and it writes the checkpoints of this run there; let "
                    "its user write there"
                ) from None
    raise ConfigError(
        f"rank {rank} on {host} does not see {path.parent}, in which the checkpoints of this run are written and read; {REMEDY}"
    )


def check_answer(probe: DirectoryProbe) -> None:
    """Raises ConfigError if what rank 0 wrote is not here."""
    with suppress(OSError):
        if _answer(probe).read_text() == probe.content:
            return
    raise ConfigError(f"what rank 0 writes into {_answer(probe).parent} is not seen on the run's machine; {REMEDY}")
