"""LeRobot's reward classifier, read and written. `tests/hf/lerobot/` holds what LeRobot 0.6.1 itself wrote.

The files were made by `scripts/lerobot_classifier.py make`, with the logits that LeRobot gives.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import guerdon as gd
from guerdon.cli.main import main
from guerdon.config import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.fit import fit_reward_model
from guerdon.fit.recalibrate import recalibrate
from guerdon.models import Contract, build_model, save_checkpoint
from guerdon.rewards.image.lerobot_writing import write_lerobot
from tests.fit.synthetic import episode, write_store
from tests.hf.tiny import SMALL, save
from tests.plain_fit import plain_fit, plain_optim

FOLDERS = Path(__file__).parent / "lerobot"
NAMES = ["resnet10", "resnet18", "vit"]
BASE = {"model_type": "lerobot_classifier", "hidden_dim": 8, "latent_dim": 6, "num_spatial_blocks": 2}
TEMPERATURE = {"kind": "temperature", "temperature": 2.0}
ISOTONIC = {"kind": "isotonic", "knots": [-1.0, 0.0, 1.0], "values": [-3.0, -0.5, 2.0]}


def theirs(tmp_path, name):
    """A copy of a folder, with the frames by camera and LeRobot's logits."""
    folder = shutil.copytree(FOLDERS / name, tmp_path / name)
    change(folder, model_name=str(FOLDERS / "encoders" / name))
    found = np.load(FOLDERS / f"{name}.npz")
    frames = {key.rpartition(".")[2]: found[key] for key in found.files if key != "logits"}
    return folder, frames, found["logits"]


def change(folder, **values):
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, **values}))


@pytest.mark.parametrize("name", NAMES)
def test_its_logits_are_those_of_lerobot(tmp_path, name):
    folder, frames, logits = theirs(tmp_path, name)
    reward = gd.load_reward(folder, device="cpu")
    assert reward.image_keys == tuple(frames) and reward.threshold == 0.5
    found, _ = reward.logits(frames)
    np.testing.assert_allclose(found, logits, atol=1e-5, rtol=0)
    assert np.ptp(logits) > 0.05
    shared = reward.save_pretrained(tmp_path / "shared")  # as a model of ours, with calibration and all
    np.testing.assert_array_equal(gd.Reward.from_pretrained(shared, device="cpu").logits(frames)[0], found)


def test_what_matters_of_the_folder(tmp_path):
    """Normalisation, the order of cameras and the pooling of LeRobot's own ResNet10 all have an effect."""
    folder, frames, logits = theirs(tmp_path, "resnet10")
    swapped = dict(zip(frames, reversed(list(frames.values())), strict=True))
    reward = gd.load_reward(folder, device="cpu")
    assert np.abs(reward.logits(swapped)[0] - logits).max() > 1e-3
    reward.model.image_encoder.end_padded_pool = False
    again = gd.load_reward(folder, device="cpu")
    again.model.image_encoder.end_padded_pool = False
    assert np.abs(again.to_device("cpu").logits(frames)[0] - logits).max() > 1e-3
    for file in folder.glob("*preprocessor*"):
        file.unlink()
    assert np.abs(gd.load_reward(folder, device="cpu").logits(frames)[0] - logits).max() > 1e-3


def test_older_versions_kept_statistics_in_the_weights(tmp_path):
    folder, frames, logits = theirs(tmp_path, "resnet18")
    stats = load_file(folder / "classifier_preprocessor_step_0_normalizer_processor.safetensors")
    weights = load_file(folder / "model.safetensors")
    for key, value in stats.items():
        name, _, kind = key.rpartition(".")
        weights[f"normalize_inputs.buffer_{name.replace('.', '_')}.{kind}"] = value
    for file in folder.glob("*preprocessor*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors")
    np.testing.assert_allclose(gd.load_reward(folder, device="cpu").logits(frames)[0], logits, atol=1e-5)


def test_a_checkpoint_folder_and_the_command(tmp_path, capsys):
    folder, frames, _ = theirs(tmp_path, "vit")
    place = tmp_path / "run" / "checkpoints" / "last"
    place.mkdir(parents=True)
    folder.rename(place / "pretrained_model")
    Image.fromarray(frames["front"][0]).save(tmp_path / "frame.png")
    asked = ["reward", "score", tmp_path / "frame.png", "--checkpoint", tmp_path / "run", "--json"]
    assert main([str(word) for word in asked]) == 0
    wanted = gd.load_reward(tmp_path / "run").predict(frames["front"][:1])[0]
    assert json.loads(capsys.readouterr().out)["mean_probability"] == pytest.approx(float(wanted), abs=1e-6)
    with pytest.raises(ConfigError, match="a folder of LeRobot: export the model"):
        recalibrate(tmp_path / "run", tmp_path, threshold=0.6)


