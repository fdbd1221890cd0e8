"""One tensor-parallel rank: prints its slot table after each step of a fixed day, as JSON.

Run as a program with another PYTHONHASHSEED, it iterates the sets in its facts in another order. With the
argument `unsorted`, hand-backs go in the order in which the rank iterates its set.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable

from state_toy import Server, SymbolWorld, prompt

from inpage.state.slots import SlotTable

SLOTS = 6


def hand_back_unsorted(table: SlotTable, requests: Iterable[str]) -> list[str]:
    """`SlotTable.hand_back` without its order."""
    holders = [request for request in set(requests) if table.holds(request)]
    for request in holders:
        table._free.append(table._held.pop(request).index)
    return holders


def day() -> list[object]:
    """Several requests end and are preempted in each step; the facts name them in sets."""
    server = Server(SymbolWorld(4, 80, SLOTS), 80, SLOTS)
    source = random.Random(0)
    table = server.worker.mover.slots
    seen: list[object] = []
    for number in range(30):
        for part in range(2):
            server.submit(f"chatcmpl-{number}-{part}", prompt(number % 3, 5 + number % 7), outputs=3 + part)
        server.step()
        seen.append([table.held, table.free])
        names = [request.name for request in server.running]
        for name in source.sample(names, k=len(names) // 2):
            source.choice([server.preempt, server.abort])(name)
    return seen


if __name__ == "__main__":
    if sys.argv[1:] == ["unsorted"]:
        SlotTable.hand_back = hand_back_unsorted  # type: ignore[method-assign]
    print(json.dumps(day()))
