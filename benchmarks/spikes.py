"""What eviction itself allocates: slicing all layers at once, layer by layer, and in place.

    python -m benchmarks.spikes                # the KV cache of Qwen3-4B, 2 rows of 2,048 tokens, half the keys kept

Bytes are allocations at the peak of the eviction, above what lived before; percentages are of the dense cache. Two
ways of slicing work on a `DynamicCache` that holds a whole prompt. Ours evicts a layer as soon as it has attended, so
the dense cache never exists; its spike is the largest of all layers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks._measure import Result, rounds
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, make_model, plain_twin, token_bytes
from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder
from tests.cache.allocations import Allocations

PAPER = 2 * 9_000 * 147_456  # bytes of the paper's cache: 2 rows of 9,000 tokens, Qwen3-4B in bfloat16
QUICK = "--tokens 256 --steps 8 --layers 3 --vocabulary 64"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="qwen3-4b-kv", choices=list(SHAPES))
    made.add_argument("--batch", type=int, default=2)
    made.add_argument("--tokens", type=int, default=2048)
    made.add_argument("--budget", type=float, default=0.5)
    made.add_argument("--steps", type=int, default=64, help="tokens decoded while addresses are watched")
    made.add_argument("--policies", nargs="+", default=["snapkv", "h2o", "streaming"])
    add_model_arguments(made, layers=36, vocabulary=512)
    return made


def slice_layers(cache: Any, kept: int, at_once: bool) -> None:
    """Gather the kept keys of every layer into new tensors, before any old one is freed or layer by layer."""

    def sliced(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, held, dim = layer.keys.shape
        index = (
            torch.linspace(0, held - 1, kept, device=layer.keys.device).long()[:, None].expand(batch, heads, -1, dim)
        )
        return layer.keys.gather(2, index), layer.values.gather(2, index)

    new = (sliced(layer) for layer in cache.layers)
    for layer, (keys, values) in zip(cache.layers, list(new) if at_once else new, strict=True):
        layer.keys, layer.values = keys, values
        del keys, values


def sliced_spike(plain: Any, ids: torch.Tensor, kept: int, at_once: bool) -> int:
    """Bytes at the peak above the end of a plain prefill."""
    cache = DynamicCache(config=plain.config)
    with Allocations() as measured:
        plain(ids, cache=cache, logits_to_keep=1)
        start = measured.restart_peak()
        slice_layers(cache, kept, at_once)
        return measured.peak - start


@contextmanager
def own_spikes(cache: CompressedCache) -> Iterator[list[tuple[int, int]]]:
    """Yield a list of, for each layer's eviction: bytes at its peak, and bytes of all keys and values at that time."""
    spikes: list[tuple[int, int]] = []

    def watched(layer: Any, measured: Allocations) -> Callable[..., None]:
        commit = layer.commit

        def committing(*args: Any) -> None:
            step = layer._step
            offered = step.keys.nbytes + step.values.nbytes if step.prefill else 0  # otherwise they are the slots
            before, start = cache.kv_bytes() + offered, measured.restart_peak()
            commit(*args)
            spike = measured.peak - start
            spikes.append((spike, before + spike))

        return committing

    with Allocations() as measured:
        for layer in cache.layers:
            setattr(layer, "commit", watched(layer, measured))  # noqa: B010
        yield spikes
    for layer in cache.layers:
        del layer.commit


def addresses(cache: CompressedCache) -> list[int]:
    """Where the keys and values of all layers are."""
    slots: list[Any] = [layer.slots for layer in cache.layers]
    return [tensor.data_ptr() for part in slots for tensor in (part.keys, part.values)]


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[Result]:
    """Evict in the three ways."""
    model = make_model(args.shape, args)
    plain = plain_twin(model)
    ids = torch.randint(args.vocabulary, (args.batch, args.tokens), device=args.device)
    dense = args.batch * args.tokens * token_bytes(model)
    claim = f"eviction of {1 - args.budget:.0%}, {args.layers} layers"
    results = []
    for case, at_once in (("all layers sliced, then freed", True), ("sliced layer by layer", False)):
        spike = sliced_spike(plain, ids, int(args.budget * args.tokens), at_once)
        results.append(Result(f"{claim}: spike", case, ratio=spike / dense, of="dense cache", bytes=spike))
        if at_once:
            size = int(spike / dense * PAPER)
            results.append(Result("the same of the paper's cache", case, ratio=spike / dense, of="2.65 GB", bytes=size))
        held = dense + spike
        results.append(Result(f"{claim}: most held", case, ratio=held / dense, of="dense cache", bytes=held))
    with MaskedAttentionAdapter(model):
        for policy in args.policies:
            results += own_rows(model, ids, policy, claim, args)
    order = list(dict.fromkeys(result.claim for result in results))
    return sorted(results, key=lambda result: order.index(result.claim))


def own_rows(model: Any, ids: torch.Tensor, policy: str, claim: str, args: argparse.Namespace) -> list[Result]:
    """Rows of one policy: a prefill, then steps that evict a key each."""
    recorder = ShadowMaskRecorder()
    cache = CompressedCache(model.config, policy, args.budget, evict_every=1, recorder=recorder)
    dense = args.batch * args.tokens * token_bytes(model)
    of_layer, case = dense / args.layers, f"ours, {policy}"
    with own_spikes(cache) as spikes:
        model(ids, cache=cache, logits_to_keep=1)
        spike, held = max(spikes)[0], max(held for _, held in spikes)
        spikes.clear()
        model(ids[:, :1], cache=cache)
        decoding = max(spikes)[0]
    before, moved = addresses(cache), 0
    for _ in rounds(args.steps, f"addresses, {policy}"):
        model(ids[:, :1], cache=cache)
        moved += addresses(cache) != before
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    slots = math.ceil(args.budget * args.tokens) + 1
    formula = args.layers * heads * slots * 2 * dim * model.dtype.itemsize * args.batch
    size = cache.kv_bytes()
    less, exact = "eviction allocates less than a layer", "keys and values held after prefill"
    results = [
        Result(f"{claim}: spike", case, ratio=spike / dense, of="dense cache", bytes=spike),
        Result(f"{claim}: most held", case, ratio=held / dense, of="dense cache", bytes=held),
        Result(less, f"{case}, prefill", ratio=spike / of_layer, of="dense layer", goal=1.0, bytes=spike),
        Result(less, f"{case}, decoding", ratio=decoding / of_layer, of="dense layer", goal=1.0, bytes=decoding),
        Result(exact, case, ratio=size / formula, of="L H (budget + reserve) 2 D", goal=1.0, exactly=True, bytes=size),
        Result(f"addresses changed in {args.steps} steps", case, ratio=float(moved), goal=0.0, exactly=True),
    ]
    if policy == args.policies[0]:
        results.append(mask_bytes(recorder, args, model))
    return results


def mask_bytes(recorder: ShadowMaskRecorder, args: argparse.Namespace, model: Any) -> Result:
    """Bytes of a real record, ids of its tokens included, against the keys and values that it describes in bfloat16."""
    tokens = args.tokens + 1 + args.steps
    shadow = recorder.shadow_mask([tokens] * args.batch)
    assert shadow.token_ids is not None
    size = shadow.nbytes + shadow.token_ids.nbytes
    described = args.batch * tokens * token_bytes(model) // model.dtype.itemsize * 2
    case = f"head size {model.config.head_dim}"
    return Result("shadow mask", case, ratio=size / described, of="keys and values in bfloat16", goal=0.01, bytes=size)


if __name__ == "__main__":
    main("spikes", parser(), measure)
