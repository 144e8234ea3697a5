"""What a run says about itself: facts are recorded, counted, judged and shown. Nothing here changes what a run does.

Read `facts.py` (what the loops report), `telemetry.py` (what every part reports by), `recorder.py` (where facts go), `records.py` (`metrics.jsonl`),
then the rooms: `numbers/`
(counted from facts), `diagnosis/` (what the numbers mean), `health/` (processes that hang or die), `screen/` (terminal and notebook),
`report/` (a page of charts). `build.py` names the sinks of `sinks.py`; `text.py` spells numbers for people;
`config.py`, `machine_mark.py` and `resume.py` are small and need no order.
"""
