"""The files of the package that a frame and its reward pass between the env's step and the loss.

    python scripts/reward_path_files.py [--write docs/architecture.md]

One iteration of small runs is traced: every function of the package that is called from the first step of
the environments to the end of the last update; what logs and watches comes after it. Left out are `core/` and
`config/` (used everywhere), environments and what reads their observations (before the step), and networks
and fast scoring graphs (after the frame has become numbers). On Ray, `distributed/ray_actors.py` is in the
place of `distributed/local_engine.py`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import guerdon
from guerdon.config import RewardModelConfig, load_config
from guerdon.envs import TabletopVectorEnv
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.rewards import StepBatch, write_demonstrations
from guerdon.training.trainer import EmbodiedRunner

PACKAGE = Path(guerdon.__file__).parent
LEFT_OUT = (
    "core/",
    "config/",
    "envs/",
    "agents/networks.py",
    "agents/policies.py",
    "agents/flat.py",
    "agents/actor_critic.py",
    "rewards/zoo/networks.py",
    "rewards/image/accelerate.py",
    "rewards/image/base.py",
    "rewards/image/encoders.py",
    "rewards/image/models.py",
    "rewards/image/steps.py",
)
SIZE = (24, 24)
SMALL = [
    "env.train.num_envs=4",
    "env.eval.num_envs=4",
    *(f"+env.{side}.init_params.image_size=[24,24]" for side in ("train", "eval")),
    "learner.network.hidden=[16]",
    "learner.ppo.num_steps=16",
    "learner.ppo.minibatch_size=32",
    "monitor.action=off",
    "runner.logger.backends=[]",
]
LEARNED = ["reward.use_reward_model=true", "reward.model.checkpoint_path={model}"]
SAC = [
    "learner.algorithm=sac",
    "learner.sac.learning_starts=16",
    "learner.sac.batch_size=16",
    "learner.sac.buffer_size=1000",
    "learner.sac.updates_per_step=0.05",
]
RUNS = {
    "PPO": LEARNED,
    "SAC and RLPD": [*LEARNED, *SAC],
    "SAC, asynchronous": [*LEARNED, *SAC, "asynchronous.enabled=true"],
    "GAIL with PPO": ["reward_model.type=gail", "reward_model.data_path={model}/../demos.safetensors"],
}


class Trace:
    """Notes when functions of each file of the package are first called, in all threads."""

    def __init__(self) -> None:
        self.first_call: dict[str, int] = {}
        self.calls, self.last_update = 0, 0
        self.active = False

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        name = frame.f_code.co_filename
        if self.active and event == "call" and name.startswith(str(PACKAGE)):
            self.calls += 1
            self.first_call.setdefault(str(Path(name).relative_to(PACKAGE)), self.calls)

    def watch_updates(self, learner: Any) -> None:
        """Note when an update of the agent ends."""
        update = learner.update

        def noted(*args: Any) -> Any:
            result = update(*args)
            self.last_update = self.calls
            return result

        learner.update = noted


def small_model(folder: Path) -> Path:
    """A reward model with random weights, and demonstrations beside it."""
    torch.manual_seed(0)
    size = (3, *SIZE)
    model = build_model(RewardModelConfig(arch="resnet10", width=8, image_size=size, hidden_dim=8)).eval()
    env = TabletopVectorEnv(8, image_size=SIZE, autoreset_mode="Disabled")
    env.reset(seed=0)
    with torch.no_grad():
        prob = torch.sigmoid(model(env.render_frames())).numpy()
    contract = Contract.of(model, frame_sizes={"base_camera": (*SIZE, 3)})
    steps = [env.step(env.action_space.sample()) for _ in range(2)]
    states = torch.from_numpy(np.stack([np.asarray(obs, np.float32) for obs, *_ in steps]))
    ends = torch.tensor([[False] * 8, [True] * 8])
    shown = StepBatch(
        obs=states,
        actions=torch.zeros(2, 8, 4),
        next_obs=states,
        env_rewards=torch.zeros(2, 8),
        terminated=torch.zeros_like(ends),
        truncated=ends,
    )
    write_demonstrations(folder / "demos.safetensors", shown.episodes())
    contract = replace(contract, threshold=float(np.median(prob)), data_hash="none")
    return save_checkpoint(folder / "model", model, contract)


def files_of(settings: list[str], work: Path) -> list[str]:
    """The files of one iteration; the first one, which also checks the path, is not traced."""
    config = load_config("train", [item.format(model=work / "model") for item in [*SMALL, *settings]])
    trace = Trace()
    threading.setprofile(trace)  # also of threads that the run starts
    sys.setprofile(trace)
    runner = EmbodiedRunner(config, work / "run")
    try:
        runner.loop.reset(0)
        runner.loop.advance(0.0)
        trace.watch_updates(runner.learner)
        trace.active = True
        runner.loop.advance(0.0)
        trace.active = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        runner.envs.close()
        runner.engine.close()
    passed = [name for name, first in trace.first_call.items() if first <= trace.last_update]
    return sorted(name for name in passed if not name.startswith(LEFT_OUT))


def lists() -> dict[str, list[str]]:
    """Of all runs."""
    with tempfile.TemporaryDirectory() as folder:
        small_model(Path(folder))
        return {name: files_of(settings, Path(folder)) for name, settings in RUNS.items()}


def table(found: dict[str, list[str]]) -> str:
    """As it stands in the docs."""
    rows = ["| run | files | |", "|---|---|---|"]
    for name, files in found.items():
        rows.append(f"| {name} | {len(files)} | {', '.join(f'`{item}`' for item in files)} |")
    return "\n".join(rows)


def main() -> int:
    """The command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--write", type=Path, help="put the table between the marks <!-- files --> of a page")
    arguments = parser.parse_args()
    text = table(lists())
    print(text)
    if arguments.write is not None:
        page = arguments.write.read_text()
        marked = re.sub(
            r"(<!-- files -->\n).*?(<!-- /files -->)", lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.S
        )
        arguments.write.write_text(marked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
