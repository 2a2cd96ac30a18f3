"""`load_reward`, `fit_reward` and `Reward`."""

import numpy as np
import pytest
import torch

import guerdon as gd
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_unit_chw
from tests.api.dot import SIZE, frames, save_untrained
from tests.fit.synthetic import episode, write_store


@pytest.fixture(scope="module")
def reward(checkpoint):
    return gd.load_reward(checkpoint)


def test_all_forms_of_frames_get_the_same_answer(reward):
    images = frames(5)
    wanted = reward.predict(images)
    assert wanted.shape == (5,) and wanted.dtype == np.float32
    assert ((wanted > 0) & (wanted < 1)).all()
    chw = np.moveaxis(images, -1, 1)
    forms = {
        "dict": {"base_camera": images},
        "CHW": chw,
        "float": images.astype(np.float32) / 255,
        "float 0-255": images.astype(np.float32),
        "torch": torch.from_numpy(images),
        "torch CHW float": torch.from_numpy(to_unit_chw(images)),
        "list": list(images),
    }
    for name, form in forms.items():
        np.testing.assert_array_equal(reward.predict(form), wanted, err_msg=name)
    np.testing.assert_allclose(reward.predict(images[0]), wanted[:1], atol=1e-6)
    assert reward.predict(images[:0]).shape == (0,)


def test_rewards_follow_the_settings(checkpoint):
    images = frames(6)
    reward = gd.load_reward(checkpoint, success_reward=2.0, fail_reward=-1.0)
    prob = reward.predict(images)
    assert set(reward(images).tolist()) == {2.0, -1.0}
    np.testing.assert_array_equal(reward(images) == 2.0, prob > reward.threshold)
    continuous = gd.load_reward(checkpoint, reward_type="continuous")
    np.testing.assert_array_equal(continuous(images), prob)
    assert gd.load_reward(checkpoint, threshold=0.9).threshold == 0.9
    assert reward.threshold == reward.contract.threshold


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 5, 5, 3), np.uint8), "frames: .*trained on \\[24, 24, 3\\]"),
        (np.full((2, SIZE, SIZE, 3), np.nan), "frames: .*NaN"),
        (np.zeros((SIZE, SIZE, 7), np.uint8), "frames: .*shape"),
        ({"wrist": np.zeros((1, SIZE, SIZE, 3), np.uint8)}, "frames: there is no camera 'base_camera'"),
        (np.full((1, SIZE, SIZE, 3), -4.0), "frames: .*-4"),
    ],
)
def test_wrong_frames_are_an_error_about_frames(reward, given, message):
    with pytest.raises(DataError, match=message):
        reward.predict(given)


def test_a_model_of_two_frames_takes_stacks_or_an_episode(tmp_path):
    reward = gd.load_reward(save_untrained(tmp_path / "two", num_frames=2))
    images = frames(4)
    stacks = np.stack([images[[0, 0, 1, 2]], images], axis=1)
    np.testing.assert_array_equal(reward.predict(images, episode=True), reward.predict(stacks))
    with pytest.raises(DataError, match=r"frames: this model scores 2 frames together.*episode=True"):
        reward.predict(images)


def test_a_model_of_two_cameras_takes_a_dict(tmp_path):
    reward = gd.load_reward(save_untrained(tmp_path / "two", cameras=("front", "side")))
    images = frames(3)
    assert reward.predict({"front": images, "side": images}).shape == (3,)
    with pytest.raises(DataError, match=r"give a dict with \['front', 'side'\]"):
        reward.predict(images)
    with pytest.raises(DataError, match="different numbers of images"):
        reward.predict({"front": images, "side": images[:2]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 2.0}, "^threshold must be"),
        ({"precision": "fp8"}, "^precision must be"),
        ({"device": "tpu9"}, "^device must be such as 'cpu'"),
        ({"reward_typ": "binary"}, "load_reward: unknown argument 'reward_typ'; did you mean 'reward_type'"),
        ({"reward_type": "binry"}, "^reward_type must be .*did you mean 'binary'"),
    ],
)
def test_wrong_arguments_are_named(checkpoint, arguments, message):
    with pytest.raises(ConfigError, match=message):
        gd.load_reward(checkpoint, **arguments)


