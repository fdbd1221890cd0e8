"""Make the emulated device and a checkout of vllm-gaudi importable in the environment that runs this.

`python install.py CHECKOUT` writes a `.pth` and three `.dist-info` folders into site-packages; nothing is copied or
built, and the checkout stays as it is. Running it again for another checkout replaces what was written.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_path("purelib"))


def distribution(name: str, version: str, entry_points: dict[str, list[str]] | None = None) -> None:
    """Metadata only: what `importlib.metadata` and vLLM's plugin loader look at."""
    for old in SITE.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    folder = SITE / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [line for group, entries in (entry_points or {}).items() for line in (f"[{group}]", *entries, "")]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def entry_points_of(setup: Path) -> dict[str, list[str]]:
    """The `entry_points` that a checkout's setup.py passes to `setup`, without running it."""
    for node in ast.walk(ast.parse(setup.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "entry_points":
            return {group: entries for group, entries in ast.literal_eval(node.value).items() if "vllm" in group}
    raise SystemExit(f"{setup} declares no entry points: is it a checkout of vllm-gaudi?")


def version_of(checkout: Path) -> str:
    """The tag that is checked out; v0.26.0 for a folder without git."""
    command = ["git", "-C", str(checkout), "describe", "--tags", "--abbrev=0"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found.removeprefix("v") or "0.26.0"


def main() -> None:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "vllm_gaudi").is_dir():
        raise SystemExit("usage: python install.py CHECKOUT_OF_VLLM_GAUDI")
    checkout = Path(sys.argv[1]).resolve()
    distribution("vllm_gaudi", version_of(checkout), entry_points_of(checkout / "setup.py"))
    distribution(
        "habana_torch_plugin",
        "1.24.1",
        {"torch_dynamo_backends": ["hpu_backend = habana_frameworks.torch.dynamo_backend:hpu_backend"]},
    )
    distribution("neural_compressor_pt", "3.6")  # the plugin asks for its version, and only quantisation for its code
    (SITE / "emulated_hpu.pth").write_text(f"{HERE}\n{checkout}\nimport emulated_torchvision\n")
    print(f"emulated device and {checkout} are importable in {SITE}")


if __name__ == "__main__":
    main()
