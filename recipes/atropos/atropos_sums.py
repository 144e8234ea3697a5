"""An environment of Atropos, on atroposlib 0.4 alone: sums of two digits. It knows nothing of headrace.

Its process needs an interpreter with atroposlib; docs/atropos.md has the command."""

import random
import re

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class Sums(BaseEnv):
    name = "sums"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            wandb_name="sums", use_wandb=False, group_size=8, max_token_length=32, total_steps=100000
        )
        return config, [APIServerConfig(server_type="vllm", api_key="none")]

    async def setup(self):
        self.random = random.Random(0)

    async def get_next_item(self):
        return self.random.randint(0, 9), self.random.randint(0, 9)

    async def collect_trajectories(self, item):
        first, second = item
        asked = [{"role": "user", "content": f"What is {first} + {second}? Answer with the number alone."}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            replies = await managed.chat_completion(
                messages=asked, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node, choice in zip(nodes, replies.choices, strict=True):
            numbers = re.findall(r"(?<![A-Za-z\d_.,])-?\d+(?:[.,]\d+)*", choice.message.content)
            right = bool(numbers) and numbers[-1] == str(first + second)
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(float(right) + 0.1 * (choice.message.content.strip() == str(first + second)))
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    Sums.cli()
