"""The taskset of verifiers.toml: sums of two numbers of one digit, with a second attempt. It is written for verifiers 0.4, and knows nothing of headrace."""

import itertools

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumsConfig(vf.TasksetConfig):
    count: int = 100
    """The number of tasks."""


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.2)
    async def number(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdigit())


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for a, b in itertools.islice(itertools.product(range(10), repeat=2), self.config.count):
            data = SumData(prompt=f"What is {a} + {b}? Answer with the number alone.", answer=str(a + b))
            yield SumTask(data, self.config.task)


class SumsEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            answer = await talk.turn()
            if not answer.terminated and not answer.last_reply.isdigit():
                await talk.turn("Answer with the number alone.")


__all__ = ["SumsEnv", "SumsTaskset"]
