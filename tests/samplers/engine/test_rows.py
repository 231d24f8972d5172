"""Row stores and batch slots: state follows the rows that it belongs to, whatever it is made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gen.samplers.engine.rows import BatchSlots, RowStore, SlotChange
from gen.samplers.engine.stats import StatsRecorder


class NotedTarget:
    """A target that notes which item each of its rows is."""

    device = torch.device("cpu")

    def __init__(self, rows: int, items: int):
        self.rows, self.items, self.holds = rows, items, list(range(rows))

    def replace(self, rows, items):
        for row, item in zip(rows.nonzero()[:, 0].tolist(), items.tolist(), strict=True):
            self.holds[row] = item

    def keep(self, rows):
        self.holds = [self.holds[row] for row in rows.tolist()]
        self.rows = len(self.holds)


def store() -> RowStore:
    out = RowStore()
    out.starts = {"tensor": 0, "array": lambda: -1, "vector": torch.tensor([7, 8]), "not yet": 0}
    out.starts["valid elsewhere"] = None
    out["tensor"] = torch.arange(6).view(3, 2)
    out["array"] = np.arange(3)
    out["vector"] = torch.arange(6).view(3, 2)
    out["valid elsewhere"] = torch.arange(3)
    out["not yet"] = None
    return out


def plain(rows: RowStore) -> dict:
    return {name: None if x is None else x.tolist() for name, x in rows.items()}


def test_selected_rows_keep_their_state_and_may_repeat():
    rows = store()
    rows.follow(SlotChange(np.array([2, 0, 2])))
    assert plain(rows) == {
        "tensor": [[4, 5], [0, 1], [4, 5]],
        "array": [2, 0, 2],
        "vector": [[4, 5], [0, 1], [4, 5]],
        "valid elsewhere": [2, 0, 2],
        "not yet": None,
    }


def test_reset_rows_begin_anew_and_others_stay():
    rows = store()
    before = plain(rows)
    rows.follow(SlotChange(fresh=np.array([False, True, False])))
    assert plain(rows) == {
        **before,
        "tensor": [[0, 1], [0, 0], [4, 5]],
        "array": [0, -1, 2],
        "vector": [[0, 1], [7, 8], [4, 5]],
    }


def test_rows_that_are_taken_and_begin_anew_at_once_do_so_in_this_order():
    rows = store()
    rows.follow(SlotChange(np.array([2, 0]), np.array([False, True])))
    assert plain(rows) == {
        "tensor": [[4, 5], [0, 0]],
        "array": [2, -1],
        "vector": [[4, 5], [7, 8]],
        "valid elsewhere": [2, 0],
        "not yet": None,
    }


def test_a_reader_says_what_a_row_begins_with_where_nobody_has_declared_it():
    rows, start = RowStore(), torch.full((3,), 9)
    assert rows.get("count", start).tolist() == [9, 9, 9]
    rows["count"] = torch.arange(3)
    rows.follow(SlotChange(fresh=np.array([True, False, False])))
    rows.follow(SlotChange(fresh=np.array([False, False, True])))
    with pytest.raises(KeyError, match="was reset"):
        rows.get("count")
    assert rows.get("count", start).tolist() == [9, 1, 9]
    assert rows.get("count").tolist() == [9, 1, 9]  # it is said once
    rows.follow(SlotChange(fresh=np.array([False, True, False])))
    rows.follow(SlotChange(np.array([1, 2])))
    assert rows.get("count", start[1:] + 1).tolist() == [10, 9]
    rows.follow(SlotChange(fresh=np.array([True, True])))
    rows["count"] = torch.tensor([4, 5])
    assert rows.get("count", start[1:]).tolist() == [4, 5]


@pytest.mark.parametrize("unfinished", [None, np.array([True, True, False, True, False, True])])
def test_slots_give_finished_rows_to_waiting_items_and_then_drop_them(unfinished):
    target, judge, rows = NotedTarget(3, 6), NotedTarget(3, 6), RowStore()
    slots = BatchSlots(target, unfinished, (judge, rows))
    # an item without anything to generate never holds a row
    first = [0, 1, 2] if unfinished is None else [0, 1, 3]
    assert slots.items.tolist() == slots.rows.tolist() == target.holds == judge.holds == first
    rows["item"], rows.starts["item"] = slots.rows.clone(), 99
    assert slots.retire(np.zeros(3, dtype=bool)) is None
    change = slots.retire(np.array([False, True, False]))
    item = 3 if unfinished is None else 5
    expected = [first[0], item, first[2]]
    assert change.source is None and change.fresh.tolist() == [False, True, False]
    assert slots.items.tolist() == target.holds == judge.holds == expected
    assert rows["item"].tolist() == [first[0], 99, first[2]]
    assert change.follow(np.arange(3), 0).tolist() == [0, 0, 2]
    done = np.array([True, True, True])
    change = slots.retire(done)
    left = [4, 5] if unfinished is None else []
    assert slots.items.tolist() == left and len(slots) == len(left)
    if left:
        assert target.holds == judge.holds == left and rows["item"].tolist() == [99, 99]
        assert change.follow(np.arange(3), 7).tolist() == [7, 7]


def test_a_recorder_counts_what_was_noted_whatever_the_counts_are_made_of():
    recorder = StatsRecorder(3, trace=True, window=2)
    recorder.add(np.array([0, 2]), 4, 6, np.array([1, 3]), np.array([0, 2]), np.array([1, 2]))
    recorder.add(np.array([2]), torch.tensor([5]), 5, 2, 1, 2, torch.tensor([False]))
    recorder.add_trace(2, range(2), [0], {0: 5})
    out = recorder.output(torch.zeros(3, 4), 6.0)
    assert [s.nfe for s in out.stats] == [1, 0, 1]
    assert [s.tokens for s in out.stats] == [1, 0, 5]
    assert [s.tokens_computed for s in out.stats] == [4, 0, 9]
    assert [s.positions_computed for s in out.stats] == [6, 0, 11]
    assert [s.draft_acceptance_rate for s in out.stats] == [0.0, None, 0.75]
    assert [s.acceptance_histogram for s in out.stats] == [[1, 0], [], [0, 1, 1]]
    assert [s.seconds for s in out.stats] == [2.0] * 3
    assert [len(row) for row in out.traces] == [0, 0, 1]
    assert recorder.output(torch.zeros(3, 4), 6.0, [7, 7, 7]).stats[2].tokens == 7


FORGETFUL = {
    "source": lambda change: SlotChange(None, change.fresh),
    "fresh": lambda change: SlotChange(change.source),
}


@pytest.mark.parametrize(
    ("forgotten", "test"),
    [
        ("source", test_selected_rows_keep_their_state_and_may_repeat),
        ("fresh", test_reset_rows_begin_anew_and_others_stay),
        ("fresh", lambda: test_slots_give_finished_rows_to_waiting_items_and_then_drop_them(None)),
    ],
)
def test_control_a_store_that_forgets_a_part_of_a_change_is_found(monkeypatch, forgotten, test):
    test()
    follow, less = RowStore.follow, FORGETFUL[forgotten]
    monkeypatch.setattr(RowStore, "follow", lambda self, change: follow(self, less(change)))
    with pytest.raises(AssertionError):
        test()
