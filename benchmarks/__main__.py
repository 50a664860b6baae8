"""Every benchmark, one table: `make bench`.

    python -m benchmarks                            # all of them; well under an hour on two cores
    python -m benchmarks --only decode growth       # parts whose names begin so; the others stay in the file
    python -m benchmarks --device cuda --out runs/bench_cuda.json
    python -m benchmarks --quick                    # tiny sizes: whether it runs, not how fast

Each part is saved when it is done, so that an interrupted run loses nothing, and a part that fails stops no other.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._report import describe, load, make_part, results_of, save
from benchmarks._table import show, show_curves
from benchmarks.growth import CURVES
from benchmarks.plot import plot
from benchmarks.table import PAGE, SOURCE, write

OUT, QUICK_OUT = SOURCE, Path("runs/bench_quick.json")
PICTURE = Path("docs/_static/bench_growth.png")


@dataclass(frozen=True)
class Part:
    """One run of a script; ``quick`` says whether a quick run has it."""

    name: str
    script: str
    arguments: str = ""
    quick: bool = True


PARTS = (
    Part("decode", "decode", "--shapes smollm2"),
    Part("decode/qwen3-0.6b", "decode", "--shapes qwen3-0.6b --layers 4 --steps 64 --no-recording", quick=False),
    Part("decode/mha", "decode", "--shapes mha --layers 4 --steps 64 --no-recording", quick=False),
    *(Part(name, name) for name in ("prefill", "generate", "chunked_prefill", "spikes", "learner", "fused_head")),
    # What the head adds to the second track: with next to no vocabulary, the passes alone.
    Part("learner/no head", "learner", "--vocabulary 256", quick=False),
    Part("profile", "profile"),
    *(Part(f"growth/{name}", "growth", f"--curves {name}") for name in CURVES),
)
ELSEWHERE = "kvpress"  # written by `make bench-kvpress`


def run(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one part."""
    script = importlib.import_module(f"benchmarks.{part.script}")
    parser = script.parser()
    line = part.arguments.split()
    if options.quick:
        # Shapes and sizes are the script's own; which curve it is stays.
        line = script.QUICK.split() + (line if part.script == "growth" else [])
    known = {action.dest for action in parser._actions}
    for name in ("device", "dtype"):
        if name in known and getattr(options, name) is not None:
            line += [f"--{name}", getattr(options, name)]
    args = parser.parse_args(line)
    start = time.perf_counter()
    results = script.measure(args)
    return make_part(args, results, time.perf_counter() - start) | {"quick": options.quick}


def show_all(parts: dict[str, Any]) -> None:
    """Print what a file holds."""
    names = [name for name in (*(part.name for part in PARTS), ELSEWHERE) if name in parts]
    for environment in dict.fromkeys(describe(parts[name]) for name in names):
        print(environment)
    print(f"measured in {sum(parts[name]['seconds'] for name in names) / 60:.1f} minutes")
    curves = [name for name in names if name.startswith("growth/")]
    show([row for name in names if name not in curves for row in results_of(parts[name])])
    show_curves([results_of(parts[name]) for name in curves])


def main() -> int:
    """Run the parts, save each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="beginnings of the names of parts")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--show", action="store_true", help="only print what the file holds")
    parser.add_argument("--device", help="default: cpu")
    parser.add_argument("--dtype", help="default: float32")
    parser.add_argument("--out", type=Path, help=f"default: {OUT}, and {QUICK_OUT} for a quick run")
    parser.add_argument("--picture", type=Path, help=f"default: {PICTURE}, beside --out otherwise")
    options = parser.parse_args()
    out = options.out or (QUICK_OUT if options.quick else OUT)
    picture = options.picture or (PICTURE if out == OUT else out.with_suffix(".png"))
    chosen = [part for part in PARTS if part.quick or not options.quick]
    if options.only:
        chosen = [part for part in chosen if part.name.startswith(tuple(options.only))]
        if not chosen:
            parser.error(f"no part begins with {options.only}; there are {', '.join(part.name for part in PARTS)}")
    failed = []
    for part in [] if options.show else chosen:
        print(f"{time.strftime('%H:%M:%S')} {part.name}", file=sys.stderr, flush=True)
        try:
            save(out, part.name, run(part, options))
        except Exception:
            traceback.print_exc()
            failed.append(part.name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    parts = load(out)
    show_all(parts)
    if any(part.get("quick") for part in parts.values()):
        print("From tiny sizes, which show that everything runs: times, ratios and missed goals say nothing.")
    if not options.show:
        written = [out]
        if out == OUT:
            write(parts, PAGE)
            written.append(PAGE)
        if any(name.startswith("growth/") for name in parts):
            plot(parts, picture)
            written.append(picture)
        print(*written)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
