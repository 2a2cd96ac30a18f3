"""Functions that ranks run."""

import logging
import os
import signal
import time

import torch
import torch.distributed as dist


def total(start):
    """Sum of start + rank over all ranks, by gloo; with where this rank is."""
    dist.init_process_group("gloo")
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    size = dist.get_world_size()
    dist.destroy_process_group()
    logging.getLogger("guerdon").warning("the sum is %g", value)
    return float(value), size, os.environ["LOCAL_RANK"], os.getpid()


def one_fails(how):
    """Rank 1 goes wrong while the others wait for it."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such layer")
    dist.all_reduce(torch.zeros(1))


class Warns:
    """A worker that has something to warn of and then goes on working."""

    def warn(self, until):
        """Busy until there is a file `until`."""
        logging.getLogger("guerdon").warning("the lens is dirty")
        while not until.exists():
            time.sleep(0.01)
