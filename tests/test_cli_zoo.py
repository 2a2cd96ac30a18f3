"""`guerdon zoo` and what it prints."""

import json

import pytest

from guerdon.cli.main import main
from guerdon.rewards import REWARD_MODELS

TINY = [
    "learner.total_steps=400",
    "learner.ppo.num_steps=50",
    "learner.eval_episodes=4",
    "env.train.num_envs=4",
    "env.eval.num_envs=4",
    "reward_model.update_per_collect=1",
]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    path = tmp_path_factory.mktemp("zoo") / "demos.safetensors"
    arguments = ["--env", "guerdon/FixedCartPole-v0", "--episodes", "2", "--out", str(path)]
    assert main(["collect-demos", *arguments]) == 0
    return path


def test_the_list_has_every_model(capsys):
    assert main(["zoo", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["models"]
    assert [item["name"] for item in listed] == sorted(REWARD_MODELS)
    assert all(item["rewards"].startswith("Rewards ") or item["rewards"] for item in listed)
    assert main(["zoo", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(REWARD_MODELS)
    assert any(line.startswith("gail ") and line.endswith("(demonstrations)") for line in lines)


def test_a_config_runs(demos, tmp_path, capsys):
    arguments = ["zoo", "--config-name", "fixed_cartpole_gail", *TINY, f"output_dir={tmp_path}"]
    assert main([*arguments, f"reward_model.data_path={demos}", "seed=2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["env_steps"], printed["seed"], printed["reward_model_type"]) == (400, 2, "gail")
    assert printed["last_return"] > 0.0 and printed["folder"].startswith(
        str(tmp_path / "fixed_cartpole_gail")
    )
    assert main([*arguments, f"reward_model.data_path={demos}", "output_dir=null"]) == 0
    out = capsys.readouterr().out
    assert "gail with ppo on guerdon/FixedCartPole-v0" in out and "400 in" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--config-name", "fixed_cartpole_gial"], "did you mean 'fixed_cartpole_gail'"),
        ([], "give --config-name"),
        (["--config-name", "fixed_cartpole_gail", "reward_model.type=gial"], "did you mean 'gail'"),
        (["--config-name", "fixed_cartpole_gail", "reward_model.hiden=[3]"], "did you mean"),
        (["--config-name", "fixed_cartpole_gail", "lerner.ppo.lr=1"], "did you mean 'learner'"),
    ],
)
def test_wrong_usage_is_explained(arguments, complaint, capsys):
    assert main(["zoo", *arguments, *(["output_dir=null"] if arguments else [])]) == 2
    assert complaint in capsys.readouterr().err
