"""DI-engine's serial pipelines: a policy that learns from a reward model of the zoo, by the one trainer."""

from __future__ import annotations

import logging
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from guerdon.agents.agent import AnyAgent
from guerdon.agents.registry import agent_class
from guerdon.config import GuerdonConfig, MonitorConfig, RewardConfig, RunnerConfig
from guerdon.config.load import load_serial
from guerdon.config.schema import LoggerConfig, TrackerName
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import display_path, fields_of
from guerdon.envs.make import make_vector_env
from guerdon.rewards import BaseRewardModel, create_reward_model
from guerdon.training.checkpoints import find_policy, find_sound_policy, load_policy
from guerdon.training.evaluation import Evaluation
from guerdon.training.folders import CHECKPOINTS, held, new_run_folder, write_summary
from guerdon.training.online_reward import space_shapes
from guerdon.training.trainer import EmbodiedRunner

log = logging.getLogger("guerdon")


@dataclass(kw_only=True)
class SerialResult:
    """What a pipeline returns."""

    policy: AnyAgent
    reward_model: BaseRewardModel
    folder: Path | None = None
    """Where the run is kept; None: nothing was written."""
    env_steps: int = 0
    train_iter: int = 0
    """Updates of the policy."""
    seconds: float = 0.0
    solved: bool = False
    """An evaluation reached `stop_value`."""
    evaluations: list[tuple[int, float, Evaluation]] = field(default_factory=list)
    """(environment steps, seconds of training, result)."""

    @property
    def best_return(self) -> float:
        """The highest mean return of an evaluation."""
        return max((result.env_return for _, _, result in self.evaluations), default=float("-inf"))

    @property
    def last_return(self) -> float:
        """The mean return of the last evaluation."""
        return self.evaluations[-1][2].env_return if self.evaluations else float("nan")

    def summary(self) -> dict[str, Any]:
        """In plain containers."""
        best, last = (
            value if math.isfinite(value) else None for value in (self.best_return, self.last_return)
        )
        return {
            "solved": self.solved,
            "env_steps": self.env_steps,
            "train_iter": self.train_iter,
            "seconds": round(self.seconds, 2),
            "best_return": best,
            "last_return": last,
            "evaluations": [
                {"env_steps": steps, "seconds": round(seconds, 2), **asdict(found)}
                for steps, seconds, found in self.evaluations
            ],
            "folder": None if self.folder is None else str(self.folder),
        }


def serial_pipeline_reward_model_onpolicy(cfg: Any, **arguments: Any) -> SerialResult:
    """Train an on-policy agent (PPO) on a learned reward; see `serial_pipeline_reward_model`."""
    return serial_pipeline_reward_model(cfg, on_policy=True, **arguments)


def serial_pipeline_reward_model_offpolicy(cfg: Any, **arguments: Any) -> SerialResult:
    """Train an off-policy agent (SAC, TD3, DQN) on a learned reward; see `serial_pipeline_reward_model`.

    DI-engine's `ppo_offpolicy` is taken too, and trained as PPO is: on its own latest steps.
    """
    pair = isinstance(cfg, Sequence) and not isinstance(cfg, str) and len(cfg) == 2
    if pair and dict(cfg[1]).get("policy", {}).get("type") == "ppo_offpolicy":
        log.info("config: ppo_offpolicy is trained as PPO, on its own latest steps")
        return serial_pipeline_reward_model(cfg, **arguments)
    return serial_pipeline_reward_model(cfg, on_policy=False, **arguments)


def serial_pipeline_reward_model(
    cfg: Any,
    seed: int | None = None,
    env_setting: Any = None,
    model: BaseRewardModel | None = None,
    max_train_iter: int | None = None,
    max_env_step: int | None = None,
    cooptrain_reward: bool | None = None,
    pretrain_reward: bool | None = None,
    resume_dir: str | None = None,
    on_policy: bool | None = None,
) -> SerialResult:
    """Train the agent of `cfg` on a learned reward.

    Args:
        cfg: the name of a config (`cartpole_gail`), the path of a YAML file, settings as a mapping or as
            `SerialConfig`, or DI-engine's `(main_config, create_config)`.
        seed: of everything that is drawn; None, here and below: as `cfg` says (0).
        env_setting: vector environments to train in; None makes those of `cfg.env.train`.
        model: a reward model that is there already; None makes the one of `cfg.reward_model`.
        max_train_iter: stop after so many updates of the policy; None: no such limit.
        max_env_step: stop after so many environment steps (`cfg.learner.total_steps`).
        cooptrain_reward: train the reward model while the policy trains (true).
        pretrain_reward: train it before the policy's first update (false).
        resume_dir: a run's folder or checkpoint to continue from.
        on_policy: which kind of agent the caller expects; None: either.
    """
    settings = load_serial(cfg, max_env_step=max_env_step)
    given = {
        "seed": seed,
        "cooptrain_reward": cooptrain_reward,
        "pretrain_reward": pretrain_reward,
        "resume_dir": resume_dir,
    }
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if max_env_step is not None:
        changed["learner"] = replace(settings.learner, total_steps=int(max_env_step))
    settings = replace(settings, **changed)
    is_on_policy = agent_class(settings.learner.algorithm).on_policy
    if on_policy not in (None, is_on_policy):
        other = "on-policy" if is_on_policy else "off-policy"
        raise ConfigError(f"learner.algorithm is {settings.learner.algorithm}: use the {other} pipeline")
    return _run(settings, env_setting, model, max_train_iter)


