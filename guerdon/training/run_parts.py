"""The parts of a run, here or in workers: environments, reward models, the agent, and the loop over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from guerdon.agents.agent import AnyAgent
from guerdon.agents.registry import agent_class, make_agent
from guerdon.config import GuerdonConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import fields_of
from guerdon.distributed import Engine
from guerdon.rewards.image.function import FunctionScorer
from guerdon.rewards.image.scorer import ImageScorer, RewardManager
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.zoo.image_success import ImageSuccess
from guerdon.training.acting import PolicySpec
from guerdon.training.asynchronous import AsynchronousLoop
from guerdon.training.env_worker import EnvWorker, LocalEnvs
from guerdon.training.env_workers import EnvWorkers
from guerdon.training.experts import play_expert
from guerdon.training.loop import Loop
from guerdon.training.off_policy import OffPolicyLoop
from guerdon.training.on_policy import OnPolicyLoop
from guerdon.training.online_reward import OnlineReward
from guerdon.training.reward_workers import RewardWorkers
from guerdon.training.rollouts import play_for

HURRY_SECONDS = 5.0
"""How long workers may take to finish writing when a run breaks off."""


class RunParts:
    """What `EmbodiedRunner` runs; what does not fit together is refused when it is made."""

    def __init__(
        self,
        config: GuerdonConfig,
        engine: Engine,
        env: Any = None,
        model: BaseRewardModel | ImageScorer | None = None,
    ) -> None:
        """Make all parts; see `EmbodiedRunner`."""
        self.config, self.engine = config, engine
        # Workers that share this process and its pace are called directly.
        direct = self.engine.shares_memory and not config.asynchronous.enabled
        self.rewards: ImageScorer | RewardWorkers | None = None
        online = model if isinstance(model, BaseRewardModel) else None
        zoo = bool(config.reward_model) or online is not None
        asked: dict[str, Any] = {"num_steps": self._steps_at_a_time(), "keep_next_obs": zoo}
        if isinstance(model, ImageSuccess):  # a classifier, whatever it comes as
            self.rewards, zoo = model.network.scorer, False
            mapping = fields_of(model.mapping)
            known = {name: mapping[name] for name in ("reward_type", "success_reward", "fail_reward")}
            config = self.config = replace(config, reward=replace(config.reward, **known))
        elif config.reward.use_reward_model:
            if direct and isinstance(model, ImageScorer):
                self.rewards = model
            elif direct:
                self.rewards = RewardManager(config.reward)
            elif isinstance(model, FunctionScorer):
                raise ConfigError(
                    "a reward function stays in this process and at its pace: it needs engine=local and "
                    "asynchronous.enabled=false"
                )
            else:
                self.rewards = RewardWorkers(self.engine, config.reward)
        if self.rewards is not None:
            facts = self.rewards.facts
            asked |= {
                "cameras": facts.image_keys,
                "num_frames": facts.num_frames,
                "only_at_rest": facts.only_at_rest,
            }
        sections = config.env.train, config.reward, config.collect
        self.envs: LocalEnvs | EnvWorkers
        if direct:
            self.envs = LocalEnvs(EnvWorker(*sections, env=env, **asked))
        else:
            self.envs = EnvWorkers(self.engine, *sections, seed=config.seed, **asked)
        try:
            self._join(zoo, direct, online)
        except BaseException:
            self.envs.close(HURRY_SECONDS)  # a robot is let go of
            raise
        self.engine.log_notices()

    def _join(self, zoo: bool, direct: bool, model: BaseRewardModel | None) -> None:
        """The learner, and the loop that puts all parts together."""
        config = self.config
        if self.rewards is not None:
            self.rewards.facts.contract.check_frames(self.envs.facts.first_frames)
            if config.reward.control == "env" and not self.envs.facts.knows_success:
                name = config.env.train.id
                raise ConfigError(f"reward.control=env rewards success, which {name} does not tell")
        self.spaces = self.envs.facts.spaces
        self.learner: AnyAgent = make_agent(config.learner, *self.spaces, config.seed)
        self.online: OnlineReward | None = None
        if zoo:
            self.online = OnlineReward(
                config.reward_model,
                self.spaces,
                self.learner,
                seed=config.seed,
                device=config.learner.device,
                reward_mode=config.reward.reward_mode,
                model=model,
                env=self.envs.local.env if direct else None,
                gives_env_rewards=config.reward.control == "env" and self.rewards is None,
            )
            play_expert(self.online.model, config.env.train, **self.online.expert, seed=config.seed)
            if self.online.augments and self.rewards is not None:
                raise ConfigError(
                    f"{type(self.online.model).__name__} makes transitions of which there are no frames: it "
                    "cannot be joined with an image reward model"
                )
        self.loop: Loop = self._make_loop()
        if self.online is not None and direct:
            self.loop.env_steps += play_for(self.online.model, self.envs.local.env, config.seed)

    def _steps_at_a_time(self) -> int:
        """The most steps that an env worker takes alone."""
        if agent_class(self.config.learner.algorithm).on_policy:
            return int(self.config.learner.section.num_steps)
        return self.config.asynchronous.steps_per_request if self.config.asynchronous.enabled else 1

    def _make_loop(self) -> Loop:
        config = self.config
        if self.learner.on_policy:
            self.envs.attach(PolicySpec(cfg=config.learner, spaces=self.spaces), self.learner)
            return OnPolicyLoop(
                self.engine, self.learner, self.envs, self.rewards, config.reward, self.online
            )
        parts = (
            self.learner, self.envs, self.rewards, config.reward, self.spaces, config.seed,
            min(config.learner.iteration_steps, config.learner.total_steps), self.online,
        )  # fmt: skip
        if config.asynchronous.enabled:
            return AsynchronousLoop(self.engine, config.learner, config.asynchronous, *parts)
        return OffPolicyLoop(*parts)
