"""The bus between a run and its rollout hosts: letters in two queues, notices on a board, and a list of who is there.

    run                     bus                       rollout host
    post(tickets)  ──────▶  tickets  ──────▶          claim(tickets), keep while it works on them
    claim(answers) ◀──────  answers  ◀──────          settle(tickets, then=answer)
    settle(answers)
    pin(notice)    ──────▶  board    ──────▶          newer(notice)
    signed         ◀──────  list     ◀──────          sign

A letter is delivered **at least once**: to one claimant at a time, and to another one when that has been silent for `lease` seconds.
Whoever needs it exactly once removes repetitions by the letter's key. Letters may come in any order.

Read `bus_port.py` (the protocol), `directory_bus.py` (the rules of a queue, as a value, and a directory that machines share),
`redis_streams.py` (a Redis server) and `open_bus.py` (a bus by its address).
"""
