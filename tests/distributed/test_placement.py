"""Placement: RLinf's spellings against machines that are only described."""

import re
from pathlib import Path

import pytest
import yaml

from guerdon.config import (
    ClusterConfig,
    GuerdonConfig,
    HardwareConfig,
    NodeGroupConfig,
    PlacementConfig,
    build,
    load_config,
)
from guerdon.core.errors import ClusterError, ConfigError
from guerdon.distributed.placement import (
    COMPONENTS,
    GROUP_LABEL,
    RANK_LABEL,
    Node,
    divide,
    make_plan,
    order_nodes,
    own_rollout_group,
)

CPU2 = Node(id="a", name="a", num_cpus=2)
GPU2 = Node(id="g", name="g", num_cpus=16, num_gpus=2)


def places(plan, component):
    return [(slot.node_id, slot.kind, slot.index) for slot in plan[component]]


def test_by_default_everything_shares_the_first_slot():
    for node, kind in ((CPU2, "CPU"), (GPU2, "GPU")):
        plan = make_plan(ClusterConfig(), [node])
        assert all(places(plan, name) == [(node.id, kind, 0)] for name in COMPONENTS)
        assert not own_rollout_group(plan)


def test_the_block_of_the_second_document():
    config = load_config("002_stage3_maniskill_ppo_mlp_resnet_reward", [], "tests/config/documents")
    plan = make_plan(config.cluster, [GPU2])
    for name in ("actor", "env", "rollout"):
        assert places(plan, name) == [("g", "GPU", 0)]
    assert places(plan, "reward") == [("g", "GPU", 1)]  # "RewardWorker runs on GPU 1"


def test_the_block_of_the_first_document():
    config = load_config("000_stage2_train_reward_model", [], "tests/config/documents")
    assert places(make_plan(config.cluster, [GPU2]), "reward") == [("g", "GPU", 0), ("g", "GPU", 1)]


@pytest.mark.parametrize(
    ("spelling", "slots"),
    [
        ("all", [0, 1, 2, 3]),
        ("0-3", [0, 1, 2, 3]),
        ("0-1", [0, 1]),
        ("0-0", [0]),
        (2, [2]),
        ("0,2-3", [0, 2, 3]),
    ],
)
def test_spellings(spelling, slots):
    node = Node(id="n", name="n", num_cpus=4)
    plan = make_plan(ClusterConfig(component_placement={"env": spelling}), [node])
    assert [slot.index for slot in plan["env"]] == slots and plan["rollout"] == plan["env"]
    both = make_plan(ClusterConfig(component_placement={"env,reward": spelling}), [node])
    assert [slot.index for slot in both["env"]] == slots


def test_slots_are_counted_over_the_machines():
    nodes = [GPU2, Node(id="h", name="h", num_cpus=16, num_gpus=2)]
    plan = make_plan(ClusterConfig(num_nodes=2, component_placement={"env": "0-3", "rollout": "2-3"}), nodes)
    assert places(plan, "env") == [("g", "GPU", 0), ("g", "GPU", 1), ("h", "GPU", 0), ("h", "GPU", 1)]
    assert own_rollout_group(plan)
    only_first = make_plan(ClusterConfig(component_placement={"env": "all"}), nodes)
    assert places(only_first, "env") == [("g", "GPU", 0), ("g", "GPU", 1)]


def test_a_robot_beside_a_gpu_node():
    groups = (
        NodeGroupConfig(label="gpu", node_ranks=0),
        NodeGroupConfig(
            label="robot", hardware=HardwareConfig(type="Franka", configs=({"robot_ip": "10.0.0.2"},))
        ),
    )
    placement = {
        "actor": PlacementConfig(node_group="gpu", placement=0),
        "rollout": PlacementConfig(node_group="gpu", placement=0),
        "reward": PlacementConfig(node_group="gpu", placement=1),
        "env": PlacementConfig(node_group="robot", placement=0),
    }
    cfg = ClusterConfig(num_nodes=2, node_groups=groups, component_placement=placement)
    robot = Node(id="r", name="r", num_cpus=4, labels={GROUP_LABEL: "robot"})
    plan = make_plan(cfg, [GPU2, robot])
    assert places(plan, "env") == [("r", "Franka", 0)] and places(plan, "reward") == [("g", "GPU", 1)]
    assert own_rollout_group(plan)
    with pytest.raises(ClusterError, match=r"no machine carries the label guerdon.io/node-group=robot"):
        make_plan(cfg, [GPU2, CPU2])


@pytest.mark.parametrize(
    ("placement", "error", "message"),
    [
        (
            {"env": "0-3"},
            ClusterError,
            r"env asks for slot 3 .* has 2 \(2 CPU\), 0 to 1; 1 machine is there: a",
        ),
        ({"envs": "all"}, ConfigError, "no component 'envs', only actor, env, rollout, reward"),
        ({"env": "3-0"}, ConfigError, "such as 0-3, not '3-0'"),
        ({"env": "some"}, ConfigError, "not 'some'"),
        ({"env": "0,0-1"}, ConfigError, "names a device twice"),
        ({"env": 0, "env,actor": 0}, ConfigError, "env is placed twice"),
        ({"env": PlacementConfig(node_group="gpu")}, ConfigError, "names the node group 'gpu'.*no labels"),
    ],
)
def test_what_is_refused(placement, error, message):
    with pytest.raises(error, match=message):
        make_plan(ClusterConfig(component_placement=placement), [CPU2])
    with pytest.raises(ClusterError, match="asks for 2 machines, 1 machine is there"):
        make_plan(ClusterConfig(num_nodes=2), [CPU2])


def test_the_order_of_machines():
    nodes = [Node(id=name, name=name, num_cpus=1) for name in "cab"]
    assert [node.id for node in order_nodes(nodes, first="b")] == ["b", "a", "c"]
    ranked = [*nodes, Node(id="z", name="z", num_cpus=1, labels={RANK_LABEL: "0"})]
    assert [node.id for node in order_nodes(ranked, first="b")] == ["z", "b", "a", "c"]
    # "a" has gone: "c", which nobody used, takes its place, and the others stay
    left = [node for node in ranked if node.id != "a"]
    assert [node.id for node in order_nodes(left, "b", ["z", "a", "b"])] == ["z", "c", "b"]


def test_environments_are_divided_evenly():
    assert divide(10, 3) == [(0, 3), (3, 6), (6, 10)] and divide(2, 2) == [(0, 1), (1, 2)]


def test_the_examples_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "placement.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.S)
    one, robot = (build(GuerdonConfig, yaml.safe_load(text)).cluster for text in blocks)
    plan = make_plan(one, [GPU2])
    assert [places(plan, name) for name in COMPONENTS] == [[("g", "GPU", 0)]] * 3 + [[("g", "GPU", 1)]]
    assert places(make_plan(one, [CPU2]), "reward") == [("a", "CPU", 1)]
    node = Node(id="r", name="r", num_cpus=4, labels={GROUP_LABEL: "robot"})
    plan = make_plan(robot, [GPU2, node])
    assert places(plan, "env") == [("r", "Franka", 0)] and own_rollout_group(plan)
    assert all(places(plan, name) == [("g", "GPU", 0)] for name in ("actor", "rollout", "reward"))
