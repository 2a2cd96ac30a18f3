"""A plugin package is installed with pip and used from the command line: no file of ours is touched."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import guerdon
from guerdon.core.types import Episode
from guerdon.data.formats import get_format
from tests.commands import CommandServer

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-guerdon"
version = "1.0"

[project.entry-points."guerdon.reward_models"]
acme_upright = "acme_guerdon.reward:Upright"
[project.entry-points."guerdon.agents"]
acme_ppo = "acme_guerdon.agent:AcmePPO"
[project.entry-points."guerdon.formats"]
acme-lines = "acme_guerdon.lines:Lines"
acme-broken = "acme_guerdon.absent:Nothing"
[project.entry-points."guerdon.envs"]
acme_sim = "acme_guerdon.env:make"
"""
MODULES = {
    "__init__": "",
    "reward": '''
        from guerdon.rewards import BaseRewardModel

        class Upright(BaseRewardModel):
            """Rewards a pole that stands upright."""

            def __init__(self, config, device, tb_logger):
                pass

            def collect_data(self, data):
                pass

            def clear_data(self, iter):
                pass

            def train(self):
                pass

            def estimate(self, data):
                return [{**item, "reward": -item["obs"][2].abs()} for item in data]
    ''',
    "agent": '''
        from guerdon.agents.ppo import PPO

        class AcmePPO(PPO):
            """PPO under another name."""

            name = "acme_ppo"
    ''',
    "env": """
        import gymnasium

        import guerdon.envs

        def make(config, *, autoreset_mode, **_):
            return gymnasium.make_vec(
                "guerdon/FixedCartPole-v0", config.num_envs, vectorization_mode="vector_entry_point",
                autoreset_mode=autoreset_mode,
            )
    """,
    "lines": '''
        import json

        import numpy as np

        from guerdon.core.types import Episode
        from guerdon.data.formats import EpisodeWriter, Format

        class Lines(Format):
            """One episode a line, as JSON."""

            name = "acme-lines"
            looks_for = "*.acme"

            def detect(self, path):
                return path.suffix == ".acme"

            def read(self, path):
                for line in path.read_text().splitlines():
                    item = json.loads(line)
                    frames = {name: np.array(values, np.uint8) for name, values in item["frames"].items()}
                    labels = np.array(item["labels"], np.float32)
                    yield Episode(frames=frames, labels=labels, success=item["success"])

            def writer(self, path):
                return LineWriter(path)

        class LineWriter(EpisodeWriter):
            def __init__(self, path):
                self.path = path

            def add(self, episode):
                frames = {name: values.tolist() for name, values in episode.frames.items()}
                item = {"frames": frames, "labels": episode.labels.tolist(), "success": bool(episode.success)}
                with self.path.open("a") as file:
                    file.write(json.dumps(item) + "\\n")
                return str(self.path)
    ''',
}
SHORT = [
    "learner.total_steps=200",
    "learner.ppo.num_steps=50",
    "learner.eval_episodes=4",
    "env.train.num_envs=4",
    "env.eval.num_envs=4",
    "output_dir=null",
]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs `guerdon` where the plugin is installed; returns exit code, parsed JSON and stderr."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    package = source / "acme_guerdon"
    package.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--target", str(site), str(source)]
    subprocess.run([*pip, *options], check=True, capture_output=True, text=True)
    paths = [str(site), os.environ.get("PYTHONPATH", ""), str(Path(guerdon.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with CommandServer(environment) as server:

        def run(*arguments, program=("guerdon",)):
            command = [*program, *map(str, arguments), "--json"]
            variables = {**environment, "PATH": server.path}
            done = subprocess.run(command, env=variables, capture_output=True, text=True)
            return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

        yield run


def test_the_list_shows_what_a_plugin_brings(command):
    code, reported, err = command("zoo", "list", program=(sys.executable, "-m", "guerdon.cli.main"))
    assert code == 0, err
    kinds = {i["name"]: i["kind"] for i in reported["plugins"] if i["distribution"] == "acme-guerdon"}
    assert kinds == {
        "acme_upright": "reward model",
        "acme_ppo": "agent",
        "acme-lines": "data format",
        "acme-broken": "data format",
        "acme_sim": "env type",
    }


def test_a_format_is_written_detected_and_read(command, tmp_path):
    rng = np.random.default_rng(0)
    labels = np.array([0, 1, 1], np.float32)
    frames = rng.integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    with get_format("native").writer(tmp_path / "native") as writer:
        writer.add_many([Episode(frames={"front": frames}, labels=labels, success=True)])
    lines = tmp_path / "x.acme"
    code, reported, err = command("data", "convert", tmp_path / "native", lines, "--to", "acme-lines")
    assert (code, reported["num_episodes"]) == (0, 1), err
    code, reported, err = command("data", "inspect", lines)
    assert (code, reported["format"], reported["num_positive_frames"]) == (0, "acme-lines", 2), err
    assert "'acme-broken' (guerdon.formats) of acme-guerdon cannot be loaded" in err  # and no other is hidden
    code, reported, err = command("data", "convert", lines, tmp_path / "back", "--to", "native")
    assert (code, reported["num_episodes"]) == (0, 1), err
    (back,) = get_format("native").read(tmp_path / "back")
    np.testing.assert_array_equal(back.frames["front"], frames)
    code, _, err = command("data", "convert", lines, tmp_path / "y", "--to", "acme-line")
    assert code == 1 and "did you mean 'acme-lines'" in err


def train(command, *settings):
    code, reported, err = command("zoo", "--config-name", "cartpole_rnd", *SHORT, *settings)
    assert (code, reported and reported["env_steps"]) == (0, 200), err
    return reported


def test_a_reward_model_trains_a_policy(command):
    reported = train(command, "~reward_model", "+reward_model.type=acme_upright")
    assert reported["reward_model_type"] == "acme_upright"


def test_an_environment_is_trained_in(command):
    reported = train(command, "env.train.env_type=acme_sim", "env.eval.env_type=acme_sim")
    assert reported["last_return"] > 0.0


def test_an_agent_learns(command):
    assert train(command, "learner.algorithm=acme_ppo")["algorithm"] == "acme_ppo"
