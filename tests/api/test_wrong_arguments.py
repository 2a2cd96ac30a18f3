"""Errors speak about the argument that was given, in one or two lines, and never come from deep inside."""

import gymnasium as gym
import numpy as np
import pytest

import guerdon as gd
from guerdon.core.errors import GuerdonError
from tests.api.dot import SIZE, Dot, frames

IMAGES = frames(8)
LABELS = np.arange(8) % 2
PPO = {"n_steps": 8, "batch_size": 8, "net_arch": (8,)}
MADE_FOR = (
    "reward: RND was made for observations of size 1 and continuous actions of size 1; "
    "env has observations of size {}"
)


def rnd():
    """A model of the zoo that was made for `Dot`."""
    return gd.reward_model("rnd", Dot, device="cpu")


class Blind(Dot):
    """Cannot render."""

    def __init__(self):
        super().__init__(render_mode=None)


class Larger(Dot):
    """Renders pictures of another size."""

    def render(self):
        return np.zeros((2 * SIZE, 2 * SIZE, 3), np.uint8)


def stepped(env):
    env.reset(seed=0)
    return env.step(env.action_space.sample())


@pytest.fixture(scope="module")
def reward(checkpoint):
    return gd.load_reward(checkpoint, device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return gd.Dataset.from_arrays(IMAGES, LABELS, tmp_path_factory.mktemp("wrong") / "data")


@pytest.fixture(scope="module")
def agent():
    with gd.PPO(Dot, **PPO) as made:
        yield made


def refused(call, message, lines=2):
    """`call` raises one of our errors that begins with `message`, in at most so many lines of 120 letters."""
    with pytest.raises(GuerdonError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(message), text
    assert len(text) <= 120 * lines and "\n" not in text, text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": None}, "path must be the path of a data set, not None"),
        ({"path": "nowhere"}, "nowhere does not exist"),
        ({"path": ".", "format": 3}, "format must be the name of a format, not 3"),
    ],
)
def test_read(arguments, message):
    refused(lambda: gd.read(**arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames": np.full((2, 8, 8, 3), np.nan)}, "frames holds NaN or infinite values"),
        ({"frames": None}, "frames has shape []"),
        ({"frames": {}}, "frames is an empty dict"),
        ({"frames": [IMAGES[0], IMAGES[1][:3]]}, "the entries of a list have different shapes"),
        ({"labels": None}, "labels must be 0 to 1, [N], not None"),
        ({"labels": ["a"] * 8}, "labels must be numbers or booleans [N], not ['a', "),
        ({"labels": np.arange(8)}, "labels must be 0 to 1, [N], not array([0, 1, "),
        ({"labels": LABELS[:3]}, f"frames (base_camera) has shape [8, {SIZE}, {SIZE}, 3], labels [3]"),
        ({"out": None}, "out must be a path, not None"),
    ],
)
def test_from_arrays(arguments, message, tmp_path):
    given = {"frames": IMAGES, "labels": LABELS, "out": tmp_path / "made", **arguments}
    refused(lambda: gd.Dataset.from_arrays(**given), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": None}, "env must be an id, a gymnasium.Env"),
        ({"env": "Nope-v0"}, "unknown environment 'Nope-v0'"),
        ({"env": "nomodule:Nope-v0"}, "the module of the environment 'nomodule:Nope-v0' cannot be imported"),
        ({"env": Blind}, "the environment shows no images of ['base_camera']"),
        ({"env": lambda size: Dot()}, "env is called as env(), and what was given takes (size)"),
        ({"policy": "scriptd"}, "policy must be one of random, scripted, motion_planner"),
        ({"policy": "scripted"}, "there is no scripted policy for SyncVectorEnv"),
        ({"policy": lambda obs: np.zeros(5)}, "policy: its actions have shape [1, 5]; the environments take"),
        ({"policy": lambda obs: np.full(1, np.nan)}, "policy: its actions have values that are not finite"),
        ({"policy": lambda obs: None}, "policy: its actions have shape [1]; the environments take"),
        ({"successes": -1}, "successes must be a whole number of at least 0, not -1"),
        ({"successes": 0, "failures": 0}, "successes and failures are both 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"seed": None}, "seed must be a whole number of at least 0, not None"),
        ({"out": None}, "out must be a path, not None"),
        ({"label_fn": 3}, "label_fn must be a function, called as label_fn(obs, info), not 3"),
        ({"label_fn": lambda obs: True}, "label_fn is called as label_fn(obs, info), and what was given"),
        ({"success_key": 3}, "success_key must name an entry of the info, not 3"),
        ({"env": "CartPole-v1", "env_kwargs": [1]}, "env_kwargs must be a dict"),
        ({"env": "CartPole-v1", "max_episode_steps": -2}, "max_episode_steps must be a whole number"),
        ({"progres": False}, "collect: unknown argument 'progres'; did you mean 'progress'?"),
    ],
)
def test_collect(arguments, message, tmp_path):
    given = {"env": Dot, "successes": 1, "failures": 1, "out": tmp_path, "progress": False, **arguments}
    refused(lambda: gd.collect(**given), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": None}, "data must be a Dataset or the path of one, not None"),
        ({"data": "nowhere"}, "data: nowhere does not exist"),
        ({"arch": "resnet11"}, "arch must be one of 'resnet10'"),
        ({"epochs": -1}, "epochs must be a whole number at least 1, not -1"),
        ({"image_size": (64, 64)}, "image_size must be a list of 3 entries"),
        ({"device": 3}, "device must be such as 'cpu'"),
        ({"device": "meta"}, "device must be 'cpu', 'cuda' or 'cuda:N', not 'meta'"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
    ],
)
def test_fit_reward(arguments, message, data, tmp_path):
    given = {"data": data, "out": tmp_path, "progress": False, **arguments}
    refused(lambda: gd.fit_reward(**given), message)


