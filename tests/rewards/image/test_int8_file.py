"""The file of an int8 model belongs to one set of weights and one threshold, and is read without trust."""

import struct
import zipfile
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.models import BinaryRewardClassifier, build_model
from guerdon.rewards.image.int8 import int8_scorer, make_int8
from guerdon.rewards.image.int8_file import load_int8, save_int8
from guerdon.rewards.image.quantize import FORMAT
from tests.rewards.image.frames import lively, random_frames


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return lively(BinaryRewardClassifier(width=8, image_size=(3, 32, 32)))


@pytest.fixture(scope="module")
def made(model):
    frames = random_frames(48, (32, 32))
    return make_int8(model, frames, frames, 5.0)


@pytest.fixture
def path(made, tmp_path):
    save_int8(tmp_path / "int8.npz", made)
    return tmp_path / "int8.npz"


def members(path):
    """Name -> bytes."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path, content, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def npy(shape, descr="<f8", data=b""):
    """A file of numpy's whose header says anything."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def test_the_file_gives_the_same_scorer(model, made, path):
    again = load_int8(path, model, 5.0)
    for field in fields(made):
        np.testing.assert_equal(getattr(again, field.name), getattr(made, field.name))
    frames = random_frames(40, (32, 32), seed=3)
    for one, other in zip(int8_scorer(model, made)(frames), int8_scorer(model, again)(frames), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(path.read_bytes()) < 16 * 32 * 32 * 3 + 10_000  # numbers and probes: no weights, no graph


def test_a_file_that_does_not_fit_is_refused(model, made, path, monkeypatch):
    with pytest.raises(ConfigError, match=r"does not exist.*guerdon reward quantize"):
        load_int8(path.with_name("other.npz"), model, 0.0)
    with pytest.raises(ConfigError, match=r"verified for a threshold at logit 5\.0000.*at 1\.5000"):
        load_int8(path, model, 1.5)
    assert load_int8(path, model, None).threshold_logit == 5.0
    with monkeypatch.context() as later:
        later.setattr("guerdon.rewards.image.quantize.FORMAT", FORMAT + 1)
        with pytest.raises(DataError, match=f"has the format {FORMAT}"):
            load_int8(path, model, 5.0)
    plain = build_model(replace(model.config, normalize=not model.config.normalize))
    plain.load_state_dict(model.state_dict())  # the same weights, but they see other numbers
    with pytest.raises(DataError, match="other weights"):
        load_int8(path, plain, 5.0)
    save_int8(path, replace(made, weights="other"))
    with pytest.raises(DataError, match="other weights"):
        load_int8(path, model, 5.0)


def test_no_graph_is_read_from_the_file(model, path):
    """A graph may name other files to be read, and did so in format 1."""
    write(path, {**members(path), "onnx.npy": npy("(3,)", "|u1", b"abc")})
    assert load_int8(path, model, 5.0).margin > 0
    np.savez(path, format=1, onnx=np.zeros(9, np.uint8), weights="x", margin=0.1)
    with pytest.raises(DataError, match=r"int8\.npz has the format 1, and this Guerdon makes"):
        load_int8(path, model, 5.0)


HOSTILE = {
    "too many values": ("probe_logits.npy", npy("(1000000000000,)")),
    "no values of a huge shape": ("probe_logits.npy", npy("(1000000000, 0)")),
    "nested header": ("format.npy", npy("(" * 3000, "<i8")),
    "objects": ("margin.npy", npy("()", "|O", b"x" * 8)),
    "huge text": ("weights.npy", npy("()", "<U999999999", b"x")),
    "no text": ("processor.npy", npy("()", "<U1", struct.pack("<I", 0xD800))),
    "no character": ("processor.npy", npy("()", "<U1", struct.pack("<I", 0xFFFFFFFF))),
    "control characters": ("processor.npy", npy("()", "<U1", struct.pack("<I", 27))),
    "no number": ("margin.npy", npy("()", data=struct.pack("<d", float("nan")))),
    "negative": ("margin.npy", npy("()", data=struct.pack("<d", -1.0))),
    "infinite": ("threshold_logit.npy", npy("()", data=struct.pack("<d", float("inf")))),
    "a share above 1": ("agreement.npy", npy("()", data=struct.pack("<d", 2.0))),
    "too few ranges": ("ranges.npy", npy("(1, 2)", data=struct.pack("<2d", 0, 1))),
    "empty ranges": ("ranges.npy", npy("(17, 2)", data=bytes(17 * 16))),
    "other probes": ("probes.npy", npy("(1, 1, 2, 2, 3)", "|u1", bytes(12))),
    "nothing": ("ranges.npy", b""),
    "no frames": ("num_check_frames.npy", npy("()", "<i8", struct.pack("<q", 0))),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_members_are_refused_by_name(model, path, kind):
    name, data = HOSTILE[kind]
    write(path, {**members(path), name: data})
    with pytest.raises(DataError, match=r"int8\.npz is damaged \(.*reward quantize"):
        load_int8(path, model, 5.0)


def test_hostile_archives_are_refused_by_name(model, path):
    whole, content = path.read_bytes(), members(path)
    damaged = {
        "cut": whole[:100],
        "empty": b"",
        "no archive": b"garbage" * 1000,
        "a byte of a probe": whole.replace(content["probes.npy"][-64:], bytes(64)),
        "larger than needed": whole + bytes(4 << 20),
    }
    for data in damaged.values():
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"int8\.npz is damaged \(.*reward quantize"):
            load_int8(path, model, 5.0)
    write(path, {**content, "probe_logits.npy": bytes(1 << 24)}, zipfile.ZIP_DEFLATED)  # 16 MiB from 16 KiB
    with pytest.raises(DataError, match="compressed"):
        load_int8(path, model, 5.0)
    write(path, {name: data for name, data in content.items() if name != "margin.npy"})
    with pytest.raises(DataError, match="margin"):
        load_int8(path, model, 5.0)
