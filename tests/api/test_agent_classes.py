"""`PPO`, `SAC`, `TD3`, `DQN`, `RLPD`, `load_agent`, and models of the zoo as their reward."""

import gymnasium as gym
import numpy as np
import pytest

import guerdon as gd
from guerdon.core.errors import ConfigError, DataError
from tests.api.dot import Dot

SMALL = {"net_arch": (8,), "seed": 1}
PPO = {**SMALL, "n_steps": 8, "batch_size": 8}
OFF = {**SMALL, "learning_starts": 8, "batch_size": 8, "iteration_steps": 8, "buffer_size": 100}


class Hidden(Dot):
    """Tells success under a name of its own."""

    def reset(self, **options):
        return super().reset(**options)[0], {}

    def step(self, action):
        *most, info = super().step(action)
        return *most, {"centred": info["success"]}


def weights(agent):
    """What the policy says of some places."""
    actions = agent.predict(np.linspace(-1, 1, 9, dtype=np.float32)[:, None], deterministic=True)[0]
    return np.concatenate([actions.ravel(), numbers(agent.policy.policy_state())])


def numbers(state):
    if isinstance(state, dict):
        return np.concatenate([numbers(part) for part in state.values()] or [np.zeros(0)])
    return np.asarray(state, np.float64).ravel() if hasattr(state, "shape") else np.zeros(0)


@pytest.mark.parametrize("name", ["PPO", "SAC", "TD3", "DQN"])
def test_every_agent_learns_acts_and_is_measured(name):
    cls = getattr(gd, name)
    settings = PPO if name == "PPO" else OFF
    with cls(lambda: Dot(discrete=name == "DQN"), **settings) as agent:
        before = weights(agent)
        assert agent.learn(16, progress=False) is agent
        assert agent.num_steps >= 16 and agent.result.env_steps == agent.num_steps
        assert not np.array_equal(weights(agent), before)
        found = agent.evaluate(3)
        assert found.episodes == 3 and 0 <= found.success_once <= 1 and found.length == 8
        assert found.to_dict()["episodes"] == 3
        action, state = agent.predict(np.zeros(1, np.float32), deterministic=True)
        assert state is None and agent.runner.spaces[1].contains(action)
        actions, _ = agent.predict(np.zeros((4, 1), np.float32))
        assert len(actions) == 4


@pytest.mark.parametrize("kind", ["instance", "function", "vector", "id"])
def test_all_kinds_of_environments(kind):
    single = Dot()
    given = {
        "instance": single,
        "function": Dot,
        "vector": gym.vector.SyncVectorEnv([lambda: single, Dot], autoreset_mode="SameStep"),
        "id": "CartPole-v1",
    }[kind]
    with gd.PPO(given, **PPO) as agent:
        assert agent.learn(8, progress=False).num_steps >= 8
        assert agent.evaluate(2).episodes == 2
        agent.learn(8, progress=False)  # also after its environments served an evaluation
    assert not single.closed


def test_learning_goes_on_where_it_stopped(tmp_path):
    """Two calls with a checkpoint between them are one run: every call ends with one."""
    steps = []
    with gd.PPO(Dot, out=tmp_path / "run", **PPO) as agent:
        agent.learn(8, callbacks=lambda step: steps.append(step.env_steps), progress=False)
        agent.learn(8, callbacks=lambda step: steps.append(step.env_steps), progress=False)
        assert steps == [8, 16] and agent.result.folder == tmp_path / "run"
        last = weights(agent)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    resumed = gd.load_agent(tmp_path / "run" / "checkpoints" / "step_8", Dot, out=tmp_path / "again", seed=1)
    assert resumed.num_steps == 8
    np.testing.assert_array_equal(weights(resumed.learn(8, progress=False)), last)
    resumed.close()


def test_saved_agents_act_without_an_environment(tmp_path):
    with gd.PPO(Dot, **PPO) as agent:
        agent.learn(8, progress=False)
        obs = np.linspace(-1, 1, 5, dtype=np.float32)[:, None]
        wanted = agent.predict(obs, deterministic=True)[0]
        place = agent.save(tmp_path / "saved")
    loaded = gd.load_agent(place)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], wanted)
    assert loaded.evaluate(2, env=Dot()).episodes == 2
    with pytest.raises(ConfigError, match=r"env is missing: .* environment of your own, Dot"):
        loaded.evaluate(2)
    with pytest.raises(DataError, match=r"obs has shape \[2, 2\]; the policy observes \[1\]"):
        loaded.predict(np.zeros((2, 2), np.float32))
    with pytest.raises(ConfigError, match="reward is for an agent that goes on learning: give env"):
        gd.load_agent(place, reward=None)
    with pytest.raises(ConfigError, match="holds a policy of ppo, not of SAC"):
        gd.SAC(Dot, resume=place)


@pytest.mark.parametrize("given", ["object", "path"])
def test_an_image_reward(checkpoint, given):
    reward = gd.load_reward(checkpoint) if given == "object" else checkpoint
    env = "guerdon/Tabletop-v0"
    kwargs = {"image_size": (24, 24), "max_episode_steps": 10}
    seen = []
    with gd.PPO(env, reward=reward, num_envs=2, env_kwargs=kwargs, success_reward=3.0, **PPO) as agent:
        agent.learn(16, callbacks=[seen.append], progress=False)
        assert agent.runner.config.reward.success_reward == 3.0
        if given == "object":
            assert agent.reward_model is reward
    assert "reward/fire_rate" in seen[0].metrics and seen[0].metrics["rollout/rewards"] in np.linspace(
        0, 3, 17
    )


