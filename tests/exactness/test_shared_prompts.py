"""Prompts computed once for their group give the states and gradients of rows that are run whole."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor

from smdlib import (
    CompressedCache,
    GRPOLoss,
    MaskedAttentionAdapter,
    ShadowMask,
    ShadowMaskRecorder,
    SMDLoss,
)
from smdlib.masks import View
from smdlib.masks.replay import row_starts
from smdlib.masks.shared import split_rows
from tests.families import FAMILIES, make_model
from tests.sampling import ragged_prompts, sample

LENGTHS = [20, 33]  # of the distinct prompts
GROUPS = [0, 1, 0, 1, 0]  # which of them each row has


def group_batch(model, policy: str = "snapkv", evict_every: int | None = None, new: int = 7, budget=0.5) -> TensorDict:
    """Sample rows of interleaved groups, unequal responses, left-padded, under the sampler's own log-probs."""
    vocab = model.config.get_text_config().vocab_size
    ids, mask = ragged_prompts(LENGTHS, vocab)
    recorder = ShadowMaskRecorder()
    rows = torch.tensor(GROUPS)
    with torch.no_grad():
        cache = CompressedCache(
            model.config,
            policy,
            budget,
            evict_every=evict_every,
            recorder=recorder,
            reserve=new,
            prompt_lengths=mask.sum(1),
        )
        model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
        cache.batch_select_indices(rows)
        ids, mask = ids[rows], mask[rows]
        tokens = model.generate(
            input_ids=ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            pad_token_id=0,
            top_k=0,
        )
    response = torch.arange(new) < torch.tensor([7, 3, 1, 5, 6])[:, None]
    loss_mask = torch.cat([torch.zeros_like(mask, dtype=torch.bool), response], 1)
    attention = torch.cat([mask.bool(), response], 1)
    tokens = torch.where(attention, tokens, 0)
    return TensorDict(
        {
            ("tokens", "full"): tokens,
            ("masks", "all_attention_mask"): attention,
            ("masks", "all_assistant_mask"): loss_mask,
            ("log_probs", "full"): torch.where(loss_mask, -2.0, torch.nan),
            "advantage": torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3]),
            "shadow": recorder.shadow_mask(attention.sum(1)),
        },
        [len(rows)],
    )


def losses_and_gradients(adapter, batch, share: bool, dense: bool = False) -> tuple[Tensor, dict[str, Tensor], float]:
    adapter.share_prompts = share
    adapter.model.zero_grad()
    output = SMDLoss(adapter, grpo=GRPOLoss(adapter, dense=dense))(batch)
    (output.loss_objective + output.loss_distill).backward()
    gradients = {n: p.grad.clone() for n, p in adapter.model.named_parameters() if p.grad is not None}
    return torch.stack([output.loss_objective, output.loss_distill]), gradients, float(output.prompts_per_row)


