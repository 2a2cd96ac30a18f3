"""What Guerdon itself writes: native stores, checkpoints, states of fits and runs, policies; and HDF5 files.

A target puts the input in place of one file of a folder that is whole otherwise, and reads the folder.
"""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fuzz.engine import Target
from fuzz.mutations import NUMBERS, mutate_bytes
from fuzz.structures import mutate_record, mutate_zip
from guerdon.agents.networks import ObsSpec
from guerdon.agents.registry import make_agent
from guerdon.agents.replay import ReplayBuffer
from guerdon.config import EnvConfig, LearnerConfig, NetworkConfig
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.types import Episode, Fault
from guerdon.data.collect.policies import CheckpointPolicy
from guerdon.data.formats import h5_process
from guerdon.data.formats.maniskill_h5 import ManiSkillH5
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.fit.state import Progress
from guerdon.models import Contract, load_checkpoint, save_checkpoint
from guerdon.rewards.image.models import build_model
from guerdon.rewards.model import _read as read_reward_model
from guerdon.training.checkpoints import load_policy, save_policy

_STEPS = 2
_SHARD = "shards/s000000"
_TEXTS: tuple[Any, ...] = ("", "x" * 5000, "a\ud800b", "²", "module:Env", "train", "\x00", None, True, [], {})


def _episode(seed: int) -> Episode:
    rng = np.random.default_rng(seed)
    vectors = rng.random((2, _STEPS, 3), np.float32)
    return Episode(
        frames={"base_camera": rng.integers(0, 255, (_STEPS, 4, 4, 3), np.uint8)},
        labels=np.array([0, 1], np.float32),
        success=True,
        actions=vectors[0],
        states=vectors[1],
        initial_state=vectors[1, 0],
        env_rewards=np.array([0, 1], np.float32),
        terminated=np.array([False, True]),
        seed=seed,
        source=f"episode {seed}",
    )


# Changes of JSON


def _change_json(value: Any, rng: random.Random) -> Any:
    """Go down at random, and put something else in the place of what is there."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _change_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _change_json(value[place], rng), *value[place + 1 :]]
    if rng.random() < 0.5:
        return rng.choice((*NUMBERS, 10**400, 0.5, float("inf"), float("nan"))) * rng.choice((1, -1))
    return rng.choice(_TEXTS)


def _mutate_json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _change_json(value, rng)
    return json.dumps(value).encode()


def _mutate_journal(data: bytes, rng: random.Random) -> bytes:
    """Change records and give them a checksum that fits, or change the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    lines = data.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    record = json.loads(lines[place][9:])
    if rng.random() < 0.3:
        name = rng.choice(list(record["arrays"]))
        raw = mutate_bytes(base64.b64decode(record["arrays"][name]), rng)
        record["arrays"][name] = base64.b64encode(raw).decode()
    else:
        record = _change_json(record, rng)
    text = json.dumps(record).encode()
    lines[place] = b"%08x %s\n" % (zlib.crc32(text), text)
    return b"".join(lines)


# Native stores


def _store(scratch: Path, name: str, sealed: bool = True) -> list[bytes]:
    path = scratch / "store"
    writer = StoreWriter(path)
    writer.add_many([_episode(seed) for seed in range(3)])
    if sealed:
        writer.close()
    return [(path / name).read_bytes()]


def _read_store(data: bytes, scratch: Path, name: str) -> int:
    (scratch / "store" / name).write_bytes(data)
    store = EpisodeStore(scratch / "store")
    size = 0
    for episode in store:
        size += sum(int(images.sum()) * 0 + images.nbytes for images in episode.frames.values())
    store.batch(np.arange(store.num_frames))
    for column in ("seed", "split", "source", "digest", "success", "complete"):
        store.episode_column(column)
    store.at_rest()
    json.dumps([fault.reason for fault in store.faults]).encode()
    return size


