"""`save_pretrained`, `from_pretrained`, `push_to_hub` and `guerdon reward export`."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import guerdon as gd
from guerdon.cli.main import main
from guerdon.config import RewardConfig, RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.fit.recalibrate import recalibrate
from guerdon.models import (
    BinaryRewardClassifier,
    Contract,
    ResNetRewardModel,
    build_model,
    load_checkpoint,
    save_checkpoint,
)
from guerdon.rewards.image import RewardModel
from guerdon.serve import RewardManager
from tests.api.dot import SIZE as DOT
from tests.api.dot import frames as dots
from tests.api.dot import save_untrained
from tests.fit.synthetic import write_store
from tests.hf.hub_server import running_hub
from tests.hf.tiny import SIZE, configs, save

ISOTONIC = {"kind": "isotonic", "knots": [-1.0, 0.0, 1.0], "values": [-3.0, -0.5, 2.0]}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A fit of seconds, and labelled episodes that it has not seen."""
    root = tmp_path_factory.mktemp("shared")
    data = write_store(root / "data")
    settings = {"arch": "resnet10", "width": 8, "image_size": (3, 32, 32), "hidden_dim": 16, "epochs": 2}
    reward = gd.fit_reward(data, out=root / "run", progress=False, batch_size=64, **settings)
    return reward, write_store(root / "fresh", count=12)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """huggingface_hub's own client, speaking to a server in this process."""
    from huggingface_hub import constants

    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as read when another test was offline
        monkeypatch.setenv("HF_TOKEN", "hf_stored")
        yield server


def same(one, other, images):
    np.testing.assert_array_equal(one.predict(images), other.predict(images))
    np.testing.assert_array_equal(one(images), other(images))
    assert one.threshold == other.threshold and one.contract == other.contract


@pytest.mark.parametrize("calibration", [{"kind": "temperature", "temperature": 2.5}, ISOTONIC])
def test_it_loads_back_to_the_bit(tmp_path, calibration):
    first = gd.load_reward(save_untrained(tmp_path / "model"))
    images = dots(20)
    contract = replace(first.contract, calibration={"map": calibration, "threshold": None})
    prob = contract.calibration_map.apply(first.model(images).detach().numpy())
    contract = replace(contract, threshold=float(np.median(prob)))
    save_checkpoint(tmp_path / "calibrated", first.model, contract)
    reward = gd.load_reward(tmp_path / "calibrated")
    folder = reward.save_pretrained(tmp_path / "shared")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("README.md", "config.json", "contract.json", "model.safetensors"),
    ]
    assert len(set(reward.fires(reward.predict(images)).tolist())) == 2  # decisions of both kinds
    for loaded in (gd.Reward.from_pretrained(folder), gd.load_reward(folder)):
        same(loaded, reward, images)
        assert loaded.calibration == reward.calibration and loaded.calibration.kind == calibration["kind"]
    section = RewardConfig(use_reward_model=True, model=RewardModelConfig(checkpoint_path=str(folder)))
    manager = RewardManager(section)
    np.testing.assert_array_equal(manager.compute_rewards({"main_images": images}), reward(images))
    told = json.loads((folder / "config.json").read_text())
    assert told["model_type"] == "guerdon_reward_model" and told["model"]["arch"] == "resnet10"
    continuous = gd.Reward.from_pretrained(folder, reward_type="continuous")
    np.testing.assert_array_equal(continuous(images), reward.predict(images))


def test_model_classes_have_the_three_too(tmp_path):
    model = BinaryRewardClassifier(arch="resnet10", width=8, image_size=(3, DOT, DOT)).eval()
    folder = model.save_pretrained(tmp_path / "model")
    for kind in (BinaryRewardClassifier, RewardModel):
        loaded = kind.from_pretrained(folder)
        assert type(loaded) is BinaryRewardClassifier
        assert torch.equal(loaded(dots(3)), model(dots(3)))
    with pytest.raises(DataError, match="holds a BinaryRewardClassifier, not a ResNetRewardModel"):
        ResNetRewardModel.from_pretrained(folder)


