"""Builds the command of vLLM's server for a layout, says what it adds and why, and becomes that server."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inpage.doctor.environment import Surroundings
from inpage.engines.activation import GAUDI_SWITCH, SWITCH, on_gaudi
from inpage.engines.retention import RETENTION as POLICY
from inpage.errors import ConfigError
from inpage.layout.geometry import Geometry
from inpage.layout.model import longest_length, read_config
from inpage.layout.pool import LAYOUTS, Layout, bytes_per_block, per_block_equivalent
from inpage.serve import checks, pool
from inpage.serve.arguments import ServerArguments
from inpage.serve.machine import Machine
from inpage.serve.model import find_folder, read_geometry, read_shape
from inpage.serve.weights import weights_bytes

SERVER = "vllm.entrypoints.openai.api_server"
"""Run as a module: the `vllm` command of the CPU distribution asks for metadata it does not have."""

DEFAULT_SEQS = 8
"""Each running sequence holds a slot, so vLLM's default of 256 would cost 256 states a layer."""

BUDGET_STEP = 128
"""Room for decodes comes in these steps: with blocks of 896 tokens the budget is 1,024."""


@dataclass(frozen=True)
class Launch:
    """A server to start: command, what to set in the environment, what was added, with reasons, what else to know."""

    command: tuple[str, ...]
    environment: dict[str, str]
    added: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


RETENTIONS = {
    "value": ("None", "every checkpoint is kept as long as there is room, then what is left behind goes first"),
    "dense": ("None", "every checkpoint, by LRU"),
    "sparse": ("0", "only the checkpoints of prompts' ends and of junctions are kept"),
}
"""vLLM's interval for each `--retention`, and what it means."""


def build(
    model: str, arguments: list[str], layout: str, machine: Machine | None = None, retention: str | None = None
) -> Launch:
    """The launch of a layout for a model; raises `ConfigError` before anything starts.

    machine: where it will run, so that the pool is chosen from the memory that is free there and what cannot start
    is refused. None leaves the memory to vLLM and looks at nothing but the flags, for callers that size the pool.
    retention: one of `RETENTIONS`, dense when None; vLLM's own flag wins over it.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"--layout {layout} is not one of {', '.join(LAYOUTS)}")
    if retention is not None and retention not in RETENTIONS:
        raise ConfigError(f"--retention {retention} is not one of {', '.join(RETENTIONS)}")
    given = ServerArguments(arguments)
    added: list[tuple[str, str]] = []
    notes: list[str] = []
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
        if not given.has(checks.RETENTION):
            kept = retention or "dense"
            interval, reason = RETENTIONS[kept]
            added.append((given.add(checks.RETENTION, interval), f"retention {kept}: {reason}"))
        elif retention is not None:
            notes.append(f"{checks.RETENTION} {given.value(checks.RETENTION)} was given and wins over --retention.")
    if not given.has("--mamba-ssm-cache-dtype") and shape is not None:
        dtype = "float32" if shape.model_type == "qwen3_next" else shape.ssm_dtype
        reason = "left alone, vLLM chooses by the processor, and pools of replicas would differ"
        added.append((given.add("--mamba-ssm-cache-dtype", dtype), reason))
    if not given.has("--enable-prompt-tokens-details"):
        added.append((given.add("--enable-prompt-tokens-details"), "answers say how many tokens were cached"))
    if not given.has("--max-num-seqs"):
        added.append((given.add("--max-num-seqs", DEFAULT_SEQS), "every running sequence holds a slot"))
    geometry = read_geometry(shape, given) if shape is not None else None
    plan, chosen = None, []
    if machine is not None:
        refuse_what_is_there(model, given, layout, machine)
        if geometry is not None and layout != "off":
            checks.refuse_retention(given, geometry.block_tokens)
        plan = plan_of(model, given, layout, geometry)
        chosen = pool.choose(given, plan, machine)
        added += chosen
    if geometry is not None:
        if layout != "off" and not given.has("--max-num-batched-tokens"):
            added.append(add_budget(given, geometry))
        if layout == "per-block":
            added.append(cut_pool(given, geometry))
    elif layout == "per-block":
        raise ConfigError(f"--layout per-block computes the pool from config.json, and {model} has none here")
    if plan is not None and machine is not None:
        more, said = pool.judge(given, plan, machine, bool(chosen) and not given.has(pool.BLOCKS))
        added += more
        notes += said
    command = (sys.executable, "-m", SERVER, "--model", model, *given)
    environment = {SWITCH: "0"} if layout != "in-page" else {GAUDI_SWITCH if on_gaudi() else SWITCH: "1"}
    if layout == "in-page" and retention in ("value", "dense"):
        environment[POLICY] = retention
    return Launch(command, environment, tuple(added), tuple(notes))


def refuse_what_is_there(model: str, given: ServerArguments, layout: str, machine: Machine) -> None:
    """Raise `ConfigError` for flags and a model folder that cannot be served; names on the hub are left to vLLM."""
    if layout == "in-page":
        checks.refuse_uncovered_flags(given)
    if Path(model).is_file():
        raise ConfigError(f"{model} is a file: give the model's folder, with config.json, tokenizer and weights.")
    if Path(model).is_dir():
        checks.refuse_folder(Path(model), given, machine.variables)


def plan_of(model: str, given: ServerArguments, layout: Layout, geometry: Geometry | None) -> pool.Plan:
    """What is known of the server's memory; weights of a folder are read from their headers.

    A model in the hub's cache may lack files that vLLM will fetch: its weights count as unknown then.
    """
    folder, weights, length = find_folder(model, given), None, None
    if folder is not None and geometry is not None:
        length = None if given.has("--hf-overrides") else longest_length(read_config(folder)[0])
        try:
            weights = weights_bytes(folder, given.value("--load-format") or "auto", given.value("--dtype") or "auto")
        except ConfigError:
            if Path(model).is_dir():
                raise
    replicas = given.number("--data-parallel-size") or given.number("-dp") or 1
    tp = given.number("--tensor-parallel-size") or given.number("-tp") or 1
    stages = given.number("--pipeline-parallel-size") or given.number("-pp") or 1
    return pool.Plan(
        # Per block has native's pool with fewer blocks.
        "native" if layout == "per-block" else layout,
        geometry,
        None if weights is None else weights * replicas,
        length,
        replicas * tp * stages,
        given.number("--max-num-seqs") or DEFAULT_SEQS,
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


def where() -> Machine | None:
    """This machine, None where the engine takes its memory from a card."""
    return Machine.here() if Surroundings.here().engine == "cpu" else None


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model folder, or a name that vLLM can fetch.")],
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")] = "in-page",
    retention: Annotated[
        str | None, typer.Option(help=f"Which checkpoints stay: {', '.join(RETENTIONS)}; dense if not given.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
) -> None:
    """Run vLLM's OpenAI server with in-page on; every argument it has can be added."""
    checks.refuse_missing_engine()
    launch = build(model, context.args, layout, where(), retention)
    if not dry_run:
        checks.refuse_address(ServerArguments(context.args))
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold]inpage serve[/]: {model}, layout {layout}")
    for flag, reason in launch.added:
        console.print(f"  {flag}  [dim]{reason}[/]", soft_wrap=True)
    for note in launch.notes:
        console.print(f"  {note}", soft_wrap=True, markup=False)
    if dry_run:
        words = [f"{key}={value}" for key, value in launch.environment.items()]
        typer.echo(" ".join([*words, *launch.command]))
        return
    sys.stderr.flush()
    os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.environment})
