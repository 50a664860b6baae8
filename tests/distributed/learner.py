"""Two processes that run SMDLoss on FSDP2, and one process that runs it on the whole batch: the truth.

Starting processes takes longer than all that they do, so they start once and run every case.
"""

from __future__ import annotations

import copy
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from smdlib import DenseToSparseKL, GRPOLoss, MaskedAttentionAdapter, ShadowMask, SMDLoss
from smdlib.losses import TokenMean
from tests.families import VOCAB, _common, make_model
from tests.losses.reference import TEMPERATURE, move, pad_rows
from tests.sampling import ragged_prompts, sample

WORLD = 2
CASES: dict[str, Callable[[int], Any]] = {}


def case(run: Callable[[int], Any]) -> Callable[[int], Any]:
    CASES[run.__name__] = run
    return run


# Models


def _sharpen(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5, generator=generator)
    return model.eval()


def tied():
    return _sharpen(hf.LlamaForCausalLM(hf.LlamaConfig(**_common(tie_word_embeddings=True))))


def biased():
    model = make_model("llama")
    torch.manual_seed(0)
    model.lm_head = nn.Linear(48, VOCAB, bias=True)
    return model


def capped():  # attention and final logits, tied
    sizes = _common(head_dim=16, sliding_window=12, query_pre_attn_scalar=16, tie_word_embeddings=True)
    config = hf.Gemma2Config(**sizes, attn_logit_softcapping=5.0, final_logit_softcapping=1.5)
    return _sharpen(hf.Gemma2ForCausalLM(config))


def scaled():
    return _sharpen(hf.CohereForCausalLM(hf.CohereConfig(**_common(logit_scale=0.25, tie_word_embeddings=True))))


def absolute():  # learned positions, layer norm with bias, tied
    sizes = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
    config = hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    return _sharpen(hf.GPT2LMHeadModel(config))


MODELS = {
    "untied": lambda: make_model("llama"),
    "tied": tied,
    "biased head": biased,
    "soft-capped head": capped,
    "scaled head": scaled,
    "absolute positions": absolute,
}


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    base: Any = model.base_model  # pyright: ignore[reportAttributeAccessIssue]
    return list(base.h if hasattr(base, "h") else base.layers)


# Ways to shard


def by_layer(model, **options):
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def root_only(model):
    fully_shard(model)


def freed_after_forward(model):
    by_layer(model, reshard_after_forward=True)


def kept_after_forward(model):
    by_layer(model, reshard_after_forward=False)


def head_alone(model):
    fully_shard(model.lm_head)
    by_layer(model)


def norm_and_head(model):
    fully_shard([model.model.norm, model.lm_head])
    by_layer(model)


def embedding_and_head(model):
    fully_shard([model.model.embed_tokens, model.lm_head])
    by_layer(model)


def base_and_root(model):
    fully_shard(model.lm_head)
    for layer in decoder_layers(model):
        fully_shard(layer)
    fully_shard(model.model)
    fully_shard(model)


