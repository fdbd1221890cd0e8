"""What the installed engine must look like, checked before anything is hooked.

Every upstream function that is wrapped or overridden is listed with its parameters and with the hash of its
source in the known releases; classes are listed with the fields that are read. The sources are parsed, not
imported, so that the check can run without starting an engine, and from the standard library alone.

- known hash: go
- parameters and fields are there, hash unknown: refuse, unless `INPAGE_ACCEPT_UNVERIFIED=1`
- something is missing: refuse and name it
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from inpage.errors import ContractError

ACCEPT_UNVERIFIED = "INPAGE_ACCEPT_UNVERIFIED"


@dataclass(frozen=True)
class Symbol:
    """A function or class of the engine that inpage relies on.

    `path` is relative to the package (`v1/core/block_pool.py`), `name` is dotted (`BlockPool.get_cached_block`).
    `needs` are the parameters of a function, or the fields and methods of a class. A function's source must be
    one of a known release (`known_sources.json`); of a class only `needs` counts.
    """

    path: str
    name: str
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"


@dataclass(frozen=True)
class Finding:
    """What a check found wrong with one symbol; `missing` is empty when only the source is unknown."""

    symbol: Symbol
    missing: tuple[str, ...]
    found_hash: str = ""


def source_hash(source: str, node: ast.AST) -> str:
    """The first 16 hex digits of the SHA-256 of a definition's source, without the indent of its first line."""
    segment = ast.get_source_segment(source, node) or ""
    return hashlib.sha256(segment.encode()).hexdigest()[:16]


PARSE_TRIES = 5
"""CPython up to 3.11.7 and 3.12.1 now and then fails with "AST constructor recursion depth mismatch" when other code
runs between two nodes (a collection of garbage, a thread); the same source then parses (python/cpython#106905)."""


@lru_cache(maxsize=64)
def _parsed(file: Path) -> tuple[str, ast.Module]:
    source = file.read_text(encoding="utf-8")
    for _ in range(PARSE_TRIES - 1):
        with contextlib.suppress(SystemError):
            return source, ast.parse(source)
    return source, ast.parse(source)


def _find(module: ast.Module, name: str) -> ast.AST | None:
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef = module
    for part in name.split("."):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == part:
                node = child
                break
        else:
            return None
    return node


