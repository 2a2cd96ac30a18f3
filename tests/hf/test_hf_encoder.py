import json
import logging

import numpy as np
import pytest
import torch

import guerdon as gd
from guerdon.config import AugmentConfig, FitDataConfig, RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.fit import fit_reward_model, inputs
from guerdon.models import Contract, build_model, load_checkpoint, save_checkpoint
from guerdon.rewards.image.hf_encoder import HFEncoder, load_hf_encoder
from tests.fit.synthetic import episode, write_store
from tests.hf.tiny import SIZE, configs, save
from tests.plain_fit import plain_fit, plain_optim

KINDS = ["vit", "dinov2", "dinov3", "siglip", "convnext", "dinov3_convnext", "resnet"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {name: save(root / name, config) for name, (config, _) in configs().items()}


@pytest.fixture(scope="module")
def frames():
    return np.random.default_rng(0).integers(0, 256, (5, SIZE, SIZE, 3), dtype=np.uint8)


def section(folder, model_type="binary_classifier", **settings):
    return RewardModelConfig(
        **{"encoder": f"hf:{folder}", "model_type": model_type, "image_size": (3, SIZE, SIZE), **settings}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_its_features_are_those_of_transformers(folders, frames, kind):
    from transformers import AutoModel

    model = build_model(section(folders[kind]))
    assert model.encoder_frozen and model.feature_shape == configs()[kind][1]
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)))
    theirs = AutoModel.from_pretrained(folders[kind]).eval()
    options = {"interpolate_pos_encoding": True} if kind in ("vit", "siglip") else {}
    with torch.no_grad():
        hidden = theirs((pixels - mean) / std, **options).last_hidden_state
        ours = model.encode(model.preprocess(frames))
    if hidden.ndim == 3:  # those before the patches are the class and the registers
        before = {"siglip": 0, "dinov3": 3}.get(kind, 1)
        hidden = hidden[:, before:].unflatten(1, model.feature_shape[1:]).permute(0, 3, 1, 2)
    torch.testing.assert_close(ours, hidden, atol=1e-4, rtol=1e-4)
    assert float(ours.std()) > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_without_its_folder(folders, frames, kind, tmp_path):
    """The checkpoint is whole: it has the weights, and the contract describes the encoder."""
    moved = tmp_path / "moved"
    folders[kind].rename(moved)
    try:
        model = build_model(section(moved, "resnet_reward", freeze_encoder=kind != "vit")).eval()
    finally:
        moved.rename(folders[kind])
    save_checkpoint(tmp_path / "model", model, Contract.of(model, threshold=0.5))
    random = torch.random.get_rng_state()
    loaded, contract, _ = load_checkpoint(tmp_path / "model")
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.equal(loaded(frames), model(frames))
    assert loaded.encoder_frozen == (kind != "vit")
    assert contract.encoder["source"] == f"hf:{moved}"
    assert contract.encoder["weights_hash"] == load_hf_encoder(f"hf:{folders[kind]}").facts.weights_hash


@pytest.mark.parametrize("kind", KINDS)
def test_trainable_if_asked(folders, frames, kind):
    model = build_model(section(folders[kind], freeze_encoder=False)).train()
    model(frames).square().sum().backward()
    asked = [name for name, value in model.named_parameters() if value.requires_grad]
    reached = [name for name, value in model.named_parameters() if value.grad is not None]
    assert asked == reached
    assert len([name for name in asked if "network" in name]) > 20


