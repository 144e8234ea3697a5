"""Settings become a run. Beside `commands/`, this is the only room that knows `RunConfig`: every other part is given its own section.

The parts: read `config.py`, `open_parts.py` (opens all parts of a run, and joins them), `build.py` (what plays and scores, and the settings of the
loops), `pools.py` and `starting.py` (trainer and engine), `needs.py` (what a run needs of its engines), `teaching.py`, `python_inputs.py`, `seats.py`
(workers elsewhere), `choosing.py` (settings that are left open), `evaluation_sets.py` (the further ones), `seeing.py` (models that see),
`wording.py`. Pairs of settings that cannot work together: `learning_problems.py` (of what is learned, of a sampler with coarser weights, and of
teachers) and `place_problems.py` (of hosts, and of engine and trainer on one device).

The directory: `run_directory.py` (with all its files, opened together), `resume_rules.py` (which settings may change, and what becomes then
of what the run has; digests of the files that settings name).

From the user's call to the result: `run.py` (with what outlives the death of a trainer), `lane.py` (directory, files and session of one
pipeline), `session.py` (until the last step or a signal), `warm_start.py` (supervised training before that), `result.py`, `rehearse.py` (checks before anything
costs time: `row_trial.py` of what the run learns from, `machine_trial.py`, `rehearsed.py`), `one_shot.py`
(evaluation and export), `rollout_hosting.py` (a process that serves another's run), `hosting.py` (the thread of the event loop),
`pieces.py` (tokens as text).

The folders: `rehearsal/` (the checks), `auto/` (choosing by measurement), `clients/` (the ports over workers), `fleets/` (several engines),
`hosts/` (rollout hosts on a bus), `worker/` (the program that a worker process runs).
"""
