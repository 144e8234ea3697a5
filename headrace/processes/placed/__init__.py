"""Workers that a cluster places: Ray finds a node and watches it, and headrace's own connection carries the frames.

    controller                          node of the cluster
    Cluster.reserve(bundle)    ──▶      a placement group of one bundle: cores and GPUs that nobody else gets
    Berth.host()               ──▶      NodeHost, an actor in that bundle: says which versions and which model are there,
    Hosted.ask("start", ...)            starts the worker, sends back what it prints, and says how it ended
    Listener, Channel          ◀══▶     the worker, which connects as every worker elsewhere does (`joining/`)

The frames do not go through Ray, because one of its calls takes ten times as long. A frozen node is noticed by the beats of the
connection, because Ray notices it after a minute.

Read `placed.py` (the port), `head.py` (a cluster that has lost its head), `host.py` (the actor), `placed.py` (the launcher), `ray_cluster.py` and `examined.py` (the same questions, put to a worker that offers itself).
"""