def hybrid(model):
    by_layer(model, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard")))


# Data


def sampled_rows(adapter: MaskedAttentionAdapter, seed: int = 0) -> list[tuple]:
    """Four rows, two of one prompt, of unequal lengths, sampled under eviction; then the weights move."""
    ids, mask = ragged_prompts([14, 6, 14, 11], VOCAB, seed)
    ids[2] = ids[0]
    taken = sample(
        adapter.model, "streaming", 0.5, prompts=(ids, mask), new_tokens=7,
        evict_every=1, eos=[3, 4, 5, 6], ends={1: 3, 2: 5}, seed=seed,
    )  # fmt: skip
    with torch.no_grad():
        log_probs = adapter.log_probs(taken.tokens, taken.attention_mask, taken.shadow, TEMPERATURE)
    rows = []
    for row, advantage in enumerate([1.3, -0.4, 0.7, -1.6]):
        real, length = taken.attention_mask[row].bool(), int(taken.lengths[row])
        shadow = ShadowMask(evicted_at=taken.shadow.evicted_at[row, :length], batch_size=[])
        prompt = length - int(taken.response_mask[row].sum())
        rows.append((taken.tokens[row][real], shadow, log_probs[row][real], prompt, advantage))
    move(adapter, 0.02)
    return rows


def make_loss(adapter: MaskedAttentionAdapter, **options: Any) -> SMDLoss:
    acceptance = options.pop("acceptance", False)
    grpo = GRPOLoss(adapter, temperature=TEMPERATURE, **options)
    distill = DenseToSparseKL(adapter, temperature=TEMPERATURE, coeff=0.5)
    return SMDLoss(adapter, grpo=grpo, distill=distill, acceptance=acceptance)


def count(loss: SMDLoss, rows: list[tuple]) -> tuple:
    lengths = torch.tensor([len(row[0]) - row[3] for row in rows])
    return loss.grpo.aggregation.count(lengths), loss.distill.aggregation.count(lengths)


def total(output) -> torch.Tensor:
    return output.loss_objective + output.loss_distill


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def summed(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return float(value)


def gaps(found: dict, truth: dict) -> tuple[float, str]:
    """Largest difference between two sets of tensors, and where."""
    assert found.keys() == truth.keys()
    return max((float((found[name] - truth[name]).abs().max()), name) for name in truth)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}


# Where the rows go: a part per rank, of unequal rows, tokens and columns, padded on either side.
SPLITS = {
    "three rows and one": lambda rows: [rows[:3], rows[3:]],
    "one row and three": lambda rows: [rows[1:2], [rows[0], rows[2], rows[3]]],
    "no loss tokens on one": lambda rows: [rows[:2], [silent(row) for row in rows[2:]]],
    "prompts shared on one": lambda rows: [rows[:3], [evicted_early(row) for row in rows[3:]]],
}


def silent(row: tuple) -> tuple:
    """The same row without a response."""
    return (row[0], row[1], torch.full_like(row[2], torch.nan), len(row[0]), row[4])


def evicted_early(row: tuple) -> tuple:
    """The same row, with a key that was evicted while its prompt was read: no prompt pass can serve it."""
    evicted_at = row[1].evicted_at.clone()
    evicted_at[0] = 2
    return (row[0], ShadowMask(evicted_at=evicted_at, batch_size=[]), *row[2:])


def compare(
    rank: int,
    build: str = "untied",
    shard: Callable[[Any], None] = by_layer,
    split: str = "three rows and one",
    checkpointing: bool = False,
    factor: float = WORLD,
    between: Callable[[MaskedAttentionAdapter, Any], Any] = lambda adapter, batch: None,
    options: dict | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """One backward pass of the parts on two ranks, against one of the whole batch in one process."""
    adapter = MaskedAttentionAdapter(MODELS[build]().to(dtype))
    parts = SPLITS[split](sampled_rows(adapter))
    rows = [row for part in parts for row in part]
    alone, model = adapter.model, copy.deepcopy(adapter.model)
    options = dict(options or {})

    loss = make_loss(adapter, **options)
    alone.train()
    output = loss(pad_rows(rows, "left"))
    total(output).backward()
    truth = gradients(alone)

    shard(model)
    learner = MaskedAttentionAdapter(model)
    loss = make_loss(learner, **options)
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    calls = []
    # Inside the layer: transformers checkpoints its forward, and hooks of the layer itself stay outside.
    attention = next(part for part in decoder_layers(model)[0].modules() if type(part).__name__.endswith("Attention"))
    attention.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = pad_rows(parts[rank], ["left", "right"][rank])
    value = loss(batch, *count(loss, rows))
    between(learner, batch)
    (factor * total(value)).backward()
    worst, where = gaps(gradients(model), truth)
    return {
        "loss": abs(summed(total(value)) - float(total(output).detach())),
        "gradient": worst,
        "where": where,
        "scale": max(float(grad.abs().max()) for grad in truth.values()),
        "size": abs(float(total(output).detach())),
        "names": len(truth),
        "parameters": len(list(alone.parameters())),
        "acceptance": value.acceptance_p5 is not None,
        "calls": len(calls),
        "prompts": float(value.prompts_per_row),
    }


PARITY: dict[str, dict[str, Any]] = {
    f"{build}, {'with' if checkpointing else 'without'} checkpointing": {"build": build, "checkpointing": checkpointing}
    for build in MODELS
    for checkpointing in (False, True)
}
PARITY |= {
    f"{build}, {shard.__name__}": {"build": build, "shard": shard, "checkpointing": True}
    for build, shard in [
        ("tied", root_only),
        ("tied", freed_after_forward),
        ("untied", freed_after_forward),
        ("tied", kept_after_forward),
        ("untied", head_alone),
        ("biased head", head_alone),
        ("untied", norm_and_head),
        ("untied", base_and_root),
        ("tied", embedding_and_head),
        ("tied", hybrid),
    ]
}
PARITY |= {split: {"split": split, "build": "tied"} for split in SPLITS}
PARITY |= {
    "token mean": {"options": {"aggregation": TokenMean()}},
    "dense policy term": {"options": {"dense": True}, "build": "tied"},
    "acceptance": {"options": {"acceptance": True}, "shard": freed_after_forward},
    "float64": {"build": "tied", "dtype": torch.float64, "checkpointing": True, "shard": freed_after_forward},
}


@torch.no_grad()
def score(adapter: MaskedAttentionAdapter, batch: Any) -> Any:
    return adapter.log_probs(batch["tokens", "full"], batch["masks", "all_attention_mask"], batch.get("shadow"))


# A pass without gradient frees the weights that the backward pass of the loss needs.
PARITY |= {
    f"scored before backward, {shard.__name__}": {"shard": shard, "build": build, "between": score}
    for build, shard in [("tied", freed_after_forward), ("untied", head_alone)]
}
for _name, _arguments in PARITY.items():
    CASES[_name] = lambda rank, arguments=_arguments: compare(rank, **arguments)


@case
def forgotten_world_size(rank: int) -> Any:
    return compare(rank, factor=1.0)


@case
def log_probs(rank: int) -> Any:
    found = {}
    for build, shard in [("tied", by_layer), ("untied", head_alone), ("soft-capped head", freed_after_forward)]:
        adapter = MaskedAttentionAdapter(MODELS[build]())
        rows = sampled_rows(adapter)
        model = copy.deepcopy(adapter.model)
        shard(model)
        learner = MaskedAttentionAdapter(model)
        mine = pad_rows(rows[:3] if rank == 0 else rows[3:], "right")
        for kind, shadow in [("masked", mine.get("shadow")), ("dense", None)]:
            arguments = (mine["tokens", "full"], mine["masks", "all_attention_mask"], shadow, TEMPERATURE)
            expected, actual = adapter.log_probs(*arguments), learner.log_probs(*arguments)
            gap = (expected - actual).abs()
            assert bool((gap.isnan() == expected.isnan()).all())
            found[f"{build}, {kind}"] = float(gap.nan_to_num().max())
        # The hidden states alone, first of all, start FSDP2 as well as a call of the model does.
        learner.hidden_states(*arguments[:3])
    return found


@case
def mixed_precision(rank: int) -> Any:
    """Parameters gathered in bfloat16 against a model of bfloat16 parameters; gradients reduced in float32."""
    adapter = MaskedAttentionAdapter(tied())
    rows = sampled_rows(adapter)
    alone, model = adapter.model, copy.deepcopy(adapter.model)
    for weight in alone.parameters():  # not the buffers: rotary frequencies stay float32
        weight.data = weight.data.bfloat16()
    by_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    learner = MaskedAttentionAdapter(model)
    parts = [rows[:3], rows[3:]]
    # In parts of the same shapes, so that only FSDP2 differs.
    values = [make_loss(adapter)(pad_rows(part, "left"), *count(make_loss(adapter), rows)) for part in parts]
    total(values[0]).backward()
    truth = {name: grad.float() for name, grad in gradients(alone).items()}
    alone.zero_grad()
    total(values[1]).backward()
    truth = {name: grad.float() + truth[name] for name, grad in gradients(alone).items()}
    value = make_loss(learner)(pad_rows(parts[rank], "left"), *count(make_loss(learner), rows))
    (WORLD * total(value)).backward()
    mine = gradients(model)
    return {
        "loss": float((total(value) - total(values[rank])).detach().abs()),
        "gradient": gaps(mine, truth)[0],
        "dtypes": {str(grad.dtype) for grad in mine.values()},
    }


@case
def updates(rank: int) -> Any:
    """Two micro-batches per update, clipped, two updates; all weights against those of one process."""
    adapter = MaskedAttentionAdapter(tied())
    rows = sampled_rows(adapter)
    alone, model = adapter.model, copy.deepcopy(adapter.model)
    by_layer(model)
    learner = MaskedAttentionAdapter(model)
    norms = []
    for actor, parts, factor in [
        (adapter, [[row] for row in rows], 1),
        (learner, [[row] for row in rows[rank::WORLD]], WORLD),
    ]:
        loss = make_loss(actor)
        items = count(loss, rows)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2, eps=1e-3)
        for _ in range(2):
            for index, part in enumerate(parts):
                if actor is learner:  # gradients are reduced once, with the last micro-batch
                    model.set_requires_gradient_sync(index == len(parts) - 1)  # pyright: ignore
                (factor * total(loss(pad_rows(part, "left"), *items))).backward()
            norms.append(float(whole(torch.nn.utils.clip_grad_norm_(actor.parameters(), 0.5))))
            optimizer.step()
            optimizer.zero_grad()
    weights = [{name: whole(p.detach()) for name, p in m.named_parameters()} for m in (model, alone)]
    return {"weights": gaps(*weights)[0], "norms": norms}


@case
def removed(rank: int) -> Any:
    """The adapter comes before or after sharding, goes, and comes back."""
    model = tied()
    adapter = MaskedAttentionAdapter(model)
    by_layer(model)
    ids = torch.arange(12, 20)[None]
    with torch.no_grad():
        before = adapter.log_probs(ids)
        adapter.remove()
        plain = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        attends = model.config._attn_implementation
        again = MaskedAttentionAdapter(model).log_probs(ids)
    return {"plain": float((before[:, 1:] - plain).abs().max()), "again": bool((before[:, 1:] == again[:, 1:]).all()),
            "attends": attends}  # fmt: skip


# What cannot be exact: the same error on every rank, and before any rank waits for another.


def _layers_only(model, adapter):
    for layer in decoder_layers(model):
        fully_shard(layer)


def _base_only(model, adapter):
    fully_shard(model.model)


def _adapter(model, adapter):
    fully_shard(adapter)


def _tie_broken(model, adapter):
    fully_shard(model.model)
    fully_shard(model)


def _rounded(model, adapter):
    by_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16))


