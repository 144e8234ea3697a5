"""The settings that differ at a resume, and what goes on of the rollouts that were under way. `resume_rules.py` decides which."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from headrace.core.types import RolloutKey
from headrace.loop.partial import shortened
from headrace.loop.snapshots import ControllerState


class ChangedSettings(NamedTuple):
    """The names of the settings that have changed, by what becomes of what they made."""

    refused: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    """Because of which the steps since the checkpoint are set aside."""
    groups: tuple[str, ...] = ()
    """Because of which its finished groups are dropped."""
    anew: tuple[str, ...] = ()
    """Because of which rollouts under way begin anew."""
    prompts: tuple[str, ...] = ()
    """Because of which the groups under way are dropped."""


UNCHANGED = ChangedSettings()


def carried_over(
    state: ControllerState, changed: ChangedSettings, max_tokens: int
) -> tuple[ControllerState, list[str]]:
    """Returns the state with what of its rollouts goes on, and sentences about the rest. `max_tokens`: the most tokens of a completion now."""
    if why := changed.anew or changed.prompts:
        tokens = sum(len(one.tokens) for one in state.begun.values())
        said = f"rollouts under way begin anew, because of changes in {' and '.join(why)}; {tokens} tokens of theirs are lost"
        is_said = bool(changed.prompts)  # where the groups are dropped
        return replace(state, begun={}, notes={}), [said] if (state.begun or state.notes) and not is_said else []
    longer = {key.ticket for key in _keys(state) if len(state.begun[str(key)].tokens) > max_tokens}
    if not longer:
        return state, []
    begun, cut = {}, set()
    for key in sorted(_keys(state), key=lambda one: one.turn):
        done = state.begun[str(key)]
        if (key.ticket, key.index) in cut:
            continue  # it came after a turn that is another now
        if len(done.tokens) > max_tokens:
            cut.add((key.ticket, key.index))
            done = shortened(done, max_tokens)
        begun[str(key)] = done
    # A state that an environment exported has seen the whole turn: its turns are given to it again.
    notes = {
        name: kept for name, kept in state.notes.items() if (of := RolloutKey.read(name)) and of.ticket not in longer
    }
    return replace(state, begun=begun, notes=notes), [
        f"{len(cut)} rollouts under way are longer than rollout.max_tokens = {max_tokens}: they are cut off there"
    ]


def _keys(state: ControllerState) -> list[RolloutKey]:
    return [key for name in state.begun if (key := RolloutKey.read(name))]
