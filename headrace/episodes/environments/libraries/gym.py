"""Text environments with the methods of `skyrl-gym`: `init(prompt)`, `step(action)` and, if there is one, `close()`.

The interface is that of skyrl-gym 0.4, `skyrl_gym.envs.base_text_env.BaseTextEnv` (https://github.com/NovaSky-AI/SkyRL): an
environment is constructed with `env_config` and `extras` (the other columns of its row). `init` returns the first messages and a dict
of its own; `step` returns `{"observations": messages, "reward": number, "done": bool, ...}`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.core.errors import ConfigError
from headrace.episodes.environments.libraries.options import Replies, near, not_installed
from headrace.episodes.environments.workers.player import LibrarySettings
from headrace.episodes.environments.workers.step_driver import LibraryRollout
from headrace.episodes.environments.workers.talk import AgentReply, BlockingAgent, messages_of
from headrace.settings.user_code import load_function, one_line

KIND = "gym"
METHODS = ("init", "step")


class EnvConfig(dict[str, Any]):
    """`environment.options`, which environments read as attributes or as items."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(f"environment.options has no {name}; set environment.options.{name}") from None
        return EnvConfig(value) if isinstance(value, dict) else value


class GymRollout(LibraryRollout):
    """A rollout: one environment. It is subclassed with the settings.

    If the environment has `export_state` and `restore`, its state is theirs. Otherwise its state are the actions, which only the user can know
    to be enough (`exports_if_set`)."""

    made: Callable[..., Any]
    """Makes an environment."""
    takes: frozenset[str] | None
    """The names of its arguments; None if it takes any."""
    options: Mapping[str, Any]
    most: int
    exports_if_set = True

    def __init__(self, prompt: Any, seed: int, **columns: Any) -> None:
        self._prompt, self._replies = prompt, Replies()
        self._thread = ThreadPoolExecutor(
            1, "gym"
        )  # all of its calls, because connections of databases may not be shared
        extras = {"max_turns": self.most, "seed": seed, **columns}
        offered = {"env_config": EnvConfig(self.options), "extras": extras}
        given = {name: value for name, value in offered.items() if self.takes is None or name in self.takes}
        self._env = self._called(lambda: type(self).made(**given))

    def step(self, agent: BlockingAgent, reply: AgentReply | None) -> Any:
        """Each step's reward is the reward of the turn that caused it."""
        if reply is None:
            return self._begin()
        if reply.stop == "limit":
            return {}
        observations, reward, done = self._act(reply.text)
        agent.reward(KIND, reward)
        return {} if done else observations

    def export_state(self) -> Any:
        return self._called(self._env.export_state) if not self.exports_if_set else self._replies.state()

    def restore(self, state: Any) -> None:
        if not self.exports_if_set:
            self._called(lambda: self._env.restore(state))
            return
        self._begin()
        for action in self._replies.again(state):
            self._act(action)

    def close(self) -> None:
        try:
            if callable(close := getattr(self._env, "close", None)):
                self._called(close)
        finally:
            self._thread.shutdown(wait=False)

    def _begin(self) -> list[dict[str, Any]]:
        observations = _begun(self._called(lambda: self._env.init(messages_of(self._prompt))))
        self._replies.said(observations)
        return observations

    def _act(self, action: str) -> tuple[list[dict[str, Any]], float, bool]:
        self._replies.given(action)
        result = _stepped(self._called(lambda: self._env.step(action)))
        self._replies.said(*result)
        return result

    def _called(self, work: Callable[[], Any]) -> Any:
        return self._thread.submit(work).result()


def open_gym(settings: LibrarySettings) -> type[GymRollout]:
    """Returns the class that plays a rollout with the environment `settings.name`: an id that is registered with skyrl-gym,
    `path/to/file.py:Class`, or `package.module:Class`. Raises ConfigError if there is none."""
    made = _creator(settings.name)
    exports = all(callable(getattr(made, name, None)) for name in ("export_state", "restore"))
    return GymRollout.opened(
        KIND,
        made=staticmethod(made),
        takes=_accepted(made),
        options=settings.options,
        most=settings.max_turns,
        exports_if_set=not exports,
    )


def _creator(name: str) -> Callable[..., Any]:
    """Returns the class, or the function that makes an environment."""
    if not name:
        raise ConfigError(
            f'environment.name is missing: environment.kind = "{KIND}" needs an id of skyrl-gym, path/to/file.py:Class, or '
            "package.module:Class"
        )
    place, _, attribute = name.rpartition(":")
    if not place:
        return _registered(name)
    if place.endswith(".py"):
        made = load_function(name, "environment.name")
    else:
        try:
            module = importlib.import_module(place)
        except Exception as error:  # what a module raises while it is imported is its own affair
            raise ConfigError(f"environment.name = {name}: importing {place} failed: {one_line(error)}") from None
        made = getattr(module, attribute, None) or _missing(name, place, attribute, vars(module))
    lacks = [method for method in METHODS if inspect.isclass(made) and not callable(getattr(made, method, None))]
    if lacks or not callable(made):
        what = f"has no method {lacks[0]}" if lacks else "cannot be called"
        raise ConfigError(
            f"environment.name = {name} {what}; it is a class with the methods init(prompt) and step(action), or a function that makes "
            "such an environment"
        )
    return made


def _missing(name: str, place: str, attribute: str, there: Mapping[str, Any]) -> Any:
    classes = [defined for defined, value in there.items() if inspect.isclass(value)]
    raise ConfigError(f"environment.name = {name}: {place} defines no {attribute}{near(attribute, classes)}")


def _registered(name: str) -> Callable[..., Any]:
    try:
        import skyrl_gym
    except ImportError:
        raise not_installed(KIND, "gym", "skyrl-gym") from None
    if name not in skyrl_gym.registry:
        raise ConfigError(
            f"environment.name = {name} is not an environment of skyrl-gym{near(name, skyrl_gym.registry)}; name one that is not "
            "registered by path/to/file.py:Class or package.module:Class"
        )

    def made(env_config: EnvConfig, extras: dict[str, Any]) -> Any:
        return skyrl_gym.make(name, env_config=env_config, extras=extras)

    return made


def _accepted(made: Callable[..., Any]) -> frozenset[str] | None:
    """Returns the names of the arguments; None if it takes any."""
    parameters = inspect.signature(made).parameters.values()
    return (
        None
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        else frozenset(parameter.name for parameter in parameters)
    )


def _begun(result: Any) -> list[dict[str, Any]]:
    """Returns the first messages. Raises ValueError if `init` did not return them."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"init returned {result!r:.80}; it returns the first messages and a dict")
    return messages_of(result[0])


def _stepped(result: Any) -> tuple[list[dict[str, Any]], float, bool]:
    """Returns the messages, the reward, and whether the episode is over. Raises ValueError if `step` did not return them."""
    if not isinstance(result, Mapping) or not {"observations", "reward", "done"} <= result.keys():
        raise ValueError(f"step returned {result!r:.80}; it returns a dict with observations, reward and done")
    done = bool(result["done"])
    if not done and not result["observations"]:
        raise ValueError(
            "step returned no observations, though the episode is not done: nothing would precede the next turn"
        )
    return [] if done else messages_of(result["observations"]), float(result["reward"]), done
