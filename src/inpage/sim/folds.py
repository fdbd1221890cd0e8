"""The symbolic state: an exact fold over tokens, so that every comparison is equality, never tolerance.

    F(0) = 0        F(n + 1) = (F(n) * MULTIPLIER + token + key) mod MODULUS

`key` stands for everything besides tokens that a state depends on (an adapter, or a cache salt that must
not be shared). The states of the GDN groups are the same fold from different starts, so that no group's
state can pass for another's. A fold is affine in its start, which makes a chunk of any length two
multiplications, whatever state it starts from:

    F(b) from s at a = s * MULTIPLIER^(b - a) + (F(b) - F(a) * MULTIPLIER^(b - a))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat

MODULUS = 2**61 - 1
MULTIPLIER = 1_152_921_504_606_846_883
VOCABULARY = 4096
GROUP_STARTS = (0x1B873593CC9E2D51 % MODULUS, 0x5DEECE66D, 0x2545F4914F6CDD1D % MODULUS, 0x9E3779B97F4A7C15 % MODULUS)
"""The empty state of GDN group g, at g; four groups at most."""


class Powers:
    """`MULTIPLIER^n mod MODULUS`, grown as needed."""

    def __init__(self) -> None:
        self._powers = [1]

    def upto(self, length: int) -> Sequence[int]:
        """A list that has at least the powers 0 to `length`."""
        missing = length + 1 - len(self._powers)
        if missing > 0:
            # In one stride more than asked, because callers come back one token later.
            more = accumulate(
                repeat(MULTIPLIER, missing + 4096), lambda p, m: p * m % MODULUS, initial=self._powers[-1]
            )
            self._powers += list(more)[1:]
        return self._powers


POWERS = Powers()


def key_of(salt: int, adapter: int) -> int:
    """The key of states under this cache salt and adapter; 0 is none."""
    return 0x1F123BB5 + 0x3C6EF372FE94 * salt + 0xA54FF53A5F1D * adapter


class Transcript:
    """Tokens with the fold of each of their prefixes: what a cold run over them gives."""

    __slots__ = ("folds", "key", "tokens")

    def __init__(self, key: int, tokens: Iterable[int] = ()) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.folds: list[int] = [0]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        added, key, state = list(tokens), self.key, self.folds[-1]
        self.tokens += added
        for token in added:
            state = (state * MULTIPLIER + token + key) % MODULUS
            self.folds.append(state)

    def prefix(self, length: int) -> Transcript:
        """A transcript of the first `length` tokens, of its own."""
        copy = Transcript(self.key)
        copy.tokens, copy.folds = self.tokens[:length], self.folds[: length + 1]
        return copy

    def state(self, position: int, group: int) -> int:
        """GDN group `group`'s state after `position` tokens."""
        return (self.folds[position] + GROUP_STARTS[group] * POWERS.upto(position)[position]) % MODULUS


def sampled_token(state: int) -> int:
    """The token that greedy sampling picks in this state."""
    return (state >> 13) % VOCABULARY
