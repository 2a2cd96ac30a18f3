import errno
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.config import load_tree
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError, StorageError, UnsafeDataError
from guerdon.models import Contract, build_model, load_checkpoint, make_resnet, save_checkpoint
from guerdon.rewards.image import checkpoint as module
from guerdon.serve import RewardManager

SMALL = {"arch": "resnet10", "width": 8, "image_size": (3, 64, 64), "hidden_dim": 16}
LAYOUTS = ["best_model", "reward_model.pt"]


def config(model_type: str = "binary_classifier", **settings) -> RewardModelConfig:
    return RewardModelConfig(model_type=model_type, **{**SMALL, **settings})


def trained(cfg: RewardModelConfig):
    """A model whose BatchNorm statistics are not the initial ones."""
    model = build_model(cfg).train()
    images = np.random.default_rng(1).integers(0, 256, (6, 64, 64, 3), dtype=np.uint8)
    model(dict.fromkeys(cfg.image_keys, images))
    return model.eval()


def same(left, right) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


layouts = pytest.mark.parametrize("name", LAYOUTS)


@layouts
@pytest.mark.parametrize("model_type", ["binary_classifier", "resnet_reward"])
@pytest.mark.parametrize("num_members", [1, 3])
def test_round_trip_is_exact(tmp_path, frames, name, model_type, num_members):
    model = trained(config(model_type, num_members=num_members, image_keys=("a", "observation.images.b")))
    contract = Contract.of(model, threshold=0.8, metrics={"auc": np.float32(0.5)}, data_hash="h")
    save_checkpoint(tmp_path / "sub" / name, model, contract, {"epoch": 7, "train_loss": 0.25})
    loaded, read, extra = load_checkpoint(tmp_path / "sub" / name)
    assert type(loaded) is type(model)
    assert same(loaded, model)
    assert not loaded.training
    batch = {"a": frames, "observation.images.b": frames[::-1].copy()}
    assert torch.equal(loaded(batch), model(batch))
    assert read == contract
    assert extra == {"epoch": 7, "train_loss": 0.25}
    assert loaded.config == replace(model.config, freeze_encoder=False)


def test_documents_dictionary_is_read_by_torch_itself(tmp_path):
    model = trained(config())
    optimizer = torch.optim.Adam(model.parameters())
    model(np.zeros((2, 64, 64, 3), np.uint8)).sum().backward()
    optimizer.step()
    extra = {
        "epoch": 3,
        "optimizer_state_dict": optimizer.state_dict(),
        "train_loss": 0.5,
        "train_acc": 0.75,
    }
    save_checkpoint(tmp_path / "reward_model.pt", model, Contract.of(model), extra)
    content = torch.load(tmp_path / "reward_model.pt", weights_only=True)
    assert list(content["model_state_dict"]) == list(model.state_dict())
    assert json.loads(content["contract"])["model"]["arch"] == "resnet10"
    assert set(content) == {*extra, "model_state_dict", "contract"}
    loaded = load_checkpoint(tmp_path / "reward_model.pt")[2]
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(loaded["optimizer_state_dict"])
    assert torch.equal(
        other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_directory_holds_two_readable_files(tmp_path):
    model = trained(config())
    save_checkpoint(tmp_path / "best", model, Contract.of(model, threshold=0.7))
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == [
        "contract.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "best" / "contract.json").read_text())["threshold"] == 0.7


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        ("step_10/checkpoint.pt", "step_10"),
        ("step_10/checkpoint.pt", "step_10/checkpoint.pt"),
        ("logs/checkpoints/best_model", "logs"),
        ("logs/checkpoints/best_model", "logs/checkpoints"),
        ("logs/checkpoints/best_model", "logs/checkpoints/best_model/model.safetensors"),
        ("logs/checkpoints/best_model", "logs/checkpoints/best_model/contract.json"),
        ("logs/reward_model_best.pt", "logs"),
        ("logs/reward_model_best.pt", "logs/best_model.pt"),
    ],
)
def test_a_checkpoint_is_found(tmp_path, saved, asked):
    model = trained(config())
    save_checkpoint(tmp_path / saved, model, Contract.of(model))
    (tmp_path / saved).parent.joinpath("notes.txt").write_text("ignored")
    assert same(load_checkpoint(tmp_path / asked)[0], model)


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(DataError, match=r"holds no checkpoint.*checkpoint.pt"):
        load_checkpoint(tmp_path)


