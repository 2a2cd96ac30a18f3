"""A reward model of DI-engine on CartPole with its own configs, run in DI-engine's own environment.

python ding_cartpole.py {gail,pwil,red} EXPERT_DATA_FOLDER SEED LIMIT_SECONDS TARGET
"""

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import torch
from easydict import EasyDict

SECTIONS = {
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


class Done(Exception):
    """The target is reached, or the time is up."""


def main() -> None:
    """Train, and print evaluations as they come; the time of evaluations is not counted."""
    name, data, seed, limit, target = sys.argv[1], Path(sys.argv[2]).resolve(), *map(float, sys.argv[3:6])
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    from ding.entry import serial_pipeline_reward_model_offpolicy
    from ding.worker import InteractionSerialEvaluator
    from dizoo.classic_control.cartpole.config.cartpole_dqn_gail_config import create_config, main_config

    begin, measuring = 0.0, 0.0
    original = InteractionSerialEvaluator.eval

    def timed(self, save_ckpt_fn=None, train_iter=-1, envstep=-1, *args, **kwargs):
        nonlocal begin, measuring
        start = time.perf_counter()
        begin = begin or start  # the clock starts with the first evaluation, when everything is set up
        _, info = original(self, save_ckpt_fn, train_iter, envstep, *args, **kwargs)
        measuring += time.perf_counter() - start
        seconds = time.perf_counter() - begin - measuring
        value = float(sum(info["eval_episode_return"]) / len(info["eval_episode_return"]))
        print(json.dumps({"env_steps": int(envstep), "seconds": seconds, "env_return": value}), flush=True)
        if value >= target or seconds > limit:
            raise Done
        return False, info

    InteractionSerialEvaluator.eval = timed
    config = deepcopy(main_config)
    config.env.stop_value = 1e9
    places = {"expert_data_path": str(data / "expert_data.pkl"), "data_path": str(data)}
    config.reward_model = EasyDict({"type": name, **places, **SECTIONS[name]})
    create = deepcopy(create_config)
    create.reward_model = EasyDict({"type": name})
    with suppress(Done):
        serial_pipeline_reward_model_offpolicy((config, create), seed=int(seed), max_env_step=10**7)


if __name__ == "__main__":
    main()
