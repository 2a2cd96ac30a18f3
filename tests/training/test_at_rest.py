"""Reward models that judge robots at rest alone: what is collected, fitted, rendered and rewarded."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.agents.cloning import demonstrations
from guerdon.agents.networks import ObsSpec
from guerdon.cli.train import train
from guerdon.config import CollectConfig, EnvConfig, FitConfig, RewardConfig, RewardModelConfig, load_config
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.collect.run import collect
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.envs import TabletopVectorEnv
from guerdon.fit.fit import fit_reward_model
from guerdon.fit.score import score_path
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.monitoring.assess import load_manager
from guerdon.serve import RewardManager
from guerdon.wrappers import LearnedRewardVectorWrapper
from tests.training.conftest import SIZE
from tests.training.short_runs import SAC, lines, make_runner

ASYNC = [*SAC, "asynchronous.enabled=true"]
SMALL = {"arch": "resnet10", "width": 8, "image_size": (3, 24, 24), "hidden_dim": 8}


def untrained(folder, **settings):
    """A model that fires on every frame it is shown."""
    torch.manual_seed(0)
    model = build_model(RewardModelConfig(**settings, **SMALL)).eval()
    sizes = {"base_camera": (*SIZE, 3)}
    contract = replace(Contract.of(model, frame_sizes=sizes), threshold=0.0, data_hash="test")
    return save_checkpoint(folder / "model", model, contract)


@pytest.fixture(scope="module")
def resting(tmp_path_factory):
    return untrained(tmp_path_factory.mktemp("resting"), only_at_rest=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "data"
    env = EnvConfig(num_envs=8, init_params={"image_size": [24, 24]})
    cfg = CollectConfig(
        save_dir=str(folder), policy="scripted", policy_noise=0.5, target_success=12, target_failure=12
    )
    collect(env, cfg, seed=3)
    return folder


def test_what_is_collected_tells_where_the_robot_rests(data):
    store = EpisodeStore(data)
    at_rest = store.at_rest()
    assert at_rest is not None and 0.05 < at_rest.mean() < 0.95
    assert at_rest[store.labels >= 0.5].all()  # success asks for rest
    episode = store.read_episode(0)
    assert np.array_equal(episode.at_rest, at_rest[: len(episode.labels)])


def test_a_fit_looks_at_frames_at_rest_alone(data, tmp_path):
    cfg = replace(FitConfig(), epochs=1, data=replace(FitConfig().data, path=str(data)))
    fits = {}
    for only in (False, True):
        model = RewardModelConfig(only_at_rest=only, **SMALL)
        fits[only] = fit_reward_model(model, cfg, folder=tmp_path / str(only), tensorboard=False)
    store, whole, rest = EpisodeStore(data), fits[False], fits[True]
    assert rest.contract.only_at_rest and not whole.contract.only_at_rest
    assert rest.metrics["num_frames"] < whole.metrics["num_frames"]
    assert rest.metrics["num_positive_frames"] == whole.metrics["num_positive_frames"]
    scored = score_path(load_manager(rest.checkpoint), data, tmp_path)
    assert (scored.prob_success[~store.at_rest()] == 0.0).all()
    assert (scored.prob_success[store.at_rest()] > 0.0).any()


def test_motion_need_not_be_rendered(settings, data, tmp_path):
    """The same episodes, with pictures of robots at rest alone; what needs the others refuses them."""
    env = EnvConfig(num_envs=8, init_params={"image_size": [24, 24]})
    cfg = CollectConfig(
        save_dir=str(tmp_path / "some"), policy="scripted", policy_noise=0.5, target_success=12,
        target_failure=12, only_at_rest=True,
    )  # fmt: skip
    collect(env, cfg, seed=3)
    whole, some = EpisodeStore(data), EpisodeStore(tmp_path / "some")
    rest = some.at_rest()
    assert rest is not None and np.array_equal(some.labels, whole.labels)
    rows, first = np.arange(some.num_frames), some.step == 0
    same = (some.frames("base_camera", rows) == whole.frames("base_camera", rows)).all(axis=(1, 2, 3))
    assert same[rest | first].all() and not same.all()
    kept = np.maximum.accumulate(np.where(rest | first, rows, 0))  # the last picture that was taken
    np.testing.assert_array_equal(some.frames("base_camera", rows), whole.frames("base_camera", kept))
    fit = replace(FitConfig(), epochs=1, data=replace(FitConfig().data, path=str(tmp_path / "some")))
    fitted = fit_reward_model(RewardModelConfig(only_at_rest=True, **SMALL), fit, folder=tmp_path / "resting")
    assert fitted.metrics["num_frames"] > 0
    with pytest.raises(DataError, match=r"collect\.only_at_rest"):
        fit_reward_model(RewardModelConfig(**SMALL), fit, folder=tmp_path / "fit")
    seen = ObsSpec(state_size=0, images=(("base_camera", (24, 24, 3)),))
    with pytest.raises(DataError, match=r"collect\.only_at_rest"):
        demonstrations(tmp_path / "some", seen)
    assert len(demonstrations(data, seen)[1])
    plain = untrained(tmp_path)
    with pytest.raises(DataError, match=r"collect\.only_at_rest"):
        score_path(load_manager(plain), tmp_path / "some", tmp_path)
    more = [*SAC, f"reward.model.checkpoint_path={plain}", f"learner.sac.prior_data={tmp_path / 'some'}"]
    with pytest.raises(DataError, match=r"collect\.only_at_rest"):
        make_runner(settings, tmp_path, more)


def test_data_that_does_not_tell_is_refused(data, tmp_path):
    with StoreWriter(tmp_path / "old") as writer:
        writer.add_many([replace(episode, at_rest=None) for episode in EpisodeStore(data)])
    cfg = replace(FitConfig(), epochs=1, data=replace(FitConfig().data, path=str(tmp_path / "old")))
    with pytest.raises(DataError, match="does not tell where the robot stands still"):
        fit_reward_model(RewardModelConfig(only_at_rest=True, **SMALL), cfg, folder=tmp_path / "fit")


@pytest.mark.parametrize(
    ("more", "mode"),
    [
        pytest.param([], "per_step", id="ppo-per_step"),
        pytest.param(SAC, "terminal", id="sac-terminal"),
        pytest.param(ASYNC, "terminal", id="async-terminal"),
        pytest.param([], "terminal", id="ppo-terminal", marks=pytest.mark.slow),
        pytest.param(SAC, "per_step", id="sac-per_step", marks=pytest.mark.slow),
        pytest.param(ASYNC, "per_step", id="async-per_step", marks=pytest.mark.slow),
    ],
)
def test_a_robot_in_motion_is_no_success_and_is_not_rendered(settings, tmp_path, resting, more, mode):
    model = f"reward.model.checkpoint_path={resting}"
    runner = make_runner(settings, tmp_path, [*more, model, f"reward.reward_mode={mode}"])
    reported, rendered, env = [], [], runner.env_worker.env.unwrapped
    real_step, real_render = env.step, env.render_frames

    def step(actions):
        actions = np.array(actions)
        actions[::2] = 0.0  # every other robot stands still
        answer = real_step(actions)
        done, info = answer[2] | answer[3], answer[4]
        final = info["final_info"]["is_robot_static"] if done.any() else done
        reported.append((np.where(done, final, info["is_robot_static"]), done))
        return answer

    def render(camera="base_camera", env_ids=None, **more):
        rendered.append(len(env_ids))
        return real_render(camera, env_ids, **more)

    env.step, env.render_frames = step, render
    runner.run()
    rest, done = (np.array(part) for part in zip(*reported, strict=True))
    with_score = rest & done if mode == "terminal" else rest
    assert 0 < with_score.sum() < with_score.size
    entries = [entry for entry in lines(tmp_path / "run") if "reward/frames_scored" in entry]
    assert sum(entry["reward/frames_scored"] for entry in entries) == with_score.sum()
    assert sum(entry["reward/frames_rendered"] for entry in entries) == with_score.sum() == sum(rendered)
    steps = np.array([entry["rollout/learned_rewards"] for entry in entries])
    assert np.isclose(steps.sum() * with_score.size / len(entries), with_score.sum())  # it always fires


def test_demonstrations_are_judged_in_the_same_way(settings, data, tmp_path, resting):
    more = [*SAC, f"reward.model.checkpoint_path={resting}", f"learner.sac.prior_data={data}"]
    runner = make_runner(settings, tmp_path, more)
    store = EpisodeStore(data)
    shown = store.success[store.episode]
    runner.loop.prior.save(tmp_path / "prior.npz")
    with np.load(tmp_path / "prior.npz") as saved:
        kept = next(saved[name] for name in saved.files if name.endswith("prob_success")).reshape(-1)
    assert np.array_equal(kept > 0.0, store.at_rest()[shown])


def test_what_contradicts_it_is_refused(settings, tmp_path, resting):
    with pytest.raises(ConfigError, match="single frames"):
        RewardModelConfig(only_at_rest=True, num_frames=2)
    cached = [f"reward.model.checkpoint_path={resting}", "reward.cache_verdicts=true"]
    with pytest.raises(ConfigError, match="cache_verdicts"):
        train(load_config("train", [*settings, *cached]))
    model = replace(RewardModelConfig(), checkpoint_path=str(resting))
    manager = RewardManager(RewardConfig(model=model))
    with pytest.raises(ConfigError, match="at rest"):
        LearnedRewardVectorWrapper(TabletopVectorEnv(2, image_size=SIZE), manager)
