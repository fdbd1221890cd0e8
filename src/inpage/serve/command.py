"""Builds the command of vLLM's server for a layout, says what it adds and why, and becomes that server."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inpage.engines.activation import GAUDI_SWITCH, SWITCH, on_gaudi
from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.pool import LAYOUTS, bytes_per_block, per_block_equivalent
from inpage.serve.arguments import ServerArguments

SERVER = "vllm.entrypoints.openai.api_server"
"""Run as a module: the `vllm` command of the CPU distribution asks for metadata it does not have."""

DEFAULT_SEQS = 8
"""Each running sequence holds a slot, so vLLM's default of 256 would cost 256 states a layer."""

BUDGET_STEP = 128
"""Room for decodes comes in these steps: with blocks of 896 tokens the budget is 1,024."""


@dataclass(frozen=True)
class Launch:
    """A server to start: command, what to set in the environment, and what was added, with reasons."""

    command: tuple[str, ...]
    environment: dict[str, str]
    added: tuple[tuple[str, str], ...]


def build(model: str, arguments: list[str], layout: str) -> Launch:
    """The launch of a layout for a model; raises `ConfigError` before anything starts."""
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout} is not one of {', '.join(LAYOUTS)}")
    given = ServerArguments(arguments)
    added: list[tuple[str, str]] = []
    shape = read_shape(model, given)

    if layout == "off":
        if given.has("--enable-prefix-caching"):
            raise ConfigError("--layout off and --enable-prefix-caching contradict each other: drop one")
        if not given.has("--no-enable-prefix-caching"):
            added.append((given.add("--no-enable-prefix-caching"), "layout off"))
    else:
        if given.has("--no-enable-prefix-caching"):
            raise ConfigError(f"--layout {layout} needs prefix caching: drop --no-enable-prefix-caching")
        if not given.has("--enable-prefix-caching"):
            added.append((given.add("--enable-prefix-caching"), f"layout {layout}"))
        if not given.has("--mamba-cache-mode"):
            added.append((given.add("--mamba-cache-mode", "align"), "checkpoints where chunks end"))
        if not given.has("--prefix-cache-retention-interval"):
            reason = "dense: a checkpoint at every boundary, so that a prefix that diverges can hit"
            added.append((given.add("--prefix-cache-retention-interval", "None"), reason))
    if not given.has("--mamba-ssm-cache-dtype") and shape is not None:
        dtype = "float32" if shape.model_type == "qwen3_next" else shape.ssm_dtype
        reason = "left alone, vLLM chooses by the processor, and pools of replicas would differ"
        added.append((given.add("--mamba-ssm-cache-dtype", dtype), reason))
    if not given.has("--enable-prompt-tokens-details"):
        added.append((given.add("--enable-prompt-tokens-details"), "answers say how many tokens were cached"))
    if not given.has("--max-num-seqs"):
        added.append((given.add("--max-num-seqs", DEFAULT_SEQS), "every running sequence holds a slot"))
    if shape is not None:
        geometry = read_geometry(shape, given)
        if layout != "off" and not given.has("--max-num-batched-tokens"):
            added.append(add_budget(given, geometry))
        if layout == "per-block":
            added.append(cut_pool(given, geometry))
    elif layout == "per-block":
        raise ConfigError(f"--layout per-block computes the pool from config.json, and {model} has none here")
    command = (sys.executable, "-m", SERVER, "--model", model, *given)
    environment = {SWITCH: "0"} if layout != "in-page" else {GAUDI_SWITCH if on_gaudi() else SWITCH: "1"}
    return Launch(command, environment, tuple(added))


def read_shape(model: str, given: ServerArguments) -> ModelShape | None:
    """The model's shape, None when its configuration is not on this machine yet (vLLM will fetch it)."""
    folder = Path(model)
    if not folder.exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "config.json", revision=given.value("--revision"))
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    return ModelShape.from_file(folder, ssm_dtype=given.value("--mamba-ssm-cache-dtype"))


def read_geometry(shape: ModelShape, given: ServerArguments) -> Geometry:
    """The geometry vLLM will choose with these flags."""
    ssm_dtype = given.value("--mamba-ssm-cache-dtype")
    if ssm_dtype not in (None, "auto"):
        shape = ModelShape(**{**vars(shape), "ssm_dtype": ssm_dtype})
    return Geometry.of(
        shape,
        kv_dtype=given.value("--kv-cache-dtype") or "auto",
        tp=given.number("--tensor-parallel-size") or given.number("-tp") or 1,
        alignment=given.number("--block-size") or 128,
    )


def add_budget(given: ServerArguments, geometry: Geometry) -> tuple[str, str]:
    """A token budget of one block and room for the decodes beside it.

    A chunk ends on a boundary and keeps the state only there: one block a chunk leaves a checkpoint at every
    boundary, two would leave one at every other. A budget of exactly one block starves prefill, because one
    running decode leaves less than a block of it.
    """
    decodes = given.number("--max-num-seqs") or DEFAULT_SEQS
    budget = geometry.block_tokens + -(-decodes // BUDGET_STEP) * BUDGET_STEP
    reason = f"one block of {geometry.block_tokens} tokens a chunk, and room for {decodes} decodes beside it"
    return given.add("--max-num-batched-tokens", budget), reason


def cut_pool(given: ServerArguments, geometry: Geometry) -> tuple[str, str]:
    """Give native align the pool that a state tensor per block would leave."""
    reason = "what one state tensor per block would leave of the pool"
    blocks, memory = given.number("--num-gpu-blocks-override"), given.number("--kv-cache-memory-bytes")
    if blocks is not None:
        return given.replace("--num-gpu-blocks-override", max(per_block_equivalent(blocks, geometry), 1)), reason
    if memory is not None:
        shared, separate = bytes_per_block("in-page", geometry), bytes_per_block("per-block", geometry)
        return given.replace("--kv-cache-memory-bytes", memory * shared // separate), reason
    raise ConfigError(
        "--layout per-block cuts the pool to what state tensors would leave of it, so it needs its size: "
        "add --num-gpu-blocks-override or --kv-cache-memory-bytes"
    )


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder, or a name that vLLM can fetch.")],
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "in-page",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
) -> None:
    """Run vLLM's OpenAI server with in-page on; every argument it has can be added."""
    launch = build(model, context.args, layout)
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold]inpage serve[/]: {model}, layout {layout}")
    for flag, reason in launch.added:
        console.print(f"  {flag}  [dim]{reason}[/]", soft_wrap=True)
    if dry_run:
        words = [f"{key}={value}" for key, value in launch.environment.items()]
        typer.echo(" ".join([*words, *launch.command]))
        return
    sys.stderr.flush()
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.environment})
