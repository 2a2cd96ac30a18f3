"""What every run does in the same way, whatever it trains: seeds, checks, what it leaves in its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch

from guerdon.agents.agent import AnyAgent
from guerdon.agents.cloning import demonstrations
from guerdon.agents.networks import ObsSpec
from guerdon.agents.registry import agent_class
from guerdon.config import GuerdonConfig, RewardConfig
from guerdon.core.atomic import make_directory
from guerdon.core.errors import ClusterError, ConfigError, DataError, GuerdonError, WorkerLostError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line
from guerdon.monitoring.alarm_check import Alarm
from guerdon.monitoring.report import write_report
from guerdon.monitoring.video import require_av
from guerdon.rewards.image.function import FunctionScorer
from guerdon.rewards.image.hf_files import absolute_encoder
from guerdon.training.checkpoints import SavedPolicy, save_policy
from guerdon.training.evaluation import Evaluation, FilmedEpisode
from guerdon.training.films import write_films
from guerdon.training.folders import CHECKPOINTS, SUMMARY, write_summary
from guerdon.training.robots import fit_for_robots

if TYPE_CHECKING:
    from guerdon.training.trainer import EmbodiedRunner

log = logging.getLogger("guerdon")


def is_due(before: int, now: int, interval: int) -> bool:
    """Whether a multiple of `interval` lies between two steps."""
    return now // interval > before // interval


def episode_seed(seed: int, step: int) -> int:
    """Of the environments from `step` on.

    They are reset at every checkpoint, with a seed that follows from the step: a resumed run and one that was
    never interrupted then see the same episodes.
    """
    return int(np.random.SeedSequence([seed, step]).generate_state(1)[0] >> 2)


def check_settings(config: GuerdonConfig) -> None:
    """Raise if settings of a training do not fit together."""
    if config.runner.task_type == "text":
        raise ConfigError("runner.task_type is text, and text tasks have no environment to train in")
    if config.reward.cache_verdicts and config.reward.relabel_at == "sampling":
        raise ConfigError(
            "reward.cache_verdicts leaves frames out, and reward.relabel_at=sampling judges all of them "
            "later: use one of the two"
        )
    if config.runner.video_format == "mp4":
        require_av("films in MP4 (runner.video_format)")  # now, not after the training
    if config.asynchronous.enabled and agent_class(config.learner.algorithm).on_policy:
        raise ConfigError(
            "asynchronous.enabled is for off-policy agents (sac, td3, dqn): "
            f"{config.learner.algorithm} learns only from steps of its present weights"
        )


def check_finite(metrics: Mapping[str, float], step: int) -> None:
    """Raise if a metric of an iteration is not a finite number."""
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise DataError(f"training broke down at step {step}: {bad[0]} is not finite")


def check_same_agent(saved: SavedPolicy, agent: AnyAgent, place: Path | str) -> None:
    """Raise if a run would be resumed with another algorithm."""
    if type(saved.learner) is not type(agent):
        raise ConfigError(
            f"{display_path(place)} holds a policy of {type(saved.learner).__name__}, "
            f"the config asks for {type(agent).__name__}"
        )


def all_finite(state: Any) -> bool:
    """Whether all floating-point tensors in nested containers are finite."""
    if isinstance(state, torch.Tensor):
        return not state.is_floating_point() or bool(torch.isfinite(state).all())
    if isinstance(state, dict):
        return all(map(all_finite, state.values()))
    return not isinstance(state, list | tuple) or all(map(all_finite, state))


def warm_start(
    agent: AnyAgent,
    config: GuerdonConfig,
    spaces: tuple[gym.Space[Any], gym.Space[Any]],
    control_mode: str | None,
) -> None:
    """Clone the successes of `learner.warm_start.data` into the policy."""
    section = config.learner.warm_start
    shown = demonstrations(
        Path(str(section.data)),
        ObsSpec.of(spaces[0]),
        control_mode,
        intended=section.intended,
        num_episodes=section.num_episodes,
    )
    outcome = agent.clone(shown, section, config.seed)
    log.info(
        "warm start: %d demonstrated actions, loss %.3f to %.3f",
        outcome["num_transitions"],
        outcome["loss_first"],
        outcome["loss_last"],
    )


def with_note(error: GuerdonError, note: str) -> GuerdonError:
    """The same kind of error with more to say; what was lost with a worker ends the run as its cluster's."""
    kind = ClusterError if isinstance(error, WorkerLostError) else type(error)
    return kind(f"{error} {note}")


def log_alarms(alarms: Sequence[Alarm], step: int) -> list[str]:
    """Warn of the monitor's alarms; returns their names."""
    for alarm in alarms:
        values = (alarm.name, step, alarm.value, alarm.limit, alarm.remedy)
        log.warning("ALARM %s at step %d: %.3g, limit %.3g. %s", *values)
    return [alarm.name for alarm in alarms]


def progress_text(metrics: dict[str, float]) -> str:
    """What a progress bar shows of an iteration."""
    shown = {"success": "env/success_once", "fires": "reward/fire_rate", "steps/s": "time/steps_per_second"}
    return " ".join(f"{key} {metrics[name]:.3g}" for key, name in shown.items() if name in metrics)


