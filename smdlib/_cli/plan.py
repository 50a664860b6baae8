"""``python -m smdlib plan``."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console
from rich.table import Table

from smdlib._cli.models import load_config, make_allocation, read_policy
from smdlib.planning import human_bytes, plan_memory
from smdlib.planning.geometry import read_geometry


def plan(options: Namespace) -> int:
    """Print the plan of a batch.

    Args:
        options: Of the command line.

    Returns:
        0.
    """
    config = load_config(options.model)
    sizes = read_geometry(config, options.dtype)
    planned = plan_memory(
        config,
        options.prompt,
        options.response,
        options.group,
        options.budget,
        prompts=options.prompts,
        policy=read_policy(options.policy),
        allocation=make_allocation(options.allocation),
        evict_every=options.evict_every,
        dtype=options.dtype,
    )
    low, high = min(planned.budgets), max(planned.budgets)
    console = Console(highlight=False)
    dtype = str(sizes.dtype).removeprefix("torch.")
    console.print(
        f"{config.model_type}: {sizes.layers} layers, {sizes.kv_heads} KV heads of {sizes.head_size}, {dtype}\n"
        f"{planned.rows} rows: {options.prompts} x {options.group}, {options.prompt} tokens of prompt and "
        f"{options.response} of response\n"
        f"{options.policy} keeps {low if low == high else f'{low} to {high}'} keys per layer and KV head",
        markup=False,
    )
    table = Table()
    for column in ("while", "bytes of", "plain", "smdlib", "ratio"):
        table.add_column(column, justify="left" if column in ("while", "bytes of") else "right")
    before = planned.lines()[0].when
    for line in planned.lines():
        if line.when != before:
            table.add_section()
        before = line.when
        ratio = "" if line.plain is None else f"{100 * line.smdlib / line.plain:.2g} %"
        plain = "" if line.plain is None else human_bytes(line.plain)
        table.add_row(line.when, line.what, plain, human_bytes(line.smdlib), ratio)
    console.print(table)
    console.print(
        "plain: a transformers cache with every key, and full logits. Weights, gradients, optimizer and activations "
        "come on top of both."
    )
    return 0
