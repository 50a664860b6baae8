"""Limits of keys against the masks that they stand for."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from smdlib.masks.limits import Limits, is_interval, narrowed
from smdlib.masks.shadow import NEVER
from smdlib.masks.spec import MaskSpec

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
PATTERNS = {
    "causal": causal_mask_function,
    "sliding": sliding_window_causal_mask_function(3),
    "chunked": chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "both": and_masks(chunked_causal_mask_function(6, torch.tensor([2, 0])), sliding_window_overlay(4)),
    "endless": sliding_window_causal_mask_function(NEVER),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_limits_are_the_models_own_pattern_and_the_evictions(name):
    spec = MaskSpec({"mask_function": PATTERNS[name]})
    assert is_interval(spec)
    torch.manual_seed(0)
    queries = torch.arange(3, 17, dtype=torch.int32).expand(2, -1)
    keys = torch.stack([torch.randperm(17)[:13] for _ in range(6)]).view(2, 3, 13).int()  # of each head other ones
    evicted = torch.randint(1, 20, keys.shape, dtype=torch.int32)
    limits = Limits(queries, keys, torch.where(evicted > 15, NEVER, evicted), {})
    expected = spec.between(queries, keys) & limits.visible()
    own = narrowed(limits, spec)
    at, key, until = own.queries[:, None, :, None], own.keys[:, :, None], own.until[:, :, None]
    assert torch.equal((key <= at) & (at < until), expected)
    assert expected.any() and not expected.all()


@pytest.mark.parametrize(
    "pattern",
    [
        bidirectional_mask_function,
        sliding_window_overlay(3),  # nothing says that the future stays hidden
        or_masks(causal_mask_function, blockwise_overlay(IDS)),
        and_masks(causal_mask_function, packed_sequence_mask_function(IDS)),
        and_masks(causal_mask_function, lambda b, h, q, k: k != 2),
        and_masks(causal_mask_function, or_masks(sliding_window_overlay(3), causal_mask_function)),
    ],
    ids=["both ways", "window alone", "images", "packed", "own", "or inside"],
)
def test_other_patterns_are_not_taken_for_intervals(pattern):
    assert not is_interval(MaskSpec({"mask_function": pattern}))