def test_what_is_no_checkpoint_is_said():
    with pytest.raises(DataError, match="nowhere"):
        gd.load_reward("nowhere")
    with pytest.raises(ConfigError, match="path must be the path of a checkpoint, not 3"):
        gd.load_reward(3)


def test_saved_and_loaded_again(reward, tmp_path):
    again = gd.load_reward(reward.save(tmp_path / "copy"))
    np.testing.assert_array_equal(again.predict(frames(3)), reward.predict(frames(3)))
    assert again.threshold == reward.threshold


def test_it_shows_itself(reward):
    assert "resnet10/8" in repr(reward) and "base_camera" in repr(reward)
    assert reward._repr_html_().startswith("<b>Reward</b><table>")


SMALL = {"arch": "resnet10", "width": 8, "image_size": (3, 32, 32), "hidden_dim": 8, "batch_size": 32}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    data = gd.read(write_store(folder / "data"))
    return gd.fit_reward(data, out=folder / "run", epochs=6, seed=1, progress=False, **SMALL)


def test_fit_reward_learns_and_is_calibrated(fitted):
    assert fitted.metrics["auc"] > 0.95 and fitted.metrics["auc"] == fitted.fit_result.metrics["auc"]
    fresh = [episode(seed, seed % 2 == 0) for seed in range(100, 106)]
    images = np.concatenate([each.frames["base_camera"] for each in fresh])
    labels = np.concatenate([each.labels for each in fresh]) >= 0.5
    prob = fitted.predict(images)
    assert prob[labels].mean() > prob[~labels].mean() + 0.3
    assert fitted.fit_result.to_dict()["val"]["auc"] == fitted.fit_result.metrics["auc"]
    assert fitted.fit_result.checkpoint.name == "best_model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "^epochs must be a whole number"),
        ({"epoch": 3}, "fit_reward: unknown argument 'epoch'; did you mean 'epochs'"),
        ({"arch": "resnet11"}, "^arch must be"),
        ({"learning_rate": -1}, "^learning_rate must be"),
        ({"device": "gpu"}, "^device must be such as 'cpu', 'cuda'"),
        ({"seed": -1}, "^seed must be"),
    ],
)
def test_wrong_arguments_of_a_fit_are_named(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        gd.fit_reward(tmp_path, out=tmp_path / "run", **arguments)


def test_a_fit_without_data_names_data(tmp_path):
    with pytest.raises(DataError, match=r"data: .*does not exist"):
        gd.fit_reward(tmp_path / "nothing", out=tmp_path / "run")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh") / "data"
    return gd.Dataset.from_arrays(*_labelled(range(100, 112)), folder, episode=np.repeat(np.arange(12), 12))


def _labelled(seeds):
    episodes = [episode(seed, seed % 2 == 0) for seed in seeds]
    images = np.concatenate([each.frames["base_camera"] for each in episodes])
    return images, np.concatenate([each.labels for each in episodes])


def test_the_card(fitted, fresh, tmp_path, capsys):
    card = fitted.card(fresh, progress=False)
    assert card.metrics["auc"] > 0.9 and card.threshold == fitted.threshold
    assert {"continuous", "binary", "terminal"} <= set(card.uses)
    assert card.save(tmp_path / "cards" / "card.html").read_text() == card.html
    assert "srcdoc=" in card._repr_html_() and "auc=" in repr(card)
    assert card.to_dict()["headline"] == card.headline and "html" not in card.to_dict()
    card.show()
    assert card.headline in capsys.readouterr().out
    with pytest.raises(DataError, match=r"data: .* does not exist"):
        fitted.card(tmp_path / "nothing")


def test_another_threshold_without_a_refit(fitted, fresh, tmp_path):
    again = fitted.recalibrate(fresh, threshold=0.25, out=tmp_path / "recalibrated")
    assert again.threshold == pytest.approx(0.25) and fitted.threshold != again.threshold
    assert gd.load_reward(tmp_path / "recalibrated").threshold == pytest.approx(0.25)


def test_frames_from_files(reward, tmp_path):
    from PIL import Image

    images = frames(3)
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    np.testing.assert_allclose(reward.predict(tmp_path), reward.predict(images), atol=1e-6)
    with pytest.raises(DataError, match=r"frames: .*does not exist"):
        reward.predict(tmp_path / "nothing.mp4")