def _mutate_index(data: bytes, rng: random.Random) -> bytes:
    """Change a column and write the table anew, or change the bytes."""
    if rng.random() < 0.5:
        return mutate_bytes(data, rng)
    table = pq.read_table(io.BytesIO(data))
    name = rng.choice([*table.column_names, "frame"])
    count = table.num_rows
    column: Any = rng.choice(
        (
            pa.array([rng.choice((*NUMBERS[:-1], -1, None)) for _ in range(count)], pa.int64()),
            pa.array([rng.choice((0, 1, 2, -1)) for _ in range(count)], pa.int32()),
            pa.array([rng.choice((0.0, 1.0, 7.0, float("nan"), None)) for _ in range(count)], pa.float64()),
            pa.array([rng.choice(("", "x" * 5000, "train", None)) for _ in range(count)], pa.string()),
            pa.array([rng.randbytes(rng.choice((0, 16, 16, 17))) for _ in range(count)], pa.binary()),
            pa.array([[1]] * count),
            pa.nulls(count),
        )
    )
    if name in table.column_names:
        place = table.column_names.index(name)
        table = table.remove_column(place) if rng.random() < 0.1 else table.set_column(place, name, column)
    else:
        table = table.append_column(name, column)
    if rng.random() < 0.2:
        table = (
            pa.concat_tables([table] * rng.choice((1, 2, 40))) if rng.random() < 0.9 else table.slice(0, 0)
        )
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()


def _sizes(scratch: Path) -> list[bytes]:
    _store(scratch, "manifest.json")
    files = sorted((scratch / "store" / _SHARD).glob("*.[uf]*"))
    return [b"".join(struct.pack("<I", file.stat().st_size) for file in files)]


def _read_sizes(data: bytes, scratch: Path) -> int:
    """The input has the sizes to which the files of a shard are cut."""
    files = sorted((scratch / "store" / _SHARD).glob("*.[uf]*"))
    for number, file in enumerate(files):
        (size,) = struct.unpack("<I", data[number * 4 :][:4].ljust(4, b"\0"))
        with file.open("r+b") as opened:
            opened.truncate(size % 1000)
    return _read_store((scratch / "store" / "manifest.json").read_bytes(), scratch, "manifest.json")


# HDF5


def _h5(scratch: Path) -> list[bytes]:
    rng = np.random.default_rng(0)
    made = []
    for libver in ("earliest", "latest"):
        path = scratch / f"{libver}.h5"
        with h5py.File(path, "w", libver=libver) as file:
            for number in range(2):
                group = file.create_group(f"traj_{number}")
                group["actions"] = rng.random((_STEPS, 4), np.float32)
                group["success"] = group["truncated"] = np.array([False, True])
                frames = rng.integers(0, 255, (_STEPS + 1, 4, 4, 3), np.uint8)
                group.create_dataset("obs/sensor_data/base_camera/rgb", data=frames, compression="gzip")
                group["obs/agent/qpos"] = rng.random((_STEPS + 1, 3), np.float32)
        made.append(path.read_bytes())
    h5_process.IDLE_SECONDS = 3600.0
    _read_h5(made[0], scratch)  # starts the process that reads, now and not while an input is run
    return made


def _read_h5(data: bytes, scratch: Path) -> int:
    (scratch / "input.h5").write_bytes(data)
    return _read_all(scratch / "input.h5")


def _h5_json(scratch: Path) -> list[bytes]:
    (scratch / "input.h5").write_bytes(_h5(scratch)[0])
    about = {"episode_id": 0, "episode_seed": 3, "control_mode": "pd_joint_pos", "success": True}
    return [json.dumps({"env_info": {}, "episodes": [about, {**about, "episode_id": 1}]}).encode()]


def _read_h5_json(data: bytes, scratch: Path) -> int:
    (scratch / "input.json").write_bytes(data)
    return _read_all(scratch / "input.h5")


def _read_all(path: Path) -> int:
    items = list(ManiSkillH5().read(path))
    assert items, "neither an episode nor a fault"
    for item in items:
        if isinstance(item, Fault):
            item.reason.encode()
    return sum(
        images.nbytes for item in items if isinstance(item, Episode) for images in item.frames.values()
    )


# Reward models


def _contract_and_model() -> tuple[Any, Contract]:
    config = RewardModelConfig(
        arch="resnet10", width=8, hidden_dim=8, num_spatial_blocks=2, image_size=(3, 32, 32)
    )
    model = build_model(config).eval()
    return model, Contract.of(model, frame_sizes={"base_camera": (32, 32, 3)}, threshold=0.5)


