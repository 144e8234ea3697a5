"""Facts of a run, and the numbers that follow from them. Nothing here changes what a run does, and nothing shows it (`views/`).

Read `facts.py` (what the loops report), `telemetry.py` (how every part reports), `recorder.py` (where facts go), `records.py`
(`metrics.jsonl`), `waits.py` (what waits for what), then the folders: `numbers/` (counted from facts) and `diagnosis/` (what the numbers
mean), `index/` (numbers as arrays, and sums from which a resume goes on). `scalars.py` has the numbers of dashboards; `texts.py` formats numbers; `costs.py` adds up dollars, and `run_sums.py` has the base of all numbers; `machine_mark.py` and `resume.py` are small and need no order.
"""
