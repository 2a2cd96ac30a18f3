"""`python -m fuzz.make_corpus`: small inputs for the targets of stores and checkpoints, from their own seeds.

For each target the seeds as this version writes them, where they are small, a torn one and one with a wrong
bit. A later version starts from these too, and so also meets files of an older one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from fuzz.targets import checkpoints, lerobot, stores

_CORPUS = Path(__file__).parent / "corpus"
_WHOLE, _TORN = 8192, 2048
"""Bytes of the largest input that is kept as it is, and of a torn one."""


def variants(seed: bytes) -> dict[str, bytes]:
    """Name -> input."""
    made = {"torn": seed[: min(_TORN, len(seed) * 2 // 3)]}
    if len(seed) <= _WHOLE:
        middle = len(seed) // 2
        made["whole"] = seed
        made["wrong-bit"] = seed[:middle] + bytes([seed[middle] ^ 4]) + seed[middle + 1 :]
    return made


def main() -> None:
    """Write them; files that were there under other names stay."""
    for name, target in (stores.TARGETS | lerobot.TARGETS | checkpoints.TARGETS).items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as scratch:
            seed = min(target.seeds(Path(scratch)), key=len)
        folder = _CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for kind, data in variants(seed).items():
            (folder / kind).write_bytes(data)


if __name__ == "__main__":
    main()
