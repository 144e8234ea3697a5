"""The placement of weights, and of the work of a step, on devices and processes.

Read `port.py` (all that the rest of the trainer asks of it), `single.py` (one device), `sharded.py` (ranks of
torch's FSDP2), `by_plan.py` (layers split by the model's tensor-parallel plan), `runs.py` (what a rank publishes), `whole_experts.py` (whole
experts on each), `cutting.py`, `model_stages.py`, `schedule.py` and `staged.py` (a pipeline of stages) and `meeting.py` (how ranks find each other).
"""
