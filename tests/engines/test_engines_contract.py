"""The contract: a known source goes, an unknown one is refused unless accepted, a broken one always."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from inpage.engines import contract
from inpage.engines.contract import CPU_WORKER, SCHEDULER, Symbol
from inpage.errors import ContractError

KNOWN = contract.known_sources("vllm")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """The installed engine's files that the contract names, to be changed at will."""
    root = contract.package_root("vllm")
    for path in {symbol.path for symbol in (*SCHEDULER, *CPU_WORKER)}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, tmp_path / path)
    return tmp_path


def change(root: Path, path: str, old: str, new: str) -> None:
    text = (root / path).read_text()
    assert text.count(old) >= 1, old
    (root / path).write_text(text.replace(old, new, 1))


def test_the_installed_engine_is_a_known_release():
    contract.verify("vllm", (*SCHEDULER, *CPU_WORKER))


def test_every_listed_function_has_a_hash_in_a_known_release():
    fingerprint = contract.fingerprint(contract.package_root("vllm"), (*SCHEDULER, *CPU_WORKER))
    assert fingerprint.items() <= KNOWN["0.30.0"].items()
    assert len(fingerprint) >= 19


def test_a_changed_line_in_a_wrapped_function_is_refused_and_named(sources, monkeypatch):
    change(sources, "v1/core/block_pool.py", "cached_blocks = []", "cached_blocks = list()")
    findings = contract.check(sources, SCHEDULER, KNOWN)
    with pytest.raises(ContractError, match=r"block_pool.py::BlockPool.get_cached_block \(source [0-9a-f]{16}\)"):
        contract.enforce("vllm", findings)
    monkeypatch.setenv(contract.ACCEPT_UNVERIFIED, "1")
    contract.enforce("vllm", findings)


def test_a_changed_line_elsewhere_in_the_file_is_none_of_its_business(sources):
    change(sources, "v1/core/block_pool.py", "def get_usage(self)", "def get_usage_(self)")
    assert contract.check(sources, SCHEDULER, KNOWN) == []


def test_a_missing_function_is_refused_even_when_unverified_sources_are_accepted(sources, monkeypatch):
    monkeypatch.setenv(contract.ACCEPT_UNVERIFIED, "1")
    change(sources, "v1/worker/gpu_model_runner.py", "def _model_forward(", "def _forward(")
    with pytest.raises(ContractError, match=r"gpu_model_runner.py::GPUModelRunner._model_forward lacks"):
        contract.enforce("vllm", contract.check(sources, CPU_WORKER, KNOWN))


def test_a_missing_parameter_and_a_missing_field_are_named(sources):
    change(sources, "v1/core/sched/scheduler.py", "        kv_cache_config: KVCacheConfig,", "        kv_config: X,")
    change(sources, "v1/core/sched/output.py", "preempted_req_ids", "taken_req_ids")
    with pytest.raises(ContractError, match=r"__init__ lacks kv_cache_config.*SchedulerOutput lacks preempted_req_ids"):
        contract.enforce("vllm", contract.check(sources, SCHEDULER, KNOWN))


def test_a_missing_file_is_named(sources):
    (sources / "v1/core/block_pool.py").unlink()
    with pytest.raises(ContractError, match=r"lacks the file v1/core/block_pool\.py"):
        contract.enforce("vllm", contract.check(sources, SCHEDULER, KNOWN))


def test_an_engine_that_is_not_installed_is_refused():
    with pytest.raises(ContractError, match="no package no_such_engine is installed here"):
        contract.verify("no_such_engine", [Symbol("a.py", "f")])


def test_a_parser_that_stumbles_is_asked_again(sources, monkeypatch):
    """CPython up to 3.11.7 fails now and then where nothing is wrong; it must not keep an engine from starting."""
    parse, asked = ast.parse, []

    def stumbles(source: str) -> ast.Module:
        asked.append(source)
        if len(asked) % contract.PARSE_TRIES:
            raise SystemError("AST constructor recursion depth mismatch (before=156, after=211)")
        return parse(source)

    monkeypatch.setattr(ast, "parse", stumbles)
    assert contract.check(sources, SCHEDULER, KNOWN) == []
    assert len(asked) == contract.PARSE_TRIES * len({symbol.path for symbol in SCHEDULER})
