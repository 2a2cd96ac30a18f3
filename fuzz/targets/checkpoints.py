"""What fits and runs leave: reward models, their contracts, states to go on from, policies, replay buffers.

A target puts the input in place of one file of a folder that is whole otherwise, and reads the folder.
"""

from __future__ import annotations

import functools
import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from fuzz.engine import Target
from fuzz.mutations import mutate_bytes
from fuzz.structures import change_json, mutate_json, mutate_record, mutate_zip, or_bytes
from guerdon.agents.networks import ObsSpec
from guerdon.agents.registry import make_agent
from guerdon.agents.replay import ReplayBuffer
from guerdon.config import EnvConfig, LearnerConfig, NetworkConfig
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.data.collect.policies import CheckpointPolicy
from guerdon.fit.state import Progress
from guerdon.models import Contract, load_checkpoint, save_checkpoint
from guerdon.rewards.image.models import build_model
from guerdon.rewards.model import _read as read_reward_model
from guerdon.training.checkpoints import load_policy, save_policy

# Reward models


def _contract_and_model() -> tuple[Any, Contract]:
    config = RewardModelConfig(
        arch="resnet10", width=1, hidden_dim=4, num_spatial_blocks=1, image_size=(3, 32, 32)
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


@or_bytes
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
        about["contract"] = json.dumps(change_json(json.loads(about["contract"]), rng))
    else:
        header = change_json(header, rng)
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


@functools.lru_cache(maxsize=64)
def _torch_content(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)  # a seed of our own


@or_bytes
def _mutate_torch(data: bytes, rng: random.Random) -> bytes:
    """Change the objects in a file and save them anew, or its members, or its bytes."""
    kind = rng.random()
    if kind < 0.2:
        return mutate_bytes(data, rng)
    if kind < 0.4:
        return mutate_zip(data, rng)
    content = dict(_torch_content(data))
    for key in ("contract", "description"):
        if key in content and rng.random() < 0.4:
            content[key] = json.dumps(change_json(json.loads(content[key]), rng))
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
        cfg = LearnerConfig(algorithm=algorithm, network=network)
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


TARGETS: dict[str, Target] = {
    "reward-safetensors": Target(_reward_folder, _read_reward, _mutate_safetensors),
    "reward-contract": Target(_contract_json, _read_contract, mutate_json),
    "fit-state": Target(_fit_state, _read_fit_state, _mutate_torch),
    "zoo-reward-model": Target(_zoo_model, _read_zoo_model, _mutate_torch),
    "policy-state": Target(_policy_states, _read_policy, _mutate_torch),
    "policy-json": Target(_old_policy, _read_old_policy, mutate_json),
    "replay-buffer": Target(_replay, _read_replay, mutate_zip),
    "mlp-policy": Target(_mlp_policy, _read_mlp),
    "mlp-policy-json": Target(_mlp_json, _read_mlp_json, mutate_json),
}
