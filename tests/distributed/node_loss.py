"""A run on a cluster of three machines, of which two go away one after another; run by test_ray_command.

python node_loss.py RUN_FOLDER key=value ... -> one JSON object.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)  # read when Ray is imported

import ray
from ray.cluster_utils import Cluster

from guerdon.config import load_config
from guerdon.core.errors import ClusterError
from guerdon.distributed.placement import RANK_LABEL
from guerdon.training.trainer import EmbodiedRunner

FAST = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
"""So that the cluster notices within seconds that a machine has gone."""


def main(folder, overrides):
    place = Path(tempfile.gettempdir(), "ray")  # where the cluster's address is written to
    place.mkdir()
    shared = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **shared,
            "labels": {RANK_LABEL: "0"},
            "_system_config": FAST,
            "temp_dir": str(place),
        },
    )
    nodes = [cluster.add_node(**shared, labels={RANK_LABEL: str(rank)}) for rank in (1, 2)]
    cluster.wait_for_nodes()
    config = load_config(
        "train",
        [
            *overrides,
            "engine=ray",
            f"cluster.address={cluster.address}",
            "cluster.num_nodes=2",
            "+cluster.component_placement.env=0-1",
        ],
    )
    folder.mkdir(exist_ok=True)
    runner = EmbodiedRunner(config, folder)
    real, calls = runner.loop.advance, []

    def advance(progress):
        calls.append(progress)
        if len(calls) in (2, 4):
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        return real(progress)

    runner.loop.advance = advance
    try:
        runner.run()
        reported = "the run went on to its end"
    except ClusterError as error:
        reported = str(error)
    finally:
        connected = ray.is_initialized()
        cluster.shutdown()
    result = {"reported": reported, "iterations": len(calls), "connected": connected}
    print(json.dumps({**result, "restarts": dict(runner.engine.restarts)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
