#!/usr/bin/env python3
"""Lay inpage's fixes into an image's site-packages, for images in which nothing can be built or downloaded.

    python3 fixes/apply_all.py --profile v0.26.0                        the fixes that everybody wants
    python3 fixes/apply_all.py --profile v0.26.0 gdn-prefix-cache       and prefix caching for GDN hybrids
    python3 fixes/apply_all.py --profile v0.26.0 --check gdn-prefix-cache
    python3 fixes/apply_all.py --revert

No file of vLLM or vllm-gaudi is edited. What is laid is this repository's package, as it is, and a `.dist-info`
whose entry points are the fixes: vLLM calls them when it starts, `pip uninstall inpage` removes them. Before that,
the installed sources are compared with those of the profile; anything else is refused and named.

The package comes first and the `.dist-info` last, so that a fix is either there as a whole or not seen at all;
reverting goes the other way. After an interruption, run the same command again, or `--revert`.

Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "inpage"
_paths_at_start = {str(Path(path).resolve()) for path in sys.path}
sys.path.insert(0, str(SOURCE.parent))
sys.dont_write_bytecode = True

from inpage import __version__  # noqa: E402
from inpage.engines import contract  # noqa: E402
from inpage.errors import InPageError  # noqa: E402

INSTALLER = "inpage-fixes"
MARKER = "LAID_BY_FIXES"
STAGING = ".inpage-staging"
DIST_INFO = f"inpage-{__version__}.dist-info"
GROUP = "vllm.general_plugins"


class RefusalError(Exception):
    """What stands in the way, in one sentence."""


@dataclass(frozen=True)
class Fix:
    """A fix is an entry point; `symbols` are what it relies on, by package."""

    name: str
    entry_point: str
    symbols: dict[str, tuple[contract.Symbol, ...]]
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """The releases that belong together, and the fixes that are applied unasked."""

    vllm: str
    vllm_gaudi: str
    known_vllm: str
    known_vllm_gaudi: str
    fixes: tuple[str, ...]


# In the order in which they are applied.
FIXES = {
    fix.name: fix
    for fix in (
        Fix(
            "hybrid-decode-pad",
            "inpage_hybrid_decode_pad = inpage.engines.plugin:register_decode_pad",
            {"vllm_gaudi": contract.GAUDI_DECODE_PAD},
        ),
        Fix(
            "gdn-prefix-cache",
            "inpage = inpage.engines.plugin:register",
            {"vllm": contract.SCHEDULER, "vllm_gaudi": contract.GAUDI_WORKER},
            requires=("hybrid-decode-pad",),
        ),
    )
}

PROFILES = {
    "v0.26.0": Profile("0.26.0", "0.26.0", "0.26.0", "v0.26.0", ("hybrid-decode-pad",)),
    "v0.30.0": Profile("0.30.", "0.30.", "0.30.0", "releases/v0.30.0", ("hybrid-decode-pad",)),
}


# --------------------------------------------------------------------------------------------------------- the image
def installed_version(package: str) -> str:
    """The version of the distribution that provides a package; CPU builds of vLLM go by another name."""
    for name in (package, package.replace("_", "-"), f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RefusalError(
        f"no distribution of {package} is installed for {sys.executable}: run it with the Python that serves, or "
        "name its site-packages with --target"
    )


def check_sources(profile: Profile, fixes: list[Fix]) -> None:
    """Refuse versions and sources that are not the profile's, and name what differs."""
    for package, expected, release in (
        ("vllm", profile.vllm, profile.known_vllm),
        ("vllm_gaudi", profile.vllm_gaudi, profile.known_vllm_gaudi),
    ):
        found = installed_version(package)
        if not found.startswith(expected):
            raise RefusalError(f"{package} {found} is installed here; this profile is for {expected.rstrip('.')}")
        symbols = dict.fromkeys(symbol for fix in fixes for symbol in fix.symbols.get(package, ()))
        known = contract.known_sources(package).get(release, {})
        root = contract.package_root(package)
        contract.enforce(package, contract.check(root, symbols, {release: known}))


# ---------------------------------------------------------------------------------------------------- what is applied
def applied(target: Path) -> list[str]:
    """Names of the fixes that are in place, in order, laid by whichever version; empty while something is half laid."""
    if not any((found / "entry_points.txt").is_file() for found in target.glob("inpage-*.dist-info")):
        return []
    return _names_in(target / "inpage")


