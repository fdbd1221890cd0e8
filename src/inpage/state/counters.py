"""What the mechanism has done so far, for the log and the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Running totals since start; `bytes` and `seconds` are those of saves, restores and copies of blocks.

    `step_seconds` is the time of the engine's steps as a whole, which an engine adds up.
    """

    saves: int = 0
    restores: int = 0
    fresh: int = 0
    hand_backs: int = 0
    zeroed_pages: int = 0
    block_copies: int = 0
    bytes: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0

    def line(self) -> str:
        """One line for a log."""
        rate = self.bytes / self.seconds / 2**30 if self.seconds else 0.0
        share = self.seconds / self.step_seconds if self.step_seconds else 0.0
        return (
            f"saves {self.saves}, restores {self.restores}, fresh slots {self.fresh}, hand-backs {self.hand_backs}, "
            f"zeroed pages {self.zeroed_pages}, copied blocks {self.block_copies}, "
            f"copied {self.bytes / 2**20:.1f} MiB in {self.seconds:.3f} s "
            f"({rate:.1f} GiB/s, {share:.3%} of the steps' time)"
        )
