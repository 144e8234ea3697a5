"""The lag bound (C1): how many tickets may be out, in which order groups may be trained, and why that bounds the lag."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StalenessConfig:
    """`max_lag` is a promise, not a target: no token older than that is ever trained, and nothing is discarded to keep it.

    **The rule.** A ticket is drawn before a prompt is sampled. It is given back when the weights that its group trained
    are live in the engine, or when the group ended otherwise (dropped, failed). At most `slots` tickets are out. The
    trainer takes P = `groups_per_step` groups a step, and only groups whose ticket lies less than W = `window` places
    behind the oldest ticket not taken yet.

    **The proof.** Let group g be admitted with ticket n while version v is live, and be trained at step s (s optimizer
    steps were done before). Its tokens are sampled at v or later, so its lag is at most s - v. The steps v, ..., s - 1
    each trained P groups whose weights were not live when g was admitted. Such a group either held a ticket at that
    moment: at most slots - 1 did, g holds the last. Or it was admitted later, with a ticket m > n, and was taken before
    g: then m < a + W, where a <= n is the oldest ticket not taken (g itself is not), so m is one of n+1, ..., n+W-1: at
    most W - 1 groups. Hence (s - v) P <= slots - 1 + W - 1, that is lag <= (slots + W - 2) // P.

    With `slots = (max_lag + 1) P - (W - 1)` the bound is exactly `max_lag`. Slots alone would not do: where groups are
    taken in the order of completion, a slow group can be passed without end.

    **Progress.** slots >= P, so that a batch can fill: its k < P groups hold k tickets, the others are ready, in flight
    or free; the oldest one that is ready may always be taken, and tickets of trained groups come back with the swap.
    """

    groups_per_step: int = Field(default=8, gt=0)
    """P: groups (prompts) that one optimizer step trains."""
    max_lag: int = Field(default=1, ge=0)
    """0 is synchronous training, 1 a double buffer, K a buffer of K steps."""
    window: int = Field(default=1, gt=0)
    """W: 1 trains groups strictly in the order of admission; more lets fast groups pass slow ones, at W - 1 slots less."""

    @model_validator(mode="after")
    def _window_leaves_a_batch(self) -> StalenessConfig:
        if self.slots < self.groups_per_step:
            raise ValueError(
                f"staleness.window = {self.window} leaves {self.slots} slots for batches of {self.groups_per_step} groups; "
                f"with max_lag = {self.max_lag} use a window of at most {self.max_lag * self.groups_per_step + 1}"
            )
        return self

    @property
    def slots(self) -> int:
        """Tickets that may be out at once."""
        return (self.max_lag + 1) * self.groups_per_step - (self.window - 1)

    @property
    def lag_bound(self) -> int:
        return (self.slots + self.window - 2) // self.groups_per_step
