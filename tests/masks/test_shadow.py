"""`ShadowMask` against loops over queries and keys."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from smdlib import NEVER, ShadowMask
from smdlib.masks.shadow import check_record


def random_mask(*batch, tokens=7, layers=2, heads=3, seed=0, never=0.3) -> ShadowMask:
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, tokens, layers, heads)
    own = torch.arange(tokens)[:, None, None]
    life = torch.randint(1, tokens + 3, shape, generator=generator)
    forever = torch.rand(shape, generator=generator) < never
    evicted_at = torch.where(forever, NEVER, own + life).int()
    return ShadowMask(evicted_at=evicted_at, batch_size=batch)


def slow_visible(mask, row, layer, head, query, key):
    """What a query of one row sees, as the definition says it."""
    return key <= query and query < int(mask.evicted_at[row][key, layer, head])


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_visible_is_its_definition(seed, tokens, heads):
    mask = random_mask(2, tokens=tokens, heads=heads, seed=seed)
    for layer in range(2):
        visible = mask.visible(layer)
        assert visible.shape == (2, heads, tokens, tokens) and visible.dtype is torch.bool
        for row, head, query, key in torch.cartesian_prod(*map(torch.arange, visible.shape)).reshape(-1, 4).tolist():
            assert visible[row, head, query, key] == slow_visible(mask, row, layer, head, query, key)


def test_visible_for_some_queries():
    mask = random_mask(2)
    assert torch.equal(mask.visible(1, queries=[5, 0, 3]), mask.visible(1)[:, :, [5, 0, 3]])
    assert torch.equal(mask.visible(1, queries=torch.tensor([6])), mask.visible(1)[:, :, [6]])
    # A query beyond the record sees what was never evicted.
    assert torch.equal(
        mask.visible(0, queries=[NEVER - 1])[:, :, 0], (mask.evicted_at[:, :, 0] == NEVER).transpose(1, 2)
    )


def test_every_query_sees_itself_and_nothing_after_itself():
    visible = random_mask(3, never=0.0).visible(0)
    assert visible.diagonal(dim1=-2, dim2=-1).all()
    assert not visible.triu(1).any()


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_any_batch_shape(batch):
    mask = random_mask(*batch)
    assert mask.batch_size == batch and mask.num_tokens == 7
    assert mask.visible(0).shape == (*batch, 3, 7, 7)
    assert mask.retention().shape == (*batch, 2, 3)
    assert mask.pad(9).evicted_at.shape == (*batch, 9, 2, 3)
    assert mask.crop(4).evicted_at.shape == (*batch, 4, 2, 3)


@given(st.integers(0, 999), st.lists(st.integers(1, 7), min_size=2, max_size=2))
@settings(max_examples=30, deadline=None)
def test_retention_is_the_mean_of_visible(seed, lengths):
    mask = random_mask(2, seed=seed)
    for given_lengths, ends in ((None, [7, 7]), (lengths, lengths), (torch.tensor(lengths), lengths)):
        retention = mask.retention(given_lengths)
        assert retention.shape == (2, 2, 3) and retention.dtype is torch.float32
        for row, end in enumerate(ends):
            for layer in range(2):
                visible = mask.visible(layer)[row, :, :end, :end].sum((-2, -1))
                torch.testing.assert_close(retention[row, layer], visible / (end * (end + 1) / 2))


def test_dense_sees_everything():
    mask = ShadowMask.dense(2, 5, 3, 1)
    assert mask.batch_size == (2,) and mask.evicted_at.dtype is torch.int32
    assert torch.equal(mask.visible(2), torch.ones(2, 1, 5, 5).tril().bool())
    assert (mask.retention() == 1).all()


def test_pad_never_evicts_what_it_adds():
    mask = random_mask(2)
    longer = mask.pad(10)
    assert torch.equal(longer.evicted_at[:, :7], mask.evicted_at)
    assert (longer.evicted_at[:, 7:] == NEVER).all() and longer.evicted_at.dtype is torch.int32
    assert torch.equal(longer.visible(0)[..., :7, :7], mask.visible(0))
    assert torch.equal(mask.pad(7).evicted_at, mask.evicted_at)


def test_crop_forgets_evictions_after_its_end():
    mask = random_mask(2, never=0.0)
    shorter = mask.crop(4)
    assert torch.equal(shorter.visible(0), mask.visible(0)[..., :4, :4])
    assert ((shorter.evicted_at < 4) | (shorter.evicted_at == NEVER)).all() and shorter.evicted_at.dtype is torch.int32
    assert torch.equal(mask.crop(7).pad(9).crop(7).evicted_at, mask.crop(7).evicted_at)


@pytest.mark.parametrize(
    ("method", "tokens", "message"),
    [
        ("pad", 6, r"cannot pad a mask of 7 tokens to 6; crop\(\) shortens"),
        ("crop", 8, r"cannot crop a mask of 7 tokens to 8; pad\(\) lengthens"),
        ("crop", 0, r"cannot crop a mask of 7 tokens to 0"),
        ("crop", -1, r"cannot crop a mask of 7 tokens to -1"),
    ],
)
def test_pad_only_lengthens_and_crop_only_shortens(method, tokens, message):
    with pytest.raises(ValueError, match=message):
        getattr(random_mask(1), method)(tokens)


def test_stack_pads_to_the_longest():
    masks = [random_mask(tokens=5, seed=1), random_mask(tokens=7, seed=2), random_mask(tokens=2, seed=3)]
    stacked = ShadowMask.stack(masks)
    assert stacked.batch_size == (3,) and stacked.num_tokens == 7
    for row, mask in enumerate(masks):
        assert torch.equal(stacked.evicted_at[row], mask.pad(7).evicted_at)
    assert ShadowMask.stack([random_mask(2), random_mask(2, tokens=9)]).evicted_at.shape == (2, 2, 9, 2, 3)


def test_stack_of_nothing_or_of_different_models_is_an_error():
    with pytest.raises(ValueError, match="needs at least one mask"):
        ShadowMask.stack([])
    with pytest.raises(ValueError, match=r"different \(layers, KV heads\): \[\(2, 1\), \(2, 3\)\]"):
        ShadowMask.stack([random_mask(heads=3), random_mask(heads=1)])


def test_nbytes_is_four_per_token_layer_and_head():
    assert random_mask(5, tokens=7, layers=2, heads=3).nbytes == 4 * 5 * 7 * 2 * 3
    # Of a bf16 cache with head size 128: below 1 %.
    assert random_mask(1).nbytes / (7 * 2 * 3 * 2 * 128 * 2) < 0.01


def test_pickle_brings_the_mask_back():
    mask = random_mask(2)
    other = pickle.loads(pickle.dumps(mask))
    assert type(other) is ShadowMask and other.batch_size == mask.batch_size
    assert torch.equal(other.evicted_at, mask.evicted_at) and other.evicted_at.dtype is torch.int32
    assert torch.equal(other.visible(1), mask.visible(1))


def test_rows_are_stacked_indexed_and_joined_as_those_of_a_tensor():
    mask = random_mask(4)
    assert type(mask[1]) is ShadowMask and mask[1].batch_size == ()
    assert torch.equal(mask[1].visible(0), mask.visible(0)[1])
    assert torch.equal(mask[1:3].evicted_at, mask.evicted_at[1:3])
    assert torch.equal(mask[torch.tensor([3, 0])].evicted_at, mask.evicted_at[[3, 0]])
    rows = torch.stack([mask[row] for row in (2, 2, 0)])
    assert rows.batch_size == (3,) and torch.equal(rows.evicted_at, mask.evicted_at[[2, 2, 0]])
    assert torch.equal(torch.cat([mask[:1], mask[3:]]).evicted_at, mask.evicted_at[[0, 3]])
    assert torch.equal(mask.reshape(2, 2).evicted_at, mask.evicted_at.reshape(2, 2, 7, 2, 3))


def test_a_tensordict_carries_a_mask():
    data = TensorDict({"shadow": random_mask(4), "advantage": torch.arange(4.0)}, batch_size=[4])
    part = data[torch.tensor([2, 1])]
    assert type(part["shadow"]) is ShadowMask
    assert torch.equal(part["shadow"].evicted_at, random_mask(4).evicted_at[[2, 1]])


@pytest.mark.parametrize(
    ("evicted_at", "message"),
    [
        (
            torch.full((1, 3, 1, 1), NEVER),
            r"must be int32 \[\*batch, T, L, H\], not torch.int64 of shape \(1, 3, 1, 1\)",
        ),
        (torch.full((3, 1), NEVER, dtype=torch.int32), r"not torch.int32 of shape \(3, 1\)"),
        (
            torch.tensor([1, 2, 2], dtype=torch.int32)[:, None, None],
            r"gone before its own query \(evicted_at\[k\] <= k\)",
        ),
        (torch.tensor([-1, 2, 3], dtype=torch.int32)[:, None, None], "gone before its own query"),
    ],
)
def test_impossible_records_are_refused(evicted_at, message):
    with pytest.raises(ValueError, match=message):
        check_record(evicted_at)


def test_a_possible_record_is_accepted():
    check_record(torch.tensor([1, 2, 3, NEVER], dtype=torch.int32)[:, None, None])
    check_record(random_mask(2, 2, never=0.0).evicted_at)


def test_retention_of_later_queries_is_the_mean_of_their_visible_keys():
    mask = random_mask(2, tokens=9, seed=3)
    for lengths, first in (([9, 7], [3, 5]), ([9, 9], [0, 8])):
        retention = mask.retention(lengths, first=first)
        for row, (end, start) in enumerate(zip(lengths, first, strict=True)):
            for layer in range(mask.evicted_at.shape[2]):
                visible = mask.visible(layer)[row, :, start:end, :end].sum((1, 2))
                pairs = sum(query + 1 for query in range(start, end))
                torch.testing.assert_close(retention[row, layer], visible / pairs)
