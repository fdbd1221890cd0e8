"""`inpage plan`: what a memory budget gives in each layout, as a table and in words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from inpage.errors import ConfigError
from inpage.layout.advice import budget_warning, prompt_warning, start_warning
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.pool import LAYOUTS, PoolPlan, plan_pool
from inpage.layout.units import mib, parse_memory
from inpage.state.grid import Grid


def plan(
    config: Annotated[Path, typer.Argument(help="A model's config.json, or its folder.")],
    memory: Annotated[str, typer.Option(help="Memory of the pool on one rank, like 18475MiB.")],
    max_model_len: Annotated[int, typer.Option(help="As given to vLLM.")],
    kv_dtype: Annotated[str, typer.Option(help="As --kv-cache-dtype: auto, bf16, fp8.")] = "auto",
    ssm_dtype: Annotated[str | None, typer.Option(help="As --mamba-ssm-cache-dtype.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel size.")] = 1,
    alignment: Annotated[int, typer.Option(help="Tokens that a block is a multiple of.")] = 128,
    engine: Annotated[str, typer.Option(help="gaudi or cpu: how many slots there are.")] = "gaudi",
    max_num_seqs: Annotated[int, typer.Option(help="As given to vLLM.")] = 4,
    session_tokens: Annotated[
        int | None, typer.Option(help="Length of the sessions to count; 65536, or max-model-len if less.")
    ] = None,
    typical_prompt: Annotated[int | None, typer.Option(help="Warn if such prompts cannot hit.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Warn if blocks do not fill it.")] = None,
    prefix_match_unit: Annotated[int | None, typer.Option(min=1, help="As given to vLLM: hits inside a block.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers here as well.")] = None,
) -> None:
    """Print block, page, state, pool and slots of every layout for a model and a memory budget."""
    shape = ModelShape.from_file(config, ssm_dtype=ssm_dtype)
    geometry = Geometry.of(shape, kv_dtype=kv_dtype, tp=tp, alignment=alignment)
    grid = Grid(geometry.block_tokens, prefix_match_unit or geometry.block_tokens)
    memory_bytes = parse_memory(memory)
    if session_tokens is None:
        session_tokens = min(65536, max_model_len)
    plans = [
        plan_pool(
            layout,
            geometry,
            memory_bytes,
            max_model_len=max_model_len,
            session_tokens=session_tokens,
            engine=engine,
            max_num_seqs=max_num_seqs,
        )
        for layout in LAYOUTS
        # Stock Gaudi shares no pages: torch.compile rejects views that change the dtype.
        if (engine, layout) != ("gaudi", "native")
    ]
    advice = [start_warning(p, geometry, max_model_len) for p in plans]
    if typical_prompt is not None:
        advice.append(prompt_warning(geometry, typical_prompt, prefix_match_unit))
    if max_num_batched_tokens is not None:
        advice.append(budget_warning(geometry, max_num_batched_tokens, max_num_seqs))
    if ssm_dtype is None and shape.ssm_dtype != "float32":
        advice.append(
            f"The ssm state is taken as {shape.ssm_dtype}, vLLM's default for {shape.model_type}; with "
            "--mamba-ssm-cache-dtype float32, or on a CPU with AVX512-BF16, plan with --ssm-dtype float32."
        )
    warnings = [text for text in advice if text]

    console = Console(highlight=False)
    console.print(
        f"{shape.model_type}: {shape.attention_layers} attention layers, {shape.gdn_layers} GDN layers in "
        f"{geometry.gdn_groups} groups; KV {kv_dtype}, ssm {shape.ssm_dtype}, TP {tp}.\n"
    )
    console.print(_table(geometry, plans, grid))
    console.print(
        f"\nMemory: {mib(memory_bytes)} ({memory_bytes:,} B) is the pool of one rank; weights, activations and "
        f"the slots come on top.\nPrinted tokens: vLLM's KV cache size at max-model-len {max_model_len:,}.\n"
        f"Sessions kept: of {session_tokens:,} tokens, by their attention blocks and two blocks in every GDN "
        "group, the newest checkpoint and the one the next turn writes; older checkpoints go first. Turns of "
        "more than four blocks keep fewer."
    )
    for warning in warnings:
        console.print(f"[bold yellow]warning:[/] {warning}", soft_wrap=True)
    if json_path is not None:
        derived = ("page_bytes", "padding_bytes", "attention_groups", "gdn_groups", "block_bytes")
        numbers = {
            "memory_bytes": memory_bytes,
            "max_model_len": max_model_len,
            "session_tokens": session_tokens,
            "shortest_hit_tokens": grid.mark_tokens,
            "geometry": asdict(geometry) | {name: getattr(geometry, name) for name in derived},
            "layouts": {p.layout: asdict(p) for p in plans},
            "warnings": warnings,
        }
        try:
            json_path.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write {json_path}: {error.strerror}.") from error


def _table(geometry: Geometry, plans: list[PoolPlan], grid: Grid) -> Table:
    table = Table("on one rank", box=None, padding=(0, 2, 0, 0))
    for p in plans:
        table.add_column(p.layout, justify="right")

    def size(value: int) -> str:
        return f"{value:,} B\n{mib(value)}" if value else "none"

    everywhere = len(plans)
    padding = [0 if p.layout == "per-block" else geometry.padding_bytes for p in plans]
    tokens = ["cannot start" if p.printed_tokens is None else f"{p.printed_tokens:,}" for p in plans]
    table.add_row("block tokens", *[f"{geometry.block_tokens:,}"] * everywhere)
    table.add_row("shortest hit", *["none" if p.layout == "off" else f"{grid.mark_tokens:,}" for p in plans])
    table.add_row("attention page", *[size(geometry.page_bytes)] * everywhere)
    table.add_row("GDN state", *[size(geometry.state_bytes)] * everywhere)
    table.add_row("padding", *map(size, padding))
    table.add_row("block, all layers", *[size(p.bytes_per_block) for p in plans])
    table.add_row("blocks", *[f"{p.num_blocks:,}" for p in plans])
    table.add_row("printed tokens", *tokens)
    table.add_row("sessions kept", *[f"{p.sessions:,}" for p in plans])
    table.add_row("slots", *[f"{p.slots:,}" for p in plans])
    table.add_row("slot memory", *[size(p.slot_bytes) for p in plans])
    return table
