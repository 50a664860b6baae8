"""Configurations, models and policies from what was typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from smdlib._cli.errors import CommandError
from smdlib._cli.main import ALLOCATIONS
from smdlib.cache import UnsupportedModelError, check_supported
from smdlib.policies import Allocation, EvictionPolicy, make_policy


def load_config(model: str) -> Any:
    """Read a configuration that smdlib supports.

    Args:
        model: Hub id, folder, or path of a ``config.json``.

    Raises:
        CommandError: if there is none, or the architecture cannot be replayed exactly.
    """
    path = Path(model).expanduser()
    if not path.exists() and (path.suffix == ".json" or model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise CommandError(f"there is no folder or file {model!r}.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CommandError(f"the folder {model!r} holds no config.json, so it is no transformers model.")
    try:
        config = AutoConfig.from_pretrained(str(path) if path.exists() else model)
    except (OSError, ValueError, KeyError) as error:
        what = "is no configuration that transformers knows" if path.exists() else "is neither here nor on the hub"
        raise CommandError(f"{model!r} {what}: {_first_line(error)}") from error
    try:
        check_supported(config)
    except UnsupportedModelError as error:
        raise CommandError(f"{model!r} is not supported: {error}") from error
    return config


def load_model(model: str, config: Any, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the weights and the tokenizer.

    Args:
        model: Hub id or folder.
        config: Its configuration.
        dtype: Of the weights.
        device: Where they go.

    Raises:
        CommandError: if that fails.
    """
    if Path(model).expanduser().is_file():
        raise CommandError(f"{model!r} is a file; to check a model give its folder, which holds weights and tokenizer.")
    source = str(Path(model).expanduser()) if Path(model).expanduser().exists() else model
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        loaded = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=getattr(torch, dtype))
        return cast(Any, loaded.eval()).to(device), tokenizer
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError) as error:  # a device, the last
        raise CommandError(f"{model!r} cannot be loaded: {_first_line(error)}") from error


def read_policy(text: str) -> EvictionPolicy:
    """Make the policy that was asked for.

    Args:
        text: Its name, with options or without.

    Raises:
        CommandError: if there is none.
    """
    try:
        return make_policy(text)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error


def make_allocation(name: str) -> Allocation | None:
    """Make the allocation of that name."""
    kind = ALLOCATIONS[name]
    return None if kind is None else kind()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
