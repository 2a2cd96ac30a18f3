"""`DataCollectorWrapper` on single and vector environments, in every auto-reset mode."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import guerdon.envs  # noqa: F401
from guerdon.collect import DataCollectorWrapper
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import Episode
from guerdon.data.collect.wrapper import VectorDataCollectorWrapper
from guerdon.data.formats import get_format
from guerdon.data.store import EpisodeStore


class Counter(gym.Env):
    """Shows its episode and step in the picture, so that a mixed-up frame gives itself away."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, length=4, images=False, render_mode=None, name=0):
        self.length, self.images, self.render_mode, self.name = length, images, render_mode, name
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        image = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
        state = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.observation_space = gym.spaces.Dict({"base_camera": image, "state": state}) if images else state
        self.episode, self.count, self.renders = -1, 0, 0

    def picture(self):
        frame = np.zeros((8, 8, 3), np.uint8)
        frame[..., 0], frame[..., 1], frame[..., 2] = self.episode, self.count, self.name
        return frame

    def observe(self):
        state = np.array([self.name, self.episode, self.count], np.float32)
        return {"base_camera": self.picture(), "state": state} if self.images else state

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self.observe(), {"success": False}

    def step(self, action):
        self.count += 1
        done = self.count == self.length + self.episode % 2  # lengths differ
        success = done and self.episode % 2 == 1
        return self.observe(), float(self.count), success, done and not success, {"success": success}

    def render(self):
        self.renders += 1
        return self.picture()


def check_counter_episodes(episodes, num_envs):
    """Every episode has all of its own frames, the final one included, and none of another."""
    seen = {env: [] for env in range(num_envs)}
    for episode in episodes:
        frames = episode.frames["base_camera"]
        number, env = int(frames[0, 0, 0, 0]), int(frames[0, 0, 0, 2])
        seen[env].append(number)
        length = 4 + number % 2
        assert (frames[..., 0] == number).all()
        assert (frames[..., 2] == env).all()
        np.testing.assert_array_equal(frames[:, 0, 0, 1], np.arange(1, length + 1))
        np.testing.assert_array_equal(episode.labels, [0] * (length - 1) + [number % 2])
        assert episode.success is bool(number % 2)
        np.testing.assert_array_equal(episode.states[:, 2], np.arange(1, length + 1))
        np.testing.assert_array_equal(episode.states[:, 1], number)
        np.testing.assert_array_equal(episode.initial_state, [env, number, 0])
        np.testing.assert_array_equal(episode.env_rewards, np.arange(1, length + 1))
        np.testing.assert_array_equal(episode.terminated, episode.labels.astype(bool))
        assert bool(episode.terminated[-1] | episode.truncated[-1])
        np.testing.assert_allclose(episode.actions[:, 0], np.arange(length) / 10 + number, atol=1e-5)
    return seen


def actions_for(obs):
    state = obs["state"] if isinstance(obs, dict) else obs
    return np.stack([state[..., 2] / 10 + state[..., 1], state[..., 0]], axis=-1).astype(np.float32)


@pytest.mark.parametrize(
    ("mode", "images"),
    [(AutoresetMode.NEXT_STEP, True), (AutoresetMode.NEXT_STEP, False), (AutoresetMode.SAME_STEP, True)],
)
def test_gymnasium_vector_environments(tmp_path, images, mode):
    makers = [
        lambda name=name: Counter(images=images, render_mode="rgb_array", name=name) for name in range(3)
    ]
    env = DataCollectorWrapper(SyncVectorEnv(makers, autoreset_mode=mode), tmp_path / "data", format="native")
    obs, _ = env.reset(seed=1)
    for _ in range(40):
        obs, *_ = env.step(actions_for(obs))
    env.close()
    store = EpisodeStore(tmp_path / "data")
    complete = [episode for episode in store if episode.complete]
    seen = check_counter_episodes(complete, 3)
    assert all(numbers == list(range(len(numbers))) and len(numbers) >= 6 for numbers in seen.values())
    cut = [episode for episode in store if not episode.complete]
    assert len(cut) == env.archive.num_unfinished
    assert all(not episode.success for episode in cut)


def test_disabled_auto_reset(tmp_path):
    makers = [lambda name=name: Counter(images=True, name=name) for name in range(2)]
    vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    env = DataCollectorWrapper(vector, tmp_path / "data", format="native")
    obs, _ = env.reset()
    for _ in range(20):
        obs, _, terminated, truncated, _ = env.step(actions_for(obs))
        done = terminated | truncated
        if done.any():
            obs, _ = env.reset(options={"reset_mask": done})
    env.close()
    seen = check_counter_episodes([e for e in EpisodeStore(tmp_path / "data") if e.complete], 2)
    assert all(len(numbers) >= 3 for numbers in seen.values())


@pytest.mark.parametrize("images", [True, False])
def test_a_single_environment(tmp_path, images):
    env = DataCollectorWrapper(
        Counter(images=images, render_mode="rgb_array"), tmp_path / "data", format="native"
    )
    assert isinstance(env, gym.Wrapper)
    for _ in range(5):
        obs, _ = env.reset()
        done = False
        while not done:
            obs, _, terminated, truncated, _ = env.step(actions_for(obs))
            done = terminated or truncated
    obs, _ = env.reset()
    env.step(actions_for(obs))
    env.close()
    store = EpisodeStore(tmp_path / "data")
    assert check_counter_episodes([e for e in store if e.complete], 1) == {0: [0, 1, 2, 3, 4]}
    assert [e.num_frames for e in store if not e.complete] == [1]


