"""Compares Guerdon's reading and writing of LeRobot's reward classifier with LeRobot itself.

Runs where LeRobot is installed, with `transformers` and without Guerdon (measured: LeRobot 0.6.1,
transformers 5.5.4, Python 3.12):

    python scripts/lerobot_classifier.py make FOLDER     # tiny random classifiers with frames and logits
    python scripts/lerobot_classifier.py check FOLDER    # folders that Guerdon wrote

`make` wrote the files in `tests/hf/lerobot/`. `check` takes folders of `guerdon reward export --to lerobot`,
each beside NAME.npz with frames, probabilities, threshold and decisions; with LEROBOT_FOLDER=FOLDER the tests
in `tests/hf/test_lerobot_classifier.py` write them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

CAMERAS = ("observation.images.front", "observation.images.wrist")
NUM_FRAMES = 3


def make(root: Path) -> None:
    """Write classifiers over a ResNet and a ViT of `transformers`."""
    import transformers as t

    resnet = t.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8, 16, 32], depths=[2, 2, 2, 2], layer_type="basic"
    )
    vit = t.ViTConfig(
        image_size=32,
        patch_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    _write(root, "resnet18", _saved(root, "resnet18", resnet), CAMERAS, 128, "cnn", "MEAN_STD")
    _write(root, "vit", _saved(root, "vit", vit), CAMERAS[:1], 32, "transformer", "MIN_MAX")
    own = root / "encoders" / "resnet10"  # a copy of LeRobot's repository, with code and weights
    if own.is_dir():
        _write(root, "resnet10", own, CAMERAS, 128, "cnn", "MEAN_STD")


def _saved(root: Path, name: str, config: Any) -> Path:
    import transformers

    torch.manual_seed(1)
    model: Any = transformers.AutoModel
    model.from_config(config).save_pretrained(root / "encoders" / name)
    return root / "encoders" / name


def _write(
    root: Path, name: str, encoder: Path, cameras: tuple[str, ...], size: int, kind: str, mode: str
) -> None:
    from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.rewards.classifier.configuration_classifier import RewardClassifierConfig
    from lerobot.rewards.classifier.modeling_classifier import Classifier
    from lerobot.rewards.classifier.processor_classifier import make_classifier_processor

    torch.manual_seed(0)
    config = RewardClassifierConfig(
        model_name=str(encoder),
        model_type=kind,
        num_cameras=len(cameras),
        hidden_dim=16,
        latent_dim=12,
        image_embedding_pooling_dim=2,
        input_features={key: PolicyFeature(FeatureType.VISUAL, (3, size, size)) for key in cameras},
        output_features={"next.reward": PolicyFeature(FeatureType.REWARD, (1,))},
        normalization_mapping={"VISUAL": NormalizationMode[mode]},
    )
    model = Classifier(config).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    rng = np.random.default_rng(1)
    ranges = {"mean": (0.3, 0.6), "std": (0.15, 0.3), "min": (0.0, 0.1), "max": (0.9, 1.0)}
    stats = {
        key: {
            kind: torch.tensor(rng.uniform(*ends, (3, 1, 1)), dtype=torch.float32)
            for kind, ends in ranges.items()
        }
        for key in cameras
    }
    before, after = make_classifier_processor(config, dataset_stats=stats)
    for part in (model, before, after):
        part.save_pretrained(root / name)
    coarse = rng.integers(0, 256, (len(cameras), NUM_FRAMES, 8, 8, 3), dtype=np.uint8)
    images = coarse.repeat(size // 8, axis=2).repeat(size // 8, axis=3)
    frames = dict(zip(cameras, images, strict=True))
    with torch.no_grad():
        batch = before({key: _pixels(value) for key, value in frames.items()})
        logits = model.predict([batch[key] for key in cameras]).logits.numpy()
    np.savez_compressed(root / f"{name}.npz", logits=logits, **frames)
    print(name, logits)


def _pixels(frames: Any) -> torch.Tensor:
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255


def check(root: Path) -> bool:
    """Load what Guerdon wrote; whether LeRobot gives its probabilities and decisions."""
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.rewards.classifier.modeling_classifier import Classifier

    good = True
    for file in sorted(root.glob("*.npz")):
        found = np.load(file)
        model = Classifier.from_pretrained(str(root / file.stem)).eval()
        before = PolicyProcessorPipeline.from_pretrained(
            str(root / file.stem), config_filename="classifier_preprocessor.json"
        )
        keys = list(model.config.input_features)
        with torch.no_grad():
            batch = before({key: _pixels(found[key]) for key in keys})
            prob = model.predict([batch[key] for key in keys]).probabilities.numpy()
            fires = model.predict_reward(batch, threshold=float(found["threshold"])).numpy()
        difference = float(np.abs(prob - found["prob_success"]).max())
        same = bool((fires == found["fires"]).all())
        decisions = "decisions equal" if same else "decisions DIFFER"
        print(f"{file.stem}: probabilities differ by {difference:.1e}, {decisions}")
        good = good and same and (difference < 1e-5 or not bool(found["same_probabilities"]))
    return good


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2])
    if verb == "make":
        make(place)
    elif not check(place):
        sys.exit("LeRobot says otherwise")
