"""SAC and DQN on the learned reward: step, judge, store; sample, relabel, update."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.episodes import EpisodeTracker
from guerdon.agents.replay import ReplayBuffer
from guerdon.core.images import latest_frames
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.fit.refit import ScoredSteps
from guerdon.monitoring.monitor import Watched
from guerdon.rewards.relabel import learned_rewards
from guerdon.rewards.steps import StepBatch
from guerdon.training.acting import EnvStep, random_actions
from guerdon.training.interventions import store_step
from guerdon.training.loop import (
    Iteration,
    Stopwatch,
    episode_metrics,
    feature_rows,
    fill_scores,
    frame_metrics,
    scored_frames_only,
)
from guerdon.training.online_reward import OnlineReward
from guerdon.training.replay_learning import ITERATION_STEPS, LearningParts, ReplayLearning


class OffPolicyLoop(ReplayLearning[ReplayBuffer]):
    """One iteration is a stretch of steps with the updates that belong to them."""

    def __init__(self, parts: LearningParts) -> None:
        super().__init__(parts)
        self.replay = self._make_replay(self.envs.num_envs, self.section.buffer_size, parts.seed)
        self.episodes = EpisodeTracker(self.envs.num_envs)
        self._obs: Any = None
        self._frames: list[UInt8Array | None] = []
        self._shown: UInt8Array | None = None  # the latest judged frame of each environment
        self._last: dict[str, FloatArray] = {}  # the latest verdicts, where they are reused
        self._num_frames = [0, 0]  # rendered, judged; in this iteration
        self._kept: list[tuple[IntArray, dict[str, UInt8Array]]] = []  # what was judged, for refits
        self._watched: list[dict[str, Any]] = []
        self._new_steps: list[StepBatch] = []  # for the online reward model

    def reset(self, seed: int) -> None:
        """Begin new episodes; those that ran are cut off in the buffer."""
        if self._obs is not None:
            self.truncate_running_episodes()
        self._obs = self.envs.reset_obs(seed, self.env_steps)
        self.episodes.reset()
        if self.online is not None:
            self.online.reset()

    def truncate_running_episodes(self) -> None:
        """The running episodes will not go on."""
        self.replay.cut(self._obs)

    # An iteration

    def advance(self, progress: float) -> Iteration:
        """A stretch of steps and updates."""
        watch, train = Stopwatch(), dict[str, float]()
        steps = -(-ITERATION_STEPS // self.envs.num_envs)
        self._watched, self._num_frames, self._kept, self._new_steps = [], [0, 0], [], []
        frames: dict[str, UInt8Array] = {}
        for t in range(steps):
            frames = self._step(t, progress, watch) or frames
            self.env_steps += self.envs.num_envs
            if self.env_steps < self.section.learning_starts:
                continue
            self._add_pending_updates(self.envs.num_envs)
            while self._pending_updates >= 1.0:
                train |= self._update()
                self._pending_updates -= 1.0
            watch.lap("update")
        metrics = {f"train/{name}": value for name, value in train.items()}
        metrics |= episode_metrics(self.episodes.pop())
        metrics |= watch.metrics(steps * self.envs.num_envs) | self.envs.fault_metrics()
        joined = {name: np.stack([item[name] for item in self._watched]) for name in self._watched[0]}
        if self.online is not None:
            metrics |= self.online.learn([StepBatch.cat(self._new_steps)])
        if self.rewards is None:
            return Iteration(metrics=metrics | self._unscored_metrics(joined["env_rewards"]))
        return self._judged_iteration(metrics, joined, frames)

    def _judged_iteration(
        self, metrics: dict[str, float], joined: dict[str, NDArray[Any]], frames: dict[str, UInt8Array]
    ) -> Iteration:
        assert self.rewards is not None
        watched = Watched(
            prob_success=scored_frames_only(joined["prob_success"], joined["disagreement"]),
            done=joined["done"],
            env_success=joined["success"] if self.knows_success() else None,
            elapsed=joined["elapsed"],
            disagreement=joined["disagreement"] if self.rewards.facts.num_members > 1 else None,
            features=self._features(frames),
            frame=self._frame,
        )
        metrics |= self._judged_metrics(joined) | frame_metrics(*self._num_frames)
        judged = None
        if watched.env_success is not None and self._kept:
            judged = ScoredSteps(
                prob_success=watched.prob_success,
                success=watched.env_success,
                elapsed=watched.elapsed,
                first_step=self.env_steps // self.envs.num_envs - len(self._kept),
                frames_at=self._show,
            )
        return Iteration(metrics=metrics, watched=watched, judged=judged)

    def _show(self, t: IntArray, env: IntArray) -> dict[str, UInt8Array]:
        """What was judged of some steps of this iteration, camera -> [M, ...]."""
        places = [int(np.searchsorted(self._kept[step][0], each)) for step, each in zip(t, env, strict=True)]
        return {
            name: np.stack([self._kept[step][1][name][place] for step, place in zip(t, places, strict=True)])
            for name in self._cameras
        }

    def _features(self, frames: dict[str, UInt8Array]) -> FloatArray | None:
        assert self.rewards is not None
        count = len(next(iter(frames.values()))) if frames else 0
        if not count:
            return None
        return self.rewards.features([self.rewards.put(frames)], [feature_rows(count, self.env_steps)])

    def _frame(self, t: int, env: int) -> UInt8Array:
        shown = self._frames[t]
        assert shown is not None  # only judged frames are asked for
        frame: UInt8Array = shown[env]
        return frame

    def _step(self, t: int, progress: float, watch: Stopwatch) -> dict[str, UInt8Array]:
        """One step of all environments into the buffer; returns the frames that were judged."""
        actions, step = self._take_step(progress)
        actions = actions if step.actions is None else step.actions
        done, success, frames = step.terminated | step.truncated, step.success, step.frames
        elapsed = self.episodes.lengths.copy()
        self.episodes.add(step.env_rewards, done, success)
        watch.lap("rollout")
        extras = self._judge(done, step)
        watch.lap("compute_model_rewards")
        env_rewards = step.env_rewards
        stored = {name: value for name, value in extras.items() if name != "disagreement"}
        if self.online is not None:
            stored |= self._score_online(self.online, actions, step)
        self.replay.add(
            self._obs, actions, env_rewards, step.terminated, step.truncated, step.next_obs, **stored
        )
        if step.intervened is not None and step.intervened.any() and self.learner.prior is not None:
            store_step(
                self._intervened(), step.intervened, self._obs, actions, env_rewards, step.terminated,
                [step.next_obs] * len(done), stored,
            )  # fmt: skip
        self._obs = step.obs
        if t == 0:
            self._frames = []
        if self.cfg.refit_interval:
            self._kept.append((step.rows, {name: images.copy() for name, images in frames.items()}))
        self._num_frames[0] += step.num_rendered
        self._num_frames[1] += len(step.rows)
        if frames:
            self._shown = _placed(self._shown, frames[self._cameras[0]], step.rows, len(done))
        self._frames.append(self._shown)
        noted = {"env_rewards": env_rewards, "done": done, "success": success, "elapsed": elapsed}
        self._watched.append({**noted, **{k: v for k, v in extras.items() if not k.startswith("frames/")}})
        return frames

    def _score_online(
        self, online: OnlineReward, actions: NDArray[Any], step: EnvStep
    ) -> dict[str, NDArray[Any]]:
        """Keep a step for the online reward model; rewards that depend on the episode are given now."""
        rows = (self._obs, actions, step.next_obs, step.env_rewards, step.terminated, step.truncated)
        steps = online.of_steps(*(_one_step(part) for part in rows))
        self._new_steps.append(steps)
        if not online.history_dependent:
            return {}
        return {"online_rewards": online.stream_rewards(steps, "run")[0]}

    def _take_step(self, progress: float) -> tuple[NDArray[Any], EnvStep]:
        """Choose actions and step; where a worker was lost, its episodes are cut off and new ones begin."""
        actions = self._actions(progress)
        step, fresh = self.envs.step(actions, self.env_steps)
        while step is None:
            for rank, first in fresh.items():
                mine = slice(*self.envs.parts[rank])
                self.replay.cut(self._obs, mine)
                self.episodes.cut(mine)
                self._obs = _with_rows(self._obs, mine, first)
            again = self._actions(progress)
            actions = actions.copy()
            for rank in fresh:
                mine = slice(*self.envs.parts[rank])
                actions[mine] = again[mine]
            step, fresh = self.envs.step(actions, self.env_steps, still=list(fresh))
        return actions, step

    def _actions(self, progress: float) -> NDArray[Any]:
        if self.env_steps < self.section.learning_starts and self.prior is None:
            return random_actions(self._action_space, self.envs.num_envs, self._rng)
        return self.learner.act(self._obs, progress=progress)

    def _judge(self, done: BoolArray, step: EnvStep) -> dict[str, NDArray[Any]]:
        """Verdicts on what the step led to, [N] each, NaN where nothing was judged; perhaps the frames."""
        if self.rewards is None:
            return {}
        rows, frames, facts = step.rows, step.frames, self.rewards.facts
        verdict = self.rewards.score(frames)
        prob, spread = (np.full(len(done), np.nan, np.float32) for _ in range(2))
        prob[rows], spread[rows] = verdict.prob_success, verdict.disagreement
        resting, last = facts.contract.only_at_rest, self._last.get
        prob = fill_scores(prob[None], done[None], self.cfg, only_at_rest=resting, last=last("prob"))[0]
        spread = fill_scores(spread[None], done[None], self.cfg, last=last("spread"))[0]
        self._last = {"prob": prob, "spread": spread}
        values: dict[str, NDArray[Any]] = {"prob_success": prob, "disagreement": spread}
        if self.scale is not None:
            self.scale.update(learned_rewards(prob, done, self.cfg, facts.threshold))
        if self.cfg.relabel_at == "sampling":
            for name in self._cameras:
                shape = facts.contract.input_sizes[name]
                kept = np.zeros((len(done), *shape), np.uint8)
                if len(rows):
                    kept[rows] = frames[name]
                values[f"frames/{name}"] = kept
        return values


def _one_step(part: Any) -> Any:
    """[N, ...] -> [1, N, ...]."""
    if isinstance(part, dict):
        return {name: _one_step(each) for name, each in part.items()}
    return np.asarray(part)[None]


def _with_rows(obs: Any, rows: slice, fresh: Any) -> Any:
    """A copy of observations [N, ...] with other ones in some rows."""
    if isinstance(obs, dict):
        return {name: _with_rows(part, rows, fresh[name]) for name, part in obs.items()}
    changed = np.array(obs)
    changed[rows] = fresh
    return changed


def _placed(before: UInt8Array | None, frames: UInt8Array, env_ids: IntArray, num_envs: int) -> UInt8Array:
    """The latest judged frame of every environment, [N, H, W, C]; black where there was none yet."""
    latest = latest_frames(frames)
    whole = np.zeros((num_envs, *latest.shape[1:]), np.uint8) if before is None else before.copy()
    whole[env_ids] = latest
    return whole
