"""Facts of a run, and the numbers that follow from them. Nothing here changes what a run does, and nothing shows it (`views/`).

Read `facts.py` (what the loops report), `telemetry.py` (how every part reports), `waits.py` (what waits for what), `records.py` (`metrics.jsonl`),
`recorder.py` (where facts go), then the numbers: `run_state.py` (everything that is counted, and rates of it) and its parts, `group_numbers.py` and
`run_totals.py` (with what all of them are, and dollars); `verdicts.py` (what the numbers mean, by the limits of `thresholds.py`), `number_tables.py`
(numbers as arrays, and those of dashboards) with `index_file.py` (files of both, so that a long run is opened at once, and sums from which a resume
goes on), `rollout_view.py` (single rollouts, from the journal), `health.py` (the verdict on a run, and its six rows) and `progress.py` (the values of
`on_step`). `texts.py` formats numbers; `kept_settings.py` knows which settings a step had.
"""
