"""Where a decoding step's time goes: `DynamicCache` against fixed slots, operator by operator.

    python -m benchmarks.profile               # batch 8, 1,024 keys, 8 layers of SmolLM2's shapes

Both need the products with the weights and one look at every key; what is left is what a cache costs. Times are those
of the operators under the profiler, which is slower than without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from benchmarks._measure import Result
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, make_model, plain_twin
from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder

# Beginnings of operators' names; what begins like none of them is the rest.
GROUPS = {
    "products with weights": ("aten::mm", "aten::addmm"),
    "attention": ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_scaled_dot_product", "aten::_flash"),
    "concatenation": ("aten::cat",),
}
QUICK = "--shape tiny --batch 2 --keys 64 --layers 2 --steps 4 --vocabulary 64"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--keys", type=int, default=1024)
    made.add_argument("--steps", type=int, default=16)
    made.add_argument("--policies", nargs="+", default=["streaming", "snapkv"])
    add_model_arguments(made, layers=8)
    return made


def spent(step: Callable[[], Any], steps: int, device: str) -> dict[str, float]:
    """Seconds that each group of operators takes in a step."""
    for _ in range(3):
        step()
    cuda = torch.device(device).type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    totals = dict.fromkeys((*GROUPS, "the rest"), 0.0)
    for event in profiled.key_averages():
        group = next((name for name, starts in GROUPS.items() if event.key.startswith(starts)), "the rest")
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        totals[group] += microseconds / 1e6 / steps
    return totals


@torch.no_grad()
def measure(args: argparse.Namespace) -> list[Result]:
    """Profile a plain cache's steps, then those of every policy, evicting and recording at each."""
    model = make_model(args.shape, args)
    plain = plain_twin(model)
    ids = torch.randint(args.vocabulary, (args.batch, args.keys), device=args.device)
    results: list[Result] = []
    with MaskedAttentionAdapter(model):
        runners: dict[str, tuple[Any, Any]] = {"DynamicCache": (plain, DynamicCache(config=plain.config))}
        for policy in args.policies:
            cache = CompressedCache(model.config, policy, args.keys, evict_every=1, recorder=ShadowMaskRecorder())
            runners[policy] = model, cache
        for name, (runner, cache) in runners.items():
            runner(input_ids=ids, cache=cache, logits_to_keep=1)
            groups = spent(lambda r=runner, c=cache: r(input_ids=ids[:, :1], cache=c), args.steps, args.device)
            total = sum(groups.values())
            results += [
                Result(f"operators of a decode step, {name}", group, seconds, ratio=seconds / total, of="all of them")
                for group, seconds in groups.items()
            ]
    return results


if __name__ == "__main__":
    main("profile", parser(), measure)
