"""Workers that connect to the controller over TCP: both ends.

    controller                               worker
    Listener.open     listens                dial       connects to HOST:PORT
                      ◀── Hello ────────────            version of headrace, token, what it is and for which seat
                      ─── Welcome ─────────▶            empty, or why it is turned away
    Channel           ◀═══ frames, beats ══▶ WorkerEnd

A worker that nobody has started for a seat offers itself. It is first shown the `Terms` of the run, and then waits until a seat is free:

                      ─── Welcome(terms) ──▶            the run's model
                      ◀── Agreed ───────────            the directory in which the worker has it, or why it cannot take part
                      ─── Welcome(waiting) ▶            every few seconds, as long as all seats are taken
                      ─── Welcome ─────────▶

A connection is not trusted until its first frame was read. That frame must be small and arrive soon, and its token is compared in
constant time. Connections that fail are refused and counted by reason.

A worker that is silent for `SILENCE` seconds counts as lost, whatever the state of its TCP connection: a machine without power closes no
connection. Both ends send beats. A worker that has not answered its first call yet (it loads a model) has `wire.WHILE_STARTING` times as
long.

A connection may break and come back: bytes travel in segments, which are frames (`frames.py`) that begin with the number of bytes that their sender
has received (u64). Each end keeps what it has sent until the other has received it. After a cut, wherever it was, the worker connects anew (only it knows the
other's address), both name what they have received, and each sends the rest again:

    Listener                  ◀── Hello ───   session, bytes received
    Returning    Welcome, bytes received ──▶  SessionEnd
                  ═══ the rest, both ways ═══

The frames above (`wire.py`) see one stream; their own numbers would show a loss. The controller waits for a worker for
`orchestration.reconnect` seconds.

Read `greeting.py` (the messages and their limits), `same_model.py` and `same_model.py` (what must be the same on all machines), `listener.py`
(the controller's socket), `dial.py` and `dial.py` (the worker's end), `dial.py` and `worker_log.py` (what a worker prints, and its
end), `same_model.py` (whether a worker elsewhere has the run's model), `dial.py` (a process that offers itself), `joined.py` (workers
elsewhere, as the controller sees them), `returning.py`, `returning.py` (the controller's end of a session), `returning.py` (the worker's) and
`joined.py` (the launcher of workers that were started by hand).
"""
