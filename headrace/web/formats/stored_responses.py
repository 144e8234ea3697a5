"""The messages up to earlier responses, for requests that name one of them (`previous_response_id`)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.chat.messages import Message, text_of
from headrace.web.errors import Refused

MOST_CHARACTERS = 64 << 20
"""Characters that one store keeps. The oldest responses go first."""


class StoredResponses:
    def __init__(self, most: int = MOST_CHARACTERS) -> None:
        self._most, self._held = most, 0
        self._messages: dict[str, tuple[Sequence[Message], int]] = {}
        """Those of each response, and their characters."""

    def keep(self, id: str, messages: Sequence[Message]) -> None:
        size = sum(map(_characters, messages))
        self._messages[id] = messages, size
        self._held += size
        while self._held > self._most:
            self._held -= self._messages.pop(next(iter(self._messages)))[1]

    def before(self, id: str | None) -> Sequence[Message]:
        """Returns the messages up to a response; none for None. Raises Refused for one that is not stored."""
        if id is None:
            return ()
        if id not in self._messages:
            said = f"previous_response_id = {id} names no stored response; send all messages as input"
            raise Refused(400, said, "previous_response_not_found")
        return self._messages[id][0]


def _characters(message: Message) -> int:
    calls = sum(len(one.function.name) + len(one.function.arguments) for one in message.tool_calls or ())
    return 64 + len(text_of(message.content)) + calls
