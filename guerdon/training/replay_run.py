"""An off-policy run: its replay buffers and demonstrations, what an iteration leaves, and what is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.networks import ObsSpec
from guerdon.agents.replay import ReplayBuffer, ReplayParts
from guerdon.config import RewardConfig
from guerdon.core.episodes import EpisodeTracker
from guerdon.core.errors import ConfigError
from guerdon.core.progress import Stopwatch
from guerdon.core.streams import EnvStream
from guerdon.core.types import display_path
from guerdon.monitoring.monitor import ScoredRollout
from guerdon.rewards.image.scorer import ImageScorer
from guerdon.rewards.relabel import RewardScale, learned_rewards, training_rewards
from guerdon.training.demonstrations import fill_with_demonstrations
from guerdon.training.env_worker import LocalEnvs
from guerdon.training.env_workers import EnvWorkers
from guerdon.training.loop import (
    Iteration,
    StoredChunk,
    env_reward_metrics,
    episode_metrics,
    flat_values,
    intervention_metrics,
    stored_iteration,
    stored_rewards,
)
from guerdon.training.online_reward import OnlineReward, load_online
from guerdon.training.reward_workers import RewardWorkers

REPLAY_FILE, PRIOR_FILE, INTERVENTIONS_FILE = "replay.npz", "prior.npz", "interventions.npz"


class ReplayRun(ABC):
    """Learner, replay buffers and demonstrations of a run: how they are made, saved and reported."""

    streams: list[EnvStream]
    replay: ReplayParts

    def __init__(
        self,
        learner: OffPolicyAgent,
        envs: LocalEnvs | EnvWorkers,
        rewards: ImageScorer | RewardWorkers | None,
        cfg: RewardConfig,
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        seed: int,
        iteration_steps: int,
        online: OnlineReward | None = None,
    ) -> None:
        """Put together a run.

        Args:
            learner: the agent.
            envs: the training environments.
            rewards: the image reward model; None: there is none.
            cfg: the `reward` section.
            spaces: of observations and of actions, for a single environment.
            seed: of sampling, and of actions before learning starts.
            iteration_steps: `learner.iteration_steps`.
            online: a reward model of the zoo; None: there is none.
        """
        self.learner, self.envs, self.rewards, self.cfg, self.online = learner, envs, rewards, cfg, online
        self.section = learner.cfg
        self.iteration_rows = -(-iteration_steps // envs.num_envs)
        """Steps of each environment in an iteration."""
        self.scale = RewardScale() if self.cfg.normalize else None
        self.env_steps, self.watches = 0, False
        self.path_checked = self.rewards is None
        self._online_checked = self.online is None
        self._learned_online: dict[str, float] = {}  # metrics of the online reward model in this iteration
        self._sampled: dict[str, float] = {}  # rewards of the latest sample that the online model scored
        self._pending_updates = 0.0  # updates that are due
        self._action_space = spaces[1]
        self._rng = np.random.default_rng(seed)
        self._spec = ObsSpec.of(spaces[0])
        self._seed = seed
        self._stored: list[StoredChunk] = []  # of this iteration
        self.prior: ReplayBuffer | None = None
        self.interventions: ReplayBuffer | None = None
        """Steps in which a person took over, sampled with the demonstrations; None until there are some."""
        shown = self.learner.prior
        if shown is not None and shown.prior_data is not None:
            self.prior = fill_with_demonstrations(
                Path(shown.prior_data),
                self._spec,
                self.rewards,
                self.cfg,
                self._make_replay,
                seed,
                envs.facts.control_mode,
            )

    def _make_streams(self, parts: list[tuple[int, int]]) -> None:
        """A replay buffer for each group of environments that step together, (start, stop) each."""
        total, capacity = self.envs.num_envs, self.section.buffer_size
        self.streams = []
        for rank, (start, stop) in enumerate(parts):
            count = stop - start
            replay = self._make_replay(count, capacity * count // total, self._seed + rank)
            self.streams.append(EnvStream(rank, start, count, replay, EpisodeTracker(count)))
        replays = [stream.replay for stream in self.streams]
        if self.online is not None and self.online.augments:  # a part for what it makes
            replays.append(self._make_replay(1, capacity, self._seed + 2))
        self.replay = ReplayParts(replays, seed=self._seed)

    def _make_replay(self, num_envs: int, capacity: int, seed: int) -> ReplayBuffer:
        """A buffer that keeps the score of every frame, or the frames themselves."""
        extras: dict[str, Any] = {}
        if self.rewards is not None:
            extras["prob_success"] = ((), np.float32)
            if self.cfg.relabel_at == "sampling":
                sizes = self.rewards.facts.contract.input_sizes
                if not sizes:
                    raise ConfigError(
                        "reward.relabel_at=sampling needs a checkpoint that knows its frame size"
                    )
                extras |= {f"frames/{name}": (sizes[name], np.uint8) for name in self._cameras}
        if self.online is not None and self.online.history_dependent:
            extras["online_rewards"] = ((), np.float32)
        space = self._action_space
        discrete = isinstance(space, gym.spaces.Discrete)
        shape, dtype = ((), np.int64) if discrete else (space.shape or (), np.float32)
        return ReplayBuffer(self._spec, shape, dtype, num_envs, capacity, extras, seed=seed)

    @property
    def _cameras(self) -> tuple[str, ...]:
        return () if self.rewards is None else self.rewards.facts.image_keys

    def knows_success(self) -> bool:
        """Whether the environments tell success."""
        return bool(self.envs.facts.knows_success)

    @abstractmethod
    def advance(self, progress: float) -> Iteration:
        """A stretch of stored steps and the updates that belong to them."""

    def truncate_running_episodes(self) -> None:
        """The running episodes will not go on, from the latest stored step of each."""
        for stream in self.streams:
            stream.requests.clear()
            stream.replay.truncate_running_episodes(stream.obs)

    def _intervened(self) -> ReplayBuffer:
        """The buffer for steps in which a person took over, made when it is first needed."""
        if self.interventions is None:
            assert self.learner.prior is not None
            self.interventions = self._make_replay(1, self.learner.prior.interventions_size, self._seed + 1)
        return self.interventions

    # What an iteration leaves

    def _iteration(self, train: dict[str, float], clock: Stopwatch, env_steps: int) -> Iteration:
        """Of the stored chunks; `env_steps` is where the run was before them."""
        metrics = {f"train/{name}": value for name, value in train.items()}
        metrics |= episode_metrics([record for stream in self.streams for record in stream.records()])
        metrics |= clock.metrics(self.env_steps - env_steps) | self.envs.fault_metrics()
        metrics |= self._learned_online
        self._learned_online = {}
        metrics |= intervention_metrics(
            self._stored, 0 if self.interventions is None else len(self.interventions)
        )
        env_rewards = flat_values(self._stored, "env_rewards")
        if self.rewards is None:
            known = env_reward_metrics(env_rewards, trained_on=self.online is None)
            return Iteration(
                metrics={**metrics, **known, **self._sampled}, for_monitor=self._rewards_for_monitor()
            )
        facts = self.rewards.facts
        scored = stored_iteration(self._stored, self.envs.num_envs, env_steps, self.knows_success())
        prob, done = (flat_values(self._stored, name) for name in ("prob_success", "done"))
        learned = learned_rewards(prob, done, self.cfg, facts.threshold)
        held = training_rewards(prob, env_rewards, done, self.cfg, facts.threshold, self.scale)
        metrics |= scored.metrics(facts, env_rewards, held, learned)
        refits = scored.for_refits() if self.cfg.refit_interval else None
        return Iteration(metrics=metrics, for_monitor=scored.for_monitor(self.rewards), scored=refits)

    @property
    def num_updates(self) -> int:
        """Of the policy."""
        return self.learner.num_updates

    def _rewards_for_monitor(self) -> ScoredRollout | None:
        """What the monitor sees of a model that gives rewards: those of the new steps."""
        if self.online is None or not self.watches:
            return None
        learned = [
            self.online.rewards(item.chunk.steps(self.online.action_space))
            if item.online_rewards is None
            else item.online_rewards
            for item in self._stored
        ]
        return stored_rewards(self._stored, learned, self.envs.num_envs, self.knows_success())

    # State

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Counters; the replay buffer goes to a file of its own."""
        self.truncate_running_episodes()
        self.replay.save(folder / REPLAY_FILE)
        if self.prior is not None:
            self.prior.save(folder / PRIOR_FILE)
        if self.interventions is not None:
            self.interventions.save(folder / INTERVENTIONS_FILE)
        scale = None if self.scale is None else [self.scale.count, self.scale.mean, self.scale.spread]
        return {
            "env_steps": self.env_steps,
            "owed": self._pending_updates,
            "scale": scale,
            "online": None if self.online is None else self.online.state_dict(),
            "rng": self._rng.bit_generator.state,
            "control": self.cfg.control,
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`."""
        if self.rewards is not None or (self.online is not None and self.online.history_dependent):
            check_stored_rewards(self.cfg.control, state, folder)
        self.env_steps, self._pending_updates = int(state["env_steps"]), float(state["owed"])
        if self.scale is not None and state["scale"] is not None:
            self.scale = RewardScale(*state["scale"])
        self._rng.bit_generator.state = state["rng"]
        load_online(self.online, state)
        self.replay.load(folder / REPLAY_FILE)
        if self.prior is not None and self.cfg.control != "env":  # what is saved has the model's verdicts
            self.prior.load(folder / PRIOR_FILE)
        if (folder / INTERVENTIONS_FILE).exists():
            self._intervened().load(folder / INTERVENTIONS_FILE)


def check_stored_rewards(control: str, state: Mapping[str, Any], folder: Path) -> None:
    """Raise if a run would learn from stored steps whose rewards are another kind than its own.

    A replay buffer keeps what the reward model said of a step, or with `reward.control: env` whether the
    environment reported success. Neither can be had from the other later.

    Args:
        control: `reward.control` of the run that goes on.
        state: of the saved loop.
        folder: of its checkpoint.
    """
    before = str(state.get("control", "none"))  # older checkpoints do not tell
    if control == before or "env" not in (control, before) or not int(state.get("env_steps", 0)):
        return
    kinds = {True: "the environment's success", False: "the scores of a reward model"}
    raise ConfigError(
        f"{display_path(folder)} has a replay buffer with {kinds[before == 'env']}, and "
        f"reward.control={control} needs {kinds[control == 'env']} of the same steps, which were not stored: "
        "begin without runner.resume_dir, with learner.warm_start if the policy should not begin anew"
    )
