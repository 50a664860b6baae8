"""Prefill with eviction against a plain prefill: time, memory at the peak, and a group's prompt read once.

    python -m benchmarks.prefill               # 2,048 tokens, 1 and 4 rows, half the keys kept, every policy

The peers are the same model without an adapter on transformers' `DynamicCache`, and on a cache that gathers the kept
keys into new tensors after each layer. Memory is live bytes of tensors at the peak, keys and values included; what it
takes above the plain prefill is held against a P x P tensor of one head of every row in float32; an implementation that
forms attention weights needs as many as there are heads.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from transformers import DynamicCache, PreTrainedModel

from benchmarks import peers
from benchmarks._measure import Result, alternate, peak
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, make_model, plain_twin
from smdlib import CompressedCache, EvictionPolicy, MaskedAttentionAdapter, ShadowMaskRecorder, SparseActor
from smdlib.policies import available_policies, make_policy, tracks_attention
from smdlib.testing import byte_tokenizer

PLAIN, SLICED = "DynamicCache", "streaming, sliced"
QUICK = "--shape tiny --batches 1 2 --tokens 256 --reserve 16 --layers 2 --repeats 1 --group 4 --vocabulary 259"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    made.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    made.add_argument("--tokens", type=int, default=2048)
    made.add_argument("--budget", type=float, default=0.5)
    made.add_argument("--reserve", type=int, default=128, help="slots for the response")
    made.add_argument("--group", type=int, default=8, help="samples of one prompt")
    made.add_argument("--policies", nargs="+", default=available_policies(), choices=available_policies())
    made.add_argument("--repeats", type=int, default=3)
    add_model_arguments(made, layers=4)
    return made


def policy_of(name: str) -> EvictionPolicy:
    """Make a policy; recent keys alone would be warned about."""
    return make_policy(name, sinks=4) if name == "recent" else make_policy(name)


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[Result]:
    """Time prefills of every policy in turn with plain ones, then a group's."""
    model = make_model(args.shape, args)
    plain = plain_twin(model)
    with MaskedAttentionAdapter(model) as adapter:
        results = [row for batch in args.batches for row in measure_batch(model, plain, batch, args)]
        return results + measure_group(adapter, plain, args)


def plain_prefill(plain: PreTrainedModel, ids: torch.Tensor) -> Callable[[], Any]:
    """Return a prefill of the peer."""
    return lambda: plain(input_ids=ids, cache=DynamicCache(config=plain.config), logits_to_keep=1)


def sliced_prefill(slicing: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace) -> Callable[[], Any]:
    """Return a prefill of the peer that gathers the kept keys after each layer."""
    kept = math.ceil(args.budget * args.tokens)
    return lambda: slicing(
        input_ids=ids, cache=peers.slicing_cache(slicing.config, kept, "streaming"), logits_to_keep=1
    )


def own_prefill(model: PreTrainedModel, ids: torch.Tensor, policy: str, args: argparse.Namespace) -> Callable[[], Any]:
    """Return a prefill with eviction, recorded; the record is part of what has to be done."""

    def prefill() -> Any:
        recorder = ShadowMaskRecorder()
        cache = CompressedCache(model.config, policy_of(policy), args.budget, reserve=args.reserve, recorder=recorder)
        return model(input_ids=ids, cache=cache, logits_to_keep=1)

    return prefill


def measure_batch(model: Any, plain: Any, batch: int, args: argparse.Namespace) -> list[Result]:
    """Rows of one batch size."""
    ids = torch.randint(args.vocabulary, (batch, args.tokens), device=args.device)
    slicing = plain_twin(plain)
    slicing.set_attn_implementation(peers.NAME)
    ways = {PLAIN: plain_prefill(plain, ids), SLICED: sliced_prefill(slicing, ids, args)}
    ways |= {policy: own_prefill(model, ids, policy, args) for policy in args.policies}
    # Counting slows a call down, but it warms up as well as another.
    peaks = {name: peak(way).peak for name, way in ways.items()}
    times = alternate(ways, device=args.device, repeats=args.repeats, warmup=0, label=f"prefill, {batch} rows")
    claim = f"prefill, {batch} x {args.tokens} tokens"
    results = [times.result(claim, name, PLAIN, bytes=peaks[name]) for name in (PLAIN, SLICED)]
    for policy in args.policies:
        goal = 2.0 if tracks_attention(policy_of(policy)) else 1.1
        results.append(times.result(claim, policy, PLAIN, goal, bytes=peaks[policy]))
    worst = max(args.policies, key=lambda policy: peaks[policy])
    extra = peaks[worst] - peaks[PLAIN]
    results.append(
        Result(
            claim=f"peak above a plain prefill's, {batch} x {args.tokens} tokens",
            case=f"{worst}, the most of {len(args.policies)} policies",
            ratio=extra / (4 * batch * args.tokens**2),
            of="P x P of one head",
            goal=1.0,
            bytes=extra,
        )
    )
    return results


@contextmanager
def prefills_counted(model: PreTrainedModel):
    """Yield a list of the prompt tokens of every forward pass with more than one token a row."""
    tokens: list[int] = []

    def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        rows, columns = kwargs["input_ids"].shape
        if columns > 1:
            tokens.append(rows * columns)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield tokens
    finally:
        hook.remove()


def measure_group(adapter: MaskedAttentionAdapter, plain: Any, args: argparse.Namespace) -> list[Result]:
    """First tokens of G samples of one prompt: the actor's way, and `generate` on G rows."""
    options = {"max_new_tokens": 1, "eos_token_id": None}
    actor = SparseActor(adapter, byte_tokenizer(), policy="snapkv", budget=args.budget, generate_kwargs=options)
    prompt = torch.randint(args.vocabulary, (1, args.tokens + 1), device=args.device).expand(args.group, -1)
    batch = TensorDict({("tokens", "prompt"): prompt}, [args.group])

    def every_row() -> Any:
        return plain.generate(prompt, max_new_tokens=1, do_sample=True, eos_token_id=None, pad_token_id=0)

    ways = {"one prefill per distinct prompt": lambda: actor(batch), "every row prefilled": every_row}
    own, other = ways
    counts = {}
    for name, model in ((own, adapter.model), (other, plain)):
        with prefills_counted(model) as tokens:
            ways[name]()
        counts[name] = sum(tokens) / args.tokens
    times = alternate(ways, device=args.device, repeats=args.repeats, warmup=0, label="prefill, a group")
    claim = f"first token of {args.group} samples of a prompt"
    prompts = [
        Result(f"prompts prefilled for {args.group} samples", name, ratio=count, of="distinct prompts")
        for name, count in ((own, round(counts[own], 3)), (other, round(counts[other], 3)))
    ]
    prompts[0] = Result(**{**vars(prompts[0]), "goal": 1.0, "exactly": True})
    return [times.result(claim, name, other) for name in (other, own)] + prompts


if __name__ == "__main__":
    main("prefill", parser(), measure)
