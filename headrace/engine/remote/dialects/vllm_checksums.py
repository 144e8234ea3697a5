"""vLLM's checksums of its weights, compared with those of the files that it was to load.

`/weight_checker` (`entrypoints/rl/online/api_router.py`, vLLM 0.32) returns the SHA-256 of every parameter as it runs, under
`dp0:pp0:pcp0:tp0:NAME` (`v1/worker/gpu_worker.py`). One can be compared if the parameter runs as it lies in the file, or as some tensors
of the file one behind the other. Shards, padded vocabularies, and weights that vLLM quantises or packs anew cannot: on a CPU, only the
embeddings and the norms are left. The first version that a server is given shows which they are: a checksum that equals the file's then
has to do so under every later version.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import BinaryIO

from headrace.core.errors import IdentityError
from headrace.core.weights import WeightUpdate
from headrace.engine.remote.connection import Connection
from headrace.engine.remote.errors import Unreachable
from headrace.models.resolve import read_header
from headrace.models.vllm_names import parts_of

FILE = "model.safetensors"
CHUNK = 1 << 24
SHOWN = 3
"""Names of weights in a message."""


class Checksums:
    """The checksums of one server."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self.comparable: frozenset[str] = frozenset()
        """Empty until the first comparison."""

    async def compare(self, connection: Connection, update: WeightUpdate, seconds: float) -> None:
        """Raises IdentityError if the server does not run the weights of the update. Does nothing if the server has no checksums."""
        try:
            answer = await connection.post("/weight_checker", {"action": "checksum"}, seconds)
        except Unreachable as error:
            if error.status == 404:
                return
            raise
        found: dict[str, str] = answer["checksums"]
        first = self._names != found.keys()
        asked = frozenset(found) if first else self.comparable
        try:
            expected = await asyncio.to_thread(checksums, Path(str(update.where["path"])) / FILE, asked)
        except (OSError, ValueError) as error:
            raise IdentityError(
                f"version {update.version} cannot be read again to compare its checksums: {error}"
            ) from None
        equal = frozenset(name for name in asked if found[name] == expected.get(name))
        if first and equal:
            self._names, self.comparable = frozenset(found), equal
        elif others := sorted(asked - equal):
            raise IdentityError(_different(connection.url, update, others, len(asked)))


def checksums(path: Path, names: Collection[str]) -> dict[str, str]:
    """Returns the SHA-256 of each of vLLM's parameters that lies in the file. `names`: vLLM's. Raises OSError, ValueError."""
    there = read_header(path)
    found = {}
    with path.open("rb") as file:
        for name in names:
            if parts := parts_of(name.rpartition(":")[2], there):
                found[name] = _digest(file, [(there[part].begin, there[part].end) for part in parts])
    return found


def _digest(file: BinaryIO, spans: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for begin, end in spans:
        file.seek(begin)
        for start in range(begin, end, CHUNK):
            digest.update(file.read(min(CHUNK, end - start)))
    return digest.hexdigest()


def _different(url: str, update: WeightUpdate, others: list[str], asked: int) -> str:
    shown = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
    return (
        f"vLLM at {url} was given version {update.version}, and {len(others)} of {asked} checksums of its weights are not those of the files "
        f"({shown}): it has not applied the whole update (its log may have the reason). If its weights can never be those of the files, "
        "watch.identity_every = 0 switches off the comparison, and the probe with it"
    )