def test_a_camera_that_is_not_there(data, tmp_path):
    message = f"{data.path} has no camera 'wrist'; it has ['base_camera']"
    refused(lambda: gd.fit_reward(data, cameras=("wrist",), out=tmp_path / "run", progress=False), message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.predict(None), "frames: the image array has shape []"),
        (lambda r: r.predict(np.full((1, SIZE, SIZE, 3), np.nan)), "frames: the image array holds NaN"),
        (lambda r: r.predict(np.zeros((1, 48, 48, 3), np.uint8)), "frames: camera 'base_camera': frames are"),
        (lambda r: r.predict([IMAGES[0], IMAGES[1][:3]]), "frames: the entries of a list have different"),
        (lambda r: r.predict("nowhere"), "frames: nowhere does not exist"),
        (lambda r: r.card(None), "data must be a Dataset or the path of one, not None"),
        (lambda r: r.card("nowhere"), "data: nowhere does not exist"),
        (lambda r: r.recalibrate(None), "data must be a Dataset or the path of one, not None"),
        (lambda r: r.recalibrate(".", seed=-1), "seed must be a whole number of at least 0, not -1"),
        (lambda r: r.save(None), "path must be a path, not None"),
        (lambda r: gd.load_reward(None), "path must be the path of a checkpoint, not None"),
        (lambda r: gd.wrap(Dot(), None), "reward must be a Reward, the path of a checkpoint"),
        (lambda r: gd.wrap(Dot(), "nowhere"), "nowhere: there is no such checkpoint"),
        (lambda r: gd.wrap("Nope-v0", r), "unknown environment 'Nope-v0'"),
        (lambda r: gd.wrap(Dot(), r, train_every=5), "train_every is for models of the zoo"),
        (lambda r: gd.wrap(Dot(), lambda obs, info: 0.0), "reward is called as reward(frames), and what was"),
        (lambda r: stepped(gd.wrap(Larger, r)), "camera 'base_camera': frames are [48, 48, 3]"),
        (lambda r: stepped(gd.wrap(Blind(), r)), "the environment shows no images"),
    ],
)
def test_rewards_and_wrap(call, message, reward):
    refused(lambda: call(reward), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "CartPole-v9"}, "unknown environment 'CartPole-v9'; did you mean 'CartPole-v1'?"),
        ({"env": "CartPole-v1", "env_kwargs": [1]}, "env_kwargs must be a dict"),
        ({"eval_env": "CartPole-v1"}, "eval_env has observations of [4] numbers; the policy"),
        ({"label_fn": 3}, "label_fn must be a function"),
        ({"placement": {"env": "0"}}, "placement is for engine='ray'"),
        ({"resume": 3}, "resume must be a path, not 3"),
        ({"out": 3}, "out must be a path, not 3"),
        ({"standalone": True}, "PPO: unknown argument 'standalone'"),
        ({"reward": lambda obs, info: 0.0}, "reward is called as reward(frames), and what was given takes"),
    ],
)
def test_agents(arguments, message):
    refused(lambda: gd.PPO(**{"env": Dot, **PPO, **arguments}), message)


