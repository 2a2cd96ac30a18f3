"""Two test processes share two cores: one thread each, in what they start too."""

import os
import signal
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

# A shell that starts the tests in the background has Ctrl-C ignored, and so would have all that they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
