"""A reward model of DI-engine on CartPole with its own configs, run in DI-engine's own environment.

python ding_cartpole.py {gail,pwil,red,gcl,trex,drex} DATA_FOLDER SEED LIMIT_SECONDS TARGET

It gets the data that ours get: `demonstrations.npz` (gail, pwil, red, gcl), `ranked.npz` (trex), `poor.npz`
and `noisy.npz` (drex). Two of its ways to data are not used:
- guided cost collects from an expert's policy at each iteration. The demonstrations are given in that place,
  so the expert's steps cost it nothing.
- D-REX: this release neither clones nor adds noise. It gets noisy episodes of our clone, for nothing. Of its
  config the collector of whole episodes is left out, which the training loop cannot learn from, and the
  environments are in one process.

Seconds are those of fitting the reward before the policy (trex, drex), then of everything from the first
evaluation on but evaluations. What is read and built before, and the accuracy that T-REX tells after its fit,
do not count.
"""

import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from easydict import EasyDict

SECTIONS: dict[str, dict[str, Any]] = {
    "gail": {
        "input_size": 5,
        "hidden_size": 64,
        "batch_size": 64,
        "learning_rate": 1e-3,
        "update_per_collect": 100,
    },
    "pwil": {"s_size": 4, "a_size": 2, "sample_size": 500},
    "red": {
        "sample_size": 1000,
        "input_size": 5,
        "hidden_size": 64,
        "update_per_collect": 200,
        "batch_size": 32,
    },
}
FOREVER = 10**7
"""Environment steps; the time ends a run."""


class Done(Exception):
    """The target is reached, or the time is up."""