def asked_for(target: Path) -> list[str]:
    """Names of the fixes that are in place or that an interrupted run was about to put there."""
    names = {*_names_in(target / "inpage"), *_names_in(target / STAGING / "inpage")}
    return [name for name in FIXES if name in names]


def _names_in(package: Path) -> list[str]:
    if not (package / MARKER).is_file():
        return []
    names = (package / MARKER).read_text(encoding="utf-8").split()
    return [name for name in FIXES if name in names]


def refuse_foreign(target: Path) -> None:
    """Refuse to touch an inpage that pip, or a person, has put there."""
    # An empty one is what an interrupted removal may leave.
    found = [path for path in target.glob("inpage-*.dist-info") if any(path.iterdir())]
    for dist_info in found:
        installer = dist_info / "INSTALLER"
        if not installer.is_file() or installer.read_text(encoding="utf-8").strip() != INSTALLER:
            raise RefusalError(
                f"{dist_info} was not laid by this script: inpage is installed already, so ask for its fixes with "
                "VLLM_COMPACT_GDN=1 and INPAGE_HYBRID_DECODE_PAD=1, or run pip uninstall inpage first"
            )
    package = target / "inpage"
    # A package without its marker, but with our .dist-info, is a removal that was interrupted.
    if package.exists() and not found and not (package / MARKER).is_file():
        raise RefusalError(f"{package} was not laid by this script: move it away first")


def is_whole(target: Path) -> bool:
    """Whether every file that was laid is there as it was laid, and as this repository has it."""
    record = target / DIST_INFO / "RECORD"
    if not record.is_file():
        return False
    names = set()
    for line in record.read_text(encoding="utf-8").splitlines():
        name, digest, _ = line.rsplit(",", 2)
        names.add(name)
        if digest and (not (target / name).is_file() or digest != _digest((target / name).read_bytes())):
            return False
    return all(
        f"inpage/{file}" in names and (target / "inpage" / file).read_bytes() == (SOURCE / file).read_bytes()
        for file in _source_files()
    )


# ------------------------------------------------------------------------------------------------- laying and reverting
def lay(target: Path, fixes: list[Fix]) -> None:
    """Put package and `.dist-info` in place; safe to interrupt and to repeat."""
    staging = target / STAGING
    shutil.rmtree(staging, ignore_errors=True)
    package, dist_info = staging / "inpage", staging / DIST_INFO
    for file in _source_files():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCE / file, package / file)
    (package / MARKER).write_text(" ".join(fix.name for fix in fixes) + "\n", encoding="utf-8")
    dist_info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: inpage\nVersion: {__version__}\nLicense: Apache-2.0\n"
    entry_points = "\n".join([f"[{GROUP}]", *(fix.entry_point for fix in fixes), ""])
    for name, text in (
        ("METADATA", metadata),
        ("INSTALLER", INSTALLER + "\n"),
        ("entry_points.txt", entry_points),
    ):
        (dist_info / name).write_text(text, encoding="utf-8")
    _write_record(staging, dist_info / "RECORD")
    remove(target, keep_staging=True)
    os.rename(package, target / "inpage")
    os.rename(dist_info, target / DIST_INFO)
    shutil.rmtree(staging)


def remove(target: Path, keep_staging: bool = False) -> None:
    """Take everything away that was laid, the entry points first; safe to interrupt and to repeat."""
    if not keep_staging:
        shutil.rmtree(target / STAGING, ignore_errors=True)
        if (target / "inpage" / MARKER).is_file():
            # What is taken away for good is not asked for any more, should this be interrupted.
            (target / "inpage" / MARKER).write_text("", encoding="utf-8")
    for found in target.glob("inpage-*.dist-info"):
        # Without this file vLLM sees no fix any more, whatever else is still there.
        (found / "entry_points.txt").unlink(missing_ok=True)
    if (target / "inpage").exists():
        # The marker goes last: until then an interrupted removal can be told from somebody else's package.
        for path in sorted((target / "inpage").iterdir()):
            if path.name != MARKER:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(target / "inpage")
    for found in target.glob("inpage-*.dist-info"):
        for path in sorted(found.iterdir()):
            if path.name != "INSTALLER":
                path.unlink()
        shutil.rmtree(found)


def _folders(target: Path) -> tuple[Path, Path]:
    return target / "inpage", target / STAGING