def assert_same(adapter, batch, **kwargs) -> None:
    whole, expected, each = losses_and_gradients(adapter, batch, share=False, **kwargs)
    shared, gradients, once = losses_and_gradients(adapter, batch, share=True, **kwargs)
    assert (each, once) == (1.0, pytest.approx(2 / 5))
    torch.testing.assert_close(shared, whole, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize("evict_every", [None, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_whole_rows(family, evict_every):
    model = make_model(family)
    adapter = MaskedAttentionAdapter(model)
    assert_same(adapter, group_batch(model, evict_every=evict_every))


@pytest.mark.parametrize("policy", ["streaming", "random", "h2o"])
def test_rows_of_a_group_may_have_lost_different_keys(policy):
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    batch = group_batch(model, policy, evict_every=1, budget=9)
    if policy == "random":
        rows = batch["shadow"].evicted_at
        assert not torch.equal(rows[0, :20], rows[2, :20])  # same prompt, other keys
    assert_same(adapter, batch)


@pytest.mark.parametrize("dense", [False, True], ids=["smd", "track 2"])
def test_with_activation_checkpointing(dense):
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    batch = group_batch(model)
    _, expected, _ = losses_and_gradients(adapter, batch, share=False, dense=dense)
    runs = []
    # A hook inside the layer: the layer's own hooks stay outside what is computed again.
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    model.gradient_checkpointing_enable()
    model.train()
    _, gradients, once = losses_and_gradients(adapter, batch, share=True, dense=dense)
    assert once < 1
    # Prompt and masked pass, each again in the backward pass; the teacher once, or as the policy twice too.
    assert len(runs) == (6 if dense else 5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_reentrant_checkpointing_hides_the_prompts_keys_and_is_run_whole():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    batch = group_batch(model)
    _, expected, _ = losses_and_gradients(adapter, batch, share=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    _, gradients, each = losses_and_gradients(adapter, batch, share=True)
    assert each == 1.0
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_padding_side_and_raggedness_do_not_matter():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    batch = group_batch(model)
    attention = batch["masks", "all_attention_mask"]
    ragged = lazy_stack(
        [
            TensorDict(
                {
                    ("tokens", "full"): row["tokens", "full"][keep],
                    ("masks", "all_assistant_mask"): row["masks", "all_assistant_mask"][keep],
                    ("log_probs", "full"): row["log_probs", "full"][keep],
                    "advantage": row["advantage"],
                    "shadow": row["shadow"].crop(int(keep.sum())),
                }
            )
            for row, keep in zip(batch.unbind(0), attention, strict=True)
        ]
    )
    mine, gradients, once = losses_and_gradients(adapter, batch, share=True)
    other, others, again = losses_and_gradients(adapter, ragged, share=True)
    assert once == again == pytest.approx(2 / 5)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


def test_each_prompt_is_read_once_and_nothing_of_size_t_by_t_is_made():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    batch = group_batch(model)
    shapes, masks = [], []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    inner = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, **kwargs):
        masks.append(None if attn_mask is None else tuple(attn_mask.shape[-2:]))
        return inner(query, key, value, attn_mask, **kwargs)

    adapter.head()
    shapes.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        patch.setattr("smdlib.masks.attention.scaled_dot_product_attention", spy)
        losses_and_gradients(adapter, batch, share=True)
    assert shapes == [(2, 32), (5, 7), (5, 7)]  # two prompts, then the responses masked and dense
    layers = model.config.num_hidden_layers
    kept = masks[layers][1] - 7
    assert masks == [None] * layers + [(7, kept + 7)] * layers + [(7, 32 + 7)] * layers
    assert kept <= 17  # half of the longer prompt


def test_a_prompt_that_was_evicted_while_it_was_read_is_not_shared():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    prompts = ragged_prompts([30, 30], model.config.vocab_size)
    taken = sample(model, "snapkv", 8, prompts=prompts, new_tokens=5, chunk=10)
    batch = TensorDict(
        {
            ("tokens", "full"): taken.tokens,
            ("masks", "all_attention_mask"): taken.attention_mask.bool(),
            ("masks", "all_assistant_mask"): taken.response_mask,
            ("log_probs", "full"): taken.sampled,
            "advantage": torch.tensor([1.0, -1.0]),
            "shadow": taken.shadow,
        },
        [2],
    )
    output = SMDLoss(adapter)(batch)
    assert float(output.prompts_per_row) == 1.0
    assert float(output.max_mismatch) < 1e-4


def parts(loss_mask: list[list[int]], ids: list[list[int]], shadows=()):
    mask = torch.ones(len(ids), len(ids[0]), dtype=torch.bool)
    starts, lengths = row_starts(mask)
    return split_rows(torch.tensor(ids), starts, lengths, torch.tensor(loss_mask).bool(), shadows)


def test_rows_are_split_before_the_first_loss_token():
    rows = parts(
        [[0, 0, 1, 1, 1], [0, 0, 0, 1, 0], [0, 0, 1, 0, 1]], [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 1, 2, 3, 4]]
    )
    assert rows is not None
    assert rows.prompts.tolist() == [[5, 0], [5, 6]]  # the last prompt token goes with the response
    assert rows.lengths.tolist() == [1, 2]
    assert rows.group.tolist() == [0, 1, 0]
    assert rows.tokens.tolist() == [[6, 7, 8], [7, 8, 0], [1, 2, 3]]
    assert rows.wanted.tolist() == [0, 1, 2, 3, 6, 8]


def test_a_row_without_loss_tokens_runs_its_last_token_only():
    rows = parts([[0, 0, 0, 0], [0, 0, 1, 1]], [[5, 6, 7, 8], [5, 6, 7, 8]])
    assert rows is not None
    assert rows.prompts.tolist() == [[5, 6, 0], [5, 0, 0]] or rows.lengths.tolist() == [2, 1]
    assert rows.wanted.tolist() == [2, 3]


def test_a_prompt_of_one_token_is_not_split():
    assert parts([[0, 1, 1]], [[5, 6, 7]]) is None


def test_keys_evicted_inside_the_prompt_are_noticed():
    mask = [[0, 0, 0, 1, 1]]
    shadow = ShadowMask.dense(1, 5, 2, 2)
    shadow.evicted_at[0, 0, 1, 1] = 2  # the prompt's last query is at 2, and goes with the response
    assert parts(mask, [[1, 2, 3, 4, 5]], [shadow]) is not None
    shadow.evicted_at[0, 0, 1, 1] = 1
    assert parts(mask, [[1, 2, 3, 4, 5]], [shadow]) is None


def test_views_need_no_gradient_under_no_grad():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    batch = group_batch(model)
    arguments = batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["masks", "all_assistant_mask"]
    with torch.no_grad():
        states, _ = adapter.response_states(*arguments, [View(batch["shadow"])])
    assert not states[0].requires_grad
    states, _ = adapter.response_states(*arguments, [View(batch["shadow"]), View(None, gradient=False)])
    assert [state.requires_grad for state in states] == [True, False]
