"""Arguments, and what becomes of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from smdlib._cli.errors import CommandError
from smdlib.policies import AdaptiveHeadAllocation, Allocation, PyramidAllocation, available_policies

ALLOCATIONS: dict[str, type[Allocation] | None] = {
    "uniform": None,
    "pyramid": PyramidAllocation,
    "adaptive": AdaptiveHeadAllocation,
}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Those of the command line by default.

    Returns:
        Exit code: 0 for a plan, or a promise that holds; 1 for one that does not hold or was not put to the test; 2
        for a command that could not be run.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        # Here, so that --help needs nothing.
        if options.command == "plan":
            from smdlib._cli.plan import plan

            return plan(options)
        from smdlib._cli.check import check

        return check(options)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        return _fail("the tables are drawn by rich, which is not installed: pip install 'smdlib[cli]'")
    except CommandError as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    sys.stderr.write(f"error: {message}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m smdlib",
        description="Shadow Mask Distillation: sparse-cache rollouts, replayed exactly in the learner.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    plan = commands.add_parser(
        "plan",
        help="what a rollout and its update will take, from a configuration alone",
        description="Bytes of one batch: the cache with every key and with evicted ones, the record, and what the "
        "learner needs. Reads the model's configuration only, no weights.",
        epilog="example: python -m smdlib plan Qwen/Qwen3-4B --prompt 8192 --response 1024 --group 8 --budget 0.25",
    )
    plan.add_argument("model", metavar="MODEL_OR_CONFIG", help="hub id, folder, or path of a config.json")
    plan.add_argument("--prompt", type=_count, default=4096, metavar="N", help="tokens of each prompt (4096)")
    plan.add_argument("--response", type=_count, default=1024, metavar="N", help="longest response, in tokens (1024)")
    plan.add_argument("--group", type=_count, default=8, metavar="N", help="responses per prompt (8)")
    plan.add_argument("--prompts", type=_count, default=1, metavar="N", help="distinct prompts of the batch (1)")
    plan.add_argument("--dtype", choices=_DTYPES, help="of keys and values (the configuration's)")
    check = commands.add_parser(
        "check",
        help="whether the promise holds on a model of yours",
        description="Samples from the model with evicted keys, replays the record, and compares the log-probs of the "
        "sampled tokens. Says in plain words whether they agree.",
        epilog="exit code: 0 if it holds, 1 if it does not or nothing was put to the test, 2 if it could not be run. "
        "example: python -m smdlib check ./my-model --policy 'h2o(recent=64)' --budget 0.3 --evict-every 8",
    )
    check.add_argument("model", metavar="MODEL", help="hub id or folder of a causal language model")
    check.add_argument("--prompt-file", metavar="FILE", help="text to read (a built-in one)")
    check.add_argument("--prompt-tokens", type=_count, default=400, metavar="N", help="cut the text to N tokens (400)")
    check.add_argument("--new-tokens", type=_count, default=32, metavar="N", help="tokens to sample per row (32)")
    check.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the weights (float32)")
    check.add_argument("--tolerance", type=float, metavar="NATS", help="(1e-4; 0.15 in half precision)")
    check.add_argument("--device", default="cpu", help="where to run (cpu)")
    check.add_argument("--seed", type=int, default=0, help="of sampling (0)")
    for command in (plan, check):
        command.add_argument(
            "--policy",
            default="snapkv",
            help=f"eviction policy, with options if you like: 'snapkv(window=16)' (snapkv); {available_policies()}",
        )
        command.add_argument(
            "--budget",
            type=_budget,
            default=0.5,
            metavar="KEYS",
            help="keys to keep per KV head: with a decimal point a share of the prompt, without one a number (0.5)",
        )
        command.add_argument(
            "--evict-every",
            type=_count,
            metavar="N",
            help="evict after every N sampled tokens too (after the prompt only)",
        )
        command.add_argument(
            "--allocation", choices=ALLOCATIONS, default="uniform", help="of the budget over layers and heads (uniform)"
        )
    return parser


def _count(text: str) -> int:
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return number


def _budget(text: str) -> float | int:
    try:
        number = int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        number = 0
    if not (number >= 1 if isinstance(number, int) else 0 < number <= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a share such as 0.5 (up to 1.0) nor a number of keys")
    return number
