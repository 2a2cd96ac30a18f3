"""Short training runs for tests: settings on top of the fixture `settings`, and what they leave."""

import json

from guerdon.config import CollectConfig, EnvConfig, load_config
from guerdon.data.collect.run import collect
from guerdon.training.trainer import EmbodiedRunner

SAC = [
    "learner.algorithm=sac",
    "learner.sac.learning_starts=200",
    "learner.sac.batch_size=32",
    "learner.sac.updates_per_step=0.1",
    "learner.sac.buffer_size=2000",
    "learner.total_steps=1000",
    "learner.save_interval=512",
]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(entry):
    return {name: value for name, value in entry.items() if not name.startswith("time/")}


def make_runner(settings, tmp_path, more=()):
    """A runner that has not begun."""
    (tmp_path / "run").mkdir(exist_ok=True)
    return EmbodiedRunner(load_config("train", [*settings, *more]), tmp_path / "run")


def run_with(settings, tmp_path, more=()):
    return make_runner(settings, tmp_path, more).run()


def demonstrate(folder, episodes=20, format="native"):
    """Successes of the expert in episodes of 50 steps."""
    env = EnvConfig(num_envs=8, init_params={"image_size": [24, 24]})
    demos = CollectConfig(
        save_dir=str(folder),
        policy="scripted",
        policy_noise=0.1,
        target_success=episodes,
        target_failure=0,
        format=format,
    )
    assert collect(env, demos, seed=0).complete
    return folder
