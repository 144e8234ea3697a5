"""Connections that may break and come back: a stream of bytes over one TCP connection after another.

    controller                                worker
    Listener                  ◀── Hello ───   session, bytes received
    Returning    Welcome, bytes received ──▶  SessionEnd
                  ═══ the rest, both ways ═══

Bytes travel in segments: their length (u32), the number of bytes that the sender has received itself (u64), and the bytes. Each end keeps what it
has sent until the other has received it, and counts a segment when it is complete. After a cut, wherever it was, the worker connects anew, both
name what they have received, and each sends the rest again. The frames above (`wire.py`) see one stream; their own numbers would show a loss.

The worker connects, because only it knows the other's address. It does so when its connection ends, and when it has heard nothing for `SILENCE`
seconds. The controller waits for it for `orchestration.reconnect` seconds.

Read `outbox.py`, `returning.py` (the controller's end) and `session_end.py` (the worker's).
"""
