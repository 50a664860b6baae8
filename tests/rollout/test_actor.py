"""What SparseActor writes, line by line of what goes wrong in TorchRL's stock wrapper, and the inputs that it takes."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import Tokens
from transformers import LogitsProcessor

from smdlib import NEVER, MaskedAttentionAdapter, ShadowMask
from smdlib.rollout import SparseActor, segments
from tests.families import VOCAB, make_model
from tests.rollout.actors import batch_of, byte_actor, gaps, make_actor, make_prompts, run, word_tokenizer
from tests.tokenizer import EOS, byte_tokenizer


def test_tokens_in_tokens_out():
    """The prompt's tokens reach the model and come back, also where their text would tokenise differently."""
    actor = byte_actor(max_new_tokens=30)
    tokenizer = actor.tokenizer
    # Half of a two-byte letter, an end token in the middle, and bytes that are no text.
    prompts = [torch.tensor([100, EOS, 130, 131, 7, 7]), torch.tensor([*tokenizer("Why?")["input_ids"], 127])]
    rows = run(actor, prompts)
    for row, prompt in zip(rows, prompts, strict=True):
        tokens = row["tokens"]
        assert torch.equal(tokens.prompt, prompt) and len(tokens.response) == 30
        assert torch.equal(tokens.full, torch.cat([prompt, tokens.response]))
        assert row["shadow"].token_ids[:-1].tolist() == tokens.full[:-1].tolist()  # what the model was fed
        assert tokenizer(row["text"].full, add_special_tokens=False)["input_ids"] != tokens.full.tolist()
        for part in ("prompt", "response", "full"):
            assert row["text", part] == tokenizer.decode(tokens.get(part), skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("policy", [None, "snapkv"])
def test_log_probs_by_hand(policy, temperature):
    """Every response token's log-prob, the first one's included, by one uncached pass of the plain model."""
    actor = make_actor(policy=policy, budget=1.0, temperature=temperature)  # keeps the prompt and the response
    prompts = make_prompts(11, 4)
    rows = run(actor, prompts)
    plain = make_model("llama")
    for row, prompt in zip(rows, prompts, strict=True):
        full, size = row["tokens", "full"], len(prompt)
        with torch.no_grad():
            logits = plain(full[None]).logits[0]
        expected = (logits / temperature).log_softmax(-1)[:-1].gather(1, full[1:, None])[size - 1 :, 0]
        assert row["log_probs", "response"].dtype == torch.float32
        torch.testing.assert_close(row["log_probs", "response"], expected, rtol=0, atol=1e-4)
        assert row["log_probs", "full"].isnan().tolist() == [True] * size + [False] * 6
        assert torch.equal(row["log_probs", "full"][size:], row["log_probs", "response"])


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_masks_do_not_depend_on_the_padding_token(pad_is_eos):
    """A sampled padding token stays real, and so does the end token where both are the same."""
    actor = byte_actor(tokenizer=byte_tokenizer(pad_is_eos), eos_token_id=EOS, max_new_tokens=40)
    pad = actor.tokenizer.pad_token_id
    with torch.no_grad():  # every third token or so is the padding token or the end token
        actor.model.lm_head.weight[[pad, EOS]] *= 3
    rows = run(actor, make_prompts(9, 5, 14, 5, vocab=250), seed=1)
    lengths = [len(row["tokens", "response"]) for row in rows]
    assert len(set(lengths)) > 1
    seen_pad = 0
    for row in rows:
        response, size = row["tokens", "response"].tolist(), len(row["tokens", "prompt"])
        assert EOS not in response[:-1] and (response[-1] == EOS or len(response) == 40)
        seen_pad += response[:-1].count(pad)
        assert row["masks", "all_attention_mask"].tolist() == [True] * (size + len(response))
        assert row["masks", "all_assistant_mask"].tolist() == [False] * size + [True] * len(response)
        assert gaps(actor, row)[0] < 1e-4
    assert pad_is_eos or seen_pad > 0


@pytest.mark.parametrize("evict_every", [None, 2])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("policy", [None, "h2o"])
def test_rows_of_unequal_length_are_as_if_alone(policy, family, evict_every):
    if policy is None and evict_every:
        return
    prompts = make_prompts(19, 1, 7, 12)
    actor = make_actor(family, policy, evict_every=evict_every, do_sample=False)
    for row, prompt in zip(run(actor, prompts), prompts, strict=True):
        (alone,) = run(actor, [prompt])
        assert torch.equal(row["tokens", "full"], alone["tokens", "full"])
        assert torch.equal(row["shadow"].evicted_at, alone["shadow"].evicted_at)
        torch.testing.assert_close(row["log_probs", "response"], alone["log_probs", "response"], rtol=0, atol=1e-4)


def test_one_step_of_logits_at_a_time(monkeypatch):
    """While a step is drawn, nobody holds the logits of the steps before."""
    alive: list[int] = []
    logits: list[weakref.ref] = []

    class Spy(LogitsProcessor):
        def __init__(self, temperature: float) -> None:
            self.inner = original(temperature)

        def __call__(self, input_ids, scores):
            logits.append(weakref.ref(scores))
            out = self.inner(input_ids, scores)
            alive.append(sum(one() is not None for one in logits))
            return out

        def log_probs(self, response):
            return self.inner.log_probs(response)

    original = segments.SampledLogProbs
    monkeypatch.setattr(segments, "SampledLogProbs", Spy)
    run(make_actor(max_new_tokens=8), make_prompts(9, 5))
    assert len(alive) == 8 and max(alive) <= 2  # this step's, and what the loop still holds of the one before
    gc.collect()
    assert not any(one() is not None for one in logits)


def test_shadow_and_bytes():
    """A share of 0.5 keeps ceil(P / 2) keys of the prompt; the rest of it is gone after its last query."""
    prompts = make_prompts(20, 7)
    for row, size in zip(run(make_actor(budget=0.5), prompts), (20, 7), strict=True):
        gone = row["shadow"].evicted_at
        assert gone.shape == (size + 6, 3, 2) and gone.dtype == torch.int32
        assert (gone != NEVER).sum(0).unique().tolist() == [size - -(-size // 2)]
        assert (gone[size:] == NEVER).all()
        # 3 layers, 2 heads, keys and values of 12 floats; slots as for the longest row, and 6 for the response
        assert row["kv_bytes"].item() == 3 * 2 * (10 + 6) * 2 * 12 * 4
    for row, size in zip(run(make_actor(policy=None), prompts), (20, 7), strict=True):
        assert torch.equal(row["shadow"].evicted_at, ShadowMask.dense(size + 6, 3, 2).evicted_at)
        assert row["kv_bytes"].item() == 3 * 2 * (20 + 5) * 2 * 12 * 4
        wrong = row["tokens", "full"].flip(0)[None]
        with pytest.raises(ValueError, match="token"):  # the record of a dense row knows its tokens, too
            make_actor(policy=None).log_probs(wrong, None, row["shadow"][None])


def inputs(prompts):
    """The same rows in every form that is taken."""
    tokens = [Tokens(prompt=prompt) for prompt in prompts]
    return {
        "lazy stack": batch_of(prompts),
        "padded=False": lazy_stack([TensorDict({"tokens": Tokens(prompt=prompt, padded=False)}) for prompt in prompts]),
        "Tokens rows": lazy_stack([TensorDict({"tokens": one}) for one in tokens]),
        "Tokens stack": TensorDict({"tokens": lazy_stack(tokens)}, batch_size=[len(prompts)]),
        "TensorDict": TensorDict({("tokens", "prompt"): torch.stack(prompts)}, batch_size=[len(prompts)]),
        "int32": TensorDict({("tokens", "prompt"): torch.stack(prompts).int()}, batch_size=[len(prompts)]),
    }


@pytest.mark.parametrize("form", list(inputs(make_prompts(3))))
def test_input_forms(form):
    prompts = make_prompts(8, 8, 8)
    actor = make_actor()
    expected = run(actor, prompts)
    batch = inputs(prompts)[form]
    before = batch.clone()
    torch.manual_seed(0)
    out = actor(batch)
    assert out.shape == (3,) and set(out.keys()) >= set(actor.out_keys)
    for row, other in zip(out.unbind(0), expected, strict=True):
        assert row["tokens", "full"].dtype == torch.int64
        assert torch.equal(row["tokens", "full"], other["tokens", "full"])
        assert torch.equal(row["log_probs", "response"], other["log_probs", "response"])
    assert set(batch.keys()) == set(before.keys())  # what was given is not written to
    assert all(row.get(("tokens", "full"), None) is None for row in batch.unbind(0))


def test_other_entries_ride_along():
    batch = batch_of(make_prompts(5, 9))
    for index, row in enumerate(batch.unbind(0)):
        row.set("number", torch.tensor(index)).set("label", f"row {index}").set(("next", "x"), torch.ones(index + 1))
    out = make_actor()(batch)
    for index, row in enumerate(out.unbind(0)):
        assert row["number"] == index and row["label"] == f"row {index}" and row["next", "x"].shape == (index + 1,)


@pytest.mark.parametrize("policy", [None, "h2o"])
def test_turns_do_not_mix(policy):
    """A second turn on the first one's rows: all containers are of its own tokens."""
    actor = make_actor(policy=policy)
    rows = run(actor, make_prompts(12, 8))
    turns = [copy.deepcopy(rows)]
    for _ in range(2):
        for row in rows:
            more = torch.tensor([20, 21, 22])
            row.set(("tokens", "prompt"), torch.cat([row["tokens", "full"], more]))
        rows = list(actor(lazy_stack(rows)).unbind(0))
        turns.append(copy.deepcopy(rows))
    for before, after in itertools.pairwise(turns):
        for old, new in zip(before, after, strict=True):
            size = len(old["tokens", "full"]) + 3
            assert new["tokens", "prompt"].tolist() == [*old["tokens", "full"].tolist(), 20, 21, 22]
            assert len(new["tokens", "full"]) == size + 6 == new["shadow"].num_tokens
            assert new["masks", "all_assistant_mask"].tolist() == [False] * size + [True] * 6
            assert new["log_probs", "full"].isnan().sum() == size
            assert gaps(actor, new)[0] < 1e-4


REFUSED = {
    "0 dims": (TensorDict({("tokens", "prompt"): torch.arange(5)}), ValueError, r"batch of rows \[B\]"),
    "2 dims": (TensorDict({("tokens", "prompt"): torch.ones(2, 2, 5).long()}, [2, 2]), ValueError, r"reshape\(-1\)"),
    "no rows": (TensorDict({("tokens", "prompt"): torch.ones(0, 5).long()}, [0]), ValueError, "at least 1"),
    "missing": (TensorDict({"text": torch.ones(2, 5)}, [2]), KeyError, "no prompts at .*the batch has .*text"),
    "one missing": (lazy_stack([*batch_of(make_prompts(3)).unbind(0), TensorDict({})]), KeyError, "no prompts"),
    "empty": (batch_of([*make_prompts(4), torch.zeros(0).long()]), ValueError, r"rows \[1\] are empty"),
    "matrix": (TensorDict({("tokens", "prompt"): torch.ones(2, 3, 5).long()}, [2]), ValueError, r"\[3, 5\]"),
    "floats": (TensorDict({("tokens", "prompt"): torch.ones(2, 5)}, [2]), ValueError, "float32"),
    "padded": (
        lazy_stack([TensorDict({"tokens": Tokens(prompt=torch.arange(3), padded=True)})]),
        ValueError,
        "prompts are padded",
    ),
    "mask": (
        TensorDict(
            {("tokens", "prompt"): torch.ones(1, 3).long(), ("masks", "all_attention_mask"): torch.tensor([[1, 1, 0]])},
            [1],
        ),
        ValueError,
        "prompts are padded",
    ),
    "minus": (batch_of([torch.tensor([3, -100])]), ValueError, r"rows \[0\] hold ids that are none"),
    "foreign": (batch_of([*make_prompts(3), torch.tensor([3, VOCAB])]), ValueError, rf"rows \[1\].* {VOCAB} tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_are_refused(case):
    batch, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        make_actor()(batch)


def test_leading_padding_is_refused_where_it_can_be_told():
    prompts = [torch.tensor([258, 258, 5, 6]), torch.tensor([7, 258, 9, 9])]  # within a row it may have been sampled
    with pytest.raises(ValueError, match=r"rows \[0\] begin with the padding token 258"):
        byte_actor()(batch_of(prompts))
    run(byte_actor(), prompts[1:])
    run(byte_actor(tokenizer=byte_tokenizer(pad_is_eos=True)), [torch.tensor([EOS, 5, 6])])


BAD_ARGUMENTS = {
    "policy without budget": ({"budget": None}, ValueError, "needs a budget"),
    "budget without policy": ({"policy": None}, ValueError, r"\['budget'\] would have no effect"),
    "eviction without policy": ({"policy": None, "budget": None, "evict_every": 2}, ValueError, "evict_every"),
    "unknown policy": ({"policy": "snapvk"}, ValueError, "snapvk"),
    "budget of 0": ({"budget": 0.0}, ValueError, "budget"),
    "evict_every of 0": ({"evict_every": 0}, ValueError, "evict_every"),
    "reserve": ({"reserve": 4}, TypeError, "reserve"),
    "option": ({"generate_kwargs": {"top_k": 5}}, ValueError, "top_k=5 is refused"),
    "no tokenizer": ({"tokenizer": None}, TypeError, "tokenizer must be .*NoneType"),
    "model class": ({"model": type(make_model("llama"))}, TypeError, "the class LlamaForCausalLM"),
    "no model": ({"model": "llama"}, TypeError, "not str"),
    "no head": ({"model": make_model("llama").model}, TypeError, "no language-model head"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_constructor_errors_leave_the_model_alone(case):
    change, kind, message = BAD_ARGUMENTS[case]
    model = make_model("llama")
    good = {"model": model, "tokenizer": word_tokenizer(), "policy": "streaming", "budget": 0.5}
    with pytest.raises(kind, match=message) as caught:
        SparseActor(**(good | change))
    assert model.config._attn_implementation == "sdpa" and not model._forward_pre_hooks
    SparseActor(**good)  # although the error still holds on to the frame of the first attempt
    del caught


def test_one_adapter_for_several_actors():
    adapter = MaskedAttentionAdapter(make_model("llama"))
    sparse, dense = make_actor(model=adapter), make_actor(model=adapter, policy=None)
    assert sparse.adapter is dense.adapter is adapter and sparse.model is dense.model
    prompts = make_prompts(15, 9)
    for actor in (sparse, dense, sparse):
        fresh = make_actor(policy=None if actor is dense else "snapkv")
        for row, other in zip(run(actor, prompts), run(fresh, prompts), strict=True):
            assert torch.equal(row["tokens", "full"], other["tokens", "full"])
            assert gaps(actor, row)[0] < 1e-4
    with pytest.raises(ValueError, match="already has a MaskedAttentionAdapter"):
        make_actor(model=adapter.model)
    adapter.remove()
    for actor in (sparse, dense):
        with pytest.raises(RuntimeError, match="was removed"):
            run(actor, prompts)
    with pytest.raises(RuntimeError, match="was removed"):
        make_actor(model=adapter)
    run(make_actor(model=adapter.model), prompts)
