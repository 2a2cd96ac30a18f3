"""Two test processes share two cores: one thread each, in what they start too."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
