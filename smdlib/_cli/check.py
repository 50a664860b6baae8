"""``python -m smdlib check``."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smdlib._cli.errors import CommandError
from smdlib._cli.models import load_config, load_model, make_allocation, read_policy
from smdlib._cli.verdict import verdict
from smdlib.planning import human_bytes
from smdlib.testing import check_parity

TEXT = """The lighthouse on the north cape was built in 1871, after three ships had been lost in one winter. Its
keeper, a former ship's carpenter named Aldous Finch, kept a diary in which he wrote down the weather, every
vessel that passed, and the names of those who came to visit. In the first year there were eleven visitors.
The lamp burned whale oil, later paraffin, and was turned by a clockwork that had to be wound every four
hours, so that the keeper and his two assistants slept in turns. When the fog came in from the sea they rang
a bell, once every thirty seconds, sometimes for days. The inspector, who arrived by boat each spring,
praised the brass and complained of the accounts. In 1904 a mast for wireless telegraphy was put up beside
the tower; the first message that was received read: all well, ice to the north, proceeding slowly. Finch's
daughter Clara, who had learned the code from a book, answered it. She became keeper herself in 1911, the
second woman on that coast to hold the post, and stayed for twenty-six years. Her own diary is shorter than
her father's, but it lists the birds: terns, guillemots, a snowy owl in the winter of 1918. The lamp was
electrified in 1937 and the station left without keepers in 1962. Today the tower belongs to the town, which
opens it on Sundays from May to September; the clockwork still runs, and the bell may be rung by children
under the age of ten."""


def check(options: Namespace) -> int:
    """Sample, replay, and say whether the log-probs agree.

    Args:
        options: Of the command line.

    Returns:
        0 if they do, 1 if not, or if nothing was put to the test.
    """
    console, policy = Console(highlight=False), read_policy(options.policy)
    config = load_config(options.model)
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading the model", total=None)
        model, tokenizer = load_model(options.model, config, options.dtype, options.device)
        ids, mask = _prompts(options, tokenizer)
        try:
            parity = check_parity(
                model,
                policy,
                options.budget,
                ids.to(options.device),
                mask.to(options.device),
                new_tokens=options.new_tokens,
                evict_every=options.evict_every,
                allocation=make_allocation(options.allocation),
                tolerance=options.tolerance,
                seed=options.seed,
                progress=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
            )
        except (ValueError, TypeError, torch.OutOfMemoryError) as error:
            raise CommandError(f"{options.model!r} cannot be checked: {error}") from error
    lengths = " and ".join(map(str, mask.sum(1).tolist()))
    when = "the prompt" if options.evict_every is None else f"the prompt and every {options.evict_every} tokens"
    console.print(
        f"{type(model).__name__} in {options.dtype}, prompts of {lengths} tokens, {options.new_tokens} sampled each\n"
        f"{options.policy} at budget {options.budget} ({options.allocation}), evicting after {when}\n"
        f"{parity.evicted:.0%} of all keys evicted, cache {human_bytes(parity.kv_bytes)}",
        markup=False,
    )
    table = Table()
    for column in ("log-probs of the sampler against", "largest, nats", "mean, nats"):
        table.add_column(column, justify="left" if column.startswith("log") else "right")
    table.add_row("a learner with the record", f"{parity.gap:.2g}", f"{parity.mean_gap:.2g}")
    table.add_row("a learner with every key", f"{parity.dense_gap:.2g}", f"{parity.mean_dense_gap:.2g}")
    console.print(table)
    holds, words = verdict(parity, options.dtype)
    console.print(words, markup=False)
    return 0 if holds else 1


def _prompts(options: Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """The text and its first two thirds, so that one row is padded on the left; ids and mask int64 ``[2, P]``."""
    text = TEXT
    if options.prompt_file is not None:
        try:
            text = Path(options.prompt_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read the prompt file {options.prompt_file!r}: {error}") from error
    ids = torch.tensor(tokenizer(text, truncation=False, verbose=False)["input_ids"][: options.prompt_tokens])
    if len(ids) < 3:
        raise CommandError(f"the prompt has {len(ids)} tokens; it takes 3 at least, and a few hundred to mean much.")
    short = 2 * len(ids) // 3
    mask = torch.ones(2, len(ids), dtype=torch.int64)
    mask[1, : len(ids) - short] = 0
    padded = torch.cat([ids.new_zeros(len(ids) - short), ids[:short]])
    return torch.stack([ids, padded]), mask
