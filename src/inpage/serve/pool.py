"""The pool of a server on CPU: chosen from the memory that is free, or as the user gave it; judged before the start.

vLLM by itself takes 92% of all memory and ends with a stack where less is free. What the user says about memory wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inpage.errors import ConfigError
from inpage.layout.fit import (
    CONVERSATIONS_PER_SEQUENCE,
    ENGINE_BYTES,
    RANK_BYTES,
    blocks_needed,
    holds,
    spare_bytes,
    useful_bytes,
)
from inpage.layout.geometry import Geometry
from inpage.layout.pool import Layout, slots
from inpage.layout.units import gib
from inpage.serve.arguments import ServerArguments
from inpage.serve.machine import Machine
from inpage.state.grid import Grid

BYTES, BLOCKS, SHARE = "--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--gpu-memory-utilization"
LENGTH = "--max-model-len"
SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's variable for the pool in whole GiB; it wins over `--kv-cache-memory-bytes`."""

CHANGE = f"{BYTES}, {BLOCKS}, {SHARE} or {SPACE} (whole GiB)"
SHORTEST_TOKENS = 2048
"""No max-model-len below this is chosen: a server that answers nothing but tiny prompts is not what anyone wanted."""

SMALLEST_SHARE = 0.05


@dataclass(frozen=True)
class Plan:
    """What is known of a server before its pool is chosen; lengths in tokens, sizes in bytes.

    layout: that of the pool as vLLM will see it. geometry, weights, length: None where they cannot be known.
    length is what the model allows; weights are those of all ranks together.
    """

    layout: Layout
    geometry: Geometry | None
    weights: int | None
    length: int | None
    ranks: int
    max_num_seqs: int

    @property
    def slot_bytes(self) -> int:
        """The slots of one rank."""
        return slots(self.layout, self.geometry, "cpu", self.max_num_seqs)[1] if self.geometry else 0


def choose(given: ServerArguments, plan: Plan, machine: Machine) -> list[tuple[str, str]]:
    """Add the flags that size the pool, unless the user has; returns them with reasons.

    Raises `ConfigError` when nothing fits.
    """
    if machine.variables.get(SPACE) or given.has(BYTES, SHARE):
        return []
    if given.has(BLOCKS):
        if plan.geometry is None:
            return _choose_share(given, plan, machine)
        size = (given.number(BLOCKS) or 0) * plan.geometry.block_bytes
        return [(given.add(BYTES, size), f"what {BLOCKS} takes; without it vLLM asks for 92% of the machine's memory")]
    if plan.geometry is None or plan.weights is None:
        return _choose_share(given, plan, machine)
    return [_choose_bytes(given, plan.geometry, plan.weights, plan, machine)]


