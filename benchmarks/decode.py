"""One decoding step on fixed slots, policy and recording included, against transformers' DynamicCache of as many keys.

python -m benchmarks.decode                # batch 8, 1,024 keys, the shapes of SmolLM2-135M, random weights
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder, make_policy

POLICIES: dict[str, dict[str, Any]] = {"streaming": {}, "h2o": {}, "snapkv": {}}


def make_model(layers: int, device: str, dtype: torch.dtype, vocabulary: int = 4096) -> LlamaForCausalLM:
    """SmolLM2-135M's shapes; a small vocabulary where the head costs both sides the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=65536,
    )
    return LlamaForCausalLM(config).to(device, dtype).eval()


def seconds(call: Any, device: str) -> float:
    """Time one call."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def main(args: argparse.Namespace) -> None:
    """Time every policy's steps in turn with the plain cache's."""
    model = make_model(args.layers, args.device, getattr(torch, args.dtype))
    adapter = MaskedAttentionAdapter(model)
    ids = torch.randint(4096, (args.batch, args.keys), device=args.device)
    token = ids[:, :1]
    caches: dict[str, Any] = {"DynamicCache": DynamicCache(config=model.config)}
    for name in args.policies:
        for recorded in (False, True):
            caches[f"{name}, {'recorded' if recorded else 'not recorded'}"] = CompressedCache(
                model.config,
                make_policy(name, **POLICIES[name]),
                args.keys,
                evict_every=1,
                recorder=ShadowMaskRecorder() if recorded else None,
            )
    for cache in caches.values():
        model(input_ids=ids, cache=cache, logits_to_keep=1)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(args.warmup + args.steps):
        for name, cache in caches.items():
            taken = seconds(lambda cache=cache: model(input_ids=token, cache=cache), args.device)
            if step >= args.warmup:
                times[name].append(taken)
    adapter.remove()
    plain = times["DynamicCache"]
    results = {}
    print(f"{args.batch} rows, {args.keys} keys, {args.layers} layers, {args.dtype}, {torch.get_num_threads()} threads")
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, plain, strict=True))
        results[name] = {"median_ms": 1e3 * statistics.median(taken), "ratio": ratio}
        print(f"{name:28} median {1e3 * statistics.median(taken):8.1f} ms   ratio {ratio:.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    main(parser.parse_args())
