"""`PPO`, `SAC`, `RLPD`, `TD3`, `DQN` and `load_agent`: policies that learn in an environment."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from numpy.typing import NDArray

from guerdon.api.agent_parts import OWN, agent_keywords, check_function, environments, with_reward
from guerdon.api.envs import EnvGiven
from guerdon.api.play import LoadedAgent, check_spaces, play, predict
from guerdon.api.result import TrainingResult
from guerdon.api.settings import check_count, check_path, check_seed, shown
from guerdon.api.zoo import check_fits
from guerdon.config import (
    ClusterConfig,
    EnvsConfig,
    GuerdonConfig,
    LoggerConfig,
    MonitorConfig,
    RunnerConfig,
    load_config,
)
from guerdon.config.build import check_field
from guerdon.core.atomic import make_directory
from guerdon.core.calls import check_takes
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path
from guerdon.envs.success import LabelFunction, SuccessLabels
from guerdon.rewards.image.function import FunctionScorer
from guerdon.rewards.zoo.image_success import ImageSuccess
from guerdon.training.checkpoints import SavedPolicy, load_policy
from guerdon.training.evaluation import Evaluation
from guerdon.training.folders import held
from guerdon.training.loop import Callback
from guerdon.training.trainer import EmbodiedRunner


class Agent:
    """What all agents can do; `PPO` and the others differ in their settings.

    Args:
        env: an id, an environment, a vector environment that resets in the same step, or a function that
            makes an environment. States are vectors, or dicts with a vector `state` and images.
        reward: a `Reward`, the path of a checkpoint, a model of the zoo (`gd.reward_model`), or a function
            from frames, uint8 [N, H, W, C], to rewards [N], as `gd.wrap` takes it; None: the environment's
            own reward.
        eval_env: where `evaluate` plays, given like `env`; None: another one like `env` if it can be made,
            otherwise `env` itself.
        num_envs: environments in parallel that are made of an id or a function.
        env_kwargs: arguments of the environment's constructor, with an id.
        success_key: the entry of the info that tells success; None: `success` or `is_success`.
        label_fn: tells success of a single environment's step instead, (obs, info) -> bool.
        monitor: what signs of reward hacking do: `warn`, `stop`, or `off`.
        seed: of everything that is drawn.
        device: where the networks are trained, such as `cpu` or `cuda`; `auto`: on a GPU where there is one.
        out: the run's folder, with metrics and checkpoints; None keeps nothing.
        engine: `local`, or `ray` for workers in other processes; that needs an id.
        placement: with `ray`, which part runs where, such as `{"env": "0-1"}` for two env workers.
        resume: an agent that was saved, to go on from; its settings hold unless they are given.
        **settings: fields of the algorithm's section, of `learner`, `learner.network` and `reward`; many have
            the name that Stable-Baselines3 gives them, too. `Agent.settings()` lists them.

    Attributes:
        runner: the trainer behind it, which `guerdon train` uses, too.
        policy: the networks.
        from_id: whether its environments can be made again elsewhere.
    """

    algorithm: ClassVar[Literal["ppo", "sac", "td3", "dqn"]] = "ppo"
    preset: ClassVar[str | None] = None
    """A config with other defaults."""

    def __init__(
        self,
        env: EnvGiven,
        *,
        reward: Any = None,
        eval_env: EnvGiven | None = None,
        num_envs: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        success_key: str | None = None,
        label_fn: LabelFunction | None = None,
        monitor: Literal["warn", "stop", "off"] = "warn",
        seed: int = 0,
        device: str = "auto",
        out: str | os.PathLike[str] | None = None,
        engine: Literal["local", "ray"] = "local",
        placement: Mapping[str, Any] | None = None,
        resume: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        saved = None if resume is None else load_policy(check_path("resume", resume))
        config, model = with_reward(self._defaults(saved), reward)
        check_function(model, settings, engine)
        config = agent_keywords(type(self).__name__, self.algorithm).apply(config, settings, OWN)
        if placement and engine != "ray":
            raise ConfigError("placement is for engine='ray': without it everything runs in this process")
        if engine == "ray" and (not isinstance(env, str) or success_key or label_fn):
            raise ConfigError("engine='ray' makes environments in other processes: give env as an id alone")
        config = replace(
            config,
            seed=check_field(GuerdonConfig, "seed", seed, "seed"),
            engine=check_field(GuerdonConfig, "engine", engine, "engine"),
            cluster=ClusterConfig(
                component_placement=check_field(
                    ClusterConfig, "component_placement", placement or {}, "placement"
                )
            ),
            learner=replace(config.learner, device="auto" if device == "auto" else resolve_device(device)),
            monitor=MonitorConfig(action=check_field(MonitorConfig, "action", monitor, "monitor")),
            runner=RunnerConfig(
                resume_dir=None if saved is None else str(saved.folder), logger=LoggerConfig(backends=())
            ),
        )
        self._out = None if out is None else check_path("out", out)
        self._folder = self._out or Path(tempfile.mkdtemp(prefix="guerdon-"))
        if self._out is None:
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._stopped: str | None = None
        self.from_id = isinstance(env, str) and success_key is None and label_fn is None
        labels = SuccessLabels(success_key, label_fn)
        looks = config.reward.use_reward_model or isinstance(model, ImageSuccess)
        section, made, played = environments(env, num_envs, env_kwargs, eval_env, labels, looks=looks)
        config = replace(config, env=EnvsConfig(train=section, eval=section))
        self._eval_env = played
        self.runner = EmbodiedRunner(config, self._folder, env=made, eval_env=played, reward_model=model)
        self.runner.resume_setting = "resume"
        check_fits(model, *self.runner.spaces)
        if played is not None:
            check_spaces("eval_env", played, self.runner.spaces)
        if saved is not None:
            self.runner.start_or_resume()

    @classmethod
    def _defaults(cls, saved: SavedPolicy | None = None) -> GuerdonConfig:
        """The settings before any argument; evaluations are asked for (`eval_interval`) or made by hand."""
        config = load_config(None, [] if cls.preset is None else [f"+learner={cls.preset}"])
        learner = config.learner if saved is None else saved.config
        if saved is not None and learner.algorithm != cls.algorithm:
            raise ConfigError(
                f"resume: {display_path(saved.folder)} holds a policy of {learner.algorithm}, not of "
                f"{cls.__name__}"
            )
        never = 10**12 if saved is None else learner.eval_interval
        return replace(config, learner=replace(learner, algorithm=cls.algorithm, eval_interval=never))

    @classmethod
    def settings(cls) -> list[str]:
        """The names of all keyword settings."""
        return agent_keywords(cls.__name__, cls.algorithm).names

    @property
    def policy(self) -> Any:
        """The networks; `act(obs)` gives actions."""
        return self.runner.learner

    @property
    def reward_model(self) -> Any:
        """What gives the rewards: a `Reward`, a model of the zoo, a function; None: the environment."""
        online, worker = self.runner.online, self.runner.reward_worker
        if online is not None:
            return online.model
        return worker.function if isinstance(worker, FunctionScorer) else worker

    @property
    def num_steps(self) -> int:
        """Environment steps so far, all environments together."""
        return self.runner.loop.env_steps

    @property
    def result(self) -> TrainingResult:
        """How far it is."""
        return TrainingResult(
            env_steps=self.num_steps,
            seconds=self.runner.seconds,
            stopped=self._stopped,
            alarms=tuple(self.runner.alarms),
            evaluations=tuple(result for _, _, result in self.runner.evaluations),
            folder=self._out,
        )

    def learn(
        self, total_steps: int, *, callbacks: Callback | Iterable[Callback] = (), progress: bool = True
    ) -> Self:
        """Train for so many more environment steps; called again, it goes on.

        Args:
            total_steps: all environments together; the last iteration may go a little beyond.
            callbacks: functions that are called after each iteration with its `env_steps`, `metrics` and
                `alarms`; one that returns False ends the training.
            progress: whether to show a progress bar.

        Returns:
            The agent itself.

        Examples:
            >>> agent.learn(10_000, callbacks=lambda step: print(step.env_steps, step.metrics))
        """
        steps = check_count("total_steps", total_steps)
        asked = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
        for each in asked:
            check_takes(each, "callback", "step")
        with held(make_directory(self._folder)), shown(progress):
            self._stopped = self.runner.learn(steps, asked, save=self._out is not None)
        return self

    def evaluate(
        self,
        episodes: int = 50,
        *,
        env: EnvGiven | None = None,
        seed: int | None = None,
        progress: bool = True,
    ) -> Evaluation:
        """Measure the policy, without exploration, on fresh episodes by the environment's own success.

        Args:
            episodes: how many, at least.
            env: where to play; None: in `eval_env`.
            seed: of the episodes; None: another one than in training.
            progress: whether to show a progress bar.
        """
        check_count("episodes", episodes)
        seed = None if seed is None else check_seed(seed)
        self.runner.start_or_resume()
        with shown(progress):
            if env is None:
                return self.runner.evaluate(episodes, seed=seed)[0]
            seed = self.runner.config.seed + 1_000_003 if seed is None else seed
            return play(self.policy, env, episodes, seed, self.runner.spaces)

    def predict(
        self, obs: Any, state: None = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[NDArray[Any], None]:
        """Actions, in the form of Stable-Baselines3.

        Args:
            obs: one observation, or a batch of them; a dict where the environment has dicts.
            state: unused, as policies have no memory.
            episode_start: unused.
            deterministic: the best action that is known, without exploration.

        Returns:
            The action, or actions [N, ...]; and None.
        """
        self.runner.start_or_resume()
        return predict(self.policy, self.runner.spaces[0], obs, deterministic)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save policy, reward model of the zoo, and all that going on needs; `load_agent` reads it.

        A reward function is not saved: give it to `load_agent` again.
        """
        folder = check_path("path", path)
        self.runner.start_or_resume()
        return self.runner.save(folder)

    def close(self) -> None:
        """Close the environments that were made, and end workers."""
        self.runner.close()
        if self._eval_env is not None:
            self._eval_env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(env={self.runner.config.env.train.id}, steps={self.num_steps})"


