"""Policy losses: per-token numbers in, per-token numbers out.

Read `tokens.py` (what a loss sees and gives) and `loss.py` first: a loss is a frozen value with its own constants. Then the families: `clipped.py` (a bound takes the gradient
away), `region.py` (so does a bound on probabilities), `weighted.py` (the ratio is a weight on the log-prob), `smooth.py` (a gate or a
pull in place of a bound), `user.py` (a function from a file of the user's). `constants.py` makes settings of the constants; `bounded.py` is a clamp that keeps its gradient.

Which losses there are, `algo/recipes.py` says: each is named by a recipe.
"""
