"""Run in a process of its own: Guerdon as on a system without `fcntl` and its like, in the folder `argv[1]`.

Other packages are imported first; they have their own ways on other systems.
"""

import importlib
import os
import pkgutil
import sys
from pathlib import Path

OTHERS = ("torch.distributed.fsdp", "torch.nn.parallel", "torch.multiprocessing", "gymnasium", "hydra")
OTHERS += ("pyarrow.parquet", "tensorboardX", "safetensors.torch", "PIL.Image", "tqdm", "tempfile")
MISSING = ("fcntl", "termios", "tty", "pty", "resource", "pwd", "grp", "msvcrt")
FUNCTIONS = ("fork", "forkpty", "posix_fallocate", "pidfd_open", "fdatasync", "pwritev")
FLAGS = ("O_NONBLOCK", "O_CLOEXEC")
EXTRAS = ("ray", "mani_skill", "sapien", "stable_baselines3", "minigrid", "h5py", "av", "onnxruntime")


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def take_away():
    for name in OTHERS:
        importlib.import_module(name)
    for name in MISSING:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Blocked())
    for name in (*FUNCTIONS, *FLAGS):
        delattr(os, name)
    for name in EXTRAS:
        sys.modules[name] = None


def import_all():
    """Every module of the package; returns those that need an extra."""
    import guerdon

    left_out = []
    for module in pkgutil.walk_packages(guerdon.__path__, "guerdon.", onerror=lambda name: None):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:
            if not any(extra in f"{error} {error.__cause__}" for extra in (*EXTRAS, "Stable-Baselines3")):
                raise
            left_out.append(module.name)
    return left_out


def write_and_read(root):
    import numpy as np

    from guerdon.core.atomic import NumberedFiles, write_atomic
    from guerdon.core.types import Episode
    from guerdon.data.store import EpisodeStore
    from guerdon.data.store.store_writer import StoreWriter
    from guerdon.fit.inputs import _map_file
    from guerdon.training.folders import held

    frames = np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, 8, 8, 3)
    episode = Episode(frames={"base_camera": frames}, labels=np.array([0, 0, 1], np.float32), success=True)
    for _ in range(2):
        with StoreWriter(root / "store") as writer:
            writer.add(episode)
    stored = list(EpisodeStore(root / "store"))
    assert len(stored) == 2
    assert all((each.frames["base_camera"] == frames).all() for each in stored)
    write_atomic(root / "file", "text")
    assert (root / "file").read_text() == "text"
    files = NumberedFiles([root / "numbered"], suffix=".txt")
    assert [files.write(root / "numbered", "x").name for _ in range(2)] == ["000000.txt", "000001.txt"]
    _map_file(root / "features", (4, 2), new=True)[:] = 1.0
    assert (root / "features").stat().st_size == 32
    with held(root):
        assert not list(root.rglob("*.tmp"))


if __name__ == "__main__":
    take_away()
    print("left out", *import_all())
    write_and_read(Path(sys.argv[1]))
    print("works")
