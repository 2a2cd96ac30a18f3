"""Stage 1 on a robot: a person drives, every episode is labelled and on disk before the next one begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from guerdon.config import CollectConfig, EnvConfig
from guerdon.core.errors import ConfigError, EmergencyStopError, RobotError
from guerdon.core.progress import progress_bar
from guerdon.core.types import BoolArray, Episode, Fault, display_path, with_control_mode
from guerdon.data.collect.run import CollectResult
from guerdon.data.datasets.cleaning import label_by_hold
from guerdon.data.formats.realworld_pkl import FILE_NAME, RealworldPklWriter, RecordedEpisode, read_recorded
from guerdon.envs.robot import RobotEnv
from guerdon.envs.robot.vector import LearnerNames, control_mode, make_operator, robot_config

log = logging.getLogger("guerdon")

_Step: TypeAlias = tuple[Mapping[str, Any], float, bool, Mapping[str, Any]]
"""(next_obs, env_reward, terminated, info)."""
MAX_BROKEN = 3
"""Episodes in a row that may break off with an error of the robot before recording is given up."""


class RobotCollector:
    """Counts, labels and keeps the episodes of one robot."""

    def __init__(self, env_cfg: EnvConfig, cfg: CollectConfig, num_episodes: int | None, seed: int) -> None:
        """Connect to the robot; nothing moves yet.

        Args:
            env_cfg: a section with `env_type: robot`.
            cfg: the `collect` section; `save_dir` gets the `data.pkl`.
            num_episodes: finish after so many episodes; None: when both targets are met.
            seed: of where episodes begin, and of a scripted operator.
        """
        if env_cfg.operator == "none":
            raise ConfigError("nobody drives the robot: set env.eval.operator to keyboard or spacemouse")
        self.cfg, self.num_episodes, self.seed = cfg, num_episodes, seed
        self.path = Path(cfg.save_dir) / FILE_NAME
        self.counts = {"success": 0, "failure": 0, "unfinished": 0}
        self.steps = 0
        self._count_existing()
        self.robot = robot_config(env_cfg, standalone=False)
        there = sum(self.counts.values())
        operator_seed = int(np.random.SeedSequence([seed, there]).generate_state(1)[0] >> 1)
        operator = make_operator(env_cfg, self.robot, operator_seed)
        try:
            self.env = LearnerNames(RobotEnv(self.robot, operator=operator))
        except BaseException:
            if operator is not None:
                operator.close()  # the terminal is the person's again
            raise
        self.source = with_control_mode(f"robot {self.robot.driver}", control_mode(self.robot))
        self.writer = RealworldPklWriter(self.path)

    def _count_existing(self) -> None:
        if not self.path.parent.exists():
            return
        if not self.path.exists() and not self.path.with_name(f"{FILE_NAME}.parts").exists():
            return
        if not self.cfg.resume:
            raise ConfigError(
                f"{display_path(self.path)} is there already: go on with --resume, or choose another "
                "collect.save_dir"
            )
        for item in read_recorded(self.path):
            if isinstance(item, Fault):
                raise ConfigError(f"{display_path(self.path)} cannot be added to: {item.reason}")
            self._count(item.episode)

    def _count(self, episode: Episode) -> None:
        kind = "unfinished" if not episode.complete else "success" if episode.success else "failure"
        self.counts[kind] += 1

    def progress(self) -> str:
        """Such as `success 12/50 fail 28/150`, or `success 12 fail 3, 15/20 episodes`."""
        good, bad = self.counts["success"], self.counts["failure"]
        if self.num_episodes is not None:
            return f"success {good} fail {bad}, {good + bad}/{self.num_episodes} episodes"
        return f"success {good}/{self.cfg.target_success} fail {bad}/{self.cfg.target_failure}"

    @property
    def complete(self) -> bool:
        """Whether there is enough."""
        good, bad = self.counts["success"], self.counts["failure"]
        if self.num_episodes is not None:
            return good + bad >= self.num_episodes
        return good >= self.cfg.target_success and bad >= self.cfg.target_failure

    def run(self) -> str:
        """Record until there is enough; returns why it ended. What was recorded is safe whatever happens."""
        broken = 0
        wanted = self.num_episodes or self.cfg.target_success + self.cfg.target_failure
        try:
            with progress_bar("recording", total=wanted, unit="episode") as bar:
                bar.update(self.counts["success"] + self.counts["failure"])
                while not self.complete:
                    if self.cfg.max_episodes and sum(self.counts.values()) >= self.cfg.max_episodes:
                        return f"gave up after {self.cfg.max_episodes} episodes"
                    try:
                        self._episode()
                        broken = 0
                    except EmergencyStopError as error:
                        return str(error)
                    except RobotError as error:
                        broken += 1
                        if broken >= MAX_BROKEN:
                            raise
                        log.warning("the episode broke off: %s", error)
                    log.info(self.progress())
                    bar.update(self.counts["success"] + self.counts["failure"] - bar.n)
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            self.close()
        return "targets met"

    def _episode(self) -> None:
        """One episode, on disk when it returns; also what there is of one that breaks off."""
        seed = int(np.random.SeedSequence([self.seed, 1, sum(self.counts.values())]).generate_state(1)[0])
        first_obs, _ = self.env.reset(seed=seed)
        steps: list[_Step] = []
        over = False
        rest = np.zeros(self.robot.action_size, np.float32)  # the arm stays unless somebody drives
        try:
            while not over:
                obs, env_reward, terminated, truncated, info = self.env.step(rest)
                steps.append((obs, float(env_reward), terminated, info))
                self.steps += 1
                over = terminated or truncated
        finally:
            if steps:
                recorded = self._recorded(first_obs, seed, steps, complete=over)
                self.writer.add(recorded)
                self._count(recorded.episode)

    def _recorded(
        self, first_obs: Mapping[str, Any], seed: int, steps: list[_Step], *, complete: bool
    ) -> RecordedEpisode:
        """The episode of these steps, with its labels."""
        next_obs, env_rewards, terminated, infos = zip(*steps, strict=True)

        def column(name: str, dtype: type[np.generic]) -> Any:
            return np.asarray([info[name] for info in infos], dtype)

        hold, key = self.robot.success_hold_steps, str(infos[-1]["operator_key"])
        at_target = column("at_target", np.bool_)
        ended: BoolArray = np.asarray(terminated, np.bool_)
        last = np.arange(len(infos)) == len(infos) - 1
        found = label_by_hold(at_target, hold, key)
        episode = Episode(
            frames={
                name: np.stack([obs[name] for obs in next_obs]) for name in next_obs[0] if name != "state"
            },
            labels=found.labels,
            success=found.success,
            actions=column("action_taken", np.float32),
            states=np.asarray([obs["state"] for obs in next_obs], np.float32),
            initial_state=np.asarray(first_obs["state"], np.float32),
            env_rewards=np.asarray(env_rewards, np.float32),
            terminated=ended,
            truncated=last & ~ended,
            seed=seed,
            source=self.source,
            complete=complete,
        )
        return RecordedEpisode(
            episode=episode,
            at_target=at_target,
            hold_steps=hold,
            key=key,
            # A simulated robot's time may run faster, but no camera gets older by that.
            frame_age={"oldest": column("frame_age", np.float32) / np.float32(self.robot.time_scale)},
            intervened=column("intervened", np.bool_),
        )

    def close(self) -> None:
        """Let go of the robot, then make one file of the recording."""
        try:
            self.env.close()
        finally:
            self.writer.close()


def collect_robot(
    env_cfg: EnvConfig, cfg: CollectConfig, *, num_episodes: int | None = None, seed: int = 0
) -> CollectResult:
    """Record a robot that somebody drives into `data.pkl` in `cfg.save_dir`; see `RobotCollector`."""
    if cfg.format != "realworld-pkl":
        raise ConfigError(f"a robot is recorded as realworld-pkl, not as collect.format={cfg.format}")
    started = time.perf_counter()
    collector = RobotCollector(env_cfg, cfg, num_episodes, seed)
    reason = collector.run()
    return CollectResult(
        save_dir=cfg.save_dir,
        format=cfg.format,
        num_success=collector.counts["success"],
        num_failure=collector.counts["failure"],
        target_success=None if num_episodes is not None else cfg.target_success,
        target_failure=None if num_episodes is not None else cfg.target_failure,
        num_unfinished=collector.counts["unfinished"],
        num_dropped=0,
        env_steps=collector.steps,
        seconds=time.perf_counter() - started,
        complete=collector.complete,
        reason=reason,
    )
