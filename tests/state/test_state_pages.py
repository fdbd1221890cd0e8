"""Rule 2: copies between slots and pages are exact to the bit, and touch nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inpage.errors import ConfigError, StateError
from inpage.state.pages import LayerStates, PageStore, rows_of_words

ENCODINGS = [
    0x7FC00000,  # the usual quiet NaN
    0x7FC12345,  # a quiet NaN with a payload
    0xFFC00001,  # a negative one
    0x7F800001,  # signalling NaNs
    0xFFBFFFFF,
    0x7F817F81,  # two signalling NaNs of bfloat16
    0x80000000,  # -0.0
    0x80008000,
    0x00000001,  # denormal
    0x7F800000,  # infinity
    0xFFFFFFFF,
    0x00000000,
]


def words_of(values: list[int]) -> torch.Tensor:
    return torch.tensor([value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32)


def random_parts(rows: int, sizes: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-(2**31), 2**31, (rows, size), generator=generator).int() for size in sizes]


def joined(parts: list[torch.Tensor], row: int) -> torch.Tensor:
    return torch.cat([part[row] for part in parts])


# ------------------------------------------------------------------------------------ rows of words
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.float64]
)
def test_a_tensor_of_any_dtype_is_seen_as_rows_of_int32_without_a_copy(dtype):
    tensor = torch.zeros(3, 2, 8, dtype=dtype)
    rows = rows_of_words(tensor, 3, "slots")
    assert rows.dtype == torch.int32
    assert rows.shape == (3, 16 * tensor.element_size() // 4)
    rows[1].fill_(-1)
    touched = tensor.view(torch.int8).view(3, -1) != 0
    assert touched.any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (torch.zeros(3, 5, dtype=torch.int8), 3),
        (torch.zeros(3, 3, dtype=torch.bfloat16), 3),
        (torch.zeros(3, 4), 5),
        (torch.zeros(4, 3).t(), 3),
        (torch.zeros(3, 8)[:, :4], 3),
    ],
    ids=["five bytes a row", "six bytes a row", "rows do not divide", "transposed", "a slice with gaps"],
)
def test_a_tensor_that_is_no_rows_of_whole_words_is_refused_with_shape_and_dtype(tensor, rows):
    with pytest.raises(ConfigError) as refusal:
        rows_of_words(tensor, rows, "the slots of layer 7")
    message = str(refusal.value)
    assert f"the slots of layer 7 of shape {tuple(tensor.shape)} and dtype {tensor.dtype}" in message
    assert f"cannot be seen as {rows} rows of whole int32 words" in message


def test_a_page_that_is_too_small_for_a_state_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"layer gdn.3: a state of 40 bytes does not fit into a page of 36 bytes"):
        LayerStates("gdn.3", 0, random_parts(2, [4, 6], 0), random_parts(2, [5, 4], 1))


# ---------------------------------------------------------------------------------- one layer's copy
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(slot_sizes=sizes, page_sizes=sizes, spare=st.integers(0, 5), seed=st.integers(0, 2**20))
def test_a_copy_equals_the_joined_parts_wherever_the_borders_lie(slot_sizes, page_sizes, spare, seed):
    missing = sum(slot_sizes) - sum(page_sizes)
    page_sizes = [*page_sizes[:-1], page_sizes[-1] + max(missing, 0) + spare]
    slots, pages = random_parts(3, slot_sizes, seed), random_parts(4, page_sizes, seed + 1)
    before = [part.clone() for part in pages]
    layer = LayerStates("gdn", 0, slots, pages)
    words = layer.words

    layer.save(1, 2)
    assert torch.equal(joined(pages, 2)[:words], joined(slots, 1))
    assert torch.equal(joined(pages, 2)[words:], joined(before, 2)[words:])
    for row in (0, 1, 3):
        assert torch.equal(joined(pages, row), joined(before, row))

    others = [part.clone() for part in slots]
    layer.restore(0, 2)
    assert torch.equal(joined(slots, 0), joined(slots, 1))
    for row in (1, 2):
        assert torch.equal(joined(slots, row), joined(others, row))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_encoding_survives_a_save_and_a_restore(dtype):
    slot_tensor = torch.zeros(2, len(ENCODINGS) * 4 // dtype.itemsize, dtype=dtype)
    page_tensor = torch.zeros(2, len(ENCODINGS) * 4 // dtype.itemsize, dtype=dtype)
    slots, pages = rows_of_words(slot_tensor, 2, "slots"), rows_of_words(page_tensor, 2, "pages")
    slots[0] = words_of(ENCODINGS)
    layer = LayerStates("gdn", 0, [slots], [pages])
    layer.save(0, 1)
    layer.restore(1, 1)
    assert torch.equal(pages[1], words_of(ENCODINGS))
    assert torch.equal(slots[1], words_of(ENCODINGS))


def test_pages_that_lie_apart_in_memory_are_written_without_the_gaps():
    pool = torch.full((4, 10), 7, dtype=torch.int32)
    (slots,) = random_parts(2, [6], 0)
    LayerStates("gdn", 0, [slots], [pool[:, :8]]).save(1, 3)
    assert torch.equal(pool[3, :6], slots[1])
    assert (pool[3, 6:] == 7).all()
    assert (pool[:3] == 7).all()


# -------------------------------------------------------------------------------------- the store
@pytest.fixture
def store() -> PageStore:
    """Two attention layers with K and V apart; three GDN groups of two layers on their pages."""
    pages = [random_parts(6, [8, 8], seed) for seed in (1, 2)]
    layers = [
        LayerStates(f"gdn {group}.{index}", group, random_parts(3, [3, 9], 10 * group + index), pages[index])
        for group in range(3)
        for index in range(2)
    ]
    return PageStore(layers, pages)


def test_each_group_saves_into_its_own_block_and_the_bytes_are_counted(store):
    assert store.checkpoint_bytes == 6 * 12 * 4
    assert store.save(1, [4, 2, 5]) == store.checkpoint_bytes
    for layer in store.layers:
        block = [4, 2, 5][layer.group]
        assert torch.equal(joined(layer.page_parts, block)[:12], joined(layer.slot_parts, 1))


def test_a_restore_brings_the_state_of_every_layer_into_another_slot(store):
    store.save(1, [4, 2, 5])
    assert store.restore(2, [4, 2, 5]) == store.checkpoint_bytes
    for layer in store.layers:
        assert torch.equal(joined(layer.slot_parts, 2), joined(layer.slot_parts, 1))


def test_a_zeroed_slot_has_all_bits_zero_and_its_neighbours_keep_theirs(store):
    before = [[part.clone() for part in layer.slot_parts] for layer in store.layers]
    store.zero_slot(1)
    for layer, old in zip(store.layers, before, strict=True):
        assert not joined(layer.slot_parts, 1).any()
        for row in (0, 2):
            assert torch.equal(joined(layer.slot_parts, row), joined(old, row))


def test_zeroed_pages_are_zero_in_every_attention_layer_and_no_other_page_is(store):
    before = [[part.clone() for part in parts] for parts in store.attention_pages]
    store.zero_pages([2, 5])
    for parts, old in zip(store.attention_pages, before, strict=True):
        for block in range(6):
            if block in (2, 5):
                assert not joined(parts, block).any()
            else:
                assert torch.equal(joined(parts, block), joined(old, block))


def test_zeroing_turns_minus_zero_into_zero(store):
    (first, *_), *_ = store.attention_pages
    first[3] = words_of([0x80000000] * 8)
    store.zero_pages([3])
    assert not first[3].any()


def test_a_checkpoint_without_a_block_for_every_group_is_refused_before_any_copy(store):
    before = [part.clone() for layer in store.layers for part in layer.page_parts]
    with pytest.raises(StateError, match=r"a block for each of \d+ GDN groups, got \[1\]"):
        store.save(1, [1])
    with pytest.raises(StateError, match="GDN groups"):
        store.restore(1, [1])
    after = [part for layer in store.layers for part in layer.page_parts]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_tensor_that_begins_inside_a_word_is_refused():
    with pytest.raises(ConfigError, match="first byte: 2"):
        rows_of_words(torch.zeros(9, dtype=torch.bfloat16)[1:], 2, "the slots")
