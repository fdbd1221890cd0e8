"""A command that would be served: what in-page makes of the model and the flags, from arithmetic alone."""

from __future__ import annotations

from inpage.doctor.finding import Finding, advice, info, ok, wrong
from inpage.errors import ConfigError
from inpage.layout.advice import budget_warning, start_warning
from inpage.layout.geometry import Geometry
from inpage.layout.model import ModelShape
from inpage.layout.pool import Layout, plan_pool
from inpage.layout.units import mib
from inpage.serve.arguments import ServerArguments
from inpage.serve.checks import refuse_uncovered_flags
from inpage.serve.command import BUDGET_STEP, DEFAULT_SEQS
from inpage.serve.model import read_geometry, read_shape

RETENTION = "--prefix-cache-retention-interval"
BUDGET = "--max-num-batched-tokens"


def examine(model: str, given: ServerArguments, memory_bytes: int | None, engine: str) -> list[Finding]:
    """Findings about serving `model` with these flags; `memory_bytes` is one rank's pool, None when not known."""
    try:
        shape = read_shape(model, given)
        if shape is None:
            return [info("model", f"{model} is not on this machine yet: give a folder with its config.json")]
        geometry = read_geometry(shape, given)
    except ConfigError as error:
        return [wrong("model", str(error), "in-page is for Gated DeltaNet hybrids; serve others without it")]
    block = geometry.block_tokens
    mark = given.number("--prefix-match-unit")
    unit, ends = (mark, f"marks every {mark} tokens") if mark else (block, "whole blocks")
    findings = [
        ok(
            "model",
            f"{shape.model_type}: {shape.attention_layers} attention layers, {shape.gdn_layers} GDN layers in "
            f"{geometry.gdn_groups} groups; a GDN layer's state is {mib(geometry.state_bytes)}",
        ),
        _covered(given),
        info(
            "block",
            f"{block:,} tokens. The shortest prompt that can hit has {unit + 1:,}: hits end on {ends}, and the last "
            "token is always computed",
        ),
        _budget(given, geometry),
        _retention(given),
        _state_dtype(given, shape),
    ]
    return [*findings, *_pool(given, geometry, memory_bytes, engine)]


def _covered(given: ServerArguments) -> Finding:
    """Ask the same function that the engine asks."""
    if not given.has("--enable-prefix-caching"):
        return wrong(
            "coverage",
            "in-page would have nothing to do: prefix caching is off (--enable-prefix-caching)",
            "add --enable-prefix-caching",
        )
    try:
        refuse_uncovered_flags(given)
    except ConfigError as error:
        return wrong("coverage", str(error), "change the flag, or serve without in-page")
    return ok("coverage", "in-page covers these flags")


def _budget(given: ServerArguments, geometry: Geometry) -> Finding:
    sequences = given.number("--max-num-seqs") or DEFAULT_SEQS
    block = geometry.block_tokens
    right = f"{BUDGET} {block + -(-sequences // BUDGET_STEP) * BUDGET_STEP}"
    budget = given.number(BUDGET)
    if budget is None:
        return advice(
            "token budget",
            "vLLM would choose it without looking at the block; a chunk keeps a state only where it ends, so several "
            "blocks a chunk leave fewer checkpoints",
            right,
        )
    warning = budget_warning(geometry, budget, sequences)
    if budget < block or budget - sequences + 1 < block:
        return wrong("token budget", warning or f"{budget:,} is below a block of {block:,}", right)
    if budget >= 2 * block:
        return advice(
            "token budget",
            f"{budget:,} tokens hold {budget // block} blocks of {block:,}: a chunk of several blocks leaves a "
            "checkpoint only at its end, and hits are not computed in the same chunks as cold runs, so they may differ "
            "from them in the last bits",
            right,
        )
    return ok(
        "token budget", f"{budget:,} tokens: one block of {block:,} a chunk, and room for {sequences - 1} decodes"
    )


def _retention(given: ServerArguments) -> Finding:
    value = given.value(RETENTION)
    if value == "None":
        return ok("retention", "a checkpoint at every boundary, as long as there is room")
    kept = "the ends of prompts and junctions" if value in (None, "0") else f"every {value} tokens"
    return advice(
        "retention",
        f"{'by default ' if value is None else ''}vLLM 0.30.0 keeps checkpoints of {kept} only: sessions that just "
        "grow hit, a prompt that parts from a cached one elsewhere misses at first sight",
        f"{RETENTION} None",
    )


def _state_dtype(given: ServerArguments, shape: ModelShape) -> Finding:
    flag = "--mamba-ssm-cache-dtype"
    value = given.value(flag)
    if value in (None, "auto"):
        return advice(
            "state dtype",
            f"left alone, vLLM chooses by the processor; here it is taken as {shape.ssm_dtype}, and block and pool "
            "depend on it",
            f"{flag} float32",
        )
    return ok("state dtype", f"{value}")


def _pool(given: ServerArguments, geometry: Geometry, memory_bytes: int | None, engine: str) -> list[Finding]:
    blocks = given.number("--num-gpu-blocks-override")
    if blocks is not None:
        memory_bytes = blocks * geometry.block_bytes
    memory_bytes = given.number("--kv-cache-memory-bytes") or memory_bytes
    length = given.number("--max-model-len")
    if memory_bytes is None or length is None:
        missing = [
            *([] if memory_bytes is not None else ["the pool's memory (--memory)"]),
            *([] if length is not None else ["--max-model-len"]),
        ]
        return [info("pool", f"not judged without {' and '.join(missing)}")]
    layout: Layout = "in-page"
    plan = plan_pool(
        layout,
        geometry,
        memory_bytes,
        max_model_len=length,
        session_tokens=min(65536, length),
        engine=engine,
        max_num_seqs=given.number("--max-num-seqs") or DEFAULT_SEQS,
    )
    if warning := start_warning(plan, geometry, length):
        fits = plan.largest_max_model_len
        return [wrong("pool", warning, f"--max-model-len {fits}" if fits else "give the pool more memory")]
    return [
        ok(
            "pool",
            f"{plan.num_blocks:,} blocks, {plan.printed_tokens:,} tokens at max-model-len {length:,}; "
            f"{plan.sessions:,} sessions of {min(65536, length):,} tokens stay cached; {plan.slots} slots take "
            f"{mib(plan.slot_bytes)} beside it",
        )
    ]