def test_the_tokens_of_a_dinov3_convnext_are_its_feature_map(folders):
    """Row by row, without the pooled token; whoever reads one token alone gets that."""
    encoder = load_hf_encoder(f"hf:{folders['dinov3_convnext']}").eval()
    first = load_hf_encoder(f"hf:{folders['dinov3_convnext']}", first_token=True).eval()
    images = torch.rand(2, 3, 72, 104)
    assert encoder.output_size(72, 104) == (2, 3)
    with torch.no_grad():
        maps = encoder.network.model(images).last_hidden_state
        pooled = encoder.network(images).pooler_output
        expected = encoder.network.layer_norm(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        torch.testing.assert_close(encoder(images), expected)
        torch.testing.assert_close(first(images)[..., 0, 0], pooled)


def test_frames_of_a_stack_are_encoded_each(folders, frames):
    model = build_model(section(folders["vit"], num_frames=2))
    alone = build_model(section(folders["vit"]))
    stacks = np.stack([frames[:-1], frames[1:]], axis=1)
    with torch.no_grad():
        both = model.encode(model.preprocess(stacks))
        each = alone.encode(alone.preprocess(frames))
    torch.testing.assert_close(both, torch.cat([each[:-1], each[1:]], dim=1))


def test_a_whole_siglip_gives_its_vision_tower(tmp_path, frames):
    from transformers import SiglipConfig

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = SiglipConfig(
        vision_config={"image_size": 32, "patch_size": 16, **small},
        text_config={"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **small},
    )
    model = build_model(section(save(tmp_path / "siglip", config)))
    assert model.feature_shape == (16, 4, 4)
    assert not any("text" in name for name in model.state_dict())


def test_a_fit_encodes_once_and_scores_the_same_after_loading(folders, tmp_path, monkeypatch):
    """End to end, with augmented views; the encoder is not trained, and the reward tells success."""
    calls = []
    forward = HFEncoder.forward

    def counted(self, images):
        calls.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(HFEncoder, "forward", counted)
    monkeypatch.setattr(inputs, "ENCODE_BATCH", 64)
    data = write_store(tmp_path / "data", count=16)
    frames_total = 16 * 12
    fit = plain_fit(
        epochs=8,
        optim=plain_optim(lr=3e-3),
        augment=AugmentConfig(shift_pixels=2, num_views=2),
        data=FitDataConfig(path=str(data)),
    )
    cfg = section(folders["convnext"])
    result = fit_reward_model(cfg, fit, folder=tmp_path / "run", tensorboard=False)
    in_fit = sum(count for count in calls if count > 1)
    assert in_fit == 3 * frames_total  # each frame and its two views, in eight epochs
    assert result.metrics["auc"] > 0.9
    reward = gd.load_reward(result.checkpoint)
    assert reward.model.encoder_frozen and "hf:" in repr(reward)
    images = episode(100, True).frames["base_camera"]
    first = reward.predict(images)
    reward.save(tmp_path / "again")
    np.testing.assert_array_equal(gd.load_reward(tmp_path / "again").predict(images), first)
    with pytest.raises(ConfigError, match="this needs a ResNet, not the encoder"):
        fit_reward_model(
            RewardModelConfig(**{**vars(cfg), "precision": "int8"}), fit, folder=tmp_path / "int8"
        )


def test_bfloat16_scores_are_close(folders, frames, tmp_path):
    model = build_model(section(folders["dinov2"], "resnet_reward")).eval()
    save_checkpoint(tmp_path / "model", model, Contract.of(model, threshold=0.5))
    whole = gd.load_reward(tmp_path / "model").predict(frames)
    half = gd.load_reward(tmp_path / "model", precision="bf16").predict(frames)
    assert 0 < np.abs(whole - half).max() < 0.02


# What is refused


@pytest.fixture
def saved(folders, tmp_path):
    model = build_model(section(folders["vit"])).eval()
    return save_checkpoint(tmp_path / "model", model, Contract.of(model, threshold=0.5))


def test_other_weights_are_refused(folders, saved, tmp_path):
    other = save(tmp_path / "other", configs()["vit"][0], seed=1)
    with pytest.raises(
        ConfigError, match=r"encoder is hf:.*other in the config and hf:.* with other weights"
    ):
        load_checkpoint(saved, section(other), given=["encoder"])
    with pytest.raises(ConfigError, match="encoder is None"):
        load_checkpoint(saved, RewardModelConfig(), given=["encoder"])
    copy = save(tmp_path / "copy", configs()["vit"][0])  # elsewhere, the same weights
    assert load_checkpoint(saved, section(copy), given=["encoder"])[0].encoder_frozen


def test_a_checkpoint_whose_encoder_was_changed_is_refused(saved):
    model, contract, _ = load_checkpoint(saved)
    weights = dict(model.state_dict())
    name = next(name for name in weights if name.endswith(("query.weight", "q_proj.weight")))
    save_checkpoint(saved, {**weights, name: weights[name] + 1}, contract)
    with pytest.raises(DataError, match=r"weights of its frozen encoder hf:.* are not those"):
        load_checkpoint(saved)


def test_a_contract_without_its_encoder_is_damaged(saved):
    model, contract, _ = load_checkpoint(saved)
    for wrong in (None, {"source": "hf:x"}, {**contract.encoder, "std": [0, 1, 1]}):
        plain = {**contract.to_dict(), "encoder": wrong}
        with pytest.raises(DataError, match="contract is damaged"):
            Contract.from_dict(plain)
    many = {**contract.encoder, "config": {**contract.encoder["config"], "num_hidden_layers": 10**9}}
    save_checkpoint(saved, model, Contract.from_dict({**contract.to_dict(), "encoder": many}))
    with pytest.raises(DataError, match="1000000000 layers"):
        load_checkpoint(saved)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "resnet10", "auto_map": {"AutoModel": "modeling.Evil"}},
            "code of a repository is never",
        ),
        ({"model_type": ["vit"]}, "code of a repository is never run"),
        ({"model_type": "vit", "num_channels": 4}, "images of 4 channels"),
        ({"model_type": "vit", "num_hidden_layers": -3}, "-3 layers"),
        ({"model_type": "vit", "hidden_size": "many"}, r"config.json is damaged|cannot be loaded"),
        ({"model_type": "bert"}, r"cannot be loaded|lack weights|config.json is damaged"),
        ([1], "expected a JSON object"),
    ],
)
def test_a_strange_config_is_refused(folders, tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folders["vit"] / "model.safetensors").read_bytes())
    (tmp_path / "modeling.py").write_text("raise SystemExit('code was run')\nclass Evil: ...\n")
    with pytest.raises(DataError, match=message):
        load_hf_encoder(f"hf:{tmp_path}")


