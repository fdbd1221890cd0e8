"""Find and read the recipes that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from inpage.errors import ConfigError
from inpage.recipes.schema import Recipe

LIBRARY = Path(str(files("inpage") / "recipes" / "library"))
"""In a clone, `recipes/` at the top is a link to this folder."""


def names() -> list[str]:
    """Names of all recipes that come with the package."""
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def find(name: str) -> Recipe:
    """The recipe of this name, or in this file; raises `ConfigError` that lists the names there are."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return load(path)
    if name not in names():
        known = ", ".join(names()) or f"none at all (nothing in {LIBRARY})"
        raise ConfigError(f"there is no recipe {name!r}; there are: {known}")
    return load(LIBRARY / f"{name}.yaml")


def load(path: Path) -> Recipe:
    """Read a recipe file; raises `ConfigError` that names the file and the field."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping with a recipe's fields, not a {type(data).__name__}")
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'recipe'}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(f"{path} is not a recipe: {'; '.join(faults)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is not a recipe: {error}") from error
    if recipe.name != path.stem:
        raise ConfigError(f"{path}: name is {recipe.name!r}, the file says {path.stem!r}")
    return recipe
