"""What the demo runs: which arms, which sessions, in what pool."""

from __future__ import annotations

from dataclasses import dataclass

from inpage.demo.model import DemoModel
from inpage.replay.sessions import SessionSpec

ARMS = ("off", "native", "per-block", "in-page")
BLOCK_TOKENS = 256
"""The demo model's block: the smallest multiple of 128 tokens whose page holds a float32 state."""
MARK_TOKENS = 64
"""`--prefix-match-unit` of the arm with hits inside a block: the tokens that a GDN kernel takes at a time on CPU."""
WITH_MARKS = f"in-page-{MARK_TOKENS}"
SEQUENCES = 4
MAX_MODEL_LEN = 20480


@dataclass(frozen=True)
class DemoCase:
    """One comparison.

    `blocks` is the in-page pool, `parity_prompts` how many cold and hit runs are compared. `retention` is vLLM's
    `--prefix-cache-retention-interval`: None keeps a checkpoint at every boundary, 0 (vLLM's default) those at the
    ends of prompts, which is what sessions that only grow come back to.
    """

    name: str
    what: str
    arms: tuple[str, ...]
    sessions: SessionSpec
    blocks: int
    parity_prompts: int
    retention: int | None = None
    model: DemoModel = DemoModel()
    budget: int = BLOCK_TOKENS + 128
    """Tokens a step. With one block and 64 tokens stock's grid of 128 falls on the blocks too, so that arms differ in
    layout only; with one block and 128 it does not, which is what a server gets by default."""


    def unit_tokens(self, arm: str) -> int:
        """Hits of this arm come in units of so many tokens."""
        return MARK_TOKENS if arm == WITH_MARKS else BLOCK_TOKENS

    @property
    def has_marks(self) -> bool:
        """Whether the case is about hits inside a block."""
        return WITH_MARKS in self.arms


def layout_of(arm: str) -> str:
    """The layout that an arm is served with."""
    return "in-page" if arm == WITH_MARKS else arm


def _sessions(number: int, start_tokens: int, end_tokens: int, new_tokens: int) -> SessionSpec:
    return SessionSpec(
        sessions=number,
        start_tokens=start_tokens,
        end_tokens=end_tokens,
        new_tokens=new_tokens,
        output_tokens=16,
        system_tokens=1536,
    )


CASES = {
    "arms": DemoCase(
        "arms",
        "two sessions of 2K to 16K tokens in a pool that holds them in every layout",
        ARMS,
        _sessions(2, 2048, 16384, 1152),
        blocks=360,
        parity_prompts=32,
    ),
    "quick": DemoCase(
        "quick",
        "two short sessions, a few prompts compared",
        ARMS,
        _sessions(2, 2048, 5120, 1024),
        blocks=160,
        parity_prompts=4,
    ),
    "overflow": DemoCase(
        "overflow",
        "eight sessions of 8K to 12K tokens: the in-page pool holds them, the per-block pool does not",
        ("per-block", "in-page"),
        _sessions(8, 8192, 12288, 512),
        blocks=470,
        parity_prompts=0,
        retention=0,
        budget=BLOCK_TOKENS + 64,
    ),
    "fit": DemoCase(
        "fit",
        "half as many sessions in the same pools: both hold them, and the layouts tie",
        ("per-block", "in-page"),
        _sessions(4, 8192, 12288, 512),
        blocks=470,
        parity_prompts=0,
        retention=0,
        budget=BLOCK_TOKENS + 64,
    ),
    "marks": DemoCase(
        "marks",
        "a session whose turns add 300 tokens, with hits in blocks of 256 and inside them, every 64 tokens",
        ("in-page", WITH_MARKS),
        # One at a time: of two, each waits for the other's prefill, in TTFT or in decode as their turns happen to fall.
        _sessions(1, 2048, 14336, 300),
        blocks=500,
        parity_prompts=8,
        # Wide enough that a turn's time goes into its tokens and not into the number of its steps.
        model=DemoModel(hidden=512, intermediate=512),
    ),
}