def test_a_model_over_an_encoder_is_whole(tmp_path):
    """Its weights are in the folder: nothing else is needed, and nothing is asked of a hub."""
    encoder = save(tmp_path / "vit", configs()["vit"][0])
    config = RewardModelConfig(encoder=f"hf:{encoder}", image_size=(3, SIZE, SIZE))
    model = build_model(config).eval()
    save_checkpoint(tmp_path / "model", model, Contract.of(model, threshold=0.4))
    reward = gd.load_reward(tmp_path / "model")
    folder = reward.save_pretrained(tmp_path / "shared")
    encoder.rename(tmp_path / "gone")
    images = np.random.default_rng(0).integers(0, 256, (4, SIZE, SIZE, 3), dtype=np.uint8)
    same(gd.Reward.from_pretrained(folder), reward, images)
    told = json.loads((folder / "config.json").read_text())["encoder"]
    assert told["weights_included"] and told["weights_hash"] == reward.contract.encoder["weights_hash"]
    assert told["weights_hash"] in (folder / "README.md").read_text()


def test_the_model_card_is_the_reward_card(fitted, tmp_path):
    reward, fresh = fitted
    folder = reward.save_pretrained(tmp_path / "shared", data=fresh, progress=False)
    card, text = reward.card(fresh, progress=False), (folder / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "guerdon" and "reward-model" in front["tags"]
    assert card.headline in text.replace("\\", "")
    for use, verdict in card.uses.items():
        assert f"| {use} | " in text and verdict["reason"] in text.replace("\\", "")
    assert f"| AUC | {card.metrics['auc']:.4f}" in text
    assert f"{reward.threshold:.6g}" in text and reward.contract.data_hash in text
    pictures = re.findall(r"!\[.+\]\((card_\w+\.png)\)", text)
    assert {"card_roc.png", "card_precision_recall.png", "card_reliability.png"} < set(pictures)
    assert sorted(pictures) == sorted(path.name for path in folder.glob("*.png"))
    for name in pictures:
        picture = np.asarray(Image.open(folder / name))
        blue = (picture == (37, 99, 190)).all(-1).sum()
        assert picture.shape[0] >= 360 and blue > 50, name
    without = reward.save_pretrained(folder)
    text = (without / "README.md").read_text()
    assert "Not assessed" in text and "Curves\n\nNot known" in text
    assert f"| AUC | {reward.metrics['auc']:.4g} |" in text  # what the fit measured is known
    assert not list(folder.glob("*.png"))  # those of the card before


def test_names_of_strangers_are_no_markup(tmp_path):
    reward = gd.load_reward(save_untrained(tmp_path / "model"))
    contract = replace(reward.contract, guerdon_version="1 <script>|[x](http://a)\n# h", data_hash="a`|b")
    save_checkpoint(tmp_path / "odd", reward.model, contract)
    text = (gd.load_reward(tmp_path / "odd").save_pretrained(tmp_path / "shared") / "README.md").read_text()
    assert "<script>" not in text and "\n# h" not in text and "[x](http" not in text
    assert "`a b`" in text


def _flip(folder):
    path = folder / "model.safetensors"
    blob = bytearray(path.read_bytes())
    blob[-5] ^= 0x40
    path.write_bytes(blob)


def _without_contract(folder):
    from safetensors.torch import load_file, save_file

    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    (folder / "contract.json").unlink()


def _of_another(folder):
    told = json.loads((folder / "config.json").read_text())
    told["model"]["hidden_dim"] = 99
    (folder / "config.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, "checksum does not fit"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "no safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: is no JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "expected a JSON object"),
        (_of_another, "files are of two models"),
        (_without_contract, "lost the contract"),
    ],
)
def test_damaged_folders(tmp_path, damage, message):
    folder = gd.load_reward(save_untrained(tmp_path / "model")).save_pretrained(tmp_path / "shared")
    damage(folder)
    with pytest.raises(DataError, match=message) as error:
        gd.Reward.from_pretrained(folder)
    assert len(str(error.value).splitlines()) == 1


