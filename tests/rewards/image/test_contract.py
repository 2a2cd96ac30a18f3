import json
import logging

import numpy as np
import pytest
import torch

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.models import Contract, build_model
from guerdon.rewards.image.contract import changed_settings

CONFIG = RewardModelConfig(
    model_type="binary_classifier",
    arch="resnet10",
    width=8,
    image_keys=("front", "wrist"),
    image_size=(3, 32, 32),
    hidden_dim=16,
)


def scene(count: int = 8, shift: int = 0, seed: int = 0) -> np.ndarray:
    """uint8 [N, 48, 40, 3]: a brownish table with a coloured spot that moves."""
    rng = np.random.default_rng(seed)
    images = np.full((count, 48, 40, 3), (150, 110, 80)) + rng.normal(0, 10, (count, 48, 40, 3))
    for image in images:
        row, column = rng.integers(0, 30, 2)
        image[row : row + 10, column : column + 10] = rng.integers(0, 255, 3)
    return np.clip(images + shift, 0, 255).astype(np.uint8)


def contract(**changes) -> Contract:
    pixels = scene(64)
    known = {
        "frame_sizes": dict.fromkeys(CONFIG.image_keys, (48, 40, 3)),
        "pixel_mean": dict.fromkeys(CONFIG.image_keys, tuple(pixels.mean((0, 1, 2)).tolist())),
        "pixel_std": dict.fromkeys(CONFIG.image_keys, tuple(pixels.std((0, 1, 2)).tolist())),
        "feature_mean": (0.5, 1.0),
        "feature_std": (1.0, 2.0),
        "threshold": 0.83,
        "calibration": {"kind": "temperature", "temperature": 1.5},
        "metrics": {"auc": 0.99, "confusion": [[5, 1], [0, 7]]},
        "data_hash": "abc",
    }
    return Contract.of(build_model(CONFIG), **{**known, **changes})


def batch(images: np.ndarray) -> dict[str, np.ndarray]:
    return {"front": images, "wrist": images}


def test_json_round_trip():
    original = contract()
    text = json.dumps(original.to_dict())
    assert Contract.from_dict(json.loads(text)) == original
    assert original.model["freeze_encoder"] is False  # resolved from auto
    assert (original.norm, original.layout, original.value_range) == ("batch", "HWC", "uint8 0-255")
    assert original.guerdon_version


def test_model_config_rebuilds_the_model_and_keeps_the_rest():
    base = RewardModelConfig(precision="int8", pretrained_encoder_path="gone.pt", hidden_dim=999)
    config = contract().model_config(base)
    assert (config.hidden_dim, config.precision, config.pretrained_encoder_path) == (16, "int8", None)
    assert config.image_keys == CONFIG.image_keys


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.update(thresold=1), "did you mean 'threshold'"),
        (lambda d: d.update(threshold="high"), "threshold"),
        (lambda d: d["model"].update(arch="vgg"), "arch"),
        (lambda d: d["model"].pop("width"), "lacks width"),
        (lambda d: d.pop("model"), "model is missing"),
        (lambda d: d.update(norm="layer"), "norm"),
    ],
)
def test_damaged_contract(change, complaint):
    data = contract().to_dict()
    change(data)
    with pytest.raises(DataError, match=f"file.json.*{complaint}"):
        Contract.from_dict(data, "file.json")


@pytest.mark.parametrize("data", [None, 3, [], "text"])
def test_something_else_is_no_contract(data):
    with pytest.raises(DataError, match="damaged"):
        Contract.from_dict(data)


