"""The parts of a reward, each with a name and a weight: functions, services and judges alike.

Read `part.py` (one part, and what it gives a group), `comparing.py` (comparisons of two completions as rewards), `segmenting.py` (the steps of
a completion, in characters and in tokens), `score_log.py` (scores that a killed run does not ask for again).
"""