def _reward_folder(scratch: Path) -> list[bytes]:
    save_checkpoint(scratch / "model", *_contract_and_model(), {"epoch": 1})
    load_checkpoint(scratch / "model")  # the first time torch imports a good deal
    return [(scratch / "model" / "model.safetensors").read_bytes()]


def _read_reward(data: bytes, scratch: Path) -> None:
    (scratch / "model" / "model.safetensors").write_bytes(data)
    load_checkpoint(scratch / "model")


def _mutate_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Change the header, or the contract in it, mostly without the checksum; or the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    about = header["__metadata__"]
    if rng.random() < 0.8:
        about.pop("checksum")
    if rng.random() < 0.6:
        about["contract"] = json.dumps(_change_json(json.loads(about["contract"]), rng))
    else:
        header = _change_json(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def _contract_json(scratch: Path) -> list[bytes]:
    """A folder whose safetensors file has no contract, as foreign ones: that of the JSON file is used."""
    import safetensors.torch

    model, contract = _contract_and_model()
    save_checkpoint(scratch / "model", model, contract)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    safetensors.torch.save_file(weights, scratch / "model" / "model.safetensors")
    load_checkpoint(scratch / "model")
    return [(scratch / "model" / "contract.json").read_bytes()]


def _read_contract(data: bytes, scratch: Path) -> None:
    (scratch / "model" / "contract.json").write_bytes(data)
    load_checkpoint(scratch / "model")


# Files of torch.save


def _mutate_torch(data: bytes, rng: random.Random) -> bytes:
    """Change the objects in a file and save them anew, or its members, or its bytes."""
    kind = rng.random()
    if kind < 0.2:
        return mutate_bytes(data, rng)
    if kind < 0.4:
        return mutate_zip(data, rng)
    content = torch.load(io.BytesIO(data), weights_only=False)  # a seed of our own
    for key in ("contract", "description"):
        if key in content and rng.random() < 0.4:
            content[key] = json.dumps(_change_json(json.loads(content[key]), rng))
            break
    file = io.BytesIO()
    try:
        torch.save(mutate_record(content, rng), file)
    except Exception:  # an object that cannot be saved, or nests too deeply
        return mutate_zip(data, rng)
    return file.getvalue()


def _fit_state(scratch: Path) -> list[bytes]:
    model, contract = _contract_and_model()
    optimizer = torch.optim.Adam(model.parameters())
    extra = {
        "epoch": 1,
        "optimizer_state_dict": optimizer.state_dict(),
        "seed": 0,
        "progress": vars(Progress()),
    }
    save_checkpoint(scratch / "checkpoint.pt", model, contract, extra)
    load_checkpoint(scratch / "checkpoint.pt")
    return [(scratch / "checkpoint.pt").read_bytes()]


def _read_fit_state(data: bytes, scratch: Path) -> None:
    (scratch / "checkpoint.pt").write_bytes(data)
    _, _, extra = load_checkpoint(scratch / "checkpoint.pt")
    Progress.of(extra.get("progress"), "checkpoint.pt")


def _zoo_model(scratch: Path) -> list[bytes]:
    file = io.BytesIO()
    torch.save({"state": {"network": {"weight": torch.zeros(3, 2)}, "count": 3}}, file)
    return [file.getvalue()]


def _read_zoo_model(data: bytes, scratch: Path) -> None:
    (scratch / "reward_model.pt").write_bytes(data)
    read_reward_model(scratch / "reward_model.pt")


# Policies


def _policies(scratch: Path) -> dict[str, bytes]:
    made = {}
    observations = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    continuous, discrete = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Discrete(3)
    for algorithm, actions in (("ppo", continuous), ("sac", continuous), ("dqn", discrete)):
        network = NetworkConfig(hidden=(8, 8))
        cfg = LearnerConfig(algorithm=algorithm, network=network)  # type: ignore[arg-type]
        learner = make_agent(cfg, observations, actions, 0)
        run = {"loop": {"env_steps": 3}, "alarms": []}
        save_policy(scratch / "policy", learner, cfg, EnvConfig(), (observations, actions), 3, run)
        made[algorithm] = (scratch / "policy" / "state.pt").read_bytes()
    return made


def _policy_states(scratch: Path) -> list[bytes]:
    return list(_policies(scratch).values())


def _read_policy(data: bytes, scratch: Path) -> None:
    (scratch / "policy" / "state.pt").write_bytes(data)
    saved = load_policy(scratch / "policy")
    saved.playable_env(None, "name it")


def _old_policy(scratch: Path) -> list[bytes]:
    """A policy whose description stands in its JSON file alone."""
    content = torch.load(io.BytesIO(_policies(scratch)["dqn"]), weights_only=False)
    text = content.pop("description")
    torch.save(content, scratch / "policy" / "state.pt")
    return [text.encode()]


def _read_old_policy(data: bytes, scratch: Path) -> None:
    (scratch / "policy" / "policy.json").write_bytes(data)
    load_policy(scratch / "policy").playable_env(None, "name it")


def _buffer() -> ReplayBuffer:
    return ReplayBuffer(ObsSpec(state_size=2), (2,), np.float32, 1, 8, seed=0)


def _replay(scratch: Path) -> list[bytes]:
    _buffer().save(scratch / "replay.npz")
    return [(scratch / "replay.npz").read_bytes()]


def _read_replay(data: bytes, scratch: Path) -> None:
    (scratch / "replay.npz").write_bytes(data)
    _buffer().load(scratch / "replay.npz")


def _mlp_policy(scratch: Path) -> list[bytes]:
    import safetensors.torch

    weights = {"0.weight": torch.zeros(4, 3), "0.bias": torch.zeros(4)}
    weights |= {"1.weight": torch.zeros(2, 4), "1.bias": torch.zeros(2)}
    (scratch / "policy.json").write_text('{"kind": "mlp", "activation": "tanh", "squash": true}')
    return [safetensors.torch.save(weights)]


def _read_mlp(data: bytes, scratch: Path) -> None:
    (scratch / "policy.safetensors").write_bytes(data)
    CheckpointPolicy(scratch).act(np.zeros((1, 3), np.float32))


def _mlp_json(scratch: Path) -> list[bytes]:
    (scratch / "policy.safetensors").write_bytes(_mlp_policy(scratch)[0])
    return [(scratch / "policy.json").read_bytes()]


def _read_mlp_json(data: bytes, scratch: Path) -> None:
    (scratch / "policy.json").write_bytes(data)
    CheckpointPolicy(scratch).act(np.zeros((1, 3), np.float32))


def _of_store(name: str, mutate: Callable[[bytes, random.Random], bytes], *, sealed: bool = True) -> Target:
    return Target(
        seeds=partial(_store, name=name, sealed=sealed), run=partial(_read_store, name=name), mutate=mutate
    )


TARGETS: dict[str, Target] = {
    "store-manifest": _of_store("manifest.json", _mutate_json),
    "store-schema": _of_store(f"{_SHARD}/shard.json", _mutate_json),
    "store-journal": _of_store(f"{_SHARD}/journal.log", _mutate_journal, sealed=False),
    "store-index": _of_store(f"{_SHARD}/index.parquet", _mutate_index),
    "store-sizes": Target(_sizes, _read_sizes),
    "maniskill-h5": Target(_h5, _read_h5),
    "maniskill-h5-json": Target(_h5_json, _read_h5_json, _mutate_json),
    "reward-safetensors": Target(_reward_folder, _read_reward, _mutate_safetensors),
    "reward-contract": Target(_contract_json, _read_contract, _mutate_json),
    "fit-state": Target(_fit_state, _read_fit_state, _mutate_torch),
    "zoo-reward-model": Target(_zoo_model, _read_zoo_model, _mutate_torch),
    "policy-state": Target(_policy_states, _read_policy, _mutate_torch),
    "policy-json": Target(_old_policy, _read_old_policy, _mutate_json),
    "replay-buffer": Target(_replay, _read_replay, mutate_zip),
    "mlp-policy": Target(_mlp_policy, _read_mlp),
    "mlp-policy-json": Target(_mlp_json, _read_mlp_json, _mutate_json),
}
