import torch

from smdlib.policies import CacheView


def test_of_prompt_is_left_padded_and_newest_ignores_padding():
    view = CacheView.of_prompt(torch.zeros(3, 2, 4, 16), budget=2, lengths=torch.tensor([4, 3, 1]))
    assert view.positions[:, 0].tolist() == [[0, 1, 2, 3], [-1, 0, 1, 2], [-1, -1, -1, 0]]
    assert torch.equal(view.positions[:, 0], view.positions[:, 1])
    assert view.scaling == 0.25
    assert view.budget.tolist() == [[2, 2]] * 3
    newest = [[False, False, True, True], [False, False, True, True], [False, False, False, True]]
    assert view.newest(2)[:, 1].tolist() == newest
    assert torch.equal(view.newest(100), view.present)
    assert not view.newest(0).any()


def test_newest_takes_a_number_for_each_row_and_head():
    view = CacheView.of_prompt(torch.zeros(2, 2, 4, 1), budget=2)
    counts = view.newest(torch.tensor([[0, 1], [2, 9]])).sum(-1)
    assert counts.tolist() == [[0, 1], [2, 4]]


def test_protect_is_above_everything_and_empty_slots_are_below():
    view = CacheView.of_prompt(torch.zeros(1, 1, 3, 1), budget=1, lengths=torch.tensor([2]))
    scores = torch.tensor([[[float("nan"), 1e30, -1e30]]])
    assert view.protect(scores, view.newest(1)).tolist() == [[[float("-inf"), float(torch.tensor(1e30)), float("inf")]]]
