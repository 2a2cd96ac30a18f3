"""`gd.prove`: an agent beside its controls."""

import pytest

import guerdon as gd
from guerdon.core.errors import ConfigError
from tests.api.dot import Dot

SMALL = {"net_arch": (8,), "n_steps": 8, "batch_size": 16, "seed": 1}


def test_an_agent_beside_its_controls(checkpoint, tmp_path):
    kwargs = {"image_size": (24, 24), "max_episode_steps": 8}
    with gd.PPO("guerdon/Tabletop-v0", reward=checkpoint, num_envs=2, env_kwargs=kwargs, **SMALL) as agent:
        proof = gd.prove(
            agent, seeds=1, steps=16, arms=("off",), episodes=2, workers=1, out=tmp_path / "p", progress=False
        )
    assert list(proof.arms) == ["start", "learned", "off"]
    assert proof.verdict in str(proof) and (proof.folder / "prove.html").is_file()
    assert proof.to_dict()["arms"]["off"]["episodes"] == 2


def test_what_cannot_be_proven_is_said(checkpoint):
    with (
        gd.PPO(Dot, reward=checkpoint, **SMALL) as agent,
        pytest.raises(ConfigError, match="has to be an id"),
    ):
        gd.prove(agent)
    with gd.PPO("CartPole-v1", **SMALL) as agent, pytest.raises(ConfigError, match="there is no `Reward`"):
        gd.prove(agent)