def test_a_lost_final_frame_is_an_error_not_a_wrong_label(tmp_path):
    makers = [lambda: Counter(render_mode="rgb_array")]
    vector = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    env = DataCollectorWrapper(vector, tmp_path / "data", format="native")
    obs, _ = env.reset()
    with pytest.raises(DataError, match="autoreset_mode=NEXT_STEP"):
        for _ in range(6):
            obs, *_ = env.step(actions_for(obs))
    env.close()


def tabletop(mode, num_envs=4, **settings):
    return gym.make_vec(
        "guerdon/Tabletop-v0",
        num_envs,
        vectorization_mode="vector_entry_point",
        autoreset_mode=mode,
        max_episode_steps=6,
        **settings,
    )


@pytest.mark.parametrize("obs_mode", ["state", "rgb", "state+rgb"])
def test_tabletop_gives_the_same_episodes_in_every_mode(tmp_path, obs_mode):
    rng = np.random.default_rng(0)
    plan = rng.uniform(-1, 1, (4, 3, 6, 4)).astype(np.float32)  # environment, episode, step
    found = {}
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        env = DataCollectorWrapper(
            tabletop(mode, obs_mode=obs_mode), tmp_path / mode.name, format="native", target_failure=12
        )
        env.reset(seed=3)
        episode, step = np.zeros(4, int), np.zeros(4, int)
        while env.archive.num_failure != 12:
            fresh = step >= 6  # the step that only resets, in NEXT_STEP mode
            action = plan[np.arange(4), np.minimum(episode, 2), np.minimum(step, 5)]
            _, _, terminated, truncated, _ = env.step(action)
            step += 1
            step[fresh], episode[fresh] = 0, episode[fresh] + 1
            if mode == AutoresetMode.SAME_STEP:
                done = terminated | truncated
                step[done], episode[done] = 0, episode[done] + 1
        env.close()
        store = EpisodeStore(tmp_path / mode.name)
        assert store.num_frames == 72
        found[mode] = {e.frames["base_camera"].tobytes() + e.states.tobytes() for e in store if e.complete}
    assert len(found[AutoresetMode.SAME_STEP]) == 12
    assert found[AutoresetMode.SAME_STEP] == found[AutoresetMode.NEXT_STEP]


def test_on_demand_renders_one_frame_per_episode(tmp_path):
    env = tabletop(AutoresetMode.SAME_STEP)
    rendered = []
    original = env.unwrapped.render_frames
    env.unwrapped.render_frames = lambda *args, **kw: rendered.append(len(args[1])) or original(*args, **kw)
    wrapped = DataCollectorWrapper(env, tmp_path / "data", reward_render_mode="on_demand", format="native")
    wrapped.reset(seed=0)
    for _ in range(12):
        wrapped.step(np.zeros((4, 4), np.float32))
    wrapped.close()
    assert sum(rendered) == 8  # 4 environments, 2 episodes each
    assert [e.num_frames for e in EpisodeStore(tmp_path / "data")] == [1] * 8


def test_when_the_targets_are_met_nothing_more_is_rendered_or_kept(tmp_path):
    env = tabletop(AutoresetMode.SAME_STEP)
    wrapped = DataCollectorWrapper(
        env, tmp_path / "data", target_success=0, target_failure=5, format="native"
    )
    wrapped.reset(seed=0)
    for _ in range(12):
        wrapped.step(np.zeros((4, 4), np.float32))
    assert wrapped.archive.is_full
    env.unwrapped.render_frames = None  # would raise if it were called
    for _ in range(12):
        wrapped.step(np.zeros((4, 4), np.float32))
    wrapped.close()
    assert len(EpisodeStore(tmp_path / "data")) == 5


def test_the_documents_files(tmp_path):
    env = DataCollectorWrapper(Counter(images=True), tmp_path, 1, 1, format="pkl-episode")
    for _ in range(4):
        obs, _ = env.reset()
        done = False
        while not done:
            obs, _, terminated, truncated, _ = env.step(actions_for(obs))
            done = terminated or truncated
    env.close()
    files = sorted(str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*.pkl"))
    assert files == ["failure/episode_000000.pkl", "success/episode_000001.pkl"]
    episodes = list(get_format("pkl-episode").read(tmp_path))
    assert all(isinstance(item, Episode) for item in episodes)
    assert sorted(item.success for item in episodes) == [False, True]


def test_an_environment_without_success_is_named(tmp_path):
    class Silent(Counter):
        def step(self, action):
            return (*super().step(action)[:4], {})

    env = DataCollectorWrapper(Silent(images=True), tmp_path / "data")
    env.reset()
    with pytest.raises(DataError, match="no 'success'"):
        env.step(np.zeros(2, np.float32))
    env.close()


def test_an_environment_without_pictures_is_named(tmp_path):
    env = DataCollectorWrapper(Counter(), tmp_path / "data")
    env.reset()
    with pytest.raises(DataError, match=r"shows no images of \['base_camera'\]"):
        env.step(np.zeros(2, np.float32))
    env.close()


def test_a_wrong_render_mode_is_named(tmp_path):
    with pytest.raises(ConfigError, match="'always' or 'on_demand', not 'sometimes'"):
        DataCollectorWrapper(Counter(), tmp_path / "data", reward_render_mode="sometimes")


def test_vector_environments_get_the_vector_wrapper(tmp_path):
    env = DataCollectorWrapper(tabletop(AutoresetMode.SAME_STEP), tmp_path / "data")
    assert isinstance(env, VectorDataCollectorWrapper)
    env.close()
