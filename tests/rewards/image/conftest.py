import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def few_threads():
    """Small networks are faster on one thread, and other tests run beside these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def frames() -> np.ndarray:
    """uint8 [5, 64, 64, 3]."""
    return np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), dtype=np.uint8)