def test_the_number_of_discrete_actions_is_compared():
    other = Dot(discrete=True)
    other.action_space = gym.spaces.Discrete(2)
    with gd.DQN(lambda: Dot(discrete=True), net_arch=(8,)) as agent:
        message = "env has actions of 2 choices; the policy was made for 3 choices"
        refused(lambda: agent.evaluate(1, env=other), message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.learn(8, callbacks=3), "callback must be a function, called as callback(step), not 3"),
        (lambda a: a.learn(8, callbacks=lambda: 0), "callback is called as callback(step), and what was"),
        (
            lambda a: a.evaluate(1, env="CartPole-v1"),
            "env has observations of [4] numbers; the policy was made for [1] numbers",
        ),
        (lambda a: a.evaluate(1, seed=-1), "seed must be a whole number of at least 0, not -1"),
        (lambda a: a.predict(np.full(1, np.nan)), "obs holds NaN or infinite values"),
        (lambda a: a.save(None), "path must be a path, not None"),
        (lambda a: gd.load_agent(None), "path must be the path of a saved agent, not None"),
        (lambda a: gd.load_agent("nowhere"), "nowhere holds no saved policy"),
        (lambda a: gd.RLPD(Dot).learn(8, progress=False), "bc_towards is cloned_policy, but no policy was"),
        (lambda a: gd.reward_model(None, Dot), "type must be the name of a reward model"),
        (lambda a: gd.reward_model("rnd", Dot, seed=-1), "seed must be a whole number of at least 0, not -1"),
        (lambda a: gd.reward_model("image_success", Dot), "checkpoint_path is missing"),
        (lambda a: gd.PPO("CartPole-v1", reward=rnd()), MADE_FOR.format("4 and 2 discrete actions")),
        (lambda a: gd.wrap("CartPole-v1", rnd()), MADE_FOR.format("4 and 2 discrete actions")),
        (lambda a: gd.prove("nowhere"), "agent: no config 'nowhere' in "),
        (lambda a: gd.check_reward_model(3), "model must be a BaseRewardModel"),
        (lambda a: gd.prove(None), "agent must be an agent, a config or the name or path of one, not None"),
    ],
)
def test_what_agents_and_models_do(call, message, agent):
    refused(lambda: call(agent), message)


def test_reprs_fit_a_screen_and_results_are_plain(reward, data, agent):
    results = [data, data.summary, data.audit(), agent.result, agent.evaluate(1)]
    assert all(isinstance(result.to_dict(), dict) for result in results)
    model = gd.reward_model("rnd", Dot)
    wrapped = gd.wrap(Dot, reward)
    for each in (*results, reward, agent, model, wrapped):
        assert 0 < len(repr(each)) < 600 and "\n" not in repr(each), repr(each)