def test_loading_takes_no_random_numbers_and_no_pretrained_file(tmp_path):
    model = trained(config())
    save_checkpoint(tmp_path / "m", model, Contract.of(model))
    state = torch.get_rng_state()
    base = config(pretrained_encoder_path="gone.pt", precision="bf16", debug_save_dir="debug")
    loaded = load_checkpoint(tmp_path / "m", base)[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert (loaded.config.precision, loaded.config.debug_save_dir) == ("bf16", "debug")


@layouts
@pytest.mark.parametrize("same_padding", [False, True])
def test_norm_padding_and_freezing_come_back(tmp_path, frames, name, same_padding):
    encoder = make_resnet("resnet10", 8, "group")
    torch.save(encoder.state_dict(), tmp_path / "encoder.pt")
    model = build_model(config(pretrained_encoder_path=str(tmp_path / "encoder.pt"))).eval()
    model.resnet.use_layout("group", same_padding)
    assert model.encoder_frozen
    save_checkpoint(tmp_path / name, model, Contract.of(model))
    loaded, contract, _ = load_checkpoint(tmp_path / name)
    assert (contract.norm, contract.same_padding) == ("group", same_padding)
    assert loaded.encoder_frozen
    assert not any(value.requires_grad for value in loaded.resnet.parameters())
    assert loaded.encoder.pooling_layer.kernel.requires_grad
    assert torch.equal(loaded(frames), model(frames))


def test_a_contradicting_config_is_refused(tmp_path):
    model = trained(config())
    save_checkpoint(tmp_path / "m", model, Contract.of(model))
    other = config(hidden_dim=256)
    with pytest.raises(ConfigError, match="hidden_dim is 256 in the config and 16 in the checkpoint"):
        load_checkpoint(tmp_path / "m", other, given=["hidden_dim"])
    assert same(load_checkpoint(tmp_path / "m", other)[0], model)  # a default contradicts nothing


def test_a_given_setting_is_refused_though_it_is_the_default(tmp_path):
    model = trained(config())
    save_checkpoint(tmp_path / "m", model, Contract.of(model))
    place = str(tmp_path / "m")
    assert RewardManager(load_tree({"reward": {"model": {"checkpoint_path": place}}}).reward).facts
    default = list(RewardModelConfig().image_size)
    section = load_tree({"reward": {"model": {"checkpoint_path": place, "image_size": default}}}).reward
    with pytest.raises(ConfigError, match=r"image_size is .*128.* in the config"):
        RewardManager(section)


# Files of other programs


def foreign(tmp_path, model, change=lambda name: name, **more):
    state = {change(name): value for name, value in model.state_dict().items()}
    path = tmp_path / "foreign.pt"
    torch.save({"epoch": 1, "model_state_dict": state, "train_acc": 0.9, **more}, path)
    return path


def test_foreign_file_needs_a_config(tmp_path, caplog):
    model = trained(config())
    path = foreign(tmp_path, model)
    with pytest.raises(DataError, match=r"has no contract.*give the settings"):
        load_checkpoint(path)
    with caplog.at_level(logging.INFO, "guerdon"):
        loaded, contract, extra = load_checkpoint(path, config(freeze_encoder=True))
    assert same(loaded, model)
    assert len(caplog.records) == 1
    assert "no contract" in caplog.text
    assert (contract.threshold, contract.frame_sizes, contract.data_hash) == (None, {}, None)
    assert extra == {"epoch": 1, "train_acc": 0.9}
    assert loaded.encoder_frozen


@pytest.mark.parametrize("trained_with", [True, False])
def test_pooling_kernel_decides_use_pretrain(tmp_path, caplog, trained_with):
    model = trained(config(use_pretrain=trained_with))
    path = foreign(tmp_path, model)
    with caplog.at_level(logging.WARNING, "guerdon"):
        loaded, contract, _ = load_checkpoint(path, config(use_pretrain=not trained_with))
    assert "use_pretrain" in caplog.text
    assert "pooling kernel" in caplog.text
    assert same(loaded, model)
    assert loaded.config.use_pretrain == contract.model["use_pretrain"] == trained_with


def test_names_of_another_program(tmp_path, frames):
    """RLinf keeps the head of its ResNet model in `backbone.fc`; its other model keeps ImageNet's `fc`."""
    model = trained(config("resnet_reward"))
    path = foreign(tmp_path, model, lambda name: "module." + name.replace("classifiers.0.", "backbone.fc."))
    loaded = load_checkpoint(path, config("resnet_reward"))[0]
    assert torch.equal(loaded(frames), model(frames))

    model = trained(config())
    model.resnet.use_layout("group", same_padding=False)
    state = {
        name.replace("encoder.backbone", "encoders.base_camera.resnet_backbone")
        .replace("encoder.pooling", "encoders.base_camera.pooling")
        .replace("classifiers.0", "classifier"): value
        for name, value in model.state_dict().items()
    }
    state["encoders.base_camera.resnet_backbone.fc.weight"] = torch.zeros(10, 64)
    torch.save(state, tmp_path / "bare.pt")
    loaded, contract, extra = load_checkpoint(tmp_path / "bare.pt", config())
    assert contract.norm == "group"
    assert extra == {}
    assert torch.equal(loaded(frames), model(frames))


def test_a_folder_of_rlinfs_runner(tmp_path, frames):
    model = trained(config("resnet_reward"))
    place = tmp_path / "best_model" / "actor" / "model_state_dict"
    place.mkdir(parents=True)
    state = {
        name.replace("classifiers.0.", "backbone.fc."): value for name, value in model.state_dict().items()
    }
    torch.save(state, place / "full_weights.pt")
    for folder in (tmp_path, tmp_path / "best_model", place.parent, place.parent.parent):
        loaded = load_checkpoint(folder, config("resnet_reward"))[0]
        assert torch.equal(loaded(frames), model(frames))


def test_another_architecture_names_both_sides(tmp_path):
    path = foreign(tmp_path, trained(config(arch="resnet18")))
    with pytest.raises(DataError) as caught:
        load_checkpoint(path, config())
    assert "it holds a resnet18 of width 8" in str(caught.value)
    assert "the model has a resnet10 of width 8" in str(caught.value)
    with pytest.raises(DataError, match=r"classifiers.0.0.weight is .16, 512. instead of .32, 512."):
        load_checkpoint(path, config(arch="resnet18", hidden_dim=32))


@pytest.mark.parametrize(("arch", "width"), [("resnet18", 8), ("resnet50", 4), ("resnet10", 24)])
def test_weights_tell_their_encoder_where_no_config_does(tmp_path, caplog, arch, width):
    model = trained(config(arch=arch, width=width))
    unnamed = {name: value for name, value in SMALL.items() if name not in ("arch", "width")}
    with caplog.at_level(logging.INFO, "guerdon"):
        loaded, contract, _ = load_checkpoint(
            foreign(tmp_path, model), RewardModelConfig(model_type="binary_classifier", **unnamed)
        )
    assert f"its weights are those of a {arch} of width {width}" in caplog.text
    assert (contract.model["arch"], contract.model["width"]) == (arch, width)
    assert same(loaded, model)


# Damage


@layouts
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_file(tmp_path, name, share):
    model = trained(config())
    file = save_checkpoint(tmp_path / name, model, Contract.of(model))
    file = file / "model.safetensors" if file.is_dir() else file
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(DataError) as caught:
        load_checkpoint(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert name.removesuffix(".pt") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "contract is damaged"),
        ("[]", "contract is damaged"),
        ('{"model": {}}', "lacks model_type"),
        ("num_members", "members"),
        ("width", "must be a whole number from 1 to"),
        ("image_size", "must be a whole number from 1 to"),
    ],
)
def test_hostile_contract(tmp_path, text, complaint):
    model = trained(config())
    if not text.startswith(("{", "[")):
        data = Contract.of(model).to_dict()
        data["model"][text] = [3, 2**31, 2**31] if text == "image_size" else 2**40
        text = json.dumps(data)
    torch.save({"model_state_dict": model.state_dict(), "contract": text}, tmp_path / "m.pt")
    with pytest.raises(DataError, match=complaint) as caught:
        load_checkpoint(tmp_path / "m.pt")
    assert "\n" not in str(caught.value)


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_hostile_pickle_is_refused(tmp_path, capsys):
    torch.save({"model_state_dict": {}, "epoch": Evil()}, tmp_path / "m.pt")
    with pytest.raises(UnsafeDataError):
        load_checkpoint(tmp_path / "m.pt", config())
    assert capsys.readouterr().out == ""


