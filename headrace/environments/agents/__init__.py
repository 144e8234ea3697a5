"""`environment.kind = "process"`: a command of the user plays each rollout, as a process of its own that asks the gateway for turns.

Read `agent_environment.py` (one rollout from start to reward), `agent_process.py` (its process), `printed_reward.py` (the reward in its
output), `agent_reaper.py` (ends the processes when the run is killed).
"""
