"""Holds memory so that only a share of the machine's is free, until its input ends; run as a program of its own.

It asks the kernel to be killed first, and lets go when less than `FLOOR` is left, so that it harms nobody.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
from pathlib import Path

STEP = 64 * 2**20
FLOOR = 3 * 2**29


def available() -> int:
    """Bytes that are free now, of the machine or its memory node or a cgroup."""
    from inpage.serve.machine import Machine

    machine = Machine.here({})
    return 0 if machine is None else machine.available


def main() -> None:
    wanted_free = int(sys.argv[1])
    Path("/proc/self/oom_score_adj").write_text("1000")
    written = b"1" * STEP
    held: list[mmap.mmap] = []
    while available() - wanted_free > STEP:
        piece = mmap.mmap(-1, STEP)
        piece.write(written)
        held.append(piece)
    print(f"holding {len(held) * STEP} bytes", flush=True)
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        if held and available() < FLOOR:
            held.pop().close()
    os._exit(0)


if __name__ == "__main__":
    main()
