"""vLLM's command line as data: look flags up and add the ones that are missing, change nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inpage.errors import ConfigError


class ServerArguments:
    """Arguments for vLLM's server; understands `--flag value`, `--flag=value` and underscores for dashes."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def _index(self, flag: str) -> int | None:
        for index, argument in enumerate(self._arguments):
            if argument.split("=", 1)[0].replace("_", "-") == flag:
                return index
        return None

    def has(self, *flags: str) -> bool:
        """Whether the user gave one of these flags."""
        return any(self._index(flag) is not None for flag in flags)

    def value(self, flag: str) -> str | None:
        """The value of a flag, None when it is not given; `ConfigError` when the value is missing."""
        index = self._index(flag)
        if index is None:
            return None
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
            number = int(value)
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
        assert index is not None, flag
        if "=" in self._arguments[index]:
            self._arguments[index] = f"{flag}={value}"
        else:
            self._arguments[index + 1] = str(value)
        return f"{flag} {value}"
