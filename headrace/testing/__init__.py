"""Fakes, simulated workers and seeded faults. It is in the checkout and in the source package, not in the wheel.

The ports without a model: `fake_engine.py`, `fake_trainer.py`, `fake_task.py`, `fake_scorer.py`, `fake_service.py`, `fake_environments.py`,
`fake_measurer.py`, `simulated_ranks.py` (a placement of ranks in one process), `makers.py` (values), `small_models.py` (one of every architecture). Without processes: `fake_worker.py`, `fake_arrivals.py`,
`fake_cluster.py`, `fake_user_host.py`, `memory_bus.py` and `faulty_bus.py` (any bus, with messages lost, repeated, reordered and late).
`servers/` speaks as other servers do; `faultsim/` runs the real controller with seeded faults, in virtual time.
"""
