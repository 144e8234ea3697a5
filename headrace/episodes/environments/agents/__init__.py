"""Agents that ask the gateway for the turns of their rollouts: those that are started here, and those that are not.

Read `served_rollouts.py` (what both have). `environment.kind = "process"`, a command of the user as a process for each rollout:
`agent_environment.py` (one rollout from start to reward), `agent_process.py` (its process: memory, and the reward in its output),
`agent_reaper.py` (ends the processes when the run is killed). `environment.kind = "gateway"`, agents elsewhere: `handing_out.py`
(the run's side) and `outside_agents.py` (a command that plays such rollouts, on any machine).
"""