def test_files_that_do_not_do_are_named(folders, tmp_path):
    config = (folders["vit"] / "config.json").read_text()
    with pytest.raises(DataError, match=r"has no config.json"):
        load_hf_encoder(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(DataError, match=r"has no weights"):
        load_hf_encoder(f"hf:{tmp_path}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"pickled weights alone \(pytorch_model.bin\).* refused"):
        load_hf_encoder(f"hf:{tmp_path}")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"cannot be loaded"):
        load_hf_encoder(f"hf:{tmp_path}")
    (tmp_path / "model.safetensors").write_bytes((folders["resnet"] / "model.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"lack weights of a ViTModel"):
        load_hf_encoder(f"hf:{tmp_path}")
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [1, 2]}')
    with pytest.raises(DataError, match=r"three numbers each"):
        load_hf_encoder(f"hf:{tmp_path}")


def test_without_preprocessing_it_is_imagenets_and_said(tmp_path, caplog):
    folder = save(tmp_path / "plain", configs()["resnet"][0], mean=None)
    with caplog.at_level(logging.INFO, "guerdon"):
        encoder = load_hf_encoder(f"hf:{folder}")
    assert encoder.mean == (0.485, 0.456, 0.406) and "no preprocessor_config.json" in caplog.text
    (folder / "preprocessor_config.json").write_text('{"do_normalize": false}')
    assert load_hf_encoder(f"hf:{folder}").std == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "vit"}, "hf:FOLDER or hf:OWNER/NAME, not 'vit'"),
        ({"encoder": "hf:a/b", "pretrained_encoder_path": "x.pt"}, "both an encoder and"),
        ({"encoder": "hf:a/b", "image_size": (1, 64, 64)}, r"colour images.*\[1, 64, 64\]"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ConfigError, match=message):
        RewardModelConfig(**settings)


def test_images_that_are_too_small_are_said(folders):
    with pytest.raises(ConfigError, match="8x8"):
        build_model(section(folders["vit"], image_size=(3, 8, 8)))


def test_without_the_hub_the_error_says_what_to_do(monkeypatch):
    import huggingface_hub

    asked = []

    def offline(repository, **options):
        asked.append((repository, options["revision"], options["allow_patterns"]))
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        DataError, match=r"facebook/dinov2-small@main: .*hub did not give it: Name or service"
    ):
        load_hf_encoder("hf:facebook/dinov2-small@main")
    assert asked[0][:2] == ("facebook/dinov2-small", "main")
    assert not any("bin" in pattern or "py" in pattern for pattern in asked[0][2])
    with pytest.raises(DataError, match="there is no such folder, and it is no repository"):
        load_hf_encoder("hf:/nowhere/at/all")
    assert len(asked) == 1


def test_without_the_extra_the_error_names_it(monkeypatch, folders):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs transformers: pip install 'guerdon\[hf\]'"):
        load_hf_encoder(f"hf:{folders['vit']}")