def _offers(node: ast.AST) -> set[str]:
    """Parameters of a function; fields, methods and attributes set on `self` of a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        return {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
    names: set[str] = set()
    if isinstance(node, ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(child.name)
            elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                names.add(child.target.id)
        for inner in ast.walk(node):
            if (
                isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and isinstance(inner.value, ast.Name)
                and inner.value.id == "self"
            ):
                names.add(inner.attr)
    return names


def known_sources(package: str) -> dict[str, dict[str, str]]:
    """Hashes of wrapped functions in the known releases of a package: release -> symbol -> hash."""
    text = (Path(__file__).parent / "known_sources.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, str]] = json.loads(text)[package]
    return known


def check(root: Path, symbols: Iterable[Symbol], known: dict[str, dict[str, str]]) -> list[Finding]:
    """Compare the sources under `root` (the engine's package folder) with the symbols; empty when all is known."""
    findings = []
    for symbol in symbols:
        file = root / symbol.path
        if not file.is_file():
            findings.append(Finding(symbol, (f"the file {symbol.path}",)))
            continue
        source, module = _parsed(file)
        node = _find(module, symbol.name)
        if node is None:
            findings.append(Finding(symbol, (symbol.name,)))
            continue
        missing = tuple(name for name in symbol.needs if name not in _offers(node))
        found = source_hash(source, node)
        unknown = not isinstance(node, ast.ClassDef) and all(
            release.get(str(symbol)) != found for release in known.values()
        )
        if missing or unknown:
            findings.append(Finding(symbol, missing, found))
    return findings


def enforce(package: str, findings: Iterable[Finding]) -> None:
    """Raise `ContractError` that names everything that is missing or unknown; return when there is nothing to name.

    Unknown sources pass with `INPAGE_ACCEPT_UNVERIFIED=1`; what is missing never does.
    """
    findings = list(findings)
    missing = [f"{finding.symbol} lacks {', '.join(finding.missing)}" for finding in findings if finding.missing]
    if missing:
        raise ContractError(
            f"this {package} is not one that inpage can work with: {'; '.join(missing)}. "
            "Install a release that inpage names in its documentation, or serve without inpage."
        )
    unknown = [f"{finding.symbol} (source {finding.found_hash})" for finding in findings]
    if unknown and os.environ.get(ACCEPT_UNVERIFIED) != "1":
        raise ContractError(
            f"the {package} installed here differs from the known releases in {', '.join(unknown)}: everything inpage "
            f"uses is there, but nobody has verified it. Set {ACCEPT_UNVERIFIED}=1 to go on, and run the gates."
        )


def package_root(package: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ContractError(f"no package {package} is installed here")
    return Path(next(iter(spec.submodule_search_locations)))


def verify(package: str, symbols: Iterable[Symbol]) -> None:
    """Check the installed package and raise `ContractError` unless it may be used."""
    enforce(package, check(package_root(package), symbols, known_sources(package)))


def fingerprint(root: Path, symbols: Iterable[Symbol]) -> dict[str, str]:
    """Hashes of the functions under `root`: what a maintainer adds to `known_sources.json` for a verified release."""
    return {str(f.symbol): f.found_hash for f in check(root, symbols, known={}) if not f.missing}


SCHEDULER = (
    Symbol(
        "v1/core/sched/scheduler.py",
        "Scheduler.__init__",
        ("vllm_config", "kv_cache_config", "block_size"),
    ),
    Symbol("v1/core/sched/scheduler.py", "Scheduler.schedule"),
    Symbol("v1/core/sched/scheduler.py", "Scheduler._mamba_block_aligned_split", ("request", "num_new_tokens")),
    Symbol(
        "v1/core/sched/scheduler.py",
        "Scheduler._try_schedule_encoder_inputs",
        ("request", "num_computed_tokens", "num_new_tokens"),
    ),
    Symbol("v1/core/sched/scheduler.py", "Scheduler._preempt_request", ("request",)),
    Symbol(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        (
            "block_size",
            "hash_block_size",
            "cache_config",
            "kv_cache_manager",
            "requests",
            "shutdown",
            "make_stats",
            "update_from_output",
        ),
    ),
    Symbol("v1/core/kv_cache_manager.py", "KVCacheManager.get_computed_blocks", ("request",)),
    Symbol("v1/core/kv_cache_manager.py", "KVCacheManager", ("block_pool", "coordinator", "get_block_ids")),
    Symbol("v1/core/kv_cache_coordinator.py", "KVCacheCoordinator", ("single_type_managers",)),
    Symbol("v1/core/block_pool.py", "BlockPool.get_cached_block", ("block_hash", "kv_cache_group_ids")),
    Symbol("v1/core/block_pool.py", "BlockPool.get_new_blocks", ("num_blocks",)),
    Symbol("v1/core/block_pool.py", "BlockPool._maybe_evict_cached_block", ("block",)),
    Symbol("v1/core/single_type_kv_cache_manager.py", "MambaManager.get_num_blocks_to_allocate"),
    Symbol("v1/core/single_type_kv_cache_manager.py", "MambaManager", ("cached_blocks_this_step",)),
    Symbol(
        "v1/core/sched/output.py",
        "SchedulerOutput",
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "new_block_ids_to_zero",
        ),
    ),
    Symbol(
        "v1/core/sched/output.py",
        "CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    Symbol("v1/core/sched/output.py", "NewRequestData", ("req_id", "block_ids", "num_computed_tokens")),
    # Retention: what a running request gives back, and the queue in which free blocks wait.
    Symbol("v1/core/single_type_kv_cache_manager.py", "MambaManager.remove_skipped_blocks", ("request_id",)),
    Symbol("v1/core/single_type_kv_cache_manager.py", "MambaManager", ("last_state_block_idx",)),
    Symbol("v1/core/single_type_kv_cache_manager.py", "SingleTypeKVCacheManager", ("req_to_blocks",)),
    Symbol("v1/core/kv_cache_coordinator.py", "KVCacheCoordinator", ("retention_interval",)),
    Symbol("v1/core/block_pool.py", "BlockPool.free_blocks", ("ordered_blocks",)),
    Symbol(
        "v1/core/kv_cache_utils.py",
        "FreeKVCacheBlockQueue",
        ("fake_free_list_head", "num_free_blocks", "prepend_n", "remove"),
    ),
    Symbol("v1/request.py", "Request", ("shared_prefix_boundary", "num_preemptions", "num_prompt_tokens")),
    # The way of the counters to /metrics.
    Symbol("v1/outputs.py", "ModelRunnerOutput", ("req_ids",)),
    Symbol("v1/outputs.py", "AsyncModelRunnerOutput", ("get_output",)),
    Symbol("v1/metrics/stats.py", "SchedulerStats", ("waiting_lora_adapters",)),
    Symbol("v1/metrics/loggers.py", "StatLoggerBase", ("record", "log_engine_initialized")),
    Symbol("v1/metrics/loggers.py", "StatLoggerManager", ("stat_loggers", "engine_indexes", "record")),
    # Marks: what is published inside a block, and which blocks are copied for it.
    Symbol("v1/core/block_pool.py", "BlockPool.cache_partial_block", ("block", "num_tokens")),
    Symbol("v1/core/block_pool.py", "BlockPool.move_block_hashes", ("src_block", "dst_block")),
    Symbol("v1/core/single_type_kv_cache_manager.py", "MambaManager.allocate_new_blocks"),
    Symbol("v1/core/single_type_kv_cache_manager.py", "MambaManager._cache_partial_tail_block"),
    Symbol("v1/core/kv_cache_manager.py", "KVCacheManager.take_kv_cache_block_copies"),
    Symbol("v1/core/kv_cache_utils.py", "KVCacheBlock", ("block_id", "ref_cnt", "block_hash", "block_hash_num_tokens")),
)
"""What the scheduler side uses, and the front end."""

CPU_WORKER = (
    Symbol("platforms/cpu.py", "CpuPlatform.check_and_update_config", ("vllm_config",)),
    Symbol("v1/worker/cpu_worker.py", "CPUWorker.init_device"),
    Symbol("v1/worker/cpu_model_runner.py", "CPUModelRunner._zero_block_ids", ("block_ids",)),
    Symbol(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner.initialize_kv_cache_tensors",
        ("kv_cache_config", "kernel_block_sizes"),
    ),
    Symbol("v1/worker/gpu_model_runner.py", "GPUModelRunner._update_states", ("scheduler_output",)),
    Symbol("v1/worker/gpu_model_runner.py", "GPUModelRunner._build_attention_metadata"),
    Symbol("v1/worker/gpu_model_runner.py", "GPUModelRunner._model_forward"),
    Symbol("v1/worker/gpu_model_runner.py", "GPUModelRunner.execute_model", ("scheduler_output",)),
    Symbol("v1/worker/gpu_model_runner.py", "GPUModelRunner.sample_tokens", ("grammar_output",)),
    Symbol("v1/worker/utils.py", "copy_kv_cache_blocks_inplace", ("kv_cache_block_copies",)),
    Symbol("v1/worker/mamba_utils.py", "preprocess_mamba", ("scheduler_output", "mamba_state_idx")),
    Symbol("model_executor/layers/mamba/abstract.py", "MambaBase.bind_kv_cache", ("kv_cache",)),
    Symbol(
        "v1/attention/backends/gdn_attn.py",
        "GDNAttentionMetadata",
        ("num_decodes", "non_spec_state_indices_tensor", "prefill_state_indices", "spec_sequence_masks"),
    ),
    Symbol("v1/kv_cache_interface.py", "MambaSpec", ("shapes", "dtypes", "num_speculative_blocks")),
    Symbol("v1/kv_cache_interface.py", "KVCacheConfig", ("num_blocks", "kv_cache_groups")),
)
"""What the CPU engine uses on top."""

_RUNNER, _WORKER = "v1/worker/hpu_model_runner.py", "v1/worker/hpu_worker.py"

GAUDI_DECODE_PAD = (
    Symbol("platform.py", "HpuPlatform.check_and_update_config", ("vllm_config",)),
    Symbol(_WORKER, "HPUWorker.init_device"),
    Symbol(_WORKER, "HPUWorker.load_model", ("vllm_config",)),
    Symbol(_RUNNER, "HPUModelRunner.initialize_kv_cache", ("kv_cache_config",)),
    # Where the pad ids are used: block lists, block numbers and slots, all in kernel blocks.
    Symbol(_RUNNER, "HPUModelRunner.get_habana_paged_attn_buffers"),
    Symbol(_RUNNER, "HPUModelRunner._create_decode_input_data"),
    Symbol(
        _RUNNER,
        "HPUModelRunner",
        ("_PAD_BLOCK_ID", "_PAD_SLOT_ID", "attn_block_size", "num_mamba_like_layers", "kv_cache_config"),
    ),
)
"""What the decode padding fix uses of vllm-gaudi."""

GAUDI_WORKER = (
    *GAUDI_DECODE_PAD,
    Symbol(
        "v1/core/sched/hpu_async_scheduler.py",
        "HPUAsyncScheduler._mamba_block_aligned_split",
        ("request", "num_new_tokens"),
    ),
    Symbol(_WORKER, "HPUWorker.sleep"),
    Symbol(_WORKER, "HPUWorker.shutdown"),
    Symbol(_RUNNER, "HPUModelRunner.__init__", ("vllm_config",)),
    Symbol(_RUNNER, "HPUModelRunner._update_states", ("scheduler_output",)),
    Symbol(_RUNNER, "HPUModelRunner.execute_model", ("scheduler_output", "warmup_mode")),
    Symbol(_RUNNER, "HPUModelRunner.sample_tokens", ("grammar_output",)),
    Symbol(_RUNNER, "HPUModelRunner.prepare_mamba_state_idxs", ("req_indices",)),
    Symbol(
        _RUNNER,
        "HPUModelRunner",
        (
            "_compact_gdn_group_ids",
            "_compact_gdn_group_offset",
            "_gdn_max_reqs",
            "_gdn_req_to_base_slot",
            "_gdn_slot_free_list",
            "_num_gdn_groups",
            "requests",
            "use_prefix_caching",
        ),
    ),
)
"""What the Gaudi engine uses of vllm-gaudi."""
