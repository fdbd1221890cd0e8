"""Resident memory of a server: all processes of its process group, read from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(group: int, proc: Path = Path("/proc")) -> int:
    """Sum of the resident sets of the processes of a process group; 0 when it has none."""
    total = 0
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name in parentheses may contain anything; the fields behind it are plain.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == group:
            total += int(fields[21]) * PAGE_BYTES
    return total