class PPO(Agent):
    """Proximal policy optimisation, for discrete and continuous actions; see `Agent` for the arguments.

    Examples:
        >>> agent = gd.PPO("guerdon/Tabletop-v0", reward=reward, n_steps=50, learning_rate=3e-4)
        >>> agent.learn(100_000).evaluate(100).success_once
    """


class SAC(Agent):
    """Soft actor-critic, for continuous actions; see `Agent` for the arguments.

    Examples:
        >>> gd.SAC(lambda: MyEnv(render_mode="rgb_array"), reward="runs/x/best_model").learn(50_000)
    """

    algorithm = "sac"


class RLPD(SAC):
    """SAC that learns from demonstrations and its own steps, half of each batch (Ball et al., 2023).

    `demos` is a data set whose successes fill half of each batch; `warm_start` clones them first. The other
    settings start from `conf/learner/rlpd.yaml`.

    Examples:
        >>> gd.RLPD("guerdon/Tabletop-v0", reward=reward, demos="data", warm_start="data").learn(20_000)
    """

    preset = "rlpd"


class TD3(Agent):
    """Twin delayed deep deterministic policy gradient, for continuous actions; see `Agent`.

    Examples:
        >>> gd.TD3("Pendulum-v1", learning_starts=1_000).learn(20_000)
    """

    algorithm = "td3"


