"""Attention under limits against a softmax written out, and the blocks that its kernel may skip."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask
from transformers.masking_utils import causal_mask_function, or_masks

from smdlib.masks import attention, flex
from smdlib.masks.attention import REPLAY_ARGUMENT, fused_attention, shadow_attention
from smdlib.masks.flex import causal_blocks, limited_attention, replay_attention
from smdlib.masks.limits import Limits
from smdlib.masks.replay import Replay
from smdlib.masks.shadow import NEVER, ShadowMask
from smdlib.masks.spec import MaskSpec

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def case(rows=2, group=2, heads=2, queries=5, keys=9, size=16, seed=0) -> tuple[Tensor, Tensor, Tensor, Limits]:
    """Random tensors; keys are gathered ones first, some of them missing, and then the queries' own."""
    torch.manual_seed(seed)
    query = torch.randn(rows, queries, heads * group, size).transpose(1, 2)  # as projections leave it
    key, value = torch.randn(2, rows, heads, keys, size)
    ahead = keys - queries
    at = torch.arange(50, 50 + queries).expand(rows, -1) + torch.arange(rows)[:, None]
    numbers = torch.randint(50, (rows, heads, ahead))
    numbers = torch.cat([numbers, at[:, None].expand(-1, heads, -1)], 2)
    until = torch.where(torch.rand(numbers.shape) < 0.5, NEVER, numbers + torch.randint(1, 60, numbers.shape))
    until[:, :, : ahead // 3] = 0
    return query, key, value, Limits(at.int().contiguous(), numbers.int(), until.int(), {})


def oracle(query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float) -> Tensor:
    """One query after the other."""
    output = torch.zeros_like(query)
    for row in range(query.shape[0]):
        for head in range(query.shape[1]):
            own = head * key.shape[1] // query.shape[1]
            for number in range(query.shape[2]):
                at = limits.queries[row, number]
                seen = (limits.keys[row, own] <= at) & (at < limits.until[row, own])
                if seen.any():
                    logits = key[row, own, seen] @ query[row, head, number] * scale
                    output[row, head, number] = logits.softmax(0) @ value[row, own, seen]
    return output


def to(device: str, *things):
    return [
        Limits(thing.queries.to(device), thing.keys.to(device), thing.until.to(device), {})
        if isinstance(thing, Limits)
        else thing.to(device)
        for thing in things
    ]


@DEVICES
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"group": 1},
        {"group": 3, "heads": 3, "queries": 7, "keys": 7},
        {"rows": 1, "queries": 1},
        {"queries": 140, "keys": 150, "rows": 1},
        {"queries": 9, "keys": 300, "rows": 3},
    ],
    ids=str,
)
def test_limited_attention_is_the_softmax_over_what_each_head_may_see(device, shape):
    query, key, value, limits = case(**shape)
    expected = oracle(query, key, value, limits, 0.3)
    output = limited_attention(*to(device, query, key, value, limits), 0.3)
    torch.testing.assert_close(output.cpu(), expected, atol=1e-5, rtol=1e-5)


@DEVICES
def test_queries_that_see_nothing_get_zeros(device):
    query, key, value, limits = case()
    limits.until[0, 1] = 0  # a KV head without keys
    limits.until[1, :, -1] = 0  # the last query of the other row not even itself ...
    limits.until[1, :, :-1] = torch.minimum(limits.until[1, :, :-1], limits.queries[1, -1])  # ... nor anything else
    output = limited_attention(*to(device, query, key, value, limits), 0.3).cpu()
    assert output[0, 2:].eq(0).all() and output[1, :, -1].eq(0).all()
    assert output[0, :2].ne(0).all() and output[1, :, :-1].ne(0).any(-1).all()


@DEVICES
def test_heads_of_one_group_share_the_mask_of_their_own_kv_head_only(device):
    query, key, value, limits = case(group=3)
    before = limited_attention(*to(device, query, key, value, limits), 0.3).cpu()
    limits.until[0, 1, -1] = 0
    changed = (limited_attention(*to(device, query, key, value, limits), 0.3).cpu() != before).any(-1)
    assert torch.equal(changed.nonzero(), torch.tensor([[0, 3, 4], [0, 4, 4], [0, 5, 4]]))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 300), (128, 128), (129, 129), (200, 300), (500, 800)])
def test_blocks_are_those_of_the_causal_mask(queries, keys):
    def causal(b, h, q, k):
        return k <= q + keys - queries

    plain = create_block_mask(causal, 1, 1, queries, keys, device="cpu", separate_full_blocks=False)
    names = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
    tables = causal_blocks(queries, keys, torch.device("cpu"))
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)
    for counts, table, name, other in zip(tables[::2], tables[1::2], names[::2], names[1::2], strict=True):
        assert torch.equal(counts[..., :-1], getattr(plain, name))
        for line, count in enumerate(counts[0, 0, :-1].tolist()):
            assert torch.equal(table[0, 0, line, :count], getattr(plain, other)[0, 0, line, :count])
        # What is not counted is read, if at all, as an index that exists.
        assert table.min() >= 0 and table.max() < getattr(plain, other).shape[-1]