@pytest.mark.parametrize("kind", ["instance", "function"])
def test_states_for_the_policy_and_pictures_for_the_reward(checkpoint, kind):
    """The environment only renders; the end of an episode is scored before the next one begins."""
    reward, seen = gd.load_reward(checkpoint, reward_type="continuous"), []
    with gd.SAC(Dot() if kind == "instance" else Dot, reward=reward, **OFF) as agent:
        agent.learn(24, callbacks=seen.append, progress=False)
        assert agent.evaluate(2).episodes == 2
    assert all(0 < step.metrics["rollout/rewards"] < 1 for step in seen)
    assert seen[0].metrics["reward/frames_scored"] == 8


def test_environments_that_were_made_are_closed():
    made = []

    def make():
        made.append(Dot())
        return made[-1]

    with gd.PPO(make, num_envs=2, **PPO) as agent:
        agent.learn(16, progress=False)
        assert len(made) == 4 and not any(env.closed for env in made)
    assert all(env.closed for env in made)


def test_success_by_another_name(tmp_path):
    def in_the_middle(obs, info):
        return abs(float(obs[0])) < 0.3

    with gd.PPO(Hidden, label_fn=in_the_middle, **PPO) as agent:
        assert agent.learn(8, progress=False).evaluate(2).success_once is not None
    with gd.PPO(Hidden, success_key="centred", **PPO) as agent:
        assert agent.evaluate(2).success_once is not None
    with gd.PPO(Hidden, **PPO) as agent:
        assert agent.evaluate(2).success_once is None


def test_a_callback_ends_the_training():
    with gd.PPO(Dot, **PPO) as agent:
        agent.learn(80, callbacks=lambda step: step.env_steps < 16, progress=False)
        assert agent.num_steps == 16 and agent.result.stopped == "a callback ended it"
        assert agent.result.to_dict()["stopped"] == "a callback ended it"


def test_gail_as_the_reward(tmp_path):
    steps = [
        {"obs": [t / 8], "action": [0.1], "next_obs": [(t + 1) / 8], "reward": 0.0, "done": t == 7}
        for t in range(8)
    ]
    gail = gd.reward_model("gail", Dot, demos=[steps], hidden=(8,), update_per_collect=1, batch_size=8)
    with gd.PPO(Dot, reward=gail, monitor="off", **PPO) as agent:
        agent.learn(16, progress=False)
        assert agent.reward_model is gail and gail.train_iter > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"type": "gial"}, "did you mean 'gail'"),
        ({"type": "gail"}, "demos is missing: gail learns from demonstrations"),
        ({"type": "rnd", "demos": []}, "demos: rnd does not learn"),
        ({"type": "rnd", "hiden": (8,)}, "reward_model: unknown argument 'hiden'; did you mean 'hidden'"),
        ({"type": "rnd", "lr": -1}, "^lr must be"),
    ],
)
def test_wrong_arguments_of_a_reward_model_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        gd.reward_model(env=Dot, **arguments)


def test_demonstrations_that_are_none_are_an_error_about_demos(tmp_path):
    with pytest.raises(DataError, match=r"^demos: .*nowhere"):
        gd.reward_model("gail", Dot, demos=tmp_path / "nowhere.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_steps": -1}, "^n_steps must be a whole number"),
        ({"n_step": 8}, "PPO: unknown argument 'n_step'; did you mean 'n_steps'"),
        ({"gamma": 2}, "^gamma must be"),
        ({"monitor": "stopp"}, "^monitor must be .*did you mean 'stop'"),
        ({"engine": "ray"}, "engine='ray' makes environments in other processes"),
        ({"reward": "rnd"}, r"gd.reward_model\('rnd', env\) makes one"),
        ({"reward": 3.0}, "reward must be a Reward"),
        ({"seed": "x"}, "^seed must be"),
        ({"device": "gpu"}, "^device must be such as 'cpu'"),
        ({"env_kwargs": {}}, "env_kwargs belongs to an id"),
        ({"eval_env": 7}, "eval_env must be an id"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        gd.PPO(Dot, **arguments)


def test_wrong_arguments_of_learn_are_named():
    with gd.PPO(Dot, **PPO) as agent:
        with pytest.raises(ConfigError, match=r"^total_steps must be a whole number of at least 1, not 0"):
            agent.learn(0)
        with pytest.raises(ConfigError, match=r"callback must be a function, called as .*, not 3"):
            agent.learn(8, callbacks=[3])
        with pytest.raises(ConfigError, match=r"^episodes must be"):
            agent.evaluate(0)


def test_settings_have_the_names_of_stable_baselines3():
    known = {
        gd.PPO: ["learning_rate", "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "clip_range",
                 "ent_coef", "vf_coef", "max_grad_norm", "target_kl"],
        gd.SAC: ["learning_rate", "buffer_size", "learning_starts", "batch_size", "tau", "gamma",
                 "gradient_steps", "target_entropy"],
        gd.DQN: ["exploration_fraction", "exploration_initial_eps", "target_update_interval"],
        gd.RLPD: ["demos", "warm_start"],
    }  # fmt: skip
    for cls, names in known.items():
        assert set(names) <= set(cls.settings())


def test_rlpd_starts_from_its_own_settings():
    config = gd.RLPD._defaults()
    assert config.learner.algorithm == "sac" and config.learner.sac.bc_towards == "cloned_policy"
