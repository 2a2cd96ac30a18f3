"""`RolloutWorker`: the policy as env workers use it, in their own process or in another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.agents.agent import AnyAgent, OffPolicyAgent, OnPolicyAgent
from guerdon.agents.networks import to_obs
from guerdon.agents.policies import Share
from guerdon.agents.registry import make_agent
from guerdon.agents.rollout import RolloutPolicy
from guerdon.config import LearnerConfig
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.distributed.engine import Handle


class RolloutPolicyWorker(RolloutPolicy, Protocol):
    """What an env worker asks of a policy."""

    def sync(self, version: int, weights: dict[str, Any] | None) -> None:
        """From now on act with these weights."""

    def generator_state(self) -> NDArray[Any] | None:
        """Where the random numbers are; None if they are the learner's own."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """How to make a copy of the policy; its weights come later."""

    cfg: LearnerConfig
    spaces: tuple[gym.Space[Any], gym.Space[Any]]

    def make(self) -> AnyAgent:
        """A copy, on a GPU only if the learner is on one and there is one here, under whatever number."""
        device = torch.device(self.cfg.device).type if torch.cuda.is_available() else "cpu"
        return make_agent(replace(self.cfg, device=device), *self.spaces, seed=0, only_acts=True)


class RolloutWorker:
    """Chooses actions with the weights it was given last."""

    def __init__(self, learner: OnPolicyAgent, share: Share | None = None) -> None:
        """Act with `learner`: the run's own (weights are then never given), or a copy.

        Args:
            learner: the policy.
            share: which of all environments it acts in; None: all, with the learner's own random numbers.
        """
        self.learner, self.share, self.version = learner, share, 0
        self._served: dict[Share, torch.Generator] = {}

    def sync(self, version: int, weights: dict[str, Any] | None = None) -> None:
        """Take the actor's weights; in one process they are the same, and the version is noted."""
        self.version, self._served = version, {}
        if weights is not None:
            self.learner.load_policy(weights)

    def step(self, obs: Any) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions for the environments, and as the learner needs them: actions, log-probabilities, values."""
        return self.learner.step(obs, self.share)

    def values(self, obs: Any) -> torch.Tensor:
        """Values of observations, [N]."""
        return self.learner.values(obs)

    def generator_state(self) -> NDArray[Any] | None:
        """None for the learner itself."""
        return None if self.share is None else self.learner.generator_state()

    # For env workers in other processes

    def serve_step(self, obs: Any, share: Share) -> tuple[NDArray[Any], ...]:
        """`step` in arrays, for the environments of `share`."""
        if share not in self._served:
            self._served[share] = torch.Generator().set_state(torch.tensor(self.learner.generator_state()))
        env_actions, *tensors = self.learner.step(obs, share, self._served[share])
        return (env_actions, *(item.cpu().numpy() for item in tensors))

    def serve_values(self, obs: Any) -> NDArray[Any]:
        """`values` in an array."""
        return self.learner.values(obs).cpu().numpy()

    def serve_generator(self, share: Share) -> NDArray[Any]:
        """Where the random numbers of `share` are."""
        generator = self._served.get(share)
        return self.learner.generator_state() if generator is None else generator.get_state().numpy()


def make_rollout_worker(spec: PolicySpec) -> RolloutWorker:
    """A rollout worker in a process of its own."""
    learner = spec.make()
    assert learner.on_policy  # the others play chunks
    return RolloutWorker(learner)


class DistantPolicy:
    """A rollout worker in another process, as an env worker sees it."""

    def __init__(self, worker: Handle, share: Share) -> None:
        self._worker, self._share = worker, share

    def sync(self, version: int, weights: dict[str, Any] | None) -> None:
        """Nothing: the runner gives the weights to the rollout worker itself."""

    def step(self, obs: Any) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ask for actions."""
        answer = self._worker.call("serve_step", _as_arrays(obs), self._share)
        actions, log_probs, values = (torch.tensor(item) for item in answer[1:])
        return answer[0], actions, log_probs, values

    def values(self, obs: Any) -> torch.Tensor:
        """Ask for values."""
        return torch.tensor(self._worker.call("serve_values", _as_arrays(obs)))

    def generator_state(self) -> NDArray[Any]:
        """Ask where its random numbers are."""
        state: NDArray[Any] = self._worker.call("serve_generator", self._share)
        return state


def _as_arrays(obs: Any) -> dict[str, NDArray[Any]]:
    return {name: part.numpy() for name, part in to_obs(obs).items()}


@dataclass(frozen=True, kw_only=True)
class EnvStep:
    """One step of one worker's environments, [n, ...] each."""

    obs: Any
    next_obs: Any
    """Observations that the actions led to: the final ones where an episode ended."""
    env_rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    success: BoolArray
    rows: IntArray
    """Which environments have a frame to be judged."""
    frames: dict[str, UInt8Array]
    """Camera -> uint8 [len(rows), H, W, C], or stacks of frames [len(rows), k, H, W, C]."""
    num_rendered: int = 0
    """Frames that were asked of the environments for it."""
    actions: NDArray[Any] | None = None
    """[n, ...] that were really taken, where the environments tell: a person may have stepped in."""
    intervened: BoolArray | None = None
    """bool [n]; where a person did. None: nobody can."""


