"""Serving: rewards from checkpoints, in mini-batches, with thresholds, types and debug pictures."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf

from guerdon.cli.main import main
from guerdon.config import (
    DistributedConfig,
    FitConfig,
    FitDataConfig,
    RewardConfig,
    RewardModelConfig,
)
from guerdon.core import strict_json
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.summary import convert
from guerdon.fit import fit_reward_model
from guerdon.fit.logs import MetricLog
from guerdon.models import load_checkpoint, save_checkpoint
from guerdon.serve import EmbodiedRewardWorker, ImageRewardWorker, RewardManager, RewardWorker
from guerdon.wrappers import LearnedRewardWrapper
from tests.fit.synthetic import episode, write_store
from tests.plain_fit import plain_fit, plain_optim

MODEL = RewardModelConfig(
    model_type="binary_classifier", arch="resnet10", width=8, image_size=(3, 32, 32), hidden_dim=16
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("serve") / "data", count=40)


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory):
    fit = plain_fit(
        epochs=4, global_batch_size=32, optim=plain_optim(lr=3e-3), data=FitDataConfig(path=str(data))
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    return fit_reward_model(MODEL, fit, folder=folder, tensorboard=False).checkpoint


def reward(checkpoint, **changes):
    return RewardConfig(model=replace(RewardModelConfig(), checkpoint_path=str(checkpoint)), **changes)


@pytest.fixture(scope="module")
def frames(data):
    store = EpisodeStore(data)
    return store.frames("base_camera", np.arange(store.num_frames)), store.labels


def test_binary_rewards_follow_the_calibrated_threshold(checkpoint, frames):
    images, labels = frames
    manager = RewardManager(reward(checkpoint))
    assert manager.threshold == load_checkpoint(checkpoint)[1].threshold
    rewards = manager.compute_rewards({"main_images": images})
    assert rewards.dtype == np.float32
    assert set(rewards.tolist()) == {0.0, 1.0}
    assert (rewards == (labels >= 0.5)).mean() > 0.95


def test_success_and_fail_rewards_and_thresholds(checkpoint, frames):
    images, _ = frames
    prob = RewardManager(reward(checkpoint, reward_type="continuous")).compute_rewards(images)
    assert 0 <= prob.min() < 0.1 < 0.9 < prob.max() <= 1
    cfg = reward(checkpoint, success_reward=10.0, fail_reward=-0.5, reward_threshold=0.3)
    mapped = RewardManager(cfg).compute_rewards(images)
    np.testing.assert_array_equal(mapped, np.where(prob > 0.3, np.float32(10), np.float32(-0.5)))
    never = RewardManager(reward(checkpoint, reward_threshold=1.0)).compute_rewards(images)
    assert not never.any()  # strictly above


def test_every_dialect_of_an_observation_gives_the_same_rewards(checkpoint, frames):
    images, _ = frames
    manager = RewardManager(reward(checkpoint, reward_type="continuous"))
    expected = manager.compute_rewards(images[:16])
    chw = np.moveaxis(images[:16], -1, 1)
    for observation in (
        {"base_camera": torch.from_numpy(images[:16])},
        {"images": {"base_camera": chw}},
        {"main_images": chw.astype(np.float32) / 255},
    ):
        np.testing.assert_allclose(manager.compute_rewards(observation), expected, atol=1e-6)


def test_scoring_is_pure_and_batches_do_not_matter(checkpoint, frames):
    images, _ = frames
    worker = ImageRewardWorker(reward(checkpoint, reward_type="continuous"))
    worker.init_worker()
    whole = worker.compute_batch_rewards({"main_images": images})
    assert len(images) > 256  # more than one mini-batch
    parts = np.concatenate(
        [worker.compute_batch_rewards(images[i : i + 100]) for i in range(0, len(images), 100)]
    )
    np.testing.assert_allclose(whole, parts, atol=1e-5)
    np.testing.assert_array_equal(whole, worker.compute_rewards({"main_images": images}))


def test_mini_batches_have_256_images(checkpoint, frames, monkeypatch):
    images, _ = frames
    worker = EmbodiedRewardWorker(reward(checkpoint))
    worker.init_worker()
    sizes = []
    original = RewardManager._score_batch
    monkeypatch.setattr(
        RewardManager,
        "_score_batch",
        lambda self, f: sizes.append(len(f["base_camera"])) or original(self, f),
    )
    worker.compute_batch_rewards({"main_images": images})
    assert sizes == [256, len(images) - 256]


def test_a_worker_without_a_model_says_so(checkpoint):
    with pytest.raises(ConfigError, match="init_worker"):
        ImageRewardWorker(reward(checkpoint)).compute_batch_rewards(np.zeros((1, 32, 32, 3), np.uint8))
    with pytest.raises(ConfigError, match="checkpoint_path is not set"):
        RewardManager(RewardConfig())
    with pytest.raises(DataError, match="nowhere"):
        RewardManager(reward("nowhere"))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ({"other": np.zeros((2, 32, 32, 3), np.uint8)}, "no image of camera 'base_camera'"),
        ({"base_camera": np.zeros((2, 48, 48, 3), np.uint8)}, "48.*32|32.*48"),
    ],
)
def test_frames_of_another_kind_are_refused_on_the_first_batch(checkpoint, frames, message):
    with pytest.raises(DataError, match=message):
        RewardManager(reward(checkpoint)).compute_rewards(frames)


def test_a_verdict_that_is_not_finite_is_an_error(checkpoint, frames):
    manager = RewardManager(reward(checkpoint))
    with torch.no_grad():
        list(manager.model.parameters())[-1].fill_(float("nan"))
    manager.to_device("cpu")
    with pytest.raises(DataError, match="score of frame 0 of 4 is not finite"):
        manager.compute_rewards(frames[0][:4])


def test_weights_that_are_not_finite_are_refused(checkpoint, tmp_path):
    model, contract, _ = load_checkpoint(checkpoint)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    save_checkpoint(tmp_path / "broken", model, contract)
    with pytest.raises(DataError, match="not finite"):
        RewardManager(reward(tmp_path / "broken"))


def test_a_saved_worker_scores_the_same(checkpoint, frames, tmp_path):
    worker = ImageRewardWorker(reward(checkpoint, reward_type="continuous"))
    worker.init_worker()
    place = worker.save_checkpoint(tmp_path, step=7)
    assert place.name == "step_7"
    again = RewardManager(reward(place, reward_type="continuous"))
    np.testing.assert_array_equal(
        again.compute_rewards(frames[0][:64]), worker.compute_rewards(frames[0][:64])
    )


@pytest.mark.parametrize("by", ["setting", "variable"])
def test_debug_pictures_have_the_documents_names(checkpoint, frames, tmp_path, monkeypatch, by):
    cfg = reward(checkpoint)
    if by == "setting":
        cfg = replace(cfg, model=replace(cfg.model, debug_save_dir=str(tmp_path)))
    else:
        monkeypatch.setenv("DEBUG_IMAGE_SAVE_DIR", str(tmp_path))
    images, labels = frames
    manager = RewardManager(cfg)
    chosen = np.concatenate([images[labels > 0.5][:5], images[labels < 0.5][:5]])
    verdict = manager.score({"base_camera": chosen})
    names = [
        f"resnet_{'success' if prob > manager.threshold else 'fail'}/{number:06d}_prob{prob:.4f}.png"
        for number, prob in enumerate(verdict.prob_success.tolist())
    ]
    assert sorted(str(item.relative_to(tmp_path)) for item in tmp_path.rglob("*.png")) == sorted(names)
    manager.score({"base_camera": chosen[:1]})
    assert len(list(tmp_path.rglob("000010_*.png"))) == 1  # numbers go on
    other = RewardManager(cfg)
    for each in (other, manager, other):
        each.score({"base_camera": chosen[:1]})
    numbers = [item.name.partition("_")[0] for item in tmp_path.rglob("*.png")]
    assert sorted(map(int, numbers)) == list(range(14))  # two managers share no number


def test_reward_score(checkpoint, data, tmp_path, capsys):
    out = tmp_path / "scores.parquet"
    code = main(["reward", "score", str(data), "--checkpoint", str(checkpoint), "--out", str(out), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["frames"]) == (0, EpisodeStore(data).num_frames)
    assert result["metrics"]["auc"] > 0.98
    table = pq.read_table(out).to_pydict()
    assert sum(table["fires"]) == result["fires"]
    assert set(table) == {"episode", "step", "label", "prob_success", "fires", "source"}


def test_reward_score_of_a_foreign_format_as_json(checkpoint, data, tmp_path, capsys):
    convert(data, tmp_path / "npy", "npy-trajectory")
    out = tmp_path / "scores.json"
    code = main(
        ["reward", "score", str(tmp_path / "npy"), "--checkpoint", str(checkpoint), "--out", str(out)]
    )
    assert (code, "frames/s" in capsys.readouterr().out) == (0, True)
    assert json.loads(out.read_text())[0].keys() >= {"prob_success", "label"}


def test_reward_card(checkpoint, data, tmp_path, capsys):
    out = tmp_path / "card.html"
    arguments = ["reward", "card", "--checkpoint", str(checkpoint), "--data", str(data), "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    page = out.read_text()
    assert result["headline"].split(".")[0] in page
    assert page.count("<svg") >= 4
    assert page.count("data:image/png;base64,") >= 4
    assert load_checkpoint(checkpoint)[1].data_hash in page


def test_int8_decides_as_fp32_and_belongs_to_its_checkpoint(checkpoint, data, frames, tmp_path, capsys):
    images, _ = frames
    place = tmp_path / "model"
    save_checkpoint(place, *load_checkpoint(checkpoint)[:2])
    int8 = RewardModelConfig(checkpoint_path=str(place), precision="int8")
    with pytest.raises(ConfigError, match=r"int8\.npz does not exist.*guerdon reward quantize"):
        RewardManager(RewardConfig(model=int8))
    assert main(["reward", "quantize", str(data), "--checkpoint", str(place), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["agreement"] >= 0.999 and made["num_check_frames"] > 100 and made["file"].endswith("int8.npz")
    fast = RewardManager(RewardConfig(model=int8)).compute_rewards(images)
    exact = RewardManager(reward(place)).compute_rewards(images)
    assert (fast == exact).mean() >= 0.999 and 0 < exact.mean() < 1
    with pytest.raises(ConfigError, match="verified for a threshold"):
        RewardManager(RewardConfig(model=int8, reward_threshold=0.9999))
    with pytest.raises(ConfigError, match="CPU alone, not on cuda:0"):
        RewardManager(RewardConfig(model=int8), device="cuda:0")
    assert main(["reward", "score", str(data), "--checkpoint", str(place), "--precision", "int8"]) == 0
    assert main(["reward", "quantize", str(data), "--checkpoint", str(place), "--threshold", "2"]) == 2


def test_a_fit_for_int8_brings_its_int8_version(data, tmp_path):
    fit = plain_fit(
        epochs=4, global_batch_size=32, optim=plain_optim(lr=3e-3), data=FitDataConfig(path=str(data))
    )
    made = fit_reward_model(replace(MODEL, precision="int8"), fit, folder=tmp_path, tensorboard=False)
    cfg = RewardConfig(model=RewardModelConfig(checkpoint_path=str(made.checkpoint), precision="int8"))
    assert RewardManager(cfg).threshold == made.contract.threshold


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_fit_for_int8_without_its_packages_does_not_start(tmp_path, monkeypatch, package, num_processes):
    monkeypatch.setitem(sys.modules, package, None)
    fit = plain_fit(
        data=FitDataConfig(path=str(tmp_path / "none")),
        distributed=DistributedConfig(num_processes=num_processes),
    )
    with pytest.raises(ConfigError, match=r"int8.*pip install 'guerdon\[serve\]'"):
        fit_reward_model(replace(MODEL, precision="int8"), fit, folder=tmp_path / "run", tensorboard=False)
    assert not (tmp_path / "run").exists()


def test_a_setting_that_contradicts_the_checkpoint_is_refused(checkpoint):
    model = RewardModelConfig(checkpoint_path=str(checkpoint), hidden_dim=99)
    with pytest.raises(ConfigError, match="hidden_dim is 99 in the config and 16 in the checkpoint"):
        RewardManager(RewardConfig(model=model))
    RewardManager(RewardConfig(model=replace(model, hidden_dim=16)))


# Every batch is checked


def test_every_batch_is_checked_whoever_asks(checkpoint, frames):
    images, _ = frames
    small, stacked = images[:4, ::2, ::2], images[:8].reshape(4, 2, *images.shape[1:])
    manager = RewardManager(reward(checkpoint))
    worker = ImageRewardWorker(reward(checkpoint))
    worker.init_worker()
    for ask in (
        lambda shown: manager.score({"base_camera": shown}),
        manager.compute_rewards,
        lambda shown: worker.score({"base_camera": shown}),
        lambda shown: worker.score_some({"base_camera": shown}, 0, len(shown)),
        worker.compute_batch_rewards,
    ):
        ask(images[:4])  # the first batch is right
        with pytest.raises(DataError, match=r"\[16, 16, 3\], the checkpoint was trained on \[32, 32, 3\]"):
            ask(small)
        if ask == worker.compute_batch_rewards:  # steps of several environments, as RLinf's workflow has them
            assert ask(stacked).shape == (4, 2)
            continue
        with pytest.raises(DataError, match="stacks of 2, the checkpoint scores 1"):
            ask(stacked)
    with pytest.raises(DataError, match=r"float32 from 0\..*trained on uint8"):
        manager.score({"base_camera": images[:4].astype(np.float32) / 255})
    with pytest.raises(DataError, match="values from 0 to 1"):
        manager.score({"base_camera": images[:4] // 150})
    with pytest.raises(DataError, match="red and blue are swapped"):
        manager.score({"base_camera": images[:128, ..., ::-1]})
    with pytest.raises(DataError, match=r"cameras \['wrist'\], the checkpoint was trained on"):
        manager.score({"wrist": images[:4]})


def test_checking_costs_nothing_beside_judging(checkpoint, frames):
    manager = RewardManager(reward(checkpoint))
    batch = {"base_camera": np.concatenate([frames[0]] * 2)[:256]}

    def cpu_seconds(function, times):
        function(batch)
        began = time.thread_time()
        for _ in range(times):
            function(batch)
        return (time.thread_time() - began) / times

    check, judge = cpu_seconds(manager.check, 20), cpu_seconds(manager.score, 3)
    assert check < 0.1 * judge  # of the smallest network: of ResNet10 at 64x64 it is 0.3%


# What is given


def test_a_path_will_do_for_a_section(checkpoint, frames, monkeypatch):
    expected = RewardManager(reward(checkpoint)).compute_rewards(frames[0][:8])
    for given in (str(checkpoint), checkpoint):
        np.testing.assert_array_equal(RewardManager(given).compute_rewards(frames[0][:8]), expected)
        worker = ImageRewardWorker(given)
        worker.init_worker()
        np.testing.assert_array_equal(worker.compute_rewards(frames[0][:8]), expected)
    for cls in (RewardManager, ImageRewardWorker, RewardWorker):
        with pytest.raises(ConfigError, match=f"{cls.__name__} takes a RewardConfig, .* not int"):
            cls(3)
    with pytest.raises(DataError, match="binary: there is no such checkpoint"):
        RewardManager("binary")
    with pytest.raises(ConfigError, match="task_type must be one of"):
        RewardWorker(reward(checkpoint), task_type="image")


def test_configs_of_rlinf_will_do_for_a_section(checkpoint, frames):
    expected = RewardManager(reward(checkpoint)).compute_rewards(frames[0][:8])
    model = {"checkpoint_path": str(checkpoint), "reward_type": "binary"}
    tree = {"runner": {"task_type": "embodied"}, "reward": {"use_reward_model": True, "reward_model": model}}
    for given in (OmegaConf.create(tree), tree, tree["reward"], OmegaConf.create(tree["reward"])):
        for cls in (ImageRewardWorker, RewardWorker):
            worker = cls(given)
            worker.init_worker()
            np.testing.assert_array_equal(worker.compute_batch_rewards(frames[0][:8]), expected)
    text = {"runner": {"task_type": "text"}, "reward": {"text": {"rules": []}}}
    assert RewardWorker(text).task_type == "text"
    with pytest.raises(ConfigError, match="reward_modl"):
        ImageRewardWorker({"reward": {"reward_modl": model}})


def test_rollouts_of_many_steps(checkpoint, frames):
    """[T, N] observations: stacked, in a list, or in an object as RLinf's rollouts are."""
    images, worker = frames[0][:12], ImageRewardWorker(reward(checkpoint, reward_type="continuous"))
    worker.init_worker()
    expected = worker.compute_batch_rewards(images).reshape(3, 4)
    stacked = images.reshape(3, 4, *images.shape[1:])
    steps = [{"main_images": each} for each in stacked]
    held = [
        stacked,
        {"main_images": stacked},
        steps,
        SimpleNamespace(
            transitions=[({"main_images": each * 0}, step) for each, step in zip(stacked, steps, strict=True)]
        ),
        SimpleNamespace(transitions=[{"obs": None, "next_obs": step} for step in steps]),
        SimpleNamespace(transitions=None, forward_inputs=steps),
        SimpleNamespace(forward_inputs={"main_images": stacked}),
    ]
    for each in held:
        np.testing.assert_allclose(worker.compute_batch_rewards(each), expected, atol=1e-5)
    with pytest.raises(DataError, match="no observations"):
        worker.compute_batch_rewards([])


