"""The files of the package that a frame and its reward pass between the env's step and the loss.

    python scripts/reward_path_files.py [--write docs/architecture.md]

One iteration of small runs is traced: every function of the package that is called from the first step of
the environments to the end of the update. Left out are `core/` and `config/` (used everywhere), environments
(before the step), and networks and fast scoring graphs (after the frame has become numbers).
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
from guerdon.training.trainer import EmbodiedRunner

PACKAGE = Path(guerdon.__file__).parent
LEFT_OUT = (
    "core/",
    "config/",
    "envs/",
    "agents/networks.py",
    "agents/policies.py",
    "agents/flat.py",
    "agents/adam.py",
    "rewards/zoo/networks.py",
    "rewards/image/accelerate.py",
    "rewards/image/base.py",
    "rewards/image/classifier.py",
    "rewards/image/encoders.py",
    "rewards/image/models.py",
    "rewards/image/packed.py",
    "rewards/image/resnet.py",
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
    "RND with PPO": ["reward_model.type=rnd"],
}


class Trace:
    """Collects the files of the package whose functions are called while it is active, in all threads."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.active = False

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        name = frame.f_code.co_filename
        if self.active and event == "call" and name.startswith(str(PACKAGE)):
            self.files.add(str(Path(name).relative_to(PACKAGE)))


def small_model(folder: Path) -> Path:
    """A reward model with random weights."""
    torch.manual_seed(0)
    size = (3, *SIZE)
    model = build_model(RewardModelConfig(arch="resnet10", width=8, image_size=size, hidden_dim=8)).eval()
    env = TabletopVectorEnv(8, image_size=SIZE, autoreset_mode="Disabled")
    env.reset(seed=0)
    with torch.no_grad():
        prob = torch.sigmoid(model(env.render_frames())).numpy()
    contract = Contract.of(model, frame_sizes={"base_camera": (*SIZE, 3)})
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
        trace.active = True
        runner.loop.advance(0.0)
        trace.active = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        runner.envs.close()
        runner.engine.close()
    return sorted(name for name in trace.files if not name.startswith(LEFT_OUT))


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
