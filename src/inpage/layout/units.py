"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from inpage.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def parse_memory(text: str) -> int:
    """Bytes of a size such as `18475MiB`, `18.04GiB`, `19GB` or plain bytes; a part of a byte is dropped."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a memory size; write it like 18475MiB, 18.04GiB or 19372441600.")
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise ConfigError(f"The memory size {text!r} is nothing; give the bytes that the pool may use.")
    return size


def mib(size: int) -> str:
    """`size` bytes in MiB, to two places."""
    return f"{size / 2**20:,.2f} MiB"


def gib(size: int) -> str:
    """`size` bytes in GiB, to two places, or in MiB where that would say too little."""
    return f"{size / 2**30:,.2f} GiB" if abs(size) >= 2**28 else mib(size)