def test_foreign_folders(tmp_path):
    vit = save(tmp_path / "vit", configs()["vit"][0])
    with pytest.raises(DataError, match=r"a model of the kind .*vit.*no reward model"):
        gd.Reward.from_pretrained(vit)
    with pytest.raises(DataError, match="no such folder"):
        gd.Reward.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no reward model"):
        gd.Reward.from_pretrained(tmp_path / "empty")
    reward = gd.load_reward(save_untrained(tmp_path / "model"))
    with pytest.raises(ConfigError, match="holds another model; nothing was written"):
        reward.save_pretrained(vit)
    assert not (vit / "README.md").exists()
    with pytest.raises(ConfigError, match="a folder, not a file"):
        reward.save_pretrained(tmp_path / "model.pt")


def test_up_to_the_hub_and_back(hub, tmp_path, capsys):
    reward = gd.load_reward(save_untrained(tmp_path / "model"))
    assert reward.push_to_hub("me/reward", private=True) == f"{hub.url}/me/reward"
    assert hub.private["me/reward"] and hub.tokens[0] == "Bearer hf_stored"
    assert 'from_pretrained("me/reward")' in hub.repos["me/reward"]["README.md"].decode()
    images = dots(6)
    same(gd.Reward.from_pretrained("me/reward"), reward, images)
    same(gd.load_reward("hf:me/reward@main"), reward, images)
    Image.fromarray(images[0]).save(tmp_path / "frame.png")
    asked = ["reward", "score", str(tmp_path / "frame.png"), "--checkpoint", "hf:me/reward", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mean_probability"] == pytest.approx(float(reward.predict(images[:1])[0]), abs=1e-6)
    assert reward.model.push_to_hub("me/model", reward.contract, token="hf_given").endswith("me/model")
    assert hub.tokens[-1] == "Bearer hf_given"
    assert torch.equal(RewardModel.from_pretrained("me/model")(images), reward.model(images))
    with pytest.raises(ConfigError, match="copy of the hub's: export the model"):
        recalibrate("hf:me/reward", tmp_path, threshold=0.5)


def test_a_hub_that_refuses_or_cannot_be_reached(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    reward = gd.load_reward(save_untrained(tmp_path / "model"))
    with pytest.raises(DataError, match="did not give it") as error:
        gd.Reward.from_pretrained("me/nothing")
    hub.refuse = "you may not"
    with pytest.raises(DataError, match=r"did not take the upload.*403") as refused:
        reward.push_to_hub("other/reward")
    assert hub.repos == {}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    with pytest.raises(DataError, match="Without a network") as gone:
        gd.Reward.from_pretrained("me/reward")
    with pytest.raises(DataError, match="did not take the upload") as upload:
        reward.push_to_hub("me/reward")
    for each in (error, refused, gone, upload):
        assert len(str(each.value).splitlines()) == 1 and len(str(each.value)) < 500
    for name in ("reward", "me/a/b", "../me/x", "me/reward@v1"):
        with pytest.raises(ConfigError, match="OWNER/NAME"):
            reward.push_to_hub(name)


def test_the_command(fitted, hub, tmp_path, capsys):
    reward, fresh = fitted
    checkpoint = str(reward.cfg.model.checkpoint_path)
    words = ["reward", "export", "--checkpoint", checkpoint]
    out = tmp_path / "shared"
    assert main([*words, "--data", str(fresh), "--out", str(out), "--push", "me/reward", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["out"] == str(out) and found["address"].endswith("/me/reward")
    assert found["headline"] in (out / "README.md").read_text().replace("\\", "")
    assert set(hub.repos["me/reward"]) == {path.name for path in out.iterdir()}
    png = hub.repos["me/reward"]["card_roc.png"]
    assert Image.open(io.BytesIO(png)).format == "PNG"
    loaded = load_checkpoint(out)[1]
    assert loaded.threshold == reward.threshold and loaded.metrics == reward.contract.metrics
    assert main(words) == 2
    assert "--out FOLDER, --push OWNER/NAME" in capsys.readouterr().err
    assert main([*words, "--push", "not-a-name"]) == 2
