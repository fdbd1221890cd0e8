"""The plan of a step: plain facts in, moves out, nothing touched (rule 2).

An engine describes a step with `StepFacts`; `plan_before` says what must happen before the forward pass
and `plan_after` what must happen after it. Positions count tokens from the start of a request; block
tables are those of the GDN groups only, in group order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inpage.errors import StateError
from inpage.state.grid import Grid

BlockTables = Sequence[Sequence[int]]
"""One block table per GDN group: entry k is the block of tokens [k * block_tokens, (k+1) * block_tokens)."""


@dataclass(frozen=True)
class Start:
    """A request that begins in this step: new, or resumed after preemption.

    `position` tokens are already computed (0 when cold); `tables` are its whole block tables.
    """

    request: str
    position: int
    tables: BlockTables


@dataclass(frozen=True)
class Run:
    """A request that computes tokens [position, position + tokens) in this step; its prompt has `prompt_tokens`."""

    request: str
    position: int
    tokens: int
    tables: BlockTables
    prompt_tokens: int = 0


@dataclass(frozen=True)
class StepFacts:
    """What the scheduler decided, as far as states are concerned."""

    finished: Iterable[str] = ()
    preempted: Iterable[str] = ()
    resumed: Iterable[str] = ()
    starts: Sequence[Start] = ()
    new_attention_blocks: Sequence[int] = ()
    new_state_blocks: Sequence[int] = ()
    """Blocks that running requests got for their GDN groups; those of starts are in their tables."""
    copies: Sequence[tuple[int, int]] = ()
    """Blocks to copy, source and target: a start inside a block gets blocks of its own to go on in, and a running
    request that has published a mark leaves the checkpoint to a block that it will not write."""


@dataclass(frozen=True)
class Give:
    """Give the request a slot: zeroed when `checkpoint` is None, restored from these blocks otherwise."""

    request: str
    position: int
    checkpoint: tuple[int, ...] | None
    """One block per GDN group."""


@dataclass(frozen=True)
class Save:
    """Copy the request's slot into these blocks, one per GDN group: its state after `position` tokens."""

    request: str
    position: int
    checkpoint: tuple[int, ...]


@dataclass(frozen=True)
class BeforeMoves:
    """Moves before the forward pass, in this order."""

    hand_back: tuple[str, ...] = ()
    zero: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()
    copy: tuple[tuple[int, int], ...] = ()
    give: tuple[Give, ...] = ()


def checkpoint_blocks(request: str, position: int, grid: Grid, tables: BlockTables) -> tuple[int, ...]:
    """The block of each GDN group that holds token `position` - 1; `StateError` if a table is too short."""
    index = grid.block_index(position)
    for group, table in enumerate(tables):
        if not 0 <= index < len(table):
            raise StateError(
                f"request {request} has no block for the checkpoint of position {position}: the table of GDN group "
                f"{group} has {len(table)} blocks of {grid.block_tokens} tokens, {index + 1} are needed"
            )
    return tuple(table[index] for table in tables)


def is_saved(end: int, prompt_tokens: int, grid: Grid) -> bool:
    """Whether a step that ends at `end` leaves a checkpoint: at a boundary, and at a mark of the prompt."""
    return end % grid.block_tokens == 0 or (end % grid.mark_tokens == 0 and end <= prompt_tokens)


def plan_before(facts: StepFacts, grid: Grid) -> BeforeMoves:
    """Moves before the forward pass.

    Raises `StateError` for a start off a mark, whose state was never kept, and for one inside a block from a block
    that no copy of this step fills: the request would go on in a block that others read.
    """
    block_tokens, targets = grid.block_tokens, {target for _, target in facts.copies}
    gives = []
    fresh_blocks = list(facts.new_state_blocks)
    for start in facts.starts:
        offset = start.position % grid.mark_tokens
        if offset:
            kind, unit = ("mark", "marks every") if grid.has_marks else ("boundary", "blocks of")
            raise StateError(
                f"request {start.request} starts at position {start.position}, {offset} tokens past the {kind} "
                f"{start.position - offset} ({unit} {grid.mark_tokens} tokens): no state was kept there"
            )
        checkpoint = None
        if start.position:
            checkpoint = checkpoint_blocks(start.request, start.position, grid, start.tables)
            if start.position % block_tokens and not targets.issuperset(checkpoint):
                raise StateError(
                    f"request {start.request} starts at position {start.position}, inside blocks {list(checkpoint)} "
                    f"which no copy of this step fills (copies into {sorted(targets)})"
                )
        gives.append(Give(start.request, start.position, checkpoint))
        kept = -(-start.position // block_tokens)
        fresh_blocks += [block for table in start.tables for block in table[kept:] if block]
    return BeforeMoves(
        hand_back=(*facts.finished, *facts.preempted, *facts.resumed),
        zero=tuple(facts.new_attention_blocks),
        forget=tuple(fresh_blocks),
        copy=tuple(facts.copies),
        give=tuple(gives),
    )


def plan_after(runs: Iterable[Run], grid: Grid) -> tuple[Save, ...]:
    """A save for every run that ends on a boundary, or on a mark of its prompt.

    Raises `StateError` for a run that passes a boundary without ending on one: vLLM has published the hash
    of a block whose checkpoint could then never be written. It happens when the chunk grid of the scheduler
    is not the block size of the pool.
    """
    block_tokens = grid.block_tokens
    saves = []
    for run in runs:
        end = run.position + run.tokens
        if run.position // block_tokens != end // block_tokens and end % block_tokens:
            raise StateError(
                f"request {run.request} computes tokens [{run.position}, {end}) in one step and passes the boundary "
                f"{end // block_tokens * block_tokens} without ending on it (blocks of {block_tokens} tokens): "
                "the scheduler's chunk grid is not the pool's block size"
            )
        if is_saved(end, run.prompt_tokens, grid):
            blocks = checkpoint_blocks(run.request, end, grid, run.tables)
            saves.append(Save(run.request, end, blocks))
    return tuple(saves)