def test_no_block_is_declared_full(monkeypatch):
    """The kernel does not ask the mask function about full blocks; the CPU would not notice, it asks about all."""
    masks = []

    def spy(*args, **kwargs):
        masks.append(kwargs["block_mask"])
        return args[0]

    monkeypatch.setattr(flex, "flex_attention", spy)
    query, key, value, limits = case(queries=300, keys=300)
    blocks = causal_blocks(300, 300, query.device)
    flex._attend(query, key, value, limits.queries, limits.keys, limits.until, blocks, 0.3)
    assert masks[0].full_kv_num_blocks is None and masks[0].full_q_num_blocks is None
    assert masks[0].kv_num_blocks.tolist() == [[[1, 2, 3, 3]]]


@DEVICES
def test_layers_of_a_pass_share_the_blocks(device):
    query, key, value, limits = to(device, *case())
    limited_attention(query, key, value, limits, 0.3)
    first = list(limits.blocks.values())
    limited_attention(query, key, value, Limits(limits.queries, limits.keys, limits.until - 1, limits.blocks), 0.3)
    assert len(limits.blocks) == 1 and all(a is b for a, b in zip(first, limits.blocks.values(), strict=True))


@DEVICES
def test_one_kernel_serves_all_lengths_batches_and_limits(device):
    torch._dynamo.reset()
    counters.clear()
    shapes = [(2, 5, 9), (2, 5, 9), (3, 40, 40), (5, 40, 300), (2, 20, 129)]
    # On CUDA the lowering looks whether there are 128 queries, so there may be a second one.
    for rows, queries, keys in [*shapes, (2, 130, 130), (4, 200, 300)]:
        query, key, value, limits = to(device, *case(rows=rows, queries=queries, keys=keys))
        with torch.no_grad():
            limited_attention(query, key, value, limits, 0.3)
        if queries < 128:
            assert counters["stats"]["unique_graphs"] == 1, (rows, queries, keys)
    assert counters["stats"]["unique_graphs"] <= (1 if device == "cpu" else 2)


def test_gradients_on_the_cpu_are_refused():
    query, key, value, limits = case()
    with pytest.raises(RuntimeError, match=r"no backward on the CPU: learn there with .*backend='sdpa'"):
        limited_attention(query, key.requires_grad_(), value, limits, 0.3)
    with torch.no_grad():
        limited_attention(query, key, value, limits, 0.3)


# --- what is left to sdpa


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of each way to attend."""
    counts = {"flex": 0, "dense": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(flex, "limited_attention", counted("flex", limited_attention))
    monkeypatch.setattr(attention, "sdpa_attention_forward", counted("dense", attention.sdpa_attention_forward))
    monkeypatch.setattr(
        attention, "scaled_dot_product_attention", counted("dense", attention.scaled_dot_product_attention)
    )
    return counts


class Module(torch.nn.Module):
    layer_idx = 1
    num_key_value_groups = 2
    is_causal = True


def spec_of(pattern, **more) -> MaskSpec:
    arguments = {"batch_size": 2, "q_length": 9, "kv_length": 9, "q_offset": 0, "kv_offset": 0}
    return MaskSpec({**arguments, "mask_function": pattern, "allow_is_causal_skip": False, "device": "cpu", **more})


def replayed(spec: MaskSpec, function, **kwargs) -> Tensor:
    query, key, value, _ = case(queries=9)
    shadow = ShadowMask.dense(2, 9, 3, 2)
    shadow.evicted_at[0, 2, 1, 0] = 5
    replay = Replay(shadow, torch.tensor([0, 1]), torch.tensor([9, 8]), 9)
    output, _ = function(Module(), query, key, value, spec, 0.3, **{REPLAY_ARGUMENT: replay}, **kwargs)
    assert replay.applied == {1}
    return output


def test_a_pattern_that_is_no_interval_gets_its_exact_dense_mask(calls):
    pattern = or_masks(causal_mask_function, lambda b, h, q, k: (q < 3) & (k < 3))  # as of image tokens
    spec = spec_of(pattern, attention_mask=torch.tensor([[1] * 9, [0] + [1] * 8]).bool())
    output = replayed(spec, replay_attention)
    assert calls == {"flex": 0, "dense": 1}
    assert torch.equal(output, replayed(spec, shadow_attention, inner=fused_attention))
    assert not torch.equal(output, replayed(spec_of(causal_mask_function), replay_attention))


def test_a_causal_pattern_is_replayed_by_flex_attention(calls):
    spec = spec_of(causal_mask_function, attention_mask=torch.tensor([[1] * 9, [0] + [1] * 8]).bool())
    output = replayed(spec, replay_attention)
    assert calls == {"flex": 1, "dense": 0}
    torch.testing.assert_close(output, replayed(spec, shadow_attention, inner=fused_attention), atol=1e-5, rtol=0)


@pytest.mark.parametrize("more", [{"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"position_bias": torch.zeros(1)}])
def test_more_than_softmax_attention_is_refused(more):
    with pytest.raises(ValueError, match="install the adapter with backend='eager'"):
        replayed(spec_of(causal_mask_function), replay_attention, **more)