class Clock:
    """Counts the seconds of training, and prints evaluations as they come."""

    def __init__(self, limit: float, target: float) -> None:
        self.limit, self.target = limit, target
        self.begin, self.fitting, self.measuring = 0.0, 0.0, 0.0

    def fit(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """A method whose time counts, though it runs before the clock starts."""

        def timed(model: Any) -> None:
            start = time.perf_counter()
            original(model)
            self.fitting += time.perf_counter() - start

        return timed

    def evaluation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method whose time does not count; at its first call all is set up, and the clock starts."""

        def timed(
            evaluator: Any,
            save_ckpt_fn: Any = None,
            train_iter: int = -1,
            envstep: int = -1,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[bool, Any]:
            start = time.perf_counter()
            self.begin = self.begin or start
            _, info = original(evaluator, save_ckpt_fn, train_iter, envstep, *args, **kwargs)
            now = time.perf_counter()
            self.measuring += now - start
            seconds = self.fitting + now - self.begin - self.measuring
            value = float(sum(info["eval_episode_return"]) / len(info["eval_episode_return"]))
            reported = {"env_steps": int(envstep), "seconds": seconds, "env_return": value}
            print(json.dumps(reported), flush=True)
            if value >= self.target or seconds > self.limit:
                raise Done
            return False, info

        return timed


def episodes(path: Path) -> list[dict[str, np.ndarray]]:
    """Episodes of a file: each part [T, ...]."""
    data = np.load(path)
    ends = np.cumsum(data["lengths"])[:-1]
    parts = {
        name: np.split(data[name], ends) for name in ("obs", "actions", "next_obs", "env_rewards", "done")
    }
    return [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]


def items(episode: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """An episode as DI-engine keeps it."""
    return [
        {
            "obs": torch.from_numpy(episode["obs"][row]),
            "action": torch.from_numpy(episode["actions"][row : row + 1]),
            "next_obs": torch.from_numpy(episode["next_obs"][row]),
            "reward": torch.from_numpy(episode["env_rewards"][row : row + 1]),
            "done": bool(episode["done"][row]),
        }
        for row in range(len(episode["obs"]))
    ]


def all_items(path: Path) -> list[dict[str, Any]]:
    """All steps of a file."""
    return [item for each in episodes(path) for item in items(each)]


def write(path: Path, content: object) -> None:
    """A file of DI-engine's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(content, file)


def imitate(name: str, data: Path, seed: int) -> None:
    """GAIL, PWIL and RED with the DQN of its GAIL config."""
    from ding.entry import serial_pipeline_reward_model_offpolicy
    from dizoo.classic_control.cartpole.config.cartpole_dqn_gail_config import create_config, main_config

    shown = Path("shown").resolve()
    write(shown / "expert_data.pkl", all_items(data / "demonstrations.npz"))
    config, create = deepcopy(main_config), deepcopy(create_config)
    config.env.stop_value = 1e9
    places = {"expert_data_path": str(shown / "expert_data.pkl"), "data_path": str(shown)}
    config.reward_model = EasyDict({"type": name, **places, **SECTIONS[name]})
    create.reward_model = EasyDict({"type": name})
    serial_pipeline_reward_model_offpolicy((config, create), seed=seed, max_env_step=FOREVER)


class Shown:
    """Stands where guided cost collects from an expert policy: gives steps of the demonstrations."""

    def __init__(self, collector: Any, rows: list[dict[str, Any]], count: int, seed: int) -> None:
        example = collector.collect()[0]  # what else a step has is not looked at, but has to be there
        self.rows = [
            {**example, **row, "action": row["action"].to(example["action"]).view(example["action"].shape)}
            for row in rows
        ]
        self.count, self.envstep, self.rng = count, 0, np.random.default_rng(seed)

    def collect(self, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """As many as an expert would be asked for."""
        return [dict(self.rows[row]) for row in self.rng.integers(len(self.rows), size=self.count)]


def guided_cost(name: str, data: Path, seed: int) -> None:
    """Guided cost with its PPO."""
    from ding.entry import serial_entry_guided_cost as entry
    from ding.model import VAC
    from dizoo.classic_control.cartpole.config.cartpole_gcl_config import create_config, main_config

    config = deepcopy(main_config)
    config.env.stop_value = 1e9
    config.policy.collect.model_path = "unused.pth.tar"  # loaded for the expert, which is not asked
    torch.save({"model": VAC(**config.policy.model).state_dict()}, config.policy.collect.model_path)
    rows = all_items(data / "demonstrations.npz")
    make = entry.create_serial_collector
    made: list[Any] = []

    def first_policy_then_expert(*args: Any, **kwargs: Any) -> Any:
        collector = make(*args, **kwargs)
        made.append(Shown(collector, rows, config.policy.collect.n_sample, seed) if made else collector)
        return made[-1]

    entry.create_serial_collector = first_policy_then_expert
    entry.serial_pipeline_guided_cost((config, deepcopy(create_config)), seed=seed, max_env_step=FOREVER)


def rankings(name: str, data: Path, seed: int) -> None:
    """T-REX and D-REX with their DQN."""
    from ding.entry import serial_pipeline_preference_based_irl

    module = import_module(f"dizoo.classic_control.cartpole.config.cartpole_{name}_dqn_config")
    config, create = deepcopy(module.main_config), deepcopy(module.create_config)
    config.env.stop_value = 1e9
    folder = Path(config.exp_name)
    if name == "trex":  # groups from worst to best, of one episode each
        ranked = sorted(episodes(data / "ranked.npz"), key=lambda each: each["env_rewards"].sum())
        groups = [[each] for each in ranked]
    else:  # from most to least noise
        noisy, noise = episodes(data / "noisy.npz"), np.load(data / "noisy.npz")["noise"]
        levels = sorted(set(noise), reverse=True)
        groups = [
            [each for each, mine in zip(noisy, noise, strict=True) if mine == level] for level in levels
        ]
        write(folder / "suboptimal_data.pkl", [items(each) for each in episodes(data / "poor.npz")])
        config.reward_model.offline_data_path = str(folder)
        config.env.pop("manager"), config.policy.collect.pop("collector"), create.pop("collector")
        create.env_manager.type = "base"
    write(folder / "episodes_data.pkl", [[list(each["obs"]) for each in group] for group in groups])
    returns = [[float(each["env_rewards"].sum()) for each in group] for group in groups]
    write(folder / "learning_returns.pkl", returns)
    serial_pipeline_preference_based_irl((config, create), seed=seed, max_env_step=FOREVER)


def main() -> None:
    """Train until the target is reached or the time is up."""
    name, data, seed, limit, target = sys.argv[1], Path(sys.argv[2]).resolve(), *map(float, sys.argv[3:6])
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    from ding.reward_model.trex_reward_model import TrexRewardModel
    from ding.worker import InteractionSerialEvaluator

    clock = Clock(limit, target)
    InteractionSerialEvaluator.eval = clock.evaluation(InteractionSerialEvaluator.eval)
    TrexRewardModel._train = clock.fit(TrexRewardModel._train)  # D-REX has the same one
    run = {"gcl": guided_cost, "trex": rankings, "drex": rankings}.get(name, imitate)
    with suppress(Done):
        run(name, data, int(seed))


if __name__ == "__main__":
    main()
