"""kvpress against a plain cache of its own environment: prefill, the step after it, and what compressing allocates.

    make bench-kvpress                         # SmolLM2-135M's shapes, 2,048 tokens, half the keys kept

It cannot share an environment with smdlib, so ratios are of `DynamicCache` in the transformers that kvpress runs on.
Sizes are those of benchmarks/prefill.py and benchmarks/decode.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from kvpress import DecodingPress, KnormPress, ObservedAttentionPress, SnapKVPress, StreamingLLMPress
from transformers import DynamicCache

from benchmarks._measure import Result, alternate, peak
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, cache_bytes, make_model, plain_twin, token_bytes
from tests.cache.allocations import Allocations

PLAIN = "DynamicCache"
# ObservedAttention, the relative of H2O, reads attention weights, which only eager attention forms.
PRESSES = {
    "kvpress SnapKV": SnapKVPress,
    "kvpress StreamingLLM": StreamingLLMPress,
    "kvpress Knorm": KnormPress,
    "kvpress ObservedAttention": ObservedAttentionPress,
}


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    made.add_argument("--tokens", type=int, default=2048)
    made.add_argument("--budget", type=float, default=0.5)
    made.add_argument("--batch", type=int, default=8, help="rows that decode; one is prefilled")
    made.add_argument("--keys", type=int, default=1024, help="keys that decoding rows hold")
    made.add_argument("--steps", type=int, default=64)
    made.add_argument("--repeats", type=int, default=3)
    add_model_arguments(made, layers=4)
    return made


def pressed(model: Any, press: Any, stack: ExitStack) -> Any:
    """Return the same weights with a press hooked in until the stack closes."""
    twin = plain_twin(model)
    if "Observed" in type(press).__name__:
        twin.set_attn_implementation("eager")
    stack.enter_context(press(twin))
    return twin


def measure_prefill(model: Any, args: argparse.Namespace) -> list[Result]:
    """Time and peak of a prefill, and the largest allocation of a layer's compression."""
    ids = torch.randint(args.vocabulary, (1, args.tokens), device=args.device)

    def way(runner: Any) -> Callable[[], Any]:
        return lambda: runner(input_ids=ids, past_key_values=DynamicCache(config=runner.config), logits_to_keep=1)

    claim, spike = f"prefill, 1 x {args.tokens} tokens", "eviction of a layer allocates"
    of_layer = args.tokens * token_bytes(model) / args.layers
    with ExitStack() as stack:
        presses = {name: press(compression_ratio=1 - args.budget) for name, press in PRESSES.items()}
        ways = {PLAIN: way(model)} | {name: way(pressed(model, press, stack)) for name, press in presses.items()}
        peaks = {name: peak(run).peak for name, run in ways.items()}
        times = alternate(ways, device=args.device, repeats=args.repeats, warmup=0, label="prefill, kvpress")
        results = [times.result(claim, name, PLAIN, bytes=peaks[name]) for name in ways]
        for name, press in presses.items():
            most = compression_spike(press, ways[name])
            results.append(Result(spike, name, ratio=most / of_layer, of="dense layer", bytes=most))
    return results


def compression_spike(press: Any, run: Callable[[], Any]) -> int:
    """Most bytes that the compression of one layer allocates at its peak."""
    spikes, compress = [], press.compress
    with Allocations() as measured:

        def compressing(*inputs: Any) -> Any:
            start = measured.restart_peak()
            compressed = compress(*inputs)
            spikes.append(measured.peak - start)
            return compressed

        press.compress = compressing
        run()
    press.compress = compress
    return max(spikes)


def measure_decode(model: Any, args: argparse.Namespace) -> list[Result]:
    """Steps that evict with kvpress's DecodingPress, and steps on a plain cache of as many keys."""
    ids = torch.randint(args.vocabulary, (args.batch, args.keys), device=args.device)
    with ExitStack() as stack:
        runners = {PLAIN: model}
        for name in ("kvpress StreamingLLM", "kvpress Knorm"):
            press = DecodingPress(PRESSES[name](), compression_interval=1, target_size=args.keys)
            runners[name] = pressed(model, press, stack)
        caches = {name: DynamicCache(config=model.config) for name in runners}
        for name, runner in runners.items():
            runner(input_ids=ids, past_key_values=caches[name], logits_to_keep=1)

        def step(name: str) -> Callable[[], Any]:
            return lambda: runners[name](input_ids=ids[:, :1], past_key_values=caches[name])

        times = alternate(
            {name: step(name) for name in runners},
            device=args.device,
            repeats=args.steps,
            warmup=4,
            before={PLAIN: lambda: caches[PLAIN].crop(args.keys)},
            label="decode, kvpress",
        )
    return [times.result("decode step", name, PLAIN, bytes=cache_bytes(caches[name])) for name in runners]


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[Result]:
    """Prefill, compress, decode."""
    model = make_model(args.shape, args)
    return measure_prefill(model, args) + measure_decode(model, args)


if __name__ == "__main__":
    main("kvpress", parser(), measure)
