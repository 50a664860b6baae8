"""A long prompt in chunks under one budget: what a layer holds at its peak, and whether the chunks take equal time.

    python -m benchmarks.chunked_prefill       # SmolLM2-135M's shapes, 8,192 tokens in chunks of 512, budget 1024

A layer's peak counts the slots behind every storage that holds its keys or values while it attends: its own, and the
copy that attention looks at where a chunk does not fit into the reserve (``--reserve 128``: one layer at a time holds
more than budget and chunk, all together hold less). What a policy needs for its scores is not counted. The first chunk
is left out of the times: it has nothing to look back at, and pays for the start.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks._measure import Result, rounds, seconds
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, make_model, token_bytes
from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder

QUICK = "--shape tiny --tokens 256 --chunk 32 --budget 64 --layers 2 --vocabulary 64"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    for name, default in (("tokens", 8192), ("chunk", 512), ("budget", 1024)):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--reserve", type=int, default=None, help="default: the chunk, so that chunks are in place")
    made.add_argument("--policies", nargs="+", default=["snapkv", "streaming"])
    add_model_arguments(made, layers=30)
    return made


class Peak:
    """Watches, at each layer's ``update``, which storages hold keys and values."""

    def __init__(self, cache: CompressedCache) -> None:
        self.cache, self.layer, self.total = cache, 0, 0
        for layer in cache.layers:
            setattr(layer, "update", self.watched(layer))  # noqa: B010

    def watched(self, layer: Any) -> Any:
        update = layer.update

        def watching(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            held = [self.storages(other) for other in self.cache.layers]
            self.layer = max(self.layer, sum(self.storages(layer).values()))
            self.total = max(self.total, sum(sum(one.values()) for one in held))
            return result

        return watching

    @staticmethod
    def storages(layer: Any) -> dict[int, int]:
        parts = [layer.slots, layer._step]
        tensors = [tensor for part in parts if part is not None for tensor in (part.keys, part.values)]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def prefill(model: PreTrainedModel, ids: torch.Tensor, policy: str, args: argparse.Namespace) -> list[Result]:
    """Feed ``ids [1, T]`` in chunks."""
    cache = CompressedCache(
        model.config,
        policy,
        args.budget,
        reserve=args.reserve or args.chunk,
        recorder=ShadowMaskRecorder(),
        prompt_lengths=[ids.shape[1]],
    )
    peak, times = Peak(cache), []
    for chunk in rounds(ids.shape[1] // args.chunk, f"chunks, {policy}"):
        part = ids[:, chunk * args.chunk : (chunk + 1) * args.chunk]
        times.append(seconds(lambda part=part: model(part, cache=cache, logits_to_keep=1), args.device))
    later = times[1:]
    half = len(later) // 2
    claim = f"chunks of {args.chunk} of {args.tokens} tokens, budget {args.budget}"
    of_layer = token_bytes(model) // len(cache.layers)
    return [
        Result(
            claim,
            f"{policy}, time a chunk",
            statistics.median(later),
            statistics.median(later[-half:]) / statistics.median(later[:half]),
            "first half of the chunks",
            pairs=half,
        ),
        Result(
            claim,
            f"{policy}, peak of a layer",
            ratio=peak.layer / of_layer / (args.budget + args.chunk),
            of="budget + chunk",
            # Chunks longer than the reserve are attended to in a copy.
            goal=1.0 if (args.reserve or args.chunk) >= args.chunk else None,
            bytes=peak.layer,
        ),
        Result(
            claim,
            f"{policy}, all layers at their peak",
            ratio=peak.total / token_bytes(model) / args.tokens,
            of="every key of the prompt",
            bytes=peak.total,
        ),
    ]


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[Result]:
    """Feed the prompt under every policy."""
    model = make_model(args.shape, args)
    ids = torch.randint(args.vocabulary, (1, args.tokens), device=args.device)
    with MaskedAttentionAdapter(model):
        return [row for policy in args.policies for row in prefill(model, ids, policy, args)]


if __name__ == "__main__":
    main("chunked_prefill", parser(), measure)
