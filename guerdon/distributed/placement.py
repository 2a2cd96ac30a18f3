"""Which worker runs where: `cluster.component_placement` against the machines that are there.

Pure functions over the settings and a list of machines. A machine offers *slots*: its GPUs if it has any, its
processor cores otherwise, and in a node group with `hardware` the devices listed there. Slots are numbered
through over the machines of a node group, in the order of the machines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from guerdon.config import ClusterConfig, NodeGroupConfig, PlacementConfig
from guerdon.core.errors import ClusterError, ConfigError

COMPONENTS = ("actor", "env", "rollout", "reward")
"""What can be placed. The actor learns in the process that runs the command."""
GROUP_LABEL, RANK_LABEL = "guerdon.io/node-group", "guerdon.io/node-rank"
"""Labels of a machine, as `ray start --labels` takes them."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    id: str
    name: str
    """For messages."""
    num_cpus: int
    num_gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def offers(self) -> str:
        """In words."""
        return f"{self.num_gpus} GPUs" if self.num_gpus else f"{self.num_cpus} cores"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A place for workers; those of several components may share it."""

    node_id: str
    kind: str
    """`GPU`, `CPU`, or the type of the hardware, such as `Franka`."""
    index: int
    """Of the device on its machine."""


Plan = dict[str, list[Slot]]
"""Component -> the slot of each of its workers."""


def make_plan(cfg: ClusterConfig, nodes: Sequence[Node]) -> Plan:
    """Give every component its slots; components that are not named get one worker on the first slot.

    Rollout workers that are not named run in the processes of the env workers, on the same slots.

    Args:
        cfg: the `cluster` section.
        nodes: the machines in order (see `order_nodes`); the first `cfg.num_nodes` are used.

    Raises:
        ConfigError: the settings contradict themselves.
        ClusterError: the machines do not have what is asked for.
    """
    if len(nodes) < cfg.num_nodes:
        raise ClusterError(f"cluster.num_nodes asks for {cfg.num_nodes} machines, {_there(nodes)}")
    nodes = nodes[: cfg.num_nodes]
    entries = entries_of(cfg)
    plan: Plan = {}
    for component in ("actor", "env", "reward"):
        plan[component] = _slots(component, entries.get(component, PlacementConfig(placement=0)), cfg, nodes)
    if "rollout" in entries:
        plan["rollout"] = _slots("rollout", entries["rollout"], cfg, nodes)
    else:
        plan["rollout"] = list(plan["env"])
    # A document gives the policy `0-0` and the reward worker `0-1` and says that this is GPU 1, "avoiding
    # memory conflicts": of a range that overlaps with others', reward workers take what is theirs alone.
    others = {slot for name in ("actor", "env", "rollout") if name in entries for slot in plan[name]}
    own = [slot for slot in plan["reward"] if slot not in others]
    if own and _devices(entries.get("reward")) is not None:
        plan["reward"] = own
    return plan


def order_nodes(nodes: Sequence[Node], first: str, before: Sequence[str] = ()) -> list[Node]:
    """Machines in the order in which slots are counted.

    That is the order of their label `guerdon.io/node-rank`, then the machine `first` (the one that the
    command runs on), then the others by name. With `before`, an earlier order, machines that are still there
    keep their places, and those that have gone are replaced by others.
    """

    def key(node: Node) -> tuple[int, bool, str, str]:
        rank = node.labels.get(RANK_LABEL, "")
        return (int(rank) if rank.isdecimal() else 1 << 30, node.id != first, node.name, node.id)

    ordered = sorted(nodes, key=key)
    if not before:
        return ordered
    there = {node.id: node for node in ordered}
    spare = [node for node in ordered if node.id not in before]
    kept = [there.get(place) or (spare.pop(0) if spare else None) for place in before]
    return [node for node in kept if node is not None] + spare


def own_rollout_group(plan: Plan) -> bool:
    """Whether rollout workers are apart from env workers; on the same slots they share a process."""
    return plan["rollout"] != plan["env"]


def divide(total: int, parts: int) -> list[tuple[int, int]]:
    """(start, stop) of each of `parts` nearly equal stretches of 0 .. total."""
    edges = [total * part // parts for part in range(parts + 1)]
    return list(pairwise(edges))


def entries_of(cfg: ClusterConfig) -> dict[str, PlacementConfig]:
    """Component -> its entry; `actor,env: 0` stands for two."""
    entries: dict[str, PlacementConfig] = {}
    for names, entry in cfg.component_placement.items():
        for name in (part.strip() for part in names.split(",")):
            if name not in COMPONENTS:
                known = ", ".join(COMPONENTS)
                raise ConfigError(
                    f"cluster.component_placement: there is no component {name!r}, only {known}"
                )
            if name in entries:
                raise ConfigError(f"cluster.component_placement: {name} is placed twice")
            entries[name] = entry if isinstance(entry, PlacementConfig) else PlacementConfig(placement=entry)
    return entries


def _devices(entry: PlacementConfig | None) -> list[int] | None:
    """Numbers of the slots that an entry names; None for `all`, and for no entry."""
    return None if entry is None or entry.placement == "all" else _numbers(entry.placement, "placement")


def _numbers(text: str | int, what: str) -> list[int]:
    """`0`, `0-3`, `0,2-3` -> the numbers in order."""
    found: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ConfigError(f"{what} must be `all`, a number or a range such as 0-3, not {text!r}")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise ConfigError(f"{what} {text!r} names a device twice")
    return found


def _slots(component: str, entry: PlacementConfig, cfg: ClusterConfig, nodes: Sequence[Node]) -> list[Slot]:
    where = f"cluster.component_placement.{component}"
    there, group = _group_slots(entry, cfg, nodes, where)
    if entry.placement == "all":
        if not there:
            raise ClusterError(f"{where} asks for all devices of {group}, and there are none")
        return there
    numbers = _numbers(entry.placement, where)
    if max(numbers) >= len(there):
        kinds = "no slots" if not there else f"{len(there)} ({_kinds(there)}), 0 to {len(there) - 1}"
        raise ClusterError(
            f"{where} asks for slot {max(numbers)} of {group}, which has {kinds}; {_there(nodes)}"
        )
    return [there[number] for number in numbers]


def _group_slots(
    entry: PlacementConfig, cfg: ClusterConfig, nodes: Sequence[Node], where: str
) -> tuple[list[Slot], str]:
    """All slots of the node group that an entry names, and its name for messages."""
    if entry.node_group is None:
        return [slot for node in nodes for slot in _node_slots(node)], "the cluster"
    label = str(entry.node_group)
    groups = [item for item in cfg.node_groups if str(item.label) == label]
    if not groups:
        known = ", ".join(str(item.label) for item in cfg.node_groups if item.label is not None)
        raise ConfigError(
            f"{where} names the node group {label!r}; cluster.node_groups has {known or 'no labels'}"
        )
    name = f"node group {label!r}"
    slots: list[Slot] = []
    for item in groups:
        mine = _group_nodes(item, nodes)
        if item.hardware is None:
            slots += [slot for node in mine for slot in _node_slots(node)]
            continue
        for index in range(max(len(item.hardware.configs), 1)):
            node = mine[index % len(mine)]
            slots.append(Slot(node_id=node.id, kind=item.hardware.type, index=index))
    return slots, name


def _group_nodes(group: NodeGroupConfig, nodes: Sequence[Node]) -> list[Node]:
    """The machines of a group: by rank, or those that carry its label; a single machine is in all groups."""
    if group.node_ranks is not None:
        ranks = _numbers(group.node_ranks, "cluster.node_groups.node_ranks")
        if max(ranks) >= len(nodes):
            raise ClusterError(
                f"node group {group.label!r} asks for machine {max(ranks)}, cluster.num_nodes is {len(nodes)}"
            )
        return [nodes[rank] for rank in ranks]
    named = [
        node for node in nodes if group.label is not None and node.labels.get(GROUP_LABEL) == str(group.label)
    ]
    if not named and group.label is not None and len(nodes) > 1:
        raise ClusterError(
            f"no machine carries the label {GROUP_LABEL}={group.label}, and the node group names no "
            f"node_ranks; {_there(nodes)}"
        )
    return named or list(nodes)


def _node_slots(node: Node) -> list[Slot]:
    kind, count = ("GPU", node.num_gpus) if node.num_gpus else ("CPU", node.num_cpus)
    return [Slot(node_id=node.id, kind=kind, index=index) for index in range(count)]


def _kinds(slots: Sequence[Slot]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(slot.kind for slot in slots).items())


def _there(nodes: Sequence[Node]) -> str:
    listed = ", ".join(f"{node.name} ({node.offers})" for node in nodes)
    verb = "machine is" if len(nodes) == 1 else "machines are"
    return f"{len(nodes)} {verb} there: {listed}" if nodes else "no machine is there"