def reward_kind(cfg: RewardConfig, learns: bool) -> str:
    """What the policy was trained on, for the summary."""
    if cfg.control != "none" and learns:
        return f"control ({cfg.control})"
    return f"learned ({cfg.combine_mode})" if learns else "env"


# Checkpoints

REWARD_MODEL_FILE = "reward_model.pt"
"""A model of the zoo beside each saved policy; `BaseRewardModel.load` reads it."""


def settled(config: GuerdonConfig) -> GuerdonConfig:
    """The config of a run: settings that a robot needs, and an encoder's path that every process finds."""
    network = config.learner.network
    network = replace(network, encoder=absolute_encoder(network.encoder))
    return fit_for_robots(replace(config, learner=replace(config.learner, network=network)))


def save_run(runner: EmbodiedRunner, folder: Path) -> Path:
    """Save the policy and all that going on needs."""
    make_directory(folder)
    if runner.online is not None:
        runner.online.model.save(folder / REWARD_MODEL_FILE)
    state = {
        "loop": runner.loop.state_dict(folder),
        "monitor": None if runner.monitor is None else runner.monitor.state_dict(),
        "alarms": list(runner.alarms),
        "stopped": runner.stopped,
        "seed": runner.config.seed,
        "evaluations": [[step, seconds, asdict(result)] for step, seconds, result in runner.evaluations],
        "refits": None if runner.refits is None else runner.refits.save(folder),
        "reward_function": runner.rewards.name if isinstance(runner.rewards, FunctionScorer) else None,
    }
    config, mode = runner.config, runner.envs.facts.control_mode
    steps, about = runner.loop.env_steps, (config.learner, config.env.eval, runner.spaces)
    return save_policy(folder, runner.learner, *about, steps, state, control_mode=mode)


def take_up(runner: EmbodiedRunner, saved: SavedPolicy) -> None:
    """Go on from the state of a run; the learner has its own already."""
    state = saved.state
    function = state.get("reward_function")  # the name of one that is the user's own
    if function is not None and not isinstance(runner.rewards, FunctionScorer):
        given = "is missing" if runner.rewards is None and runner.online is None else "is another one"
        raise ConfigError(
            f"reward {given}: the agent was trained on the function {one_line(str(function))!r}, and "
            "functions are not saved. Give it again: gd.load_agent(path, env, reward=function)"
        )
    runner.loop.load_state_dict(state["loop"], saved.folder)
    runner.alarms = list(state["alarms"])
    runner.stopped = _still_stopped(runner.config, state.get("stopped"), saved.folder)
    runner.evaluations = [
        (int(step), float(seconds), Evaluation(**result))
        for step, seconds, result in state.get("evaluations", [])  # older runs have none
    ]
    runner.seconds = runner.evaluations[-1][1] if runner.evaluations else 0.0
    if runner.refits is not None:
        runner.refits.load(state.get("refits"), saved.folder)
        runner.renew_monitor()
    elif state.get("refits") is not None and state["refits"]["count"]:
        log.warning("the reward model had been refitted; reward.refit_interval=0 uses the first one")
    if runner.monitor is not None and state["monitor"] is not None:
        # All episodes are reset, perhaps in another number of environments: none is carried on.
        runner.monitor.load_state_dict({**state["monitor"], "running": None})


def _still_stopped(config: GuerdonConfig, reason: Any, checkpoint: Path) -> str | None:
    """Why a resumed run has no more to train: it was stopped, and then interrupted before it came to its end.

    A run that did come to its end, or one whose settings no longer ask for the stop, goes on.
    """
    run = checkpoint.parent.parent
    if reason is None or (checkpoint.parent.name == CHECKPOINTS and (run / SUMMARY).is_file()):
        return None
    text = one_line(str(reason))
    alarm = text.startswith("alarm")
    if not (config.monitor.action == "stop" if alarm else config.learner.stop_return is not None):
        return None
    setting = "monitor.action=warn" if alarm else "learner.stop_return=null"
    log.info("the run had been stopped (%s): it is evaluated and ends; %s would go on", text, setting)
    return text


# Files


def finish_run(
    runner: EmbodiedRunner,
    result: Evaluation,
    films: list[FilmedEpisode],
    stopped: str | None,
    seconds: float,
) -> dict[str, Any]:
    """Write films, `summary.json` and `report.html` of a run that is over, for its trackers too."""
    config, folder, steps = runner.config, runner.folder, runner.loop.env_steps
    if runner.rewards is not None:
        write_films(folder, films, runner.rewards, config.runner.video_format)
    learns = runner.rewards is not None or runner.online is not None
    summary = {
        "algorithm": config.learner.algorithm,
        "env": config.env.train.id,
        "reward": reward_kind(config.reward, learns),
        "success_rate": result.success_once,
        **asdict(result),
        "env_steps": steps,
        "stopped": stopped,
        "alarms": runner.alarms,
        "refits": 0 if runner.refits is None else runner.refits.count,
        "restarts": sum(runner.engine.restarts.values()),
        "checkpoint": str(folder / "checkpoints" / f"step_{steps}"),
        "seconds": round(seconds, 2),
    }
    write_summary(folder, summary)
    write_report(folder)
    runner.trackers.finish()
    return summary
