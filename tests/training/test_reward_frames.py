"""What the reward model is shown: stacks within episodes, rendered on demand; nothing where nothing moved."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from guerdon.config import RewardConfig
from guerdon.core.errors import DataError
from guerdon.envs import TabletopVectorEnv
from guerdon.envs.observations import with_final
from guerdon.rewards.relabel import carry_forward
from guerdon.training.frames import FrameSelector
from guerdon.training.loop import ScoredPart

LENGTH = 4


def tabletop(num_envs=4, **settings):
    env = TabletopVectorEnv(
        num_envs,
        image_size=(16, 16),
        max_episode_steps=LENGTH,
        autoreset_mode=AutoresetMode.SAME_STEP,
        **settings,
    )
    env.reset(seed=0)
    env._elapsed[:] = np.arange(num_envs) % LENGTH  # first episodes of 4, 3, 2 and 1 steps
    return env


def watch(env, feed, num_steps, actions, **options):
    """Per step: what was picked and, apart from that, the stack that an environment's own history gives."""
    episodes = [[] for _ in range(env.num_envs)]
    for t in range(num_steps):
        obs, _, terminated, truncated, info = env.step(actions(t))
        done = terminated | truncated
        reached = with_final(obs, info.get("final_obs"), done)
        if isinstance(obs, dict) and getattr(env, "frames_in_obs", True):
            shown = reached["base_camera"]
        else:
            shown = env.render_frames(final=True)
        for env_id, frame in enumerate(shown):
            episodes[env_id].append(np.array(frame))
        picked = feed.step(reached, done, **options)
        yield done, picked, episodes
        for env_id in np.flatnonzero(done):
            episodes[env_id] = []


def stack_of(history, count):
    """The last `count` frames of an episode so far, its first one repeated before it."""
    return np.stack([history[0]] * max(count - len(history), 0) + history[-count:])


