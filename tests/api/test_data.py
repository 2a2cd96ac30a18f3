"""`collect`, `read` and `Dataset`."""

import gymnasium as gym
import numpy as np
import pytest

import guerdon as gd
from guerdon.core.errors import ConfigError, DataError
from tests.api.dot import SIZE, Dot, frames
from tests.fit.synthetic import write_store


def towards_the_middle(obs):
    return np.array([-np.sign(obs[0])], np.float32) * 0.4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return gd.read(write_store(tmp_path_factory.mktemp("data") / "store", count=6))


def test_a_data_set(data):
    assert (len(data), data.num_success, data.num_failure, data.format) == (6, 3, 3, "native")
    episodes = list(data)
    assert len(episodes) == 6 and episodes[0].frames["base_camera"].shape == (12, 32, 32, 3)
    assert data.inspect().num_frames == 72
    assert data.audit().num_episodes == 6
    assert data.preview().size[0] > 90
    assert data.to_dict()["num_episodes"] == 6
    assert "6 (3 success, 3 failure)" in repr(data)
    assert data._repr_html_().startswith("<b>Dataset</b>")


def test_a_copy_in_another_format(data, tmp_path):
    copy = data.convert(tmp_path / "pkl", to="pkl-episode")
    assert (copy.format, len(copy)) == ("pkl-episode", 6)


def test_labels_become_a_data_set(tmp_path):
    images, labels = frames(12), np.arange(12) % 3 == 0
    data = gd.Dataset.from_arrays(images, labels, tmp_path / "labelled", episode=np.arange(12) // 4)
    assert (len(data), data.summary.num_frames, data.summary.num_positive_frames) == (3, 12, 4)
    np.testing.assert_array_equal(next(iter(data)).frames["base_camera"], images[:4])
    with pytest.raises(DataError, match=r"labels \[11\]"):
        gd.Dataset.from_arrays(images, labels[:11], tmp_path / "other")


def test_read_speaks_of_its_argument(tmp_path):
    with pytest.raises(ConfigError, match=r"path must be the path of a data set, not \[\]"):
        gd.read([])
    with pytest.raises(DataError, match="does not exist"):
        gd.read(tmp_path / "nothing")


def test_collect_by_id(tmp_path):
    data = gd.collect(
        "guerdon/Tabletop-v0", policy="scripted", successes=2, failures=1, out=tmp_path / "data",
        num_envs=4, env_kwargs={"image_size": (24, 24), "max_episode_steps": 30}, policy_noise=0.8,
        progress=False,
    )  # fmt: skip
    assert data.num_success >= 2 and data.num_failure >= 1
    assert data.result.complete and data.result.reason == "targets met"


@pytest.mark.parametrize("kind", ["instance", "function", "vector"])
def test_collect_in_an_environment_of_ones_own(tmp_path, kind):
    single = Dot()
    given = {
        "instance": single,
        "function": Dot,
        "vector": gym.vector.SyncVectorEnv([lambda: single, Dot]),
    }[kind]
    policy = (lambda obs: -np.sign(obs) * 0.4) if kind == "vector" else towards_the_middle
    data = gd.collect(given, policy, successes=2, failures=0, out=tmp_path / kind, progress=False)
    assert data.num_success >= 2
    episode = next(iter(data))
    assert episode.frames["base_camera"].shape == (8, SIZE, SIZE, 3)
    assert episode.labels[-1] == 1.0
    assert not single.closed, "the caller's environment stays open"


def test_labels_by_a_function(tmp_path):
    data = gd.collect(
        Dot, successes=1, failures=0, label_fn=lambda obs, info: True, out=tmp_path / "data", progress=False
    )
    assert next(iter(data)).labels.tolist() == [1.0] * 8


def test_collect_with_what_predicts(tmp_path):
    class Model:
        def predict(self, obs, deterministic):
            assert obs.shape == (1, 1) and not deterministic
            return -np.sign(obs) * 0.4, None

    data = gd.collect(Dot(), Model(), successes=1, failures=0, out=tmp_path / "data", progress=False)
    assert data.num_success == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "skripted"}, "policy must be one of random, scripted"),
        ({"policy": 3}, "policy must be a name"),
        ({"successes": -1}, "^successes must be a whole number of at least 0"),
        ({"camera": ("a",)}, "collect: unknown argument 'camera'; did you mean 'cameras'"),
        ({"env_kwargs": {}}, "env_kwargs and max_episode_steps belong to an id"),
        ({"num_envs": 2}, "env is one environment and num_envs is 2"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        gd.collect(Dot(), out=tmp_path / "data", **arguments)


def test_what_is_no_environment_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"env must be an id, a gymnasium.Env.*not float"):
        gd.collect(1.5, out=tmp_path / "data")