def test_wrappers_take_a_path_or_refuse_by_name(checkpoint, frames):
    class Shows(gym.Env):
        observation_space = gym.spaces.Box(0, 255, frames[0].shape[1:], np.uint8)
        action_space = gym.spaces.Box(-1, 1, (1,))

        def reset(self, *, seed=None, options=None):
            return frames[0][0], {}

        def step(self, action):
            return frames[0][1], 0.0, False, False, {}

    env = LearnedRewardWrapper(Shows(), str(checkpoint), RewardConfig(reward_type="continuous"))
    env.reset()
    said = env.step(np.zeros(1))[1]
    assert said == RewardManager(checkpoint).score({"base_camera": frames[0][1:2]}).prob_success[0]
    with pytest.raises(ConfigError, match=r"the reward comes from a RewardManager, .* not from RewardConfig"):
        LearnedRewardWrapper(Shows(), RewardConfig())
    with pytest.raises(ConfigError, match="cfg must be a RewardConfig, not str"):
        LearnedRewardWrapper(Shows(), str(checkpoint), "binary")
    with pytest.raises(DataError, match="there is no such checkpoint"):
        LearnedRewardWrapper(Shows(), "no/such/model")


def test_functions_that_take_paths_take_text(checkpoint, data, tmp_path):
    from guerdon.cli.reward import score
    from guerdon.config import load_config
    from guerdon.datasets import RewardDataset
    from guerdon.rewards import create_reward_model
    from guerdon.run import EmbodiedRunner

    assert len(RewardDataset(str(data), cameras="base_camera")) == EpisodeStore(data).num_frames
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    assert load_config(tmp_path / "mine.yaml", "learner.ppo.gamma=0.5").learner.ppo.gamma == 0.5
    assert load_config("mine", config_path=tmp_path).seed == 3
    for refused, message in (
        (
            lambda: fit_reward_model("resnet_reward", FitConfig(), folder="x"),
            "model_cfg must be a RewardModel",
        ),
        (lambda: create_reward_model("gail"), "takes settings, not the text 'gail'"),
        (lambda: EmbodiedRunner("train", "x"), "EmbodiedRunner takes a GuerdonConfig"),
    ):
        with pytest.raises(ConfigError, match=message):
            refused()
    reported = score(str(data), str(checkpoint), str(tmp_path / "out.json"), precision="fp32")
    assert len(json.loads((tmp_path / "out.json").read_text())) == reported["frames"]


def test_json_has_no_nan(checkpoint, tmp_path, capsys):
    """Of frames of one class alone there is no AUC; it was printed as NaN, which no strict parser reads."""
    with StoreWriter(tmp_path / "failures") as writer:
        writer.add_many([episode(seed, False) for seed in range(3)])
    command = ["reward", "score", str(tmp_path / "failures"), "--checkpoint", str(checkpoint), "--json"]
    assert main(command) == 0
    reported = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert reported["metrics"]["auc"] is None and reported["metrics"]["false_positive_rate"] is not None


def test_the_one_writer_of_json(tmp_path):
    value = {"a": float("nan"), "b": [np.float32("inf"), np.int64(3), (1.5,)], "c": tmp_path, 4: np.eye(2)[0]}
    text = strict_json.dumps(value)
    expected = {"a": None, "b": [None, 3, [1.5]], "c": str(tmp_path), "4": [1.0, 0.0]}
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == expected
    with MetricLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"reward/agreement": float("nan")})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/agreement": null}\n'
