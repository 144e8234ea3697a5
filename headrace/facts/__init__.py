"""The observation of a run: facts are recorded, counted, judged and shown. Nothing here changes what a run does.

Read `facts.py` (what the loops report), `telemetry.py` (how every part reports), `recorder.py` (where facts go), `records.py`
(`metrics.jsonl`), then the folders: `numbers/` (counted from facts), `diagnosis/` (what the numbers mean), `health/` (processes that hang
or die), `screen/` (terminal and notebook), `report/` (a page of charts), `sinks/` (dashboards), `index/` (their numbers as
arrays), `board/` (a live page of all runs). `build.py` creates the recorder with
its views and sinks; `texts.py` formats numbers; `costs.py` adds up dollars; `config.py`, `machine_mark.py` and `resume.py` are small and need no order.
"""