class DQN(Agent):
    """Deep Q-learning with double targets, for discrete actions; see `Agent` for the arguments.

    Examples:
        >>> gd.DQN("CartPole-v1", exploration_fraction=0.2).learn(20_000)
    """

    algorithm = "dqn"


AGENTS: dict[str, type[Agent]] = {"ppo": PPO, "sac": SAC, "td3": TD3, "dqn": DQN}


def load_agent(path: str | os.PathLike[str], env: EnvGiven | None = None, **arguments: Any) -> Any:
    """An agent that was saved by `Agent.save` or by a run.

    Args:
        path: a checkpoint, or a run's folder.
        env: to go on learning in; None: the agent acts and can be evaluated, but not learn.
        **arguments: with `env`, those of `Agent`; give `reward` again if there was one.

    Examples:
        >>> action, _ = gd.load_agent("saved").predict(obs, deterministic=True)
        >>> gd.load_agent("saved", env, reward=reward).learn(10_000)
    """
    saved = load_policy(check_path("path", path, "the path of a saved agent"))
    if "resume" in arguments:
        raise ConfigError("resume: here path is the agent to go on with")
    if env is None:
        if arguments:
            raise ConfigError(f"{next(iter(arguments))} is for an agent that goes on learning: give env, too")
        return LoadedAgent(saved)
    if saved.config.algorithm not in AGENTS:
        raise ConfigError(
            f"{display_path(saved.folder)} holds an agent of a plugin: go on with `guerdon train`"
        )
    return AGENTS[saved.config.algorithm](env, resume=path, **arguments)
