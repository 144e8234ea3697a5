"""An algorithm as a value: an advantage, a policy loss, and the weights on it. Read in this order:

recipe_parts.py    the parts of an algorithm, and the settings that replace their values
recipes.py         the table of algorithms
config.py          the settings that replace a recipe's values
earlier.py         settings of older runs
policy/            the policy losses, each a value
rules.py           the rules by which a correction takes tokens out, each a value
advantages.py      one number per rollout from the rewards of its group; credit within a rollout, among turns in one state, and across a batch
training_rows.py   from scored groups to the trainer's batch
critic.py          advantages of tokens by a value function, over a whole step
implicit.py        advantages of tokens by a reward model that learns in each step
objective.py       the loss that the trainer computes on every microbatch, and its parts
diagnostics.py     sampler against trainer, by lag
tinker.py          the losses that clients of the Tinker API choose by name
noise.py           the noise that rounding adds to log-probs
"""