def _cut(folder):
    blob = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(blob[: len(blob) // 2])


def _without(prefix):
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        kept = {name: value for name, value in weights.items() if prefix not in name}
        save_file(kept, folder / "model.safetensors")

    return damage


def _nan_statistics(folder):
    file = folder / "classifier_preprocessor_step_0_normalizer_processor.safetensors"
    stats = load_file(file)
    stats["observation.images.front.std"][0] = float("nan")
    save_file(stats, file)


IMAGES = {"type": "VISUAL", "shape": [3, 128, 128]}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "no safetensors file"),
        (_without("classifier_head.4"), "lacks weights of the head"),
        (_without(".1.kernel"), "has no weights of the camera observation_images_front"),
        (_without("encoder."), "has no weights of an encoder|has no weights"),
        (_without("stages.2"), "is no ResNet of"),
        (_nan_statistics, "statistics of observation.images.front are damaged"),
        (lambda folder: change(folder, num_classes=5), "tells 5 classes; a reward model tells success alone"),
        (lambda folder: change(folder, num_cameras=1), "num_cameras is 1, but it has 2"),
        (lambda folder: change(folder, hidden_dim="x"), "config.json is damaged"),
        (lambda folder: change(folder, hidden_dim=17), "do not fit"),
        (lambda folder: change(folder, input_features={}), "it has no camera"),
        (lambda folder: change(folder, input_features=[1]), "names no input_features"),
        (
            lambda folder: change(
                folder,
                input_features={
                    "observation.images.front": IMAGES,
                    "observation.images.wrist": {"type": "VISUAL", "shape": [3, 64, 64]},
                },
            ),
            "cameras have different sizes",
        ),
        (
            lambda folder: change(
                folder,
                num_cameras=1,
                input_features={"observation.images.front": {"type": "VISUAL", "shape": [3, 224, 224]}},
            ),
            "images of 224x224 give 7x7",
        ),
        (lambda folder: change(folder, normalization_mapping={"VISUAL": "ODD"}), "ODD, which is not known"),
        (lambda folder: change(folder, normalization_mapping="MEAN_STD"), "MEAN_STD, which is no dict"),
        (
            lambda folder: change(folder, normalization_mapping=[1]),
            r"\[1\], which is no dict",
        ),
        (lambda folder: change(folder, normalization_mapping={"VISUAL": ["x"]}), r"by \['x'\], which is not"),
        (
            lambda folder: change(folder, normalization_mapping={"VISUAL": None}),
            "by None, which is not known",
        ),
    ],
)
def test_damaged_or_other_folders(tmp_path, damage, message):
    folder, _, _ = theirs(tmp_path, "resnet18")
    damage(folder)
    with pytest.raises(DataError, match=message) as error:
        gd.load_reward(folder)
    assert len(str(error.value).splitlines()) == 1


def test_an_encoder_that_cannot_be_had(tmp_path, monkeypatch):
    from huggingface_hub import constants

    folder, _, _ = theirs(tmp_path, "vit")
    change(folder, model_name="someone/vit")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"its encoder's config.json is needed: someone/vit"):
        gd.load_reward(folder)


