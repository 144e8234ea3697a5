"""The bytes that travel to the engines for a version of the weights, in words."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.facts.facts import WeightWay
from headrace.facts.numbers.state import RunState
from headrace.facts.numbers.step_totals import TravelSums
from headrace.facts.texts import number, percent, size

_EARLIER = {
    "shared_memory": WeightWay("shared_memory", "", "shared memory", "nothing"),
    "cuda_ipc": WeightWay("cuda_ipc", "", "CUDA IPC", "nothing"),
    "files": WeightWay("files", "", "files", "files"),
    "tcp": WeightWay("tcp", "", "TCP"),
    "http": WeightWay("http", "", "HTTP"),
    "broadcast": WeightWay("broadcast", "", "broadcast"),
}
"""The transports that there were when runs did not record their words (until 2026-11-28)."""


def travelled(state: RunState) -> tuple[str, str] | None:
    """Returns the bytes that travelled a version, and how: `4.3 MB a version`, `TCP, delta: 1.6 % of 269 MB`. None if it is not known.

    Not every engine reports what it received: servers of vLLM and SGLang and rollout hosts do not. What the trainer offered is told
    instead, and in files what it wrote."""
    way, sums = _way(state), _sums(state)
    if way is None or sums is None:
        return None
    name, delta = way.words, way.encoding == "delta"
    if way.travels == "nothing":
        return "no bytes travel", name
    form = "adapters" if "adapter" in state.swapped.travels else "delta" if delta else "full"
    known = way.travels != "files" and sums.reported and not (state.members and sums.uncounted)
    if known:
        sent, of, versions, each = sums.received, sums.wanted, sums.reported, sums.engines / sums.reported
    else:
        sent, of, versions, each = sums.offered, sums.nbytes, sums.versions, 1.0
    fleet = f" to {number(each)} engines" if each > 1 else ""
    said = []
    if delta:
        whole = f"{sums.whole} of {sums.versions} whole"
        said = [f"{_share(sent / of)} of {size(sums.nbytes / sums.versions)}{' each' if fleet else ''} ({whole})"]
    said += [] if known or way.travels == "files" else ["as offered by the trainer"]
    done = " written" if way.travels == "files" else ""
    return f"{size(sent / versions)} a version{fleet}{done}", f"{name}, {form}{': ' * bool(said)}{', '.join(said)}"


def _way(state: RunState) -> WeightWay | None:
    if state.started is None:
        return None
    if way := state.started.weights:
        return way if way.words else replace(_EARLIER[way.transport], encoding=way.encoding)
    # Runs from before 2026-11-28 have it in words: `TCP: deltas, full every 50 (the reason)`.
    name, _, form = state.started.where.get("weights", "").partition(": ")
    found = next((one for one in _EARLIER.values() if one.words == name), None)
    return replace(found, encoding="delta" if form.startswith("deltas") else "full") if found else None


def _sums(state: RunState) -> TravelSums | None:
    """Returns those of the adapters where adapters are published: their base travels once."""
    travels = state.swapped.travels
    sums = travels.get("adapter") or travels.get("full")
    return sums if sums and sums.nbytes else None


def _share(share: float) -> str:
    return percent(share) if share >= 0.1 else f"{100 * share:.2g} %"
