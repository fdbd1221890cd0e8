"""vLLM's command line as data: look flags up and add the ones that are missing, change nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import yaml

from inpage.errors import ConfigError

_SUFFIXED = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])")
"""`16k` is 16,000 and `16K` is 16,384, as vLLM reads them (argparse_utils.py); fractions only with the former."""


class ServerArguments:
    """Arguments for vLLM's server; understands `--flag value`, `--flag=value` and underscores for dashes.

    What a file given with `--config` says counts as given, behind the command line, as in vLLM.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._file: dict[str, str] = {}
        if file := self.value("--config"):
            self._file = _read_file(Path(file))

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def _index(self, flag: str) -> int | None:
        for index, argument in enumerate(self._arguments):
            if argument.split("=", 1)[0].replace("_", "-") == flag:
                return index
        return None

    def has(self, *flags: str) -> bool:
        """Whether the user gave one of these flags."""
        return any(self._index(flag) is not None or flag in self._file for flag in flags)

    def value(self, flag: str) -> str | None:
        """The value of a flag, None when it is not given; `ConfigError` when the value is missing."""
        index = self._index(flag)
        if index is None:
            return self._file.get(flag)
        _, equals, value = self._arguments[index].partition("=")
        if equals:
            return value
        if index + 1 == len(self._arguments) or self._arguments[index + 1].startswith("--"):
            raise ConfigError(f"{flag} needs a value")
        return self._arguments[index + 1]

    def number(self, flag: str) -> int | None:
        """The value of a flag as a positive whole number, None when it is not given."""
        value = self.value(flag)
        if value is None:
            return None
        try:
            number = _parse(value)
        except ValueError:
            number = 0
        if number < 1:
            raise ConfigError(f"{flag} {value} is not a positive whole number")
        return number

    def add(self, flag: str, value: object | None = None) -> str:
        """Append a flag; returns it as text."""
        words = [flag] if value is None else [flag, str(value)]
        self._arguments += words
        return " ".join(words)

    def replace(self, flag: str, value: object) -> str:
        """Change the value of a flag that is there; returns the flag as text."""
        index = self._index(flag)
        if index is None:
            return self.add(flag, value)  # it is in the file, which the command line overrides
        if "=" in self._arguments[index]:
            self._arguments[index] = f"{flag}={value}"
        else:
            self._arguments[index + 1] = str(value)
        return f"{flag} {value}"


def _parse(value: str) -> int:
    match = _SUFFIXED.fullmatch(value.strip())
    if match is None:
        return int(value)
    power = "kmgt".index(match[2].lower()) + 1
    return int(Decimal(match[1]) * 1000**power) if match[2].islower() else int(match[1]) * 1024**power


def _read_file(file: Path) -> dict[str, str]:
    """Flags of a YAML file as vLLM takes it with `--config`: names without dashes in front."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file} must map flags to values, not hold a {type(content).__name__}.")
    return {f"--{str(name).replace('_', '-')}": str(value) for name, value in content.items() if value is not False}