def make(tmp_path, calibration, **settings):
    """A random model of ours, and frames."""
    torch.manual_seed(0)
    config = RewardModelConfig(**{**BASE, **settings})
    model = build_model(config).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    size = config.image_size[1]
    coarse = np.random.default_rng(0).integers(0, 256, (len(config.image_keys), 6, 8, 8, 3), dtype=np.uint8)
    images = coarse.repeat(size // 8, axis=2).repeat(size // 8, axis=3)
    frames = dict(zip(config.image_keys, images, strict=True))
    contract = Contract.of(
        model,
        frame_sizes=dict.fromkeys(config.image_keys, (size, size, 3)),
        calibration={"map": calibration, "threshold": None},
    )
    prob = contract.calibration_map.apply(model(frames).detach().numpy())
    save_checkpoint(tmp_path / "model", model, replace(contract, threshold=float(np.median(prob))))
    return gd.load_reward(tmp_path / "model", device="cpu"), frames


@pytest.mark.parametrize(
    ("name", "calibration", "settings"),
    [
        ("resnet18", TEMPERATURE, {"arch": "resnet18", "width": 4, "image_keys": ("front", "wrist")}),
        ("resnet50", ISOTONIC, {"arch": "resnet50", "width": 4, "normalize": False}),
        ("vit", TEMPERATURE, {"image_size": (3, 32, 32)}),
        ("convnext", TEMPERATURE, {}),
    ],
)
def test_written_and_read_again(tmp_path, name, calibration, settings):
    import transformers as t

    if name == "vit":
        settings["encoder"] = f"hf:{save(tmp_path / 'e', t.ViTConfig(image_size=32, patch_size=16, **SMALL))}"
    if name == "convnext":
        config = t.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
        settings["encoder"] = f"hf:{save(tmp_path / 'e', config)}"
    reward, frames = make(tmp_path, calibration, **settings)
    out = Path(os.environ.get("LEROBOT_FOLDER", tmp_path)) / name
    threshold = write_lerobot(out, reward.model, reward.contract)
    prob = reward.score(frames).prob_success
    same = calibration is TEMPERATURE
    keys = {f"observation.images.{key}": value for key, value in frames.items()}
    fired = reward.fires(prob)
    assert 0 < fired.sum() < len(fired)
    np.savez_compressed(
        f"{out}.npz", prob_success=prob, threshold=threshold, fires=fired, same_probabilities=same, **keys
    )
    back = gd.load_reward(out, device="cpu", threshold=threshold)
    found = back.score(frames).prob_success
    np.testing.assert_array_equal(back.fires(found), fired)
    assert (np.abs(found - prob).max() < 1e-6) == same
    told = json.loads((out / "config.json").read_text())
    assert told["type"] == "reward_classifier" and told["num_cameras"] == len(frames)
    assert told["model_type"] == ("transformer" if name == "vit" else "cnn")
    if "LEROBOT_FOLDER" not in os.environ:
        moved = out.rename(tmp_path / "moved")  # `model_name` names the old place; `encoder/` is beside
        np.testing.assert_array_equal(gd.load_reward(moved, device="cpu").score(frames).prob_success, found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "resnet_reward"},
            "a resnet_reward has other layers .*model_type=lerobot_classifier",
        ),
        ({"model_type": "binary_classifier"}, "a binary_classifier has other layers"),
        ({"num_members": 2}, "has 2 heads"),
        ({"crop": (0.0, 0.0, 0.5, 0.5)}, "crops frames"),
        ({"only_at_rest": True}, "robots at rest alone"),
    ],
)
def test_what_lerobot_cannot_be(tmp_path, settings, message):
    model = build_model(RewardModelConfig(**{**BASE, "width": 4, **settings}))
    with pytest.raises(ConfigError, match=message):
        write_lerobot(tmp_path / "out", model, Contract.of(model))
    assert not (tmp_path / "out").exists()


def test_group_norm_goes_to_lerobots_own_resnet(tmp_path):
    folder, _, _ = theirs(tmp_path, "resnet10")
    narrow = gd.load_reward(folder, device="cpu")
    with pytest.raises(ConfigError, match="lerobot/resnet10, of width 64"):
        write_lerobot(tmp_path / "out", narrow.model, narrow.contract)
    model = build_model(RewardModelConfig(**BASE, width=64))
    model.image_encoder.use_layout("group", False)
    write_lerobot(tmp_path / "out", model.eval(), Contract.of(model))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_name"] == "lerobot/resnet10"
    frames = np.random.default_rng(0).integers(0, 256, (2, 128, 128, 3), dtype=np.uint8)
    assert torch.equal(gd.load_reward(tmp_path / "out", device="cpu").model(frames), model(frames))
    model.image_encoder.use_layout("group", True)
    with pytest.raises(ConfigError, match="pads as Flax does"):
        write_lerobot(tmp_path / "flax", model, Contract.of(model))


def test_its_network_can_be_fitted_here_and_goes_to_lerobot(tmp_path, capsys):
    data = write_store(tmp_path / "data", size=32)
    config = RewardModelConfig(**BASE, width=4, image_size=(3, 128, 128))
    fit = plain_fit(epochs=2, optim=plain_optim(lr=3e-3))
    fit = replace(fit, data=replace(fit.data, path=str(data)))
    result = fit_reward_model(config, fit, folder=tmp_path, seed=0)
    assert result.metrics["auc"] > 0.9
    words = ["reward", "export", "--checkpoint", str(result.checkpoint), "--to", "lerobot", "--json"]
    assert main([*words, "--out", str(tmp_path / "theirs")]) == 0
    told = json.loads(capsys.readouterr().out)
    ours = gd.load_reward(result.checkpoint, device="cpu")
    again = gd.load_reward(tmp_path / "theirs", device="cpu", threshold=told["success_threshold"])
    images = np.concatenate([episode(seed, seed % 2 == 0).frames["base_camera"] for seed in range(4)])
    with torch.no_grad():
        one, other = ours.model(images), again.model(images)
    prob, found = ours.calibration.apply(one.numpy()), torch.sigmoid(other).numpy()
    np.testing.assert_array_equal(found > again.threshold, prob > ours.threshold)
    assert main(words) == 2 and "give --out FOLDER" in capsys.readouterr().err
