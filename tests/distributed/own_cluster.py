"""What can be reached of a cluster that Guerdon started; run by test_ray_access. Prints one JSON object.

python own_cluster.py -> {"listening": ..., "address": ..., "guests": {how they came: what they were told}}
"""

import json
import os
import subprocess
import sys

import ray

from guerdon.config import ClusterConfig
from guerdon.distributed import watchdog
from guerdon.distributed.engine import WorkerSpec
from guerdon.distributed.ray_actors import Answer
from guerdon.distributed.ray_engine import RayEngine
from tests.distributed.sockets import listening

GUEST = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "1"}
"""Otherwise Ray replaces 127.0.0.1 by an address on which the cluster does not listen, and tries for 20 s."""
JOIN = """
import sys
from guerdon.config import ClusterConfig
from guerdon.core.errors import ClusterError
from guerdon.distributed.ray_engine import RayEngine
try:
    engine = RayEngine(ClusterConfig(address=sys.argv[1]))
except ClusterError as error:
    print(error)
else:
    print("joined", len(engine.nodes()))
    engine.close()
"""


def token():
    """As the cluster's own workers know it."""
    return ray.get(ray.remote(lambda: os.environ["RAY_AUTH_TOKEN"]).remote())


def main():
    engine = RayEngine(ClusterConfig())
    group = engine.group("env", [WorkerSpec(cls=Answer)])
    assert group.submit(0, "double", 21).result(300) == 42
    found = listening([*watchdog.members(engine._folder, engine._folder), os.getpid()])
    address = ray.get_runtime_context().gcs_address
    guests = {
        "the token": {"RAY_AUTH_TOKEN": token()},
        "another token": {"RAY_AUTH_TOKEN": "f" * 64},
        "disabled": {"RAY_AUTH_MODE": "disabled"},
        "none": {},
    }
    running = {}
    for name, variables in guests.items():
        command = [sys.executable, "-c", JOIN, address]
        running[name] = subprocess.Popen(
            command,
            env={**os.environ, **GUEST, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    reported = {name: process.communicate(timeout=300)[0] for name, process in running.items()}
    engine.close()
    print(json.dumps({"listening": found, "address": address, "guests": reported}))


if __name__ == "__main__":
    main()
