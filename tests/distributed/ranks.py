"""Functions that ranks run."""

import logging
import os
import signal
import time

import torch
import torch.distributed as dist

from tests.distributed.sockets import listening


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


def listens():
    """(address, port) of all sockets on which this rank listens, the meeting point's on rank 0 too."""
    dist.init_process_group("gloo")
    dist.barrier()
    found = listening([os.getpid()])
    dist.barrier()  # before the others go
    dist.destroy_process_group()
    return found


class Warns:
    """A worker that has something to warn of and then goes on working."""

    def warn(self, until):
        """Busy until there is a file `until`."""
        logging.getLogger("guerdon").warning("the lens is dirty")
        while not until.exists():
            time.sleep(0.01)
