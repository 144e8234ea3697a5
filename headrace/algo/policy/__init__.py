"""Policy losses: per-token numbers in, per-token numbers out.

Read `tokens.py` (the input and output of a loss) and `loss.py` first: a loss is a frozen value with its own constants, of which `loss.py` makes
settings. Then the families: `clipped.py` (a bound on the ratio takes the gradient away), `region.py` (a bound on probabilities does, or a
gate or a penalty instead of a bound), `weighted.py` (the ratio is a weight on the log-prob), `user.py` (a function from the user's file),
`pairs.py` (preferences: functions of two whole rollouts). `bounded.py` is a clamp that keeps its gradient.

The recipes (`algo/recipes.py`) name the losses that there are.
"""
