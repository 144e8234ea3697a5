"""The environment of gym.toml, with the methods of skyrl-gym's: it says whether the right number is higher or lower."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+")


class HigherLower:
    """An answer that is right at once earns 1, and each further turn earns `scale` of the turn before. One without a number ends it."""

    def __init__(self, env_config, extras):
        self.right, self.turns_left = int(extras["answer"]), extras["max_turns"]
        self.scale, self.worth = env_config.scale, 1.0

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        found = NUMBER.search(action)
        self.turns_left -= 1
        if found is None or int(found[0]) == self.right or not self.turns_left:
            right = found is not None and int(found[0]) == self.right
            return {"observations": [], "reward": self.worth * right, "done": True, "metadata": {}}
        self.worth *= self.scale
        hint = "higher" if self.right > int(found[0]) else "lower"
        said = [{"role": "user", "content": f"No, the right number is {hint}."}]
        return {"observations": said, "reward": 0.0, "done": False, "metadata": {}}
