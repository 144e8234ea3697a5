"""An algorithm as a value: an advantage, a policy loss, and the weights on it. Read in this order:

recipes.py         the table of algorithms
config.py          the settings that replace a recipe's values, with those of its parts in recipe_parts.py
policy/            the policy losses, each a value
rules/             the rules by which a correction takes tokens out, each a value
advantages.py      one number per rollout from the rewards of its group
advantage/         from rewards to training rows
loss/              the loss that the trainer computes on every microbatch
tinker.py          the losses that clients of the Tinker API choose by name
noise.py           the noise that rounding adds to log-probs
caveats.py, earlier.py, user_functions.py   advice, settings of older runs, losses and advantages of the user's own
"""