def _run(
    cfg: SerialConfig, env: Any, model: BaseRewardModel | None, max_train_iter: int | None
) -> SerialResult:
    _check_saved(cfg)
    with _drawn_from(cfg.seed), closing(make_env(cfg) if env is None else env) as env, _folder(cfg) as folder:
        if model is None and cfg.reward_model.get("type") == "image_success":
            section = {**shapes_of(env), "seed": cfg.seed, **cfg.reward_model}
            model = create_reward_model(section, cfg.learner.device)
        config = as_run(cfg)
        runner = EmbodiedRunner(config, folder, env=env, reward_model=model, max_updates=max_train_iter)
        runner.resume_setting = "resume_dir"
        summary = runner.run()
        model = model if runner.online is None else runner.online.model
        assert model is not None
        stop = cfg.stop_value
        result = SerialResult(
            policy=runner.learner,
            reward_model=model,
            folder=None if cfg.output_dir is None else folder,
            env_steps=runner.loop.env_steps,
            train_iter=runner.loop.num_updates,
            seconds=float(summary["seconds"]),
            solved=stop is not None and runner.evaluations[-1][2].env_return >= stop,
            evaluations=runner.evaluations,
        )
        if result.folder is not None:
            kind = str(cfg.reward_model.get("type", type(model).__name__))
            about = {"reward_model_type": kind, "seed": cfg.seed}
            write_summary(result.folder, {**summary, **about, **result.summary()})
        return result


def as_run(cfg: SerialConfig) -> GuerdonConfig:
    """The settings of a serial pipeline as those of a run."""
    section = {**cfg.reward_model, "cooptrain": cfg.cooptrain_reward, "pretrain": cfg.pretrain_reward}
    logger = LoggerConfig(backends=_backends(cfg), project_name=cfg.project_name)
    return GuerdonConfig(
        seed=cfg.seed,
        env=cfg.env,
        reward=RewardConfig(**fields_of(cfg.mix)),
        reward_model=section,
        runner=RunnerConfig(experiment_name=cfg.exp_name, resume_dir=cfg.resume_dir, logger=logger),
        learner=replace(
            cfg.learner,
            stop_return=cfg.stop_value,
            save_best=cfg.output_dir is not None,
            iteration_steps=cfg.steps_per_collect,
        ),
        monitor=MonitorConfig(action="off"),
    )


def _backends(cfg: SerialConfig) -> tuple[TrackerName, ...]:
    """The trackers of a run; one without a folder has nothing to show."""
    if cfg.output_dir is not None:
        return cfg.backends
    if set(cfg.backends) - {"tensorboard"}:
        raise ConfigError(
            f"backends names {', '.join(cfg.backends)}, and output_dir is null: give the run a folder"
        )
    return ()


def resolved(cfg: Any) -> SerialConfig:
    """Checked settings, from any of the forms that the pipelines take."""
    return load_serial(cfg)


def make_env(cfg: SerialConfig) -> Any:
    """The training environments."""
    return make_vector_env(cfg.env.train, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=False)


def shapes_of(env: Any) -> dict[str, Any]:
    """What a reward model has to know of vector environments."""
    return space_shapes(env.single_observation_space, env.single_action_space)


def _check_saved(cfg: SerialConfig) -> None:
    """A run goes on with the seed that it began with."""
    if cfg.resume_dir is None:
        return
    saved = load_policy(find_sound_policy(Path(cfg.resume_dir), "resume_dir"))
    begun, place = saved.state.get("seed"), display_path(cfg.resume_dir)
    if "monitor" not in saved.state:
        raise DataError(
            f"{place} is of a serial pipeline of an earlier version: its policy can be used, but the run "
            "cannot be continued"
        )
    if begun != cfg.seed:
        raise ConfigError(f"{place} was trained with seed {begun}, not {cfg.seed}")


@contextmanager
def _folder(cfg: SerialConfig) -> Iterator[Path]:
    """A new folder, that of the run that is resumed, or one that is gone afterwards."""
    if cfg.output_dir is None:
        with tempfile.TemporaryDirectory(prefix="guerdon-") as place:
            yield Path(place)
        return
    folder = None
    if cfg.resume_dir is not None:
        found = find_policy(cfg.resume_dir)
        folder = found.parent.parent if found.parent.name == CHECKPOINTS else None
    folder = folder or new_run_folder(Path(cfg.output_dir) / cfg.exp_name)
    with held(folder):
        yield folder


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed the generators that a plugin draws from by default, and leave the caller's as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what plugins use
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
