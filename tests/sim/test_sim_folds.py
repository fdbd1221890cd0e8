"""The symbolic state: exact, affine in its start, and never another group's."""

from __future__ import annotations

import random

from inpage.sim.folds import GROUP_STARTS, MODULUS, MULTIPLIER, POWERS, Transcript, key_of
from inpage.sim.store import GARBAGE, POISON, UNKNOWN, SymbolStore, describe, marked_state, state_mark

TOKENS = random.Random(1).choices(range(4096), k=300)


def fold(state: int, tokens: list[int], key: int) -> int:
    for token in tokens:
        state = (state * MULTIPLIER + token + key) % MODULUS
    return state


def test_a_transcript_has_the_fold_of_every_prefix() -> None:
    transcript = Transcript(key_of(0, 0), TOKENS[:100])
    transcript.extend(TOKENS[100:])
    assert transcript.folds == [fold(0, TOKENS[:n], key_of(0, 0)) for n in range(301)]
    assert transcript.prefix(70).folds == transcript.folds[:71]


def test_a_groups_state_is_the_fold_from_its_own_start() -> None:
    transcript = Transcript(key_of(1, 2), TOKENS)
    for group, start in enumerate(GROUP_STARTS):
        assert transcript.state(123, group) == fold(start, TOKENS[:123], key_of(1, 2))


def test_a_chunk_from_any_state_is_two_multiplications() -> None:
    transcript = Transcript(key_of(0, 0), TOKENS)
    power = POWERS.upto(53)[53]
    chunk = transcript.folds[230] - transcript.folds[177] * power
    assert (987654321 * power + chunk) % MODULUS == fold(987654321, TOKENS[177:230], key_of(0, 0))


def test_salts_and_adapters_change_the_state_from_the_first_token() -> None:
    keys = [key_of(salt, adapter) for salt in range(4) for adapter in range(4)]
    assert len({Transcript(key, TOKENS[:1]).folds[1] for key in keys}) == len(keys)


def test_a_page_gives_its_state_to_its_own_group_only() -> None:
    mark = state_mark(2, 12345)
    assert marked_state(mark, 2) == 12345
    assert [marked_state(mark, group) for group in (0, 1, 3)] == [GARBAGE] * 3
    assert [marked_state(page, 0) for page in (UNKNOWN, POISON, 0, 7)] == [GARBAGE] * 4
    assert describe(mark) == "a checkpoint of GDN group 2 with the state 12345"


def test_what_is_saved_comes_back_and_attention_rows_come_back_as_garbage() -> None:
    store = SymbolStore(num_blocks=8, slots=2, groups=3)
    store.zero_slot(1)
    store.save(1, (3, 4, 5))
    store.restore(2, (3, 4, 5))
    assert store.slots[2] == store.slots[1] == list(GROUP_STARTS[:3])
    store.write(4, 99)
    store.restore(2, (3, 4, 5))
    assert store.slots[2] == [GROUP_STARTS[0], GARBAGE, GROUP_STARTS[2]]
