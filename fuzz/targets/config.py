"""Config files: whatever the bytes, a config or a `ConfigError`."""

from __future__ import annotations

import random
from pathlib import Path

from omegaconf import OmegaConf

from fuzz.engine import Target
from guerdon.config import load_config
from guerdon.config.compose import PACKAGE_CONF, errors_explained, file_named
from guerdon.config.load import ZOO_CONF, load_serial, resolve_references
from guerdon.config.yaml_files import check_file

# What mutations start from beside the seeds: it uses what can be misused.
HOSTILE = (
    b"a: &a [x, x]\nb: &b [*a, *a, *a, *a]\nseed: [*b, *b, *b, *b]\n",
    b"runner: &r {logger: *r}\n",
    b"seed: [[[[[[[[1]]]]]]]]\n",
    b"reward: {model: {arch: ${reward.model.model_type}}}\n",
    b"runner: {output_dir: ${runner.experiment_name}/${runner.experiment_name}, experiment_name: ${seed}}\n",
    b"defaults: [train, _self_]\nseed: !!int 3\n<<: {engine: local}\n",
    b"seed: ${oc.env:HOME,1}\nfit: {optim: {lr: 1e-3}}\n",
)
TOKENS = (
    b"&a ", b"*a", b"[", b"]", b"{", b"}", b": ", b"- ", b"\n", b"? ", b"| ", b"~", b"\t", b"\0", b"'", b'"',
    b"<<: *a", b"${", b"${seed}", b"${.x}", b"${..}", b"!!int ", b"!!binary ", b"!!timestamp ",
    b"!!python/name:os.sep", b"\xff\xfe", b"\xc2\x85", b"---\n", b"%YAML 1.1\n", b"defaults: [x]", b".nan",
    b"hydra: {searchpath: [x]}", b"9" * 400, b"1:" * 60, b"# @package _global_\n",
)  # fmt: skip


def seeds(folder: Path) -> list[bytes]:
    """Configs of the package, the shortest ones: every input is composed."""
    return _shortest(PACKAGE_CONF)


def yaml_seeds(folder: Path) -> list[bytes]:
    """Those that refer to no setting of another file."""
    return [data for data in _shortest(PACKAGE_CONF) if b"${" not in data]


def zoo_seeds(folder: Path) -> list[bytes]:
    """Configs of the serial pipelines."""
    return _shortest(ZOO_CONF)


def _shortest(folder: Path) -> list[bytes]:
    return sorted((file.read_bytes() for file in folder.glob("*.yaml")), key=len)[:4]


def read_config(data: bytes, folder: Path) -> None:
    """As `guerdon train --config-name FILE`."""
    file = folder / "input.yaml"
    file.write_bytes(data)
    load_config("input", (), str(folder))


def read_zoo_config(data: bytes, folder: Path) -> None:
    """As `guerdon zoo --config-name FILE`."""
    file = folder / "input.yaml"
    file.write_bytes(data)
    load_serial(str(file))


def read_yaml(data: bytes, folder: Path) -> None:
    """What is read of a file before Hydra composes it: fast, so that many inputs can be tried."""
    file = folder / "input.yaml"
    file.write_bytes(data)
    check_file(file)
    with errors_explained([folder]), file_named(file):
        config = OmegaConf.load(file)
        tree = OmegaConf.to_container(config, resolve=False)
    if isinstance(tree, dict):
        resolve_references({str(key): value for key, value in tree.items()})


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Insert, repeat and remove what means something in YAML, in Hydra and in OmegaConf."""
    data = rng.choice(HOSTILE) if rng.random() < 0.3 else data
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:at] + rng.choice(TOKENS) * rng.choice((1, 1, 1, 2, 50)) + data[at:]
        elif kind == 1:
            data = data[:at] + data[at + rng.randint(1, 20) :]
        elif kind == 2:
            lines = data.splitlines(keepends=True)
            rng.shuffle(lines)
            data = b"".join(lines)
        elif kind == 3:
            piece = data[at : at + rng.randint(1, 60)]
            data = data[:at] + piece * rng.choice((2, 3, 100)) + data[at:]
        elif at < len(data):
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


TARGETS = {
    "yaml": Target(seeds=yaml_seeds, run=read_yaml, mutate=mutate),
    "config": Target(seeds=seeds, run=read_config, mutate=mutate),
    "zoo_config": Target(seeds=zoo_seeds, run=read_zoo_config, mutate=mutate),
}
