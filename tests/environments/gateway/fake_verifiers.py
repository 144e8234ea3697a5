"""A stand-in for `verifiers` with the part of its interface that headrace uses, as a package of one file, and an interpreter that has it.

The slow test holds the same expectations against the real package.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = """
import asyncio, contextlib, dataclasses, importlib, itertools, json, types, urllib.request

NUMBERS = itertools.count()

class Config:
    def __init__(self, **given):
        for name, value in given.items():
            if name not in self.FIELDS:
                raise ValueError(f"{type(self).__name__}.{name}: Extra inputs are not permitted")
        for name, value in (self.FIELDS | given).items():
            setattr(self, name, KINDS[name](**value) if isinstance(value, dict) else value)
        self.model_fields_set = set(given)
    def __iter__(self):
        return iter([(name, getattr(self, name)) for name in self.FIELDS])
    def model_copy(self, update):
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | update)

class SelectConfig(Config): FIELDS = {"limit": None}
class RetryConfig(Config): FIELDS = {"max_retries": 0, "rules": []}
class SubprocessConfig(Config): FIELDS = {}
class HarnessConfig(Config): FIELDS = {"id": "bash"}
class TasksetConfig(Config): FIELDS = {"id": "", "task": None, "endless": False}
class AgentConfig(Config): FIELDS = {"harness": None, "runtime": None, "client": None, "model": None, "max_turns": None, "retries": RetryConfig()}
class EvalClientConfig(Config): FIELDS = {"base_url": "", "api_key_var": ""}
class TrainClientConfig(EvalClientConfig):
    FIELDS = {**EvalClientConfig.FIELDS, "renderer": None, "renderer_model_name": None}
    def __init__(self, **given):
        if given["renderer"]["name"] != "letters":
            raise ValueError("no such renderer")
        super().__init__(**{**given, "renderer": "letters"})

@dataclasses.dataclass
class ModelContext:
    model: str
    client: object

KINDS = {"taskset": TasksetConfig, "retries": RetryConfig, "harness": HarnessConfig, "client": EvalClientConfig}
KINDS |= dict.fromkeys(["agent", "judge"], AgentConfig)

class EnvConfig(Config):
    FIELDS = {"id": "", "taskset": None, "agent": AgentConfig(), "retries": RetryConfig()}

class Judged(EnvConfig):
    FIELDS = {**EnvConfig.FIELDS, "judge": AgentConfig()}

def resolve_env_config(raw):
    return (Judged if raw.get("id") == "judged" else EnvConfig)(**raw)

def default_harness_id(id): return "bash"
def harness_config_type(id): return HarnessConfig
def load_harness(config): return types.SimpleNamespace(EXECUTES_CODE=config.id != "null")

class Data:
    def __init__(self, **fields): self.__dict__.update(fields)
    @classmethod
    def model_validate(cls, row):
        if "prompt" not in row: raise ValueError("prompt: Field required")
        return cls(**row)

class Task:
    def __init__(self, data, config=None): self.data = data
    @classmethod
    def data_type(cls): return Data

class Taskset:
    def __init__(self, config, tasks): self.bounded, self.tasks = not config.endless, tasks
    def task_type(self): return Task
    def select(self, select):
        view = Taskset.__new__(Taskset)
        view.bounded, view.tasks = self.bounded or bool(select.limit), self.tasks[:select.limit]
        return view
    def __iter__(self): return iter(self.tasks)

class Env:
    def __init__(self, config, module):
        self.config, self.module = config, module
        self.taskset = Taskset(config.taskset, [Task(Data(**one)) for one in module.TASKS])
    @contextlib.asynccontextmanager
    async def serving(self):
        yield
    async def run_episode(self, task, ctx):
        traces = []
        def run(name="agent"):
            traces.append(Run(name, getattr(self.config, name), ctx))
            return traces[-1]
        try:
            if hasattr(self.module, "episode"):
                await self.module.episode(task.data, run)
            else:
                first = run()
                await self.module.play(task.data, first.ask, first.give, self.config)
        except Exception as error:
            said = types.SimpleNamespace(type="TaskError", message=str(error), traceback="Traceback\\nTaskError: " + str(error))
            traces[0].errors.append(said)
        return types.SimpleNamespace(ok=not any(one.errors for one in traces), errors=[], traces=traces)

class Run:
    def __init__(self, name, seat, ctx):
        self.id, self.agent = f"run-{next(NUMBERS)}", types.SimpleNamespace(name=name, trainable=True)
        self.rewards, self.errors, self.said = {}, [], []
        self.client, self.model = seat.client or ctx.client, seat.model or ctx.model
    def give(self, name, score, weight=1.0):
        self.rewards[name] = types.SimpleNamespace(value=score * weight)
    async def post(self, path, body):
        base = self.client.base_url.removesuffix("/v1" if path.startswith("/inference") else "")
        headers = {"Content-Type": "application/json", "X-Session-ID": self.id}
        url = urllib.request.Request(base + path, json.dumps({**body, "model": self.model}).encode(), headers)
        return json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(url).read()))
    async def ask(self, text):
        if hasattr(self.client, "renderer"):
            self.said.extend(map(ord, text))
            body = {"token_ids": self.said, "sampling_params": {"logprobs": 1}}
            (choice,) = (await self.post("/inference/v1/generate", body))["choices"]
            self.said.extend(choice["token_ids"])
            return self.client.renderer_model_name
        self.said.append({"role": "user", "content": text})
        answer = await self.post("/chat/completions", {"messages": self.said})
        self.said.append(answer["choices"][0]["message"])
        return self.said[-1]["content"]

def load_environment(config):
    return Env(config, importlib.import_module(config.taskset.id))
"""


def interpreter(place: Path, version: str = "0.4.9") -> Path:
    """Makes a Python that has the stand-in as verifiers of this version, and no other package: headrace is not there either. The taskset is a module with `TASKS` and `play`, or
    with `episode` if it runs several agents."""
    package = place / "site" / "verifiers"
    metadata = place / "site" / f"verifiers-{version}.dist-info"
    for folder in (package / "v1", metadata):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "v1" / "__init__.py").write_text(PACKAGE)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    python = place / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={place / "site"} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python
