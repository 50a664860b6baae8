"""The ring of the newest queries against the end of a concatenation."""

import pytest
import torch

from smdlib.cache.queries import QueryWindow

BATCH, HEADS, DIM = 2, 3, 4


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("sizes", [[1] * 9, [3] * 4, [20], [2, 1, 1, 7, 1, 3], [8, 1, 8], [1, 30, 1]])
def test_window_is_the_end_of_all_queries(window, sizes):
    torch.manual_seed(0)
    ring, everything = QueryWindow(window), torch.zeros(BATCH, HEADS, window, DIM)
    for size in sizes:
        queries = torch.randn(BATCH, HEADS, size, DIM)
        ring.push(queries)
        everything = torch.cat([everything, queries], dim=2)
        assert torch.equal(ring.newest_last(), everything[:, :, -window:])


def test_storage_is_allocated_once():
    ring = QueryWindow(4)
    ring.push(torch.zeros(BATCH, HEADS, 2, DIM))
    address = ring._ring.data_ptr()
    for _ in range(9):
        ring.push(torch.ones(BATCH, HEADS, 1, DIM))
    assert ring._ring.data_ptr() == address and ring._ring.shape[2] == 4


def test_rows_are_mapped_at_any_turn_of_the_ring():
    ring = QueryWindow(3)
    ring.map_rows(lambda rows: rows[[0, 0]])  # before the first query there is nothing to map
    queries = torch.randn(BATCH, HEADS, 4, DIM)
    ring.push(queries)
    ring.map_rows(lambda rows: rows[[1, 0, 1]])
    newest = torch.randn(3, HEADS, 1, DIM)
    ring.push(newest)
    assert torch.equal(ring.newest_last(), torch.cat([queries[[1, 0, 1], :, 2:], newest], dim=2))


def test_the_window_holds_no_graph():
    ring = QueryWindow(2)
    ring.push(torch.randn(BATCH, HEADS, 5, DIM, requires_grad=True))
    assert not ring.newest_last().requires_grad


def test_reading_before_the_first_query_is_an_error():
    with pytest.raises(RuntimeError, match=r"newest_last\(\) before the first push\(\)"):
        QueryWindow(2).newest_last()
