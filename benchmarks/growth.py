"""How decoding, prefill and the learner's step grow, ours beside the plain way.

    python -m benchmarks.growth                # two layers of SmolLM2-135M's shapes; some minutes
    python -m benchmarks.growth --curves learner-group

Every point alternates the two as the other scripts do. ``python -m benchmarks.plot`` draws the saved curves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import decode, learner, prefill
from benchmarks._measure import Result, alternate, peak
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, cache_bytes, make_model, plain_twin
from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder


@dataclass(frozen=True)
class Curve:
    """One horizontal axis.

    Attributes:
        title: What is measured, at which sizes (names of arguments in braces).
        axis: What grows, with its unit.
        points: Where it is measured.
        quick: The same for a test.
        measure: Gives the rows of one point.
    """

    title: str
    axis: str
    points: tuple[int, ...]
    quick: tuple[int, ...]
    measure: Callable[[int, Models, argparse.Namespace], list[Result]]


@dataclass(frozen=True)
class Models:
    """The same weights with an adapter and without."""

    own: Any
    plain: Any
    adapter: MaskedAttentionAdapter


def decoding(prompt: int, budget: int | float, models: Models, args: argparse.Namespace) -> list[Result]:
    """Steps with H2O, evicting at every one, and on a plain cache of the whole prompt."""
    ids = torch.randint(args.vocabulary, (args.batch, prompt), device=args.device)
    own = CompressedCache(models.own.config, "h2o", budget, evict_every=1, recorder=ShadowMaskRecorder())
    dense = DynamicCache(config=models.plain.config)
    runs = {"DynamicCache": (models.plain, dense), "h2o": (models.own, own)}
    with torch.no_grad():
        for model, cache in runs.values():
            model(input_ids=ids, cache=cache, logits_to_keep=1)
        times = alternate(
            {name: decode.step(model, cache, ids[:, :1]) for name, (model, cache) in runs.items()},
            device=args.device,
            repeats=args.steps,
            warmup=3,
            before={"DynamicCache": decode.held_at(dense, prompt)},
        )
    return [times.result("", name, "DynamicCache", bytes=cache_bytes(cache)) for name, (_, cache) in runs.items()]


def prefilling(prompt: int, models: Models, args: argparse.Namespace) -> list[Result]:
    """One row, half its keys kept."""
    ids = torch.randint(args.vocabulary, (1, prompt), device=args.device)
    sizes = argparse.Namespace(budget=0.5, reserve=128)
    ways = {"DynamicCache": prefill.plain_prefill(models.plain, ids)}
    ways |= {policy: prefill.own_prefill(models.own, ids, policy, sizes) for policy in ("snapkv", "h2o")}
    with torch.no_grad():
        peaks = {name: peak(way).peak for name, way in ways.items()}
        times = alternate(ways, device=args.device, repeats=args.repeats, warmup=0)
    return [times.result("", name, "DynamicCache", bytes=peaks[name]) for name in ways]


def learning(models: Models, args: argparse.Namespace, **sizes: Any) -> list[Result]:
    """Both tracks and TorchRL's loss on full logits; sizes left out are those of the arguments."""
    own = {"group": args.group, "prompt": args.prompt, "response": args.response, "budget": 0.5} | sizes
    batch = learner.make_batch(models.own, **own)
    ways = learner.steps(models.own, models.plain, batch, models.adapter, every=False)
    ways = {name: ways[name] for name in (learner.TORCHRL, learner.BOTH)}
    peaks = {name: peak(way).peak for name, way in ways.items()}
    times = alternate(ways, device=args.device, repeats=args.repeats, warmup=0)
    return [times.result("", name, learner.TORCHRL, bytes=peaks[name]) for name in ways]


PERCENT = (10, 25, 50, 75, 100)
CURVES = {
    "decode-keys": Curve(
        "decoding step, {batch} rows, as many keys in both caches",
        "keys held (tokens)",
        (256, 512, 1024, 2048, 4096, 8192),
        (32, 64),
        lambda at, models, args: decoding(at, at, models, args),
    ),
    "decode-budget": Curve(
        "decoding step, {batch} rows after {long} tokens",
        "budget (% of the prompt)",
        PERCENT,
        (50, 100),
        lambda at, models, args: decoding(args.long, at / 100, models, args),
    ),
    "prefill-prompt": Curve(
        "prefill of a row, half the keys kept",
        "prompt (tokens)",
        (1024, 2048, 4096, 8192),
        (64, 128),
        prefilling,
    ),
    "learner-prompt": Curve(
        "learner step, {group} x (P + {response}) tokens",
        "prompt (tokens)",
        (1024, 2048, 4096, 8192),
        (16, 32),
        lambda at, models, args: learning(models, args, prompt=at),
    ),
    "learner-group": Curve(
        "learner step, G x ({prompt} + {response}) tokens",
        "group (rows)",
        (1, 2, 4, 8, 16),
        (1, 2),
        lambda at, models, args: learning(models, args, group=at),
    ),
    "learner-budget": Curve(
        "learner step, {group} x ({prompt} + {response}) tokens",
        "budget (% of the prompt)",
        PERCENT,
        (50, 100),
        lambda at, models, args: learning(models, args, budget=at / 100),
    ),
    "learner-response": Curve(
        "learner step, {group} x ({prompt} + R) tokens",
        "response (tokens)",
        (16, 64, 128, 256, 512),
        (4, 8),
        lambda at, models, args: learning(models, args, response=at),
    ),
}
QUICK = (
    "--shape tiny --batch 2 --steps 2 --repeats 1 --long 64 --group 2 --prompt 16 --response 4 --vocabulary 64 --quick"
)


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--curves", nargs="+", default=list(CURVES), choices=list(CURVES))
    made.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    made.add_argument("--batch", type=int, default=4, help="rows that decode")
    made.add_argument("--long", type=int, default=4096, help="prompt of decode-budget")
    made.add_argument("--steps", type=int, default=30, help="decoding steps")
    made.add_argument("--group", type=int, default=4, help="rows of the learner, where they do not grow")
    made.add_argument("--prompt", type=int, default=1024, help="tokens of the learner's prompt, likewise")
    made.add_argument("--response", type=int, default=64, help="tokens of its responses, likewise")
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--quick", action="store_true", help="two small points of every curve")
    add_model_arguments(made, layers=2, vocabulary=2048)
    return made


def measure(args: argparse.Namespace) -> list[Result]:
    """Rows of all points, ``at`` says of which."""
    return [row for name in args.curves for row in measure_curve(name, args)]


def measure_curve(name: str, args: argparse.Namespace) -> Iterator[Result]:
    """Rows of one curve."""
    curve, model = CURVES[name], make_model(args.shape, args)
    plain = plain_twin(model)
    with MaskedAttentionAdapter(model) as adapter:
        for at in curve.quick if args.quick else curve.points:
            for row in curve.measure(at, Models(model, plain, adapter), args):
                yield replace(row, claim=f"{curve.title.format(**vars(args))}, against {curve.axis}", at=at)


if __name__ == "__main__":
    main("growth", parser(), measure)
