"""Workers that offer to run the user's code, reward functions or environments, for a run elsewhere: *user hosts*.

    controller                                   user host                         process of the user's code
    HostedSite    ─── start ─────────────▶       loads the code once, to see that it can
                  ─── spawn, tell, kill ─▶       OwnSite.spawn       ── stdin ──▶   reward_worker, environment_worker
                  ◀── said, gone, pulse ──                           ◀─ stdout ─

The processes are those that a run has on its own machine, with the same frames. A host passes their bytes on and reads none of them. Deadlines stay
with the run, and the time in which nothing was heard of a host is no part of them.

Read `host_messages.py` and `user_host.py` (the worker's end). The controller's end is `run/clients/hosted_site.py`; whether the user's files
are the run's is found out in `processes/joining/same_model.py`.
"""
