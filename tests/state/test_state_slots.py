"""Rule 1: a running state lives in its slot, and nowhere else."""

import pytest

from inpage.errors import ConfigError, StateError
from inpage.state.slots import SlotTable


def test_slots_are_given_from_the_lowest_index_up():
    table = SlotTable([3, 1, 2])
    assert [table.give(request, 0) for request in ("a", "b", "c")] == [1, 2, 3]
    assert table.held == {"a": 1, "b": 2, "c": 3}
    assert table.free == ()
    assert table.count == 3


def test_a_slot_remembers_up_to_which_position_its_state_covers():
    table = SlotTable(range(1, 3))
    table.give("a", 48)
    slot = table.of("a")
    assert (slot.index, slot.position) == (1, 48)
    slot.position += 5
    assert table.of("a").position == 53


def test_a_slot_that_was_handed_back_is_given_next():
    table = SlotTable(range(1, 4))
    table.give("a", 0)
    table.give("b", 0)
    assert table.hand_back(["a"]) == ["a"]
    assert not table.holds("a")
    assert table.holds("b")
    assert table.free == (3, 1)
    assert table.give("c", 24) == 1


def test_hand_backs_go_in_sorted_order_whatever_the_order_of_the_facts():
    frees = set()
    for order in (["c", "a", "b"], ["b", "c", "a"], ["a", "b", "c"]):
        table = SlotTable(range(1, 5))
        for request in ("b", "c", "a"):
            table.give(request, 0)
        assert table.hand_back(order) == ["a", "b", "c"]
        frees.add(table.free)
    assert frees == {(4, 3, 1, 2)}


def test_handing_back_twice_or_without_a_slot_changes_nothing():
    table = SlotTable(range(1, 3))
    table.give("a", 0)
    assert table.hand_back(["a", "a", "stranger"]) == ["a"]
    assert table.hand_back(["a"]) == []
    assert table.free == (2, 1)
    table.check_integrity()


def test_a_request_that_holds_a_slot_is_refused_a_second_one():
    table = SlotTable(range(1, 3))
    table.give("a", 24)
    with pytest.raises(
        StateError, match=r"request a starts at position 48 while it still holds slot 1 at position 24: a hand-back"
    ):
        table.give("a", 48)
    assert table.free == (2,)


def test_without_a_free_slot_the_request_is_refused_and_the_holders_are_named():
    table = SlotTable(range(1, 3))
    table.give("a", 0)
    table.give("b", 0)
    with pytest.raises(StateError, match=r"no slot for request c at position 24: all 2 are held by a, b; preempted"):
        table.give("c", 24)
    assert not table.holds("c")


def test_a_request_without_a_slot_is_refused_when_it_is_scheduled():
    table = SlotTable(range(1, 4))
    table.give("a", 0)
    with pytest.raises(StateError, match=r"request b is scheduled but holds no slot.*\(1 of 3 slots are held\)"):
        table.of("b")


def test_integrity_holds_after_every_give_and_hand_back():
    table = SlotTable(range(1, 4))
    table.check_integrity()
    for request in ("a", "b"):
        table.give(request, 0)
        table.check_integrity()
    table.hand_back(["a"])
    table.check_integrity()


@pytest.mark.parametrize("break_it", [lambda free: free.pop(), lambda free: free.append(1)], ids=["lost", "doubled"])
def test_integrity_names_a_slot_that_was_lost_or_doubled(break_it):
    table = SlotTable(range(1, 4))
    table.give("a", 0)
    break_it(table._free)
    with pytest.raises(StateError, match=r"slots lost or doubled: free \[.*\], held \{'a': 1\}, all \(1, 2, 3\)"):
        table.check_integrity()


def test_the_queries_hand_out_copies():
    table = SlotTable(range(1, 3))
    table.give("a", 0)
    table.held.clear()
    assert table.held == {"a": 1}


def test_the_same_slot_twice_is_refused():
    with pytest.raises(ConfigError, match=r"\[1, 1, 2\] are not all different"):
        SlotTable([1, 2, 1])