@dataclass(frozen=True, kw_only=True)
class StepChunk:
    """K steps of one worker's n environments."""

    policy_version: int
    """Of the weights that acted."""
    first_step: int
    """Steps that the worker had taken before since its episodes were begun from outside."""
    obs: Any
    """In which the actions were chosen, [K, n, ...]; an array or a mapping."""
    actions: NDArray[Any]
    """[K, n, ...]; those that were taken, the policy's or a person's."""
    env_rewards: FloatArray
    """float32 [K, n]."""
    terminated: BoolArray
    """bool [K, n]."""
    truncated: BoolArray
    """bool [K, n]."""
    success: BoolArray
    """bool [K, n]."""
    final_obs: dict[int, Any]
    """Step -> observations [n, ...] that its actions led to, of steps with which an episode ended."""
    last_obs: Any
    """Observations [n, ...] after the last step."""
    rows: IntArray
    """Which steps have a frame to be judged, as places in a flat [K * n], ascending."""
    seconds: float
    """That acting took."""
    num_rendered: int = 0
    """Frames that were asked of the environments for it."""
    intervened: BoolArray | None = None
    """bool [K, n]; where a person chose the action. None: nobody can."""

    def __len__(self) -> int:
        return len(self.env_rewards)

    def obs_at(self, step: int) -> Any:
        """Observations [n, ...] of one step."""
        if isinstance(self.obs, dict):
            return {name: part[step] for name, part in self.obs.items()}
        return self.obs[step]

    def obs_after(self, step: int) -> Any:
        """Observations [n, ...] after one step; those of a new episode where one ended."""
        return self.last_obs if step == len(self) - 1 else self.obs_at(step + 1)


class StepTaker(Protocol):
    """What `PolicyRunner` asks of an env worker."""

    def step_once(self, t: int, actions: NDArray[Any]) -> EnvStep:
        """Step all environments as step `t` of a chunk; frames are kept aside."""


class PolicyRunner:
    """A copy of the policy and the observations that it acts on next."""

    def __init__(self, learner: OffPolicyAgent, action_space: gym.Space[Any], first_env: int) -> None:
        self._learner, self._space, self._first_env = learner, action_space, first_env
        self._rng = np.random.default_rng(0)
        self._obs: Any = None
        self._steps = 0
        self.version = -1

    def reset(self, obs: Any, seed: int) -> None:
        """New episodes have begun; the actions' random numbers are seeded again as well."""
        self._obs, self._steps = obs, 0
        self._rng = np.random.default_rng([seed, self._first_env])
        self._learner.seed_acting(int(self._rng.integers(1 << 62)))

    def sync(self, version: int, weights: dict[str, Any] | None) -> None:
        """From now on act with these weights; None if they have not changed."""
        if weights is not None:
            self._learner.load_policy(weights)
            self.version = version
        if self.version != version:
            raise RuntimeError(f"asked to act with version {version}, but the weights are of {self.version}")

    def play(
        self,
        worker: StepTaker,
        num_steps: int,
        random_steps: int,
        progress: float,
        gather: Callable[[int], tuple[IntArray, dict[str, UInt8Array]]],
    ) -> tuple[StepChunk, dict[str, UInt8Array]]:
        """Take `num_steps` steps, the first `random_steps` at random; also the frames to be judged.

        Args:
            worker: whose environments are stepped.
            num_steps: K.
            random_steps: how many of them.
            progress: share of the run that is over; exploration may follow from it.
            gather: K -> the places of the judged frames and the frames themselves.
        """
        began = time.perf_counter()
        first, obs_rows = self._steps, _Rows(num_steps)
        actions, steps = [], []
        for t in range(num_steps):
            count = len(next(iter(self._obs.values())) if isinstance(self._obs, dict) else self._obs)
            chosen = (
                self._random(count) if t < random_steps else self._learner.act(self._obs, progress=progress)
            )
            obs_rows.put(t, self._obs)
            step = worker.step_once(t, chosen)
            actions.append(chosen if step.actions is None else step.actions)
            steps.append(step)
            self._obs = step.obs
        self._steps += num_steps
        rows, frames = gather(num_steps)
        ended = {t: step.next_obs for t, step in enumerate(steps) if (step.terminated | step.truncated).any()}
        names = ["env_rewards", "terminated", "truncated", "success"]
        names += [] if steps[0].intervened is None else ["intervened"]
        values: dict[str, Any] = {name: np.stack([getattr(step, name) for step in steps]) for name in names}
        chunk = StepChunk(
            policy_version=self.version,
            first_step=first,
            obs=obs_rows.arrays,
            actions=np.stack(actions),
            final_obs=ended,
            last_obs=self._obs,
            rows=rows,
            seconds=time.perf_counter() - began,
            **values,
        )
        return chunk, frames

    def _random(self, count: int) -> NDArray[Any]:
        return random_actions(self._space, count, self._rng)


class _Rows:
    """Observations of several steps in one array each, copied once: environments may reuse their own."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self.arrays: Any = None

    def put(self, t: int, obs: Any) -> None:
        if isinstance(obs, dict):
            if self.arrays is None:
                self.arrays = {name: self._room(part) for name, part in obs.items()}
            for name, part in obs.items():
                self.arrays[name][t] = part
            return
        if self.arrays is None:
            self.arrays = self._room(obs)
        self.arrays[t] = obs

    def _room(self, part: Any) -> NDArray[Any]:
        array = np.asarray(part)
        return np.empty((self._num_steps, *array.shape), array.dtype)


def random_actions(space: gym.Space[Any], count: int, rng: np.random.Generator) -> NDArray[Any]:
    """Uniform over the action space, [count, ...]."""
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(int(space.n), size=count) + int(space.start)
    assert isinstance(space, gym.spaces.Box)
    return rng.uniform(space.low, space.high, (count, *space.shape)).astype(np.float32)
