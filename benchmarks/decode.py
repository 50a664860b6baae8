"""One decoding step on fixed slots, policy and recording included, against caches that concatenate.

    python -m benchmarks.decode                # batch 8, 1,024 keys, 8 layers of each shape, random weights

Peers: transformers' `DynamicCache` of as many keys, the same of twice as many (what a budget of 50 % replaces), and a
cache that concatenates and gathers at every step. All run the same weights; theirs have no adapter.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import peers
from benchmarks._measure import Result, Times, alternate
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, cache_bytes, make_model, plain_twin
from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder

PLAIN, DOUBLE = "DynamicCache", "DynamicCache, 2x keys"
EVERY = 32  # of the amortised variant
SLICED = ("streaming", "h2o")  # policies of the peer that concatenates and gathers
# Policy, steps between evictions.
WAYS = (("streaming", 1), ("h2o", 1), ("snapkv", 1), ("snapkv", EVERY))
QUICK = "--shapes tiny --batch 2 --keys 64 --layers 2 --steps 32 --vocabulary 64"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", nargs="+", default=["smollm2", "qwen3-0.6b", "mha"], choices=list(SHAPES))
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--keys", type=int, default=1024)
    made.add_argument("--steps", type=int, default=3 * EVERY, help=f"a multiple of {EVERY}")
    made.add_argument("--warmup", type=int, default=4)
    made.add_argument("--recording", action=argparse.BooleanOptionalAction, default=True, help="time it unrecorded too")
    add_model_arguments(made, layers=8)
    return made


def case_of(policy: str, every: int, recorded: bool) -> str:
    """Name of one of our ways."""
    often = "" if every == 1 else f" every {every} steps"
    return f"{policy}{often}{'' if recorded else ', not recorded'}"


def held_at(cache: DynamicCache, keys: int) -> Callable[[], None]:
    """Return what takes the newest keys off a plain cache, so that it keeps its length over the steps."""

    def cut() -> None:
        extra = cache.get_seq_length() - keys
        if extra:
            cache.crop(-extra)

    return cut


def sliced(policy: str) -> str:
    """Name of a peer that concatenates and gathers."""
    return f"{policy}, sliced and concatenated"


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[Result]:
    """Time every way's steps in turn, one shape after the other."""
    if args.steps < 1 or args.steps % EVERY:
        raise SystemExit(f"--steps must be a multiple of {EVERY} above 0, so that every period is whole.")
    results = []
    for shape in args.shapes:
        times, sizes = measure_shape(shape, args)
        results += rows(shape, times, sizes, args.recording)
        gc.collect()  # layers and the keys they handed out know each other; the next shape needs the room
    return results


def measure_shape(shape: str, args: argparse.Namespace) -> tuple[Times, dict[str, int]]:
    """Times of one shape, and bytes of the caches."""
    model = make_model(shape, args)
    plain, slicing = plain_twin(model), plain_twin(model)
    slicing.set_attn_implementation(peers.NAME)
    ids = torch.randint(args.vocabulary, (args.batch, 2 * args.keys), device=args.device)
    caches: dict[str, tuple[Any, Any]] = {}
    for name in (PLAIN, DOUBLE):
        caches[name] = plain, DynamicCache(config=model.config)
    for policy in SLICED:
        caches[sliced(policy)] = slicing, peers.slicing_cache(model.config, args.keys, policy)
    for policy, every in WAYS:
        for recorded in (False, True) if args.recording else (True,):
            recorder = ShadowMaskRecorder() if recorded else None
            cache = CompressedCache(model.config, policy, args.keys, evict_every=every, recorder=recorder)
            caches[case_of(policy, every, recorded)] = model, cache
    with MaskedAttentionAdapter(model):
        for name, (runner, cache) in caches.items():
            runner(input_ids=ids if name == DOUBLE else ids[:, : args.keys], cache=cache, logits_to_keep=1)
        times = alternate(
            {name: step(runner, cache, ids[:, :1]) for name, (runner, cache) in caches.items()},
            device=args.device,
            repeats=args.steps,
            warmup=args.warmup,
            before={PLAIN: held_at(caches[PLAIN][1], args.keys), DOUBLE: held_at(caches[DOUBLE][1], 2 * args.keys)},
            label=f"decode, {shape}",
        )
    return times, {name: cache_bytes(cache) for name, (_, cache) in caches.items()}


def step(model: Any, cache: Any, token: torch.Tensor) -> Callable[[], Any]:
    """Return one decoding step."""
    return lambda: model(input_ids=token, cache=cache)


def rows(shape: str, times: Times, sizes: dict[str, int], recording: bool) -> list[Result]:
    """Rows of one shape."""
    claim = f"decode step, {shape}"
    own = [(case_of(policy, every, True), every) for policy, every in WAYS]
    results = [times.result(claim, name, PLAIN, bytes=sizes[name]) for name in (PLAIN, DOUBLE, *map(sliced, SLICED))]
    results += [times.result(claim, name, PLAIN, 0.8, every, bytes=sizes[name]) for name, every in own]
    half, same = f"{claim}, half the keys", f"{claim}, same policy"
    results += [times.result(half, name, DOUBLE, 0.5, every, bytes=sizes[name]) for name, every in own]
    results += [times.result(same, policy, sliced(policy), bytes=sizes[policy]) for policy in SLICED]
    if recording:
        for policy, every in WAYS:
            name, without = case_of(policy, every, True), case_of(policy, every, False)
            results.append(times.result(f"recording, {shape}", name, without, 1.03, every, of="not recorded"))
    return results


if __name__ == "__main__":
    main("decode", parser(), measure)