def test_only_given_settings_can_contradict():
    other = RewardModelConfig(hidden_dim=512, arch="resnet50", image_keys=("wrist", "front"))
    contract().check_config(other, given=())
    contract().check_config(other, given=("image_keys", "precision"))  # the order is the checkpoint's
    with pytest.raises(ConfigError) as caught:
        contract().check_config(other, given=("hidden_dim", "arch", "image_keys"))
    message = str(caught.value)
    assert "hidden_dim is 512 in the config and 16 in the checkpoint" in message
    assert "arch is resnet50 in the config and resnet10 in the checkpoint" in message
    assert "image_keys" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_size", (3, 64, 64)),
        ("image_keys", ("front",)),
        ("model_type", "resnet_reward"),
        ("width", 64),
        ("normalize", False),
        ("num_members", 3),
        ("num_spatial_blocks", 2),
    ],
)
def test_each_contradiction_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        contract().check_config(RewardModelConfig(**{key: value}), given=(key,))


def test_what_training_alone_needs_does_not_contradict(caplog):
    other = RewardModelConfig(dropout=0.5, freeze_encoder=True, use_pretrain=False)
    with caplog.at_level(logging.WARNING, "guerdon"):
        contract().check_config(other, given=("dropout", "freeze_encoder", "use_pretrain"))
    assert "use_pretrain is False in the config and True in the checkpoint" in caplog.text


def test_frames_of_the_same_kind_pass():
    for shift in (-40, 0, 60):
        contract().check_frames(batch(scene(4, shift, seed=shift + 50)))
    contract().check_frames({"front": torch.from_numpy(scene(1)), "wrist": scene(1)[0], "more": None})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda x: x[:, :40], r"\[40, 40, 3\].*trained on \[48, 40, 3\]"),
        (lambda x: np.moveaxis(x, -1, 1), r"CHW \[3, 48, 40\].*HWC \[48, 40, 3\]"),
        (lambda x: x / 255, r"float64 from 0.* to .*trained on uint8 0-255"),
        (lambda x: torch.from_numpy(x).float(), "float32.*trained on uint8 0-255"),
        (lambda x: (x > 100).astype(np.uint8), "from 0 to 1.*trained on uint8 0-255"),
        (lambda x: x[..., ::-1], "trained on RGB.*red and blue are swapped"),
        (lambda x: np.clip(x[..., ::-1].astype(int) + 25, 0, 255).astype(np.uint8), "swapped"),
        (lambda x: x[..., 0], "trained on"),
    ],
    ids=["size", "layout", "unit", "float", "binary", "bgr", "bgr-brighter", "no-channels"],
)
def test_frames_of_another_kind_are_refused(change, complaint):
    frames = batch(scene(8, seed=3)) | {"wrist": change(scene(8, seed=3))}
    with pytest.raises(DataError, match=f"camera 'wrist'.*{complaint}"):
        contract().check_frames(frames)


def test_other_cameras_are_refused():
    with pytest.raises(DataError, match=r"\['front', 'top'\].*trained on \['front', 'wrist'\]"):
        contract().check_frames({"front": scene(), "top": scene()})
    with pytest.raises(DataError, match="one array"):
        contract().check_frames(scene())


def test_colour_order_is_not_guessed_without_contrast():
    grey = np.random.default_rng(0).integers(0, 255, (8, 48, 40, 3), dtype=np.uint8)
    mean, std = tuple(grey.mean((0, 1, 2)).tolist()), tuple(grey.std((0, 1, 2)).tolist())
    keys = CONFIG.image_keys
    lenient = contract(pixel_mean=dict.fromkeys(keys, mean), pixel_std=dict.fromkeys(keys, std))
    lenient.check_frames(batch(grey[..., ::-1]))


def test_what_is_unknown_is_not_checked():
    unknown = Contract.of(build_model(CONFIG))
    unknown.check_frames(batch(scene()[:, :20, ..., ::-1]))


def test_former_defaults_are_nobodys_wish():
    assert changed_settings(RewardModelConfig(arch="resnet18", width=64)) == set()  # an older config.yaml
    assert changed_settings(RewardModelConfig(arch="resnet34", width=64)) == {"arch"}
    assert changed_settings(RewardModelConfig(width=32, hidden_dim=8)) == {"width", "hidden_dim"}
