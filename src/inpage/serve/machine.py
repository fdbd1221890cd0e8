"""How much memory is free for a server here: of the machine, of its memory nodes, of the cgroups that it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

NODES = "CPU_VISIBLE_MEMORY_NODES"
"""vLLM's variable that limits the memory nodes it uses on CPU."""


@dataclass(frozen=True)
class Machine:
    """Bytes as vLLM's CPU worker and the kernel count them; tests make them up.

    total, available: of the machine, or of the tightest cgroup around this process. nodes: available bytes of each
    memory node, when there are several. counts_files: whether the cgroup counts cached files as used, as vLLM reads
    it. variables: the environment that the server will have.
    """

    total: int
    available: int
    nodes: tuple[int, ...] = ()
    counts_files: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, variables: Mapping[str, str] | None = None, root: Path = Path("/")) -> Machine | None:
        """The machine of this process, None where there is no /proc/meminfo; `root` is the file system's."""
        variables = os.environ if variables is None else variables
        memory = _meminfo(root / "proc/meminfo")
        if "MemTotal" not in memory or "MemAvailable" not in memory:
            return None
        nodes = [_node(root, node) for node in _allowed_nodes(root, variables)]
        known = [one for one in nodes if one is not None]
        total, available = memory["MemTotal"], memory["MemAvailable"]
        if len(known) == 1:
            # vLLM counts a little differently by node; the smaller figure passes both checks.
            total, available = min(total, known[0][0]), min(available, known[0][1])
        counts_files = False
        for limit, free, at_root in _cgroups(root):
            if limit < total or free < available:
                total, available, counts_files = min(total, limit), min(available, max(0, free)), at_root
        several = tuple(one[1] for one in known) if len(known) > 1 else ()
        return cls(total, available, several, counts_files, dict(variables))

    def available_to(self, ranks: int) -> int:
        """Bytes that so many ranks may take together: each is bound to one memory node, evenly dealt."""
        if not self.nodes:
            return self.available
        return min(self.available, min(self.nodes) * min(ranks, len(self.nodes)))

    def held_by_weights(self, weights: int) -> int:
        """Bytes that loading takes away from `available`; where cached files count, the files are counted as well."""
        return 2 * weights if self.counts_files else weights


def _meminfo(file: Path) -> dict[str, int]:
    """Bytes by name of /proc/meminfo, or of a node's, whose lines begin with `Node 0`; empty when there is none."""
    values = {}
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        words = line.removeprefix("Node").split()
        name = next((index for index, word in enumerate(words) if word.endswith(":")), None)
        if name is not None and name + 1 < len(words):
            values[words[name][:-1]] = int(words[name + 1]) * 1024
    return values


def _allowed_nodes(root: Path, variables: Mapping[str, str]) -> list[int]:
    try:
        status = (root / "proc/self/status").read_text()
    except OSError:
        return []
    allowed: list[int] = []
    for line in status.splitlines():
        if line.startswith("Mems_allowed_list:"):
            for part in filter(None, line.split(":")[1].strip().split(",")):
                first, _, last = part.partition("-")
                allowed += range(int(first), int(last or first) + 1)
    visible = [int(one) for one in variables.get(NODES, "").split(",") if one.strip().isdigit()]
    return [node for node in allowed if node in visible] if visible else allowed


def _node(root: Path, node: int) -> tuple[int, int] | None:
    """Total and available bytes of a memory node, as vLLM's `get_memory_node_info` adds them up."""
    memory = _meminfo(root / f"sys/devices/system/node/node{node}/meminfo")
    if "MemTotal" not in memory:
        return None
    parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return memory["MemTotal"], sum(memory.get(part, 0) for part in parts)


def _cgroups(root: Path) -> Iterator[tuple[int, int, bool]]:
    """Limit and free bytes of every cgroup around this process that has a limit, and whether vLLM reads it.

    vLLM reads the one that is mounted as the root and takes cached files for used; of the others only the kernel
    keeps account, and it drops cached files before it kills.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit_file, usage_file, files = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit_file, usage_file = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = "total_inactive_file"
        else:
            continue
        folder = root / mount / path.strip("/")
        while True:
            at_root = folder == root / mount
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is not None and usage is not None and limit < 1 << 62:
                yield limit, limit - usage + (0 if at_root else _stat(folder / "memory.stat", files)), at_root
            if at_root:
                break
            folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(file: Path, name: str) -> int:
    try:
        words = dict(line.split() for line in file.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(words.get(name, 0))