def _choose_bytes(
    given: ServerArguments, geometry: Geometry, weights: int, plan: Plan, machine: Machine
) -> tuple[str, str]:
    available = machine.available_to(plan.ranks)
    held = machine.held_by_weights(weights)
    size = spare_bytes(available, held, plan.slot_bytes, plan.ranks)
    engine = ENGINE_BYTES + (plan.ranks - 1) * RANK_BYTES
    free = f"{gib(available)} of {gib(machine.total)} are free"
    taken = f"weights take {gib(held)}, the engine {gib(engine)}, slots {gib(plan.slot_bytes * plan.ranks)}"
    wanted = length_of(given) or plan.length
    shortest = min(wanted or SHORTEST_TOKENS, SHORTEST_TOKENS) if not given.has(LENGTH) else (wanted or 1)
    grid = grid_of(given, geometry)
    fits = holds(max(0, size) // geometry.block_bytes, plan.layout, geometry, shortest, grid)
    if fits.longest < shortest:
        needed = blocks_needed(shortest, plan.layout, geometry, grid) * geometry.block_bytes
        remedy = (
            f"{LENGTH} {fits.longest} would fit"
            if fits.longest and given.has(LENGTH)
            else f"free some memory, serve a smaller model, or say what the pool may take with {BYTES}"
        )
        raise ConfigError(
            f"no pool fits: {free}; {taken}, which leaves {gib(max(0, size))} for the pool of each rank, and one "
            f"request of {shortest:,} tokens needs {gib(needed)}: {remedy}."
        )
    reason = f"{free}; {taken}; the pool takes four fifths of the rest"
    if wanted is not None:
        useful = useful_bytes(plan.layout, geometry, wanted, plan.max_num_seqs)
        if useful < size:
            size = useful
            reason = (
                f"{gib(size)}, {CONVERSATIONS_PER_SEQUENCE} whole conversations for each of {plan.max_num_seqs} "
                f"running sequences; {free}; {taken}"
            )
    size -= size % geometry.block_bytes
    return given.add(BYTES, size), reason


def _choose_share(given: ServerArguments, plan: Plan, machine: Machine) -> list[tuple[str, str]]:
    """For a model of which too little is known: vLLM subtracts from a share of the memory what its weights take."""
    ranks = max(plan.ranks, 1)
    available = machine.available_to(ranks)
    left = (available - ENGINE_BYTES // 2) * 4 // 5 // ranks
    share = math.floor(100 * left / machine.total) / 100
    free = f"{gib(available)} of {gib(machine.total)} are free"
    if share < SMALLEST_SHARE:
        raise ConfigError(
            f"no pool fits: {free}, and vLLM needs {gib(ENGINE_BYTES)} before weights and pool: free some memory, or "
            f"say what the pool may take with {BYTES}."
        )
    size = gib(int(share * machine.total))
    added = [(given.add(SHARE, share), f"{free}; weights and pool of a rank together take {size}")]
    if not given.has(LENGTH):
        added.append((given.add(LENGTH, "auto"), "as long as the model allows and the pool holds"))
    return added


def judge(
    given: ServerArguments, plan: Plan, machine: Machine, chosen: bool
) -> tuple[list[tuple[str, str]], list[str]]:
    """What the pool holds, as a line, and a `--max-model-len` when the user gave none and the model's is too long.

    Raises `ConfigError` for a pool that memory does not hold, and for a pool that holds no request of max-model-len.
    """
    source, size = pool_of(given, plan, machine)
    if size is None or plan.geometry is None:
        return [], [f"how many tokens the pool holds, the server's log will say; another size: {CHANGE}"]
    available, weights = machine.available_to(plan.ranks), machine.held_by_weights(plan.weights or 0)
    at_most = given.has(SHARE) and source.startswith(SHARE)
    wanted = size * plan.ranks + (0 if at_most else weights)
    if wanted > available:
        beside = "" if at_most else f", the weights {gib(weights)}"
        raise ConfigError(
            f"{source} asks for {gib(size)}{f' on each of {plan.ranks} ranks' if plan.ranks > 1 else ''}{beside}, and "
            f"{gib(available)} of {gib(machine.total)} are free: give less, or leave it out and inpage serve chooses."
        )
    if at_most:
        size -= (plan.weights or 0) // plan.ranks
    geometry, grid = plan.geometry, grid_of(given, plan.geometry)
    blocks = max(0, size) // geometry.block_bytes
    length, added = length_of(given) or plan.length, []
    if length is None or (given.value(LENGTH) or "").lower() in ("auto", "-1"):
        most = "at most " if at_most else ""
        by = "chosen" if chosen else f"by {source}"
        return [], [
            f"pool: {most}{gib(size)}, {blocks:,} blocks of {geometry.block_tokens} tokens, {by}; its tokens the "
            f"server's log will say; another size: {CHANGE}"
        ]
    fits = holds(blocks, plan.layout, geometry, length, grid)
    if fits.longest < length:
        shortest = min(length, SHORTEST_TOKENS)
        if given.has(LENGTH) or fits.longest < shortest or at_most:
            needed = blocks_needed(length, plan.layout, geometry, grid) * geometry.block_bytes
            remedy = f"the longest that fits is {LENGTH} {fits.longest}" if fits.longest else "no length fits"
            raise ConfigError(
                f"{LENGTH} {length:,} is longer than the pool: {source} gives {gib(size)}, {blocks:,} blocks of "
                f"{geometry.block_tokens} tokens, and one such request needs "
                f"{gib(needed)}; {remedy}. Change the pool with {CHANGE}."
            )
        added.append((given.add(LENGTH, fits.longest), f"the longest that the pool holds; the model allows {length:,}"))
        length = fits.longest
        fits = holds(blocks, plan.layout, geometry, length, grid)
    most, plural = "at most " if at_most else "", "" if fits.conversations == 1 else "s"
    rank = " on each rank" if plan.ranks > 1 else ""
    line = (
        f"pool{rank}: {most}{gib(size)}, {blocks:,} blocks of {geometry.block_tokens} tokens, {most}{fits.tokens:,} "
        f"tokens, {most}{fits.conversations:,} whole conversation{plural} of {length:,} tokens, "
        f"{'chosen' if chosen else f'by {source}'}; another size: {CHANGE}"
    )
    return added, [line]


def pool_of(given: ServerArguments, plan: Plan, machine: Machine) -> tuple[str, int | None]:
    """What sizes the pool, and its bytes on one rank, None when not known; of a share also what weights take."""
    blocks = given.number(BLOCKS)
    if blocks is not None:
        return f"{BLOCKS} {blocks}", blocks * plan.geometry.block_bytes if plan.geometry else None
    if space := machine.variables.get(SPACE):
        if not space.strip().isdigit() or not int(space):
            raise ConfigError(
                f"{SPACE}={space} is no pool: give whole GiB, one or more, or unset it and use {BYTES} for less."
            )
        return f"{SPACE}={space}", int(space) * 2**30
    if (size := given.number(BYTES)) is not None:
        return f"{BYTES} {given.value(BYTES)}", size
    value = given.value(SHARE)
    try:
        share = float(value or "0.92")
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{SHARE} {value} is not a share of the memory: give more than 0 and at most 1.")
    return f"{SHARE} {share}", math.ceil(share * machine.total)


def length_of(given: ServerArguments) -> int | None:
    """`--max-model-len` in tokens; None when it is not given, or left to vLLM with `auto` or `-1`."""
    if (given.value(LENGTH) or "auto").strip().lower() in ("auto", "-1"):
        return None
    return given.number(LENGTH)


def grid_of(given: ServerArguments, geometry: Geometry) -> Grid:
    """Boundaries, and marks if they are asked for; raises `ConfigError` when marks do not divide the block."""
    return Grid(geometry.block_tokens, given.number("--prefix-match-unit") or geometry.block_tokens)
