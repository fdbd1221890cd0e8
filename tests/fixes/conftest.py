"""An image to apply fixes to: site-packages with a vLLM and a vllm-gaudi that have what the contract names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from inpage.engines import contract

SCRIPT = Path(__file__).parents[2] / "fixes" / "apply_all.py"


@pytest.fixture(scope="session")
def apply_all() -> Iterator[ModuleType]:
    """`fixes/apply_all.py` as a module; it changes the interpreter's settings as a script may."""
    path, bytecode = list(sys.path), sys.dont_write_bytecode
    spec = importlib.util.spec_from_file_location("apply_all", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["apply_all"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:], sys.dont_write_bytecode = path, bytecode


def write_package(root: Path, symbols: tuple[contract.Symbol, ...]) -> None:
    """Sources with these functions and classes, and nothing in them."""
    files: dict[str, dict[str, dict[str, contract.Symbol]]] = {}
    plain: dict[str, list[contract.Symbol]] = {}
    fields: dict[tuple[str, str], set[str]] = {}
    for symbol in symbols:
        owner, _, method = symbol.name.rpartition(".")
        if owner:
            files.setdefault(symbol.path, {}).setdefault(owner, {})[method] = symbol
        elif symbol.name.islower():
            plain.setdefault(symbol.path, []).append(symbol)
        else:
            files.setdefault(symbol.path, {}).setdefault(symbol.name, {})
            fields.setdefault((symbol.path, symbol.name), set()).update(symbol.needs)
    for path in {*files, *plain}:
        lines = []
        for owner, methods in files.get(path, {}).items():
            lines += [f"class {owner}:", '    """Of the image."""', ""]
            lines += [f"    {field}: object = None" for field in sorted(fields.get((path, owner), set()) - {*methods})]
            for method, symbol in methods.items():
                lines += [f"    def {method}(self, {', '.join(symbol.needs)}):", f"        return {method!r}", ""]
        for symbol in plain.get(path, []):
            lines += [f"def {symbol.name}({', '.join(symbol.needs)}):", "    return 1", ""]
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")
    (root / "__init__.py").write_text("")


@pytest.fixture
def image(tmp_path: Path, apply_all: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """site-packages of v0.26.0, whose sources are the known ones."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts its target in front
    site_packages = tmp_path / "site-packages"
    known = {}
    for package, release, symbols in (
        ("vllm", "0.26.0", contract.SCHEDULER),
        ("vllm_gaudi", "v0.26.0", contract.GAUDI_WORKER),
    ):
        write_package(site_packages / package, symbols)
        dist_info = site_packages / f"{package}-0.26.0.dist-info"
        dist_info.mkdir()
        (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.26.0\n")
        known[package] = {release: contract.fingerprint(site_packages / package, symbols)}
    monkeypatch.setattr(apply_all.contract, "known_sources", known.__getitem__)
    monkeypatch.setattr(apply_all.contract, "package_root", lambda package: site_packages / package)
    monkeypatch.setattr(apply_all, "installed_version", lambda package: "0.26.0")
    monkeypatch.delenv("INPAGE_ACCEPT_UNVERIFIED", raising=False)
    contract._parsed.cache_clear()
    return site_packages
