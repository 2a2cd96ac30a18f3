"""Commands in processes of their own that do not import: they are forked from one that has.

`guerdon` and `python` in `CommandServer.path` hand their arguments, folder, environment and standard streams
to the server, which forks a process that runs them: importing torch takes longer than most commands of the
docs do. Where a test is about the program itself, how it starts or how it is ended, it starts a real one.
"""

import array
import atexit
import gc
import json
import multiprocessing
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "guerdon.cli.collect",
    "guerdon.cli.data",
    "guerdon.cli.demo",
    "guerdon.cli.main",
    "guerdon.cli.reward",
    "guerdon.cli.robot",
    "guerdon.cli.train",
    "guerdon.cli.train_reward",
    "guerdon.cli.zoo",
)
SIMULATOR = ["mani_skill.envs", "guerdon.envs.maniskill.pool"]
"""What the processes of `guerdon.envs.maniskill.pool` are forked with."""
CLIENT = """#!{python} -IS
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([{program!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([len(asked).to_bytes(8, "big")], streams)
    server.sendall(asked)
    code = server.recv(1)
sys.exit(code[0] if code else "the server of the commands has ended")
"""


class CommandServer:
    """The process that forks commands, and a folder with programs that ask it to.

    Example:
        >>> with CommandServer() as server:
        ...     subprocess.run(["guerdon", "--help"], env={**os.environ, "PATH": server.path}, check=True)

    Args:
        environment: of the server; what it says about imports holds for the commands too.
        simulator: whether the commands share one process that has ManiSkill imported, from which their
            simulator processes are forked; otherwise each command that needs it starts its own.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, simulator: bool = False) -> None:
        self._environment, self._simulator = environment, simulator

    def __enter__(self) -> "CommandServer":
        self._folder = tempfile.TemporaryDirectory(prefix="guerdon-commands-")
        place = Path(self._folder.name)
        address = str(place / "socket")
        for program in ("guerdon", "python"):
            file = place / program
            file.write_text(CLIENT.format(python=sys.executable, address=address, program=program))
            file.chmod(0o755)
        self.path = os.pathsep.join([str(place), str(Path(sys.executable).parent), os.environ["PATH"]])
        command = [sys.executable, "-m", "tests.commands", address, *["simulator"] * self._simulator]
        root = Path(__file__).parent.parent
        self._process = subprocess.Popen(
            command, cwd=root, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._process.stdout.readline() != b"ready\n":  # with it the socket is there
            raise RuntimeError(f"the server of the commands ended with {self._process.wait()}")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # an end of its input
        self._folder.cleanup()


def serve(address: str, simulator: bool) -> None:
    """Fork a process for each command, until the input ends."""
    from guerdon.monitoring import video
    from guerdon.training import trainer

    for name in PRELOADED:
        __import__(name)
    trainer.NUM_FILMS, video.MIN_SIDE = 1, 24  # four enlarged films take longer than most runs of the docs
    if simulator:
        multiprocessing.set_forkserver_preload(SIMULATOR)
        forkserver.ensure_running()
        forkserver._forkserver.ensure_running = lambda: None  # it is no child of the commands
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        gc.freeze()  # or the first collection of a process writes to, and so copies, all memory
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        running: list[int] = []
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            child = os.fork()
            if child == 0:
                listener.close()
                _answer(connection)
            connection.close()
            running = [pid for pid in [*running, child] if os.waitpid(pid, os.WNOHANG) == (0, 0)]


def _answer(connection: socket.socket) -> None:
    """In a process of its own: run one command in another, and tell its exit code."""
    streams = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    streams.frombytes(ancillary[0][2])
    with connection.makefile("rb") as file:
        program, arguments, folder, environment = json.loads(file.read(int.from_bytes(head, "big")))
    child = os.fork()
    if child == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        end(_run, program, arguments)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.send(bytes([code % 256 if code >= 0 else 128 - code]))
    os._exit(0)


def end(action: Callable[..., None], *arguments: Any) -> NoReturn:
    """Do it and end the process as Python does; to take apart what was imported takes a second."""
    code: Any = 0
    try:
        action(*arguments)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


def _run(program: str, arguments: list[str]) -> None:
    """What the program does with the arguments; `python` knows `-m`, `-c` and files."""
    if program == "guerdon":
        from guerdon.cli.main import command

        sys.argv = ["guerdon", *arguments]
        command()  # raises SystemExit
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, str(Path.cwd()))
        sys.modules.pop(rest[0], None)  # runpy warns of a module that is there already
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, str(Path.cwd()))
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent.absolute()))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], simulator="simulator" in sys.argv[2:])
