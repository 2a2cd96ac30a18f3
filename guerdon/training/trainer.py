"""`EmbodiedRunner`: train a policy on the learned reward, measure it by the environment's own success."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from guerdon.agents.agent import AnyAgent
from guerdon.agents.registry import agent_class, make_agent
from guerdon.config import GuerdonConfig
from guerdon.config.unused import log_without_effect
from guerdon.core.atomic import make_directory
from guerdon.core.errors import (
    ConfigError,
    GuerdonError,
    RunInterrupted,
)
from guerdon.core.interrupts import Interrupts
from guerdon.core.progress import progress_bar
from guerdon.core.types import display_path
from guerdon.distributed import Engine, make_engine
from guerdon.fit.logs import MetricLog
from guerdon.monitoring.monitor import RewardMonitor
from guerdon.monitoring.report import write_report
from guerdon.rewards.image.scorer import RewardManager, available_device
from guerdon.rewards.image.worker import ImageRewardWorker
from guerdon.training.acting import PolicySpec
from guerdon.training.asynchronous import AsynchronousLoop
from guerdon.training.checkpoints import (
    SavedPolicy,
    find_sound_policy,
    load_policy,
    readable_state,
    save_policy,
)
from guerdon.training.env_worker import EnvWorker, LocalEnvs
from guerdon.training.env_workers import EnvWorkers
from guerdon.training.evaluation import Evaluation, FilmedEpisode, evaluate
from guerdon.training.loop import Iteration, Loop
from guerdon.training.off_policy import OffPolicyLoop
from guerdon.training.on_policy import OnPolicyLoop
from guerdon.training.online_reward import OnlineReward
from guerdon.training.refits import Refits
from guerdon.training.reward_workers import RewardWorkers
from guerdon.training.robots import fit_for_robots
from guerdon.training.runs import (
    all_finite,
    check_finite,
    check_same_agent,
    check_settings,
    episode_seed,
    is_due,
    progress_text,
    warm_start,
    with_note,
    write_config,
    write_films,
    write_summary,
)

log = logging.getLogger("guerdon")

NUM_FILMS = 4
HURRY_SECONDS = 5.0
"""How long workers may take to finish writing when a run breaks off."""


class EmbodiedRunner:
    """Calls the workers in order: rollout, reward model, update; evaluates, saves, watches and reports."""

    def __init__(self, config: GuerdonConfig, folder: Path | str) -> None:
        """Make environments, learner and reward worker; what does not fit together is refused here.

        Args:
            config: the whole tree; each part gets its own section.
            folder: the run's folder.
        """
        if not isinstance(config, GuerdonConfig):
            raise ConfigError(f"EmbodiedRunner takes a GuerdonConfig (see load_config), not {config!r:.80}")
        log_without_effect(config)
        self.config, self.folder = config, Path(folder)
        check_settings(config)
        config = self.config = fit_for_robots(config)
        if config.learner.num_threads is not None:
            torch.set_num_threads(config.learner.num_threads)
        self.alarms: list[str] = []
        self.interrupts = Interrupts()
        threads = config.asynchronous.enabled
        self.engine: Engine = make_engine(config.engine, config.cluster, threads=threads)
        try:
            self._make_workers()
            self.monitor = self._make_monitor()
            self.refits = self._make_refits()
        except BaseException:
            if hasattr(self, "envs"):
                self.envs.close(HURRY_SECONDS)  # a robot is let go of
            self.engine.close()
            raise

    def _make_workers(self) -> None:
        """Reward model and environments, here or in workers, the learner, and the loop that joins them."""
        config = self.config
        # Workers that share this process and its pace are called directly.
        direct = self.engine.shares_memory and not config.asynchronous.enabled
        self.rewards: RewardManager | RewardWorkers | None = None
        asked: dict[str, Any] = {
            "num_steps": self._steps_at_a_time(),
            "keep_next_obs": bool(config.reward_model),
        }
        if config.reward.use_reward_model:
            if direct:
                self.rewards = RewardManager(config.reward, device=available_device())
            else:
                self.rewards = RewardWorkers(self.engine, config.reward)
            facts = self.rewards.facts
            asked |= {
                "cameras": facts.image_keys,
                "num_frames": facts.contract.num_frames,
                "only_at_rest": facts.contract.only_at_rest,
            }
        sections = config.env.train, config.reward, config.collect
        self.envs: LocalEnvs | EnvWorkers
        if direct:
            self.envs = LocalEnvs(EnvWorker(*sections, **asked))
        else:
            self.envs = EnvWorkers(self.engine, *sections, seed=config.seed, **asked)
        if self.rewards is not None:
            self.rewards.facts.contract.check_frames(self.envs.facts.first_frames)
        self.spaces = self.envs.facts.spaces
        self.learner: AnyAgent = make_agent(config.learner, *self.spaces, config.seed)
        self.online = OnlineReward.of(config, self.spaces, self.learner)
        self.loop: Loop = self._make_loop()
        self.engine.log_notices()

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
            self.learner, self.envs, self.rewards, config.reward, self.spaces, config.seed, self.online,
        )  # fmt: skip
        if config.asynchronous.enabled:
            return AsynchronousLoop(self.engine, config.learner, config.asynchronous, *parts)
        return OffPolicyLoop(*parts)

    @property
    def env_worker(self) -> EnvWorker:
        """The env worker, where it is in this process."""
        return self.envs.local

    @property
    def reward_worker(self) -> RewardManager | ImageRewardWorker | None:
        """Who scores frames, where that is in this process."""
        return self.rewards.local if isinstance(self.rewards, RewardWorkers) else self.rewards

    def _make_monitor(self) -> RewardMonitor | None:
        if self.rewards is None or self.config.monitor.action == "off":
            return None
        return RewardMonitor(
            self.config.monitor,
            self.rewards.facts.contract,
            self.rewards.facts.threshold,
            self.folder,
            knows_success=self.loop.knows_success(),
        )

    def _make_refits(self) -> Refits | None:
        if self.rewards is None or not self.config.reward.refit_interval:
            return None
        return Refits(self.config, self.rewards, self.folder, knows_success=self.loop.knows_success())

    # A run

    def run(self) -> dict[str, Any]:
        """Train to the end; returns what `summary.json` holds."""
        started = time.perf_counter()
        write_config(self.folder, self.config)
        cfg = self.config.learner
        stopped: str | None = None
        boards = "tensorboard" in self.config.runner.logger.backends
        try:
            resumed = self._begin()
            resume_step = self.loop.env_steps if resumed else None
            with (
                self.interrupts,
                MetricLog(self.folder, tensorboard=boards, resume_step=resume_step) as logs,
                progress_bar("training", total=cfg.total_steps, unit="step") as bar,
            ):
                bar.update(self.loop.env_steps)
                try:
                    stopped = self._train(logs, bar)
                    if self.config.env.train.env_type == "robot":
                        self.envs.close()  # an arm and its cameras can be held by one at a time
                    result, films = self._evaluate(cfg.eval_episodes, NUM_FILMS)
                except KeyboardInterrupt as interrupt:
                    self._keep_interrupted(interrupt)
                logs.write(self.loop.env_steps, result.metrics())
            self.envs.close()
            self.engine.log_notices()
            return self._finish(result, films, stopped, time.perf_counter() - started)
        except BaseException:
            self.envs.close(HURRY_SECONDS)  # what was collected so far is written
            raise
        finally:
            self.engine.close()

    def _train(self, logs: MetricLog, bar: Any) -> str | None:
        """Iterations to the end; returns why they ended earlier, if they did."""
        cfg, stopped = self.config.learner, None
        waits = self.config.env.train.env_type != "robot"  # an arm is stopped at once
        while self.loop.env_steps < cfg.total_steps and stopped is None:
            before = self.loop.env_steps
            with self.interrupts.deferred(waits):
                iteration = self._advance(before / cfg.total_steps)
                step = self.loop.env_steps
                stopped = self._watch(step, iteration)
            metrics = dict(iteration.metrics)
            try:
                metrics |= self._refit(before, step, iteration)
                metrics |= self.monitor.metrics() if self.monitor else {}
                if is_due(before, step, cfg.eval_interval) and step < cfg.total_steps:
                    self.interrupts.check()
                    metrics |= self._evaluate(cfg.eval_episodes)[0].metrics()
            finally:  # also after Ctrl-C, which does not wait for a refit or an evaluation
                logs.write(step, metrics)
            bar.update(step - before)
            bar.set_postfix_str(progress_text(metrics), refresh=False)
            if is_due(before, step, cfg.save_interval) or step >= cfg.total_steps or stopped:
                self._save(step)
            self.interrupts.check()
        return stopped

    def _keep_interrupted(self, interrupt: KeyboardInterrupt) -> NoReturn:
        """Save what there is after the first Ctrl-C; a second one does not wait for that."""
        step = self.loop.env_steps
        if self.interrupts.count > 1 or not step:
            raise interrupt
        if self.config.env.train.env_type == "robot":
            self.envs.close(HURRY_SECONDS)  # the arm comes first
        kept = display_path(self._write_checkpoint(step))
        raise RunInterrupted(step, kept, "runner.resume_dir") from None

    def _begin(self) -> bool:
        """Warm start or resume; returns whether a run is resumed."""
        place = self.config.runner.resume_dir
        if place is not None:
            saved = load_policy(find_sound_policy(Path(place), "runner.resume_dir"))
            check_same_agent(saved, self.learner, place)
            saved.check_fits(self.spaces, self.envs.facts.control_mode)
            self.learner.load_state_dict(saved.learner.state_dict())
            with readable_state(saved.folder):
                self._take_up(saved)
            log.info("resumed from %s at step %d", display_path(place), saved.step)
        else:
            if self.config.learner.warm_start.data is not None:
                warm_start(self.learner, self.config, self.spaces, self.envs.facts.control_mode)
            if self.online is not None:
                self.online.pretrain()
        self.learner.check_reference()
        self.loop.reset(episode_seed(self.config.seed, self.loop.env_steps))
        return place is not None

    def _take_up(self, saved: SavedPolicy) -> None:
        """Go on from the state of a run."""
        self.loop.load_state_dict(saved.state["loop"], saved.folder)
        self.alarms = list(saved.state["alarms"])
        if self.refits is not None:
            self.refits.load(saved.state.get("refits"), saved.folder)
            self._renew_monitor()
        elif saved.state.get("refits") is not None and saved.state["refits"]["count"]:
            log.warning("the reward model had been refitted; reward.refit_interval=0 uses the first one")
        if self.monitor is not None and saved.state["monitor"] is not None:
            # All episodes are reset, perhaps in another number of environments: none is carried on.
            self.monitor.load_state_dict({**saved.state["monitor"], "running": None})

    def _advance(self, progress: float) -> Iteration:
        """One iteration; if it fails, the last good state is saved first."""
        try:
            iteration = self.loop.advance(progress)
        except GuerdonError as error:
            if all_finite(self.learner.state_dict()):
                step = self.loop.env_steps
                kept = display_path(self._write_checkpoint(step))
                raise with_note(error, f"(step {step}; the last good state is {kept})") from error
            raise
        self.engine.log_notices(wait=not self.config.asynchronous.enabled)  # busy workers are not waited for
        check_finite(iteration.metrics, self.loop.env_steps)
        return iteration

    def _watch(self, step: int, iteration: Iteration) -> str | None:
        """Look for signs of reward hacking; returns why to stop, if that is what the config wants."""
        if self.monitor is None or iteration.watched is None:
            return None
        alarms = self.monitor.observe(step, iteration.watched)
        self.alarms += [alarm.name for alarm in alarms]
        for alarm in alarms:
            values = (alarm.name, step, alarm.value, alarm.limit, alarm.remedy)
            log.warning("ALARM %s at step %d: %.3g, limit %.3g. %s", *values)
        if alarms and self.config.monitor.action == "stop":
            return f"alarm: {alarms[0].name}"
        return None

    def _refit(self, before: int, step: int, iteration: Iteration) -> dict[str, float]:
        """Keep frames for refits and refit when it is time; returns what is to be logged."""
        if self.refits is None:
            return {}
        self.refits.add(step, iteration)
        due = is_due(before, step, self.config.reward.refit_interval) and not self.interrupts.requested
        if due and self.refits.refit(step):
            self._renew_monitor()
            if self.config.reward.cache_verdicts:  # those of the model before hold no longer
                self.loop.reset(episode_seed(self.config.seed, step))
        return self.refits.metrics()

    def _renew_monitor(self) -> None:
        """Watch for what the present model promises; counts start again, but that of alarms."""
        if self.monitor is not None and self.refits is not None and self.refits.count:
            raised = self.monitor.num_alarms
            self.monitor = self._make_monitor()
            assert self.monitor is not None
            self.monitor.num_alarms = raised

    def _evaluate(self, episodes: int, num_films: int = 0) -> tuple[Evaluation, list[FilmedEpisode]]:
        cameras = () if self.rewards is None else self.rewards.facts.image_keys
        result, films = evaluate(
            lambda obs: self.learner.act(obs, deterministic=True),
            self.config.env.eval,
            episodes=episodes,
            seed=self.config.seed + 1_000_003,
            cameras=cameras,
            num_films=num_films if cameras else 0,
        )
        return result, films

    def _save(self, step: int) -> Path:
        """Save everything, then begin new episodes, as a resumed run does."""
        folder = self._write_checkpoint(step)
        self.loop.reset(episode_seed(self.config.seed, step))
        return folder

    def _write_checkpoint(self, step: int) -> Path:
        folder = self.folder / "checkpoints" / f"step_{step}"
        make_directory(folder)
        state = {
            "loop": self.loop.state_dict(folder),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
            "alarms": list(self.alarms),
            "refits": None if self.refits is None else self.refits.save(folder),
        }
        save_policy(
            folder,
            self.learner,
            self.config.learner,
            self.config.env.eval,
            self.spaces,
            step,
            state,
            control_mode=self.envs.facts.control_mode,
        )
        return folder

    # What is left behind

    def _finish(
        self, result: Evaluation, films: list[FilmedEpisode], stopped: str | None, seconds: float
    ) -> dict[str, Any]:
        if self.rewards is not None:
            write_films(self.folder, films, self.rewards)
        section, learns = self.config.reward, self.rewards is not None or self.online is not None
        summary = {
            "algorithm": self.config.learner.algorithm,
            "env": self.config.env.train.id,
            "reward": f"learned ({section.combine_mode})" if learns else "env",
            "success_rate": result.success_once,
            **asdict(result),
            "env_steps": self.loop.env_steps,
            "stopped": stopped,
            "alarms": self.alarms,
            "refits": 0 if self.refits is None else self.refits.count,
            "restarts": sum(self.engine.restarts.values()),
            "checkpoint": str(self.folder / "checkpoints" / f"step_{self.loop.env_steps}"),
            "seconds": round(seconds, 2),
        }
        write_summary(self.folder, summary)
        write_report(self.folder)
        return summary
