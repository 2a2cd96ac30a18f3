"""Workers of Ray that do not import: they are forked from a process that has.

A worker takes four processor seconds before it does anything, for Ray (twice), torch and Guerdon; one that
is forked takes less than one, for Ray. With `forked_workers()` the raylets that this process starts run this
file in place of Ray's `setup_worker.py`: it asks a server for a process with the same arguments, variables
and streams, and waits for its end. Clusters of programs that a test starts have workers as Ray starts them.
"""

import array
import contextlib
import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

PRELOADED = (
    "google.protobuf.descriptor_pb2",
    "guerdon.fit.distributed",
    "guerdon.training.env_workers",
    "guerdon.training.reward_workers",
    "guerdon.training.trainer",
    "jsonschema",
    "requests",
    "torch._dynamo",
    "torch.distributed",
)
"""Not Ray itself: as it is imported it reads variables, among them its raylet's id and token."""
OPTIONS = ("--serialized-runtime-env-context", "--language")
"""Of `setup_worker.py`; the others are the worker's."""
ADDRESS = "GUERDON_TEST_RAY_WORKERS"
"""Holds the server's, for what asks it."""
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def forked_workers():
    """For all clusters that start meanwhile: Ray joins the folder of its files and the name of one."""
    import pytest  # not in `ask`, which runs once for each worker

    with (
        tempfile.TemporaryDirectory(prefix="guerdon-workers-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        address = str(Path(folder, "socket"))
        command = [sys.executable, "-m", "tests.distributed.ray_workers", "serve", address]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the server of Ray's workers ended with {process.wait()}")
            patch.setattr("ray._private.ray_constants.SETUP_WORKER_FILENAME", str(Path(__file__).absolute()))
            patch.setenv(ADDRESS, address)
            yield
            process.communicate()  # an end of its input


def ask(arguments: list[str]) -> int:
    """In the process that the raylet has started: the exit code of a forked worker."""
    own = {name: value for name, _, value in (text.partition("=") for text in arguments) if name in OPTIONS}
    assert own["--language"] == "PYTHON", arguments
    wanted = json.loads(own.get("--serialized-runtime-env-context", "{}"))
    assert not wanted.get("command_prefix"), wanted
    command = [text for text in arguments if text.partition("=")[0] not in OPTIONS]
    environment = {**os.environ, **wanted.get("env_vars", {})}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[ADDRESS])
        asked = json.dumps([command, str(Path.cwd()), environment]).encode()
        streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        server.sendmsg([len(asked).to_bytes(8, "big")], streams)
        server.sendall(asked)
        code = server.recv(1)
    return code[0] if code else 1


def serve(address: str) -> None:
    """Fork a process for each worker, until the input ends."""
    for name in PRELOADED:
        __import__(name)
    assert "ray" not in sys.modules
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.freeze()  # or the first collection of a worker writes to, and so copies, all memory
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while sys.stdin not in (
            ready := select.select([listener, sys.stdin], [], [], 0.05 if running else None)[0]
        ):
            if ready:
                connection, _ = listener.accept()
                child = os.fork()
                if child == 0:
                    listener.close()
                    for other in running.values():
                        other.close()
                    work(connection)
                running[child] = connection
            for child in list(running):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    with running.pop(child) as connection, contextlib.suppress(BrokenPipeError):
                        code = os.waitstatus_to_exitcode(status)
                        connection.send(bytes([code % 256 if code >= 0 else 128 - code]))


def work(connection: socket.socket) -> None:
    """In a process of its own: Ray's worker, with what was sent."""
    from tests.commands import end

    streams = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    streams.frombytes(ancillary[0][2])
    with connection.makefile("rb") as file:
        command, folder, environment = json.loads(file.read(int.from_bytes(head, "big")))
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    end(runpy.run_path, command[0], None, "__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1:]))