def _source_files() -> list[Path]:
    files = (path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file())
    return sorted(file for file in files if "__pycache__" not in file.parts)


def _digest(content: bytes) -> str:
    """As RECORD files have it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _write_record(root: Path, record: Path) -> None:
    lines = []
    for path in sorted(root.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            lines.append(f"{path.relative_to(root).as_posix()},{_digest(content)},{len(content)}")
    lines.append(f"{record.relative_to(root).as_posix()},,")
    record.write_text("\n".join(lines) + "\n", encoding="utf-8")


# -------------------------------------------------------------------------------------------------------- the command
def in_order(names: list[str]) -> list[Fix]:
    """The named fixes and what they require, in the order in which they are applied."""
    wanted = set(names)
    for name in names:
        for required in FIXES[name].requires:
            if required not in wanted:
                print(f"{required} comes along: {name} requires it")
                wanted.add(required)
    return [fix for fix in FIXES.values() if fix.name in wanted]


def apply(target: Path, profile: Profile, names: list[str]) -> None:
    """Check, then lay; says what it did."""
    refuse_foreign(target)
    fixes = in_order([*dict.fromkeys([*profile.fixes, *asked_for(target), *names])])
    check_sources(profile, fixes)
    if applied(target) == [fix.name for fix in fixes] and is_whole(target):
        shutil.rmtree(target / STAGING, ignore_errors=True)
        print(f"nothing to do: {', '.join(applied(target))} in place in {target}")
        return
    lay(target, fixes)
    if str(target) not in _paths_at_start:
        print(f"note: {sys.executable} does not look for packages in {target}; the Python that serves must")
    print(f"applied to {target}: {', '.join(applied(target))}")


def check(target: Path, profile: Profile, names: list[str]) -> None:
    """Say whether the fixes are in place and whole, and whether the sources are still the profile's."""
    refuse_foreign(target)
    fixes = in_order([*dict.fromkeys([*profile.fixes, *names])])
    check_sources(profile, fixes)
    there = applied(target)
    missing = [fix.name for fix in fixes if fix.name not in there]
    if missing:
        raise RefusalError(
            f"not applied to {target}: {', '.join(missing)}; the sources are the profile's, so they can be"
        )
    if not is_whole(target):
        raise RefusalError(f"{target / 'inpage'} is not as this repository has it: apply again")
    print(f"in place in {target}, sources as in the profile: {', '.join(there)}")


def revert(target: Path, names: list[str]) -> None:
    """Take fixes away, all of them when none is named."""
    refuse_foreign(target)
    there = applied(target)
    rest = [FIXES[name] for name in there if names and name not in names]
    for fix in rest:
        if gone := [name for name in fix.requires if name in names]:
            raise RefusalError(f"{fix.name} requires {', '.join(gone)}: revert it as well")
    if rest:
        lay(target, rest)
        print(f"left in {target}: {', '.join(applied(target))}")
    else:
        was_there = any(target.glob("inpage-*.dist-info")) or any(map(Path.exists, _folders(target)))
        remove(target)
        print(f"nothing of inpage is left in {target}" if was_there else f"nothing was applied to {target}")


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when done or in place, 1 with one sentence otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("fixes", nargs="*", metavar="FIX", help=", ".join(FIXES))
    parser.add_argument("--profile", choices=PROFILES, help="the release that the image is made of")
    parser.add_argument("--target", type=Path, help="site-packages of the image; this interpreter's if not given")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="change nothing, say what is in place")
    action.add_argument("--revert", action="store_true", help="take the named fixes away, or all of them")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.fixes if name not in FIXES]:
        parser.error(f"there is no fix {', '.join(unknown)}; there are {', '.join(FIXES)}")
    if not options.revert and options.profile is None:
        parser.error("--profile is needed")
    target = (options.target or Path(sysconfig.get_path("purelib"))).resolve()
    if not target.is_dir():
        parser.error(f"there is no folder {target}")
    if options.target:
        sys.path.insert(1, str(target))
        site.addsitedir(str(target))
    names = list(options.fixes)
    try:
        if options.revert:
            revert(target, names)
        elif options.check:
            check(target, PROFILES[options.profile], names)
        else:
            apply(target, PROFILES[options.profile], names)
    except (RefusalError, InPageError) as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"failed: {error}. Once that is put right, run this again, or --revert.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