def _tensor_parallel(model, adapter):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(model.lm_head, init_device_mesh("cpu", (WORLD,)), ColwiseParallel(use_local_output=False))


REFUSED = {
    "layers only": (_layers_only, "untied"),
    "base model only": (_base_only, "tied"),
    "the adapter": (_adapter, "untied"),
    "tie broken": (_tie_broken, "tied"),
    "scores rounded": (_rounded, "untied"),
    "tensor parallel": (_tensor_parallel, "untied"),
}


def refuse(rank: int, name: str) -> str:
    shard, build = REFUSED[name]
    adapter = MaskedAttentionAdapter(MODELS[build]())
    rows = sampled_rows(adapter)
    adapter._head_checked = True  # an earlier check, in one process, does not excuse
    shard(adapter.model, adapter)
    try:
        make_loss(adapter)(pad_rows(rows, "left"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


for _name in REFUSED:
    CASES["refused: " + _name] = lambda rank, name=_name: refuse(rank, name)


@case
def one_rank_fails(rank: int) -> Any:
    """The last case: one rank has rows without their mask and leaves; the other hears of it instead of waiting."""
    adapter = MaskedAttentionAdapter(tied())
    batch = pad_rows(sampled_rows(adapter), "left")
    by_layer(adapter.model)
    if rank == 1:
        del batch["shadow"]
    start = time.perf_counter()
    try:
        total(make_loss(adapter)(batch)).backward()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - start}
    return {"error": "", "seconds": 0.0}


def worker(rank: int, folder: str) -> None:
    """Run every case and write what came out, an error where one came."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)  # no port that another test could take
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    results: dict[str, Any] = {}
    only = os.environ.get("SMDLIB_FSDP_CASES", "")
    for name, run in CASES.items():
        if only not in name:
            continue
        start = time.perf_counter()
        try:
            results[name] = run(rank)
        except Exception:
            results[name] = traceback.format_exc()
        results[name, "seconds"] = time.perf_counter() - start
    torch.save(results, Path(folder) / f"{rank}.pt")
    # Without the barrier of a clean end: the other rank may be the one that failed.
    os._exit(0)