def random_actions(num_envs, seed=0):
    rng = np.random.default_rng(seed)
    return lambda t: rng.uniform(-1, 1, (num_envs, 4)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mode", ["per_step", "terminal"])
@pytest.mark.parametrize("obs", [{}, {"obs_mode": "rgb"}, {"obs_mode": "rgb", "obs_image_size": (24, 24)}])
def test_a_stack_holds_the_latest_frames_of_its_own_episode(count, mode, obs):
    """Also where the policy observes images of another size than the model scores."""
    env = tabletop(**obs)
    feed = FrameSelector(env, ["base_camera"], RewardConfig(reward_mode=mode), count)
    seen = 0
    for done, (env_ids, frames), episodes in watch(env, feed, 11, random_actions(4)):
        assert env_ids.tolist() == (np.flatnonzero(done).tolist() if mode == "terminal" else [0, 1, 2, 3])
        for place, env_id in enumerate(env_ids):
            expected = stack_of(episodes[env_id], count)
            np.testing.assert_array_equal(
                frames["base_camera"][place], expected[0] if count == 1 else expected
            )
            seen += 1
    assert seen == (11 if mode == "terminal" else 44)


def test_terminal_mode_renders_the_frames_of_its_stacks_and_no_others():
    env = tabletop()
    feed = FrameSelector(env, ["base_camera"], RewardConfig(reward_mode="terminal"), 3)
    rendered = []

    def counted(real):
        def render(camera, env_ids, *rest, **options):
            rendered.append(len(env_ids))
            return real(camera, env_ids, *rest, **options)

        return render

    env.render_frames, env.render_past = counted(env.render_frames), counted(env.render_past)
    actions, lengths = random_actions(4), np.arange(4, 0, -1)
    expected = 0
    for t in range(12):
        _, _, _, truncated, _ = env.step(actions(t))
        feed.step(env.state(), truncated)
        expected += int(np.minimum(lengths[truncated], 3).sum())
        lengths[truncated] = LENGTH
    assert feed.num_rendered == sum(rendered) == expected
    assert expected < 12 * 4


def test_new_episodes_from_outside_end_the_stacks():
    env = tabletop()
    feed = FrameSelector(env, ["base_camera"], RewardConfig(), 2)
    everyone = np.zeros(4, np.bool_)
    for _ in range(2):
        obs = env.step(np.ones((4, 4), np.float32))[0]
        feed.step(obs, everyone)
    env.reset(seed=5)
    feed.reset()
    obs = env.step(np.ones((4, 4), np.float32))[0]
    frames = feed.step(obs, everyone)[1]["base_camera"]
    np.testing.assert_array_equal(frames[:, 0], frames[:, 1])
    np.testing.assert_array_equal(frames[:, 1], env.render_frames())


def test_the_past_reaches_only_as_far_as_it_was_kept():
    env = tabletop()
    env.keep_past(1)
    env.step(np.ones((4, 4), np.float32))
    first = env.render_frames(final=True)
    env.step(-np.ones((4, 4), np.float32))
    np.testing.assert_array_equal(env.render_past("base_camera", [0, 1], [1, 1]), first[:2])
    with pytest.raises(DataError, match=r"steps_back must lie in 1\.\.1"):
        env.render_past("base_camera", [0], [2])


# Verdicts that are reused


class PictureOnlyEnv(gym.Env):
    """Shows a picture of a number that changes only with an action above 0; tells no state."""

    observation_space = gym.spaces.Dict({"base_camera": gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    action_space = gym.spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self):
        self.number, self.steps = 0, 0

    def _obs(self):
        return {"base_camera": np.full((8, 8, 3), self.number, np.uint8)}

    def reset(self, *, seed=None, options=None):
        self.number, self.steps = self.number + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.number, self.steps = self.number + int(action[0] > 0), self.steps + 1
        return self._obs(), 0.0, False, self.steps >= 9, {}


def lazy_actions(num_envs, seed=0):
    """Half of the environments rest at any time, for some steps each; at rest their fingers stay too."""
    rng = np.random.default_rng(seed)
    moving = rng.random((8, num_envs)) < 0.4

    def act(t):
        actions = rng.uniform(0.2, 1, (num_envs, 4)).astype(np.float32)
        actions[:, 3] = 1.0  # open, as they begin
        actions[~moving[(t // 5) % 8], :3] = 0.0
        return actions

    return act


def verdicts(stacks):
    """A number that depends on every pixel."""
    return (stacks.reshape(len(stacks), -1).astype(np.float64) @ np.arange(1, stacks[0].size + 1)) % 1009


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["states", "pictures"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_reused_verdicts_are_those_of_judging_everything(count, kind, by_hand):
    def make():
        if kind == "pictures":
            env = SyncVectorEnv([PictureOnlyEnv] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
            env.reset(seed=0)
            return env
        env = TabletopVectorEnv(
            4, image_size=(16, 16), max_episode_steps=23, autoreset_mode=AutoresetMode.SAME_STEP
        )
        env.reset(seed=0)
        return env

    results, shown = {}, {}
    for cached in (False, True):
        env = make()
        feed = FrameSelector(
            env, ["base_camera"], RewardConfig(cache_verdicts=cached, cache_tolerance=0.0), count
        )
        values, num_judged = np.full((60, 4), np.nan), 0
        for t, (_, (env_ids, frames), _) in enumerate(watch(env, feed, 60, lazy_actions(4))):
            num_judged += len(env_ids)
            if len(env_ids):
                values[t, env_ids] = verdicts(frames["base_camera"])
            if not by_hand:
                continue
            values[t : t + 1] = carry_forward(values[t : t + 1], values[t - 1] if t else None)
        results[cached] = values if by_hand else carry_forward(values)
        shown[cached] = (num_judged, feed.num_rendered)
    np.testing.assert_array_equal(results[True], results[False])
    assert shown[False] == (240, 240)
    assert shown[True][0] < 200
    assert shown[True][1] == (240 if kind == "pictures" else shown[True][1]) and shown[True][1] <= 240
    if kind == "states":
        assert shown[True][1] < 170
        assert (shown[True][0] == shown[True][1]) == (count == 1)


def test_a_tolerance_is_measured_from_the_last_motion_and_not_from_the_last_step():
    env = TabletopVectorEnv(1, image_size=(16, 16), autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    cfg = RewardConfig(cache_verdicts=True, cache_tolerance=0.05)
    feed = FrameSelector(env, ["base_camera"], cfg)
    creeping = np.array([[0.1, 0.0, 0.0, 1.0]], np.float32)  # 2 mm a step
    scored = []
    for t in range(45):
        obs, _, _, truncated, _ = env.step(creeping)
        if len(feed.step(obs, truncated)[0]):
            scored.append(t)
    assert scored[0] == 0 and 2 <= len(scored) <= 5


def test_a_rollout_begins_with_a_verdict_on_everyone():
    env = tabletop()
    feed = FrameSelector(env, ["base_camera"], RewardConfig(cache_verdicts=True))
    still = np.zeros((4, 4), np.float32)
    still[:, 3] = 1.0
    obs = env.step(still)[0]
    feed.step(obs, np.zeros(4, np.bool_))
    obs = env.step(still)[0]
    env_ids, frames = feed.step(obs, np.zeros(4, np.bool_), score_all=True)
    assert env_ids.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(frames["base_camera"], env.render_frames(final=True))


def test_the_frame_of_a_reused_verdict_is_the_last_one_before_it():
    rows = np.array([0, 1, 2, 4, 6, 8])  # 3 environments, 3 steps
    part = ScoredPart(first_step=10, num_steps=3, first_env=6, num_envs=3, rows=rows, frames={})
    shown = [part.frame_row(10 + place // 3, 6 + place % 3) for place in range(9)]
    assert shown == [0, 1, 2, 0, 3, 2, 4, 3, 5]
