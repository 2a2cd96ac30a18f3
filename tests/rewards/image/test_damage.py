"""Bytes that changed inside a saved reward model, or inside the state of a fit, are noticed."""

import json
import logging

import numpy as np
import pytest
import safetensors.torch
import torch

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import DataError
from guerdon.data.files.checksums import check_archive, load_npz
from guerdon.fit.process_group import ProcessGroup
from guerdon.fit.state import Checkpoints, Progress
from guerdon.models import Contract, build_model, load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def model():
    return build_model(
        RewardModelConfig(arch="resnet10", width=8, image_size=(3, 32, 32), hidden_dim=8)
    ).eval()


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.3, 0.6, 0.95])
@pytest.mark.parametrize(("name", "file"), [("best", "best/model.safetensors"), ("best.pt", "best.pt")])
def test_a_changed_number_is_noticed(tmp_path, model, name, file, place):
    save_checkpoint(tmp_path / name, model, Contract.of(model))
    load_checkpoint(tmp_path / name)
    flip(tmp_path / file, place)
    with pytest.raises(DataError, match=rf"{file.rpartition('/')[2]}: is damaged"):
        load_checkpoint(tmp_path / name)


def test_a_changed_threshold_is_noticed(tmp_path, model):
    save_checkpoint(tmp_path / "best", model, Contract.of(model, threshold=0.875))
    file = tmp_path / "best" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"0.875", b"0.125"))
    with pytest.raises(DataError, match="checksum does not fit"):
        load_checkpoint(tmp_path / "best")


def test_checkpoints_without_checksums_load_with_a_notice(tmp_path, model, caplog):
    """As older versions wrote them."""
    contract = Contract.of(model)
    text = json.dumps(contract.to_dict())
    (tmp_path / "old").mkdir()
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    safetensors.torch.save_file(weights, tmp_path / "old" / "model.safetensors", {"contract": text})
    with caplog.at_level(logging.INFO, "guerdon"):
        loaded, _, _ = load_checkpoint(tmp_path / "old")
    assert "carries no checksum" in caplog.text
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in weights.items())


def test_made_up_extras_are_refused(tmp_path, model):
    save_checkpoint(tmp_path / "a", model, Contract.of(model))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    text = json.dumps({**Contract.of(model).to_dict(), "extra": 5})
    safetensors.torch.save_file(weights, tmp_path / "a" / "model.safetensors", {"contract": text})
    with pytest.raises(DataError, match="contract is damaged"):
        load_checkpoint(tmp_path / "a")


# The state of a fit


def steps(folder, model, contract):
    extra = {"progress": vars(Progress(step=1)), "seed": 0, "optimizer_state_dict": {}}
    for step in (9, 10, 100):
        save_checkpoint(folder / f"step_{step}" / "checkpoint.pt", model, contract, extra)
    return Checkpoints(folder, contract, 0, ProcessGroup())


def test_the_state_before_a_damaged_one_is_offered(tmp_path, model):
    kept = steps(tmp_path, model, Contract.of(model, data_hash="h"))
    newest = kept.latest()
    assert newest.parent.name == "step_100" and kept.load(newest)[2].step == 1
    flip(newest, 0.5)
    offer = r"step_100/checkpoint\.pt: is damaged.*runner\.resume_dir=\S*step_10/checkpoint\.pt$"
    with pytest.raises(DataError, match=offer):
        kept.load(newest)
    flip(kept.of_step(10), 0.5)
    with pytest.raises(DataError, match=r"runner\.resume_dir=\S*step_9/checkpoint\.pt$"):
        kept.load(newest)
    flip(kept.of_step(9), 0.5)
    with pytest.raises(DataError, match="no whole checkpoint before it"):
        kept.load(newest)


@pytest.mark.parametrize(
    "progress",
    [None, [], {"step": "x"}, {"step": -1}, {"more": 1}, {"metrics": 3}, {"best_value": "x"}],
    ids=str,
)
def test_made_up_progress_is_refused(progress):
    with pytest.raises(DataError, match="state of the fit is damaged"):
        Progress.of(progress, "checkpoint.pt")


# Archives


def test_arrays_come_back_and_damage_is_noticed(tmp_path):
    arrays = {
        "frames": np.arange(240, dtype=np.uint8).reshape(2, 5, 8, 3),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "text": np.array("meta"),
        "none": np.zeros((3, 0), np.float32),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    read = load_npz(tmp_path / "a.npz")
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype and read[name].flags.writeable
    content = (tmp_path / "a.npz").read_bytes()
    assert check_archive(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(content.replace(bytes(range(100, 120)), bytes(range(101, 121))))
    for read_it in (load_npz, check_archive):
        with pytest.raises(DataError, match=r"a\.npz: is damaged.*CRC"):
            read_it(tmp_path / "a.npz")


def test_archives_that_explode_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", zeros=np.zeros(10**7, np.uint8))
    for read_it in (load_npz, check_archive):
        with pytest.raises(DataError, match="compressed archive"):
            read_it(tmp_path / "bomb.npz")
    np.savez(tmp_path / "objects.npz", objects=np.array([{}], object))
    with pytest.raises(DataError, match="no array"):
        load_npz(tmp_path / "objects.npz")
