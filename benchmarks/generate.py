"""The whole of `generate`, prefill and decoding, with evicted keys and with transformers' `DynamicCache`.

python -m benchmarks.generate              # 4 rows, 2,048 + 64 tokens, half the keys kept
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks._measure import Result, alternate
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, cache_bytes, make_model, plain_twin
from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder

PLAIN = "DynamicCache"
QUICK = "--shape tiny --batch 2 --tokens 64 --new 4 --layers 2 --repeats 1 --vocabulary 64"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    made.add_argument("--batch", type=int, default=4)
    made.add_argument("--tokens", type=int, default=2048)
    made.add_argument("--new", type=int, default=64, help="tokens to decode")
    made.add_argument("--budget", type=float, default=0.5)
    made.add_argument("--policies", nargs="+", default=["streaming", "snapkv", "h2o"])
    made.add_argument("--repeats", type=int, default=3)
    add_model_arguments(made, layers=4)
    return made


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[Result]:
    """Time `generate` with every cache in turn."""
    model = make_model(args.shape, args)
    plain = plain_twin(model)
    ids = torch.randint(args.vocabulary, (args.batch, args.tokens), device=args.device)
    caches: dict[str, Any] = {}

    def way(name: str, runner: Any, make_cache: Callable[[], Any]) -> Callable[[], Any]:
        def generate() -> Any:
            caches[name] = make_cache()
            length = {"max_new_tokens": args.new, "min_new_tokens": args.new}
            # A mask of its own: transformers would take a random token that equals the padding for padding.
            given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "do_sample": False}
            return runner.generate(ids, cache=caches[name], **given, **length)

        return generate

    def own(policy: str, every: int | None) -> Callable[[], CompressedCache]:
        # Prompt only: the response is kept on top, so there have to be slots for it.
        reserve = args.new if every is None else None
        return lambda: CompressedCache(
            model.config, policy, args.budget, evict_every=every, reserve=reserve, recorder=ShadowMaskRecorder()
        )

    ways = {PLAIN: way(PLAIN, plain, lambda: DynamicCache(config=model.config))}
    for policy in args.policies:
        for every, when in ((None, "prompt"), (16, "every 16 tokens")):
            name = f"{policy}, {when}"
            ways[name] = way(name, model, own(policy, every))
    with MaskedAttentionAdapter(model):
        times = alternate(ways, device=args.device, repeats=args.repeats, label="generate")
    claim = f"generate, {args.batch} x ({args.tokens} + {args.new}) tokens"
    return [times.result(claim, name, PLAIN, bytes=cache_bytes(caches[name])) for name in ways]


if __name__ == "__main__":
    main("generate", parser(), measure)