def test_file_without_weights(tmp_path):
    torch.save({"epoch": 1}, tmp_path / "m.pt")
    with pytest.raises(DataError, match="holds no weights"):
        load_checkpoint(tmp_path / "m.pt", config())


# Interruptions


@pytest.mark.parametrize("name", LAYOUTS)
def test_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, name):
    old, new = trained(config()), trained(config())
    save_checkpoint(tmp_path / name, old, Contract.of(old, threshold=0.1))
    original = module.write_atomic

    def full(path, write, **options):
        def interrupted(file):
            write(file)
            raise OSError(errno.ENOSPC, "full")

        original(path, interrupted, **options)

    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(StorageError, match="disk is full"):
        save_checkpoint(tmp_path / name, new, Contract.of(new, threshold=0.9))
    loaded, contract, _ = load_checkpoint(tmp_path / name)
    assert same(loaded, old)
    assert contract.threshold == 0.1


def test_interruption_between_the_files_mixes_nothing(tmp_path, monkeypatch, caplog):
    old, new = trained(config()), trained(config())
    save_checkpoint(tmp_path / "m", old, Contract.of(old, threshold=0.1))
    original = module.write_atomic

    def killed(path, write, **options):
        if path.name == "contract.json":
            raise KeyboardInterrupt
        original(path, write, **options)

    monkeypatch.setattr(module, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "m", new, Contract.of(new, threshold=0.9))
    loaded, contract, _ = load_checkpoint(tmp_path / "m")
    assert same(loaded, new)
    assert contract.threshold == 0.9
    assert "differs from the contract inside" in caplog.text


def test_contract_json_alone_is_read_too(tmp_path):
    model = trained(config())
    save_checkpoint(tmp_path / "m", model, Contract.of(model, threshold=0.4))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    module.safetensors.torch.save_file(weights, tmp_path / "m" / "model.safetensors")
    assert load_checkpoint(tmp_path / "m")[1].threshold == 0.4
