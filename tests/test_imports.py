"""Imports point one way, the policies know tensors only, and importing smdlib changes nobody else's library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import smdlib

ROOT = Path(smdlib.__file__).parent
# Lowest first: a package may import itself and what stands before it.
LAYERS = ["policies", "cache", "masks", "losses", "rollout", "planning", "testing", "_cli"]
FILES = {str(path.relative_to(ROOT)): path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))}


def imported(source: str, package: str) -> set[str]:
    """Full names of all that `source`, a module in `package`, imports: lazily, conditionally or for types alike."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: -node.level + 1 or None] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT.parent).parts)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import smdlib.masks as m, torch", {"smdlib.masks", "torch"}),
        ("def f():\n    from smdlib.losses import GRPOLoss", {"smdlib.losses.GRPOLoss"}),
        ("from . import view", {"smdlib.cache.view"}),
        ("from .view import CacheView", {"smdlib.cache.view.CacheView"}),
        ("from .. import masks", {"smdlib.masks"}),
        ("from ..masks.record import A, B", {"smdlib.masks.record.A", "smdlib.masks.record.B"}),
    ],
)
def test_every_form_of_import_is_read(source, expected):
    assert imported(source, "smdlib.cache") == expected


def test_every_subpackage_has_its_place():
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found <= set(LAYERS), f"add {found - set(LAYERS)} to LAYERS, below whatever imports it"


@pytest.mark.parametrize("file", FILES)
def test_imports_point_one_way(file):
    path = FILES[file]
    layer = path.relative_to(ROOT).parts[0]
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    ours = {name for name in imported(path.read_text(), package_of(path)) if name.split(".")[0] == "smdlib"}
    # `from smdlib import X` would reach X through the top package, which imports everything.
    wrong = {name for name in ours if name.split(".")[1:2] == [] or name.split(".")[1] not in allowed}
    assert not wrong, f"smdlib.{layer} may import smdlib.{{{', '.join(allowed)}}} only"


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("policies")])
def test_policies_know_tensors_only(file):
    path = FILES[file]
    roots = {name.split(".")[0] for name in imported(path.read_text(), package_of(path))}
    assert not roots & {"transformers", "torchrl", "tensordict"}


# Run in a process of its own: here, another test may have imported and installed things already.
IMPORT_CHANGES_NOTHING = """
import importlib, pkgutil, sys
import torch, transformers
from tensordict import list_to_stack, lazy_legacy
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.gpt2 import modeling_gpt2 as gpt2

def state():
    classes = [llama.LlamaAttention, llama.LlamaForCausalLM, gpt2.GPT2Attention, transformers.PreTrainedModel,
               transformers.GenerationMixin, transformers.Cache, transformers.DynamicCache, transformers.DynamicLayer]
    return {
        "attention": dict(ALL_ATTENTION_FUNCTIONS), "masks": dict(ALL_MASK_ATTENTION_FUNCTIONS),
        "classes": {cls.__name__: dict(vars(cls)) for cls in classes},
        "eager": (llama.eager_attention_forward, gpt2.eager_attention_forward),
        "sdpa": torch.nn.functional.scaled_dot_product_attention,
        "tensordict": (list_to_stack(), lazy_legacy()),
        "threads": torch.get_num_threads(), "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "seed": torch.initial_seed(),
    }

before = state()
import smdlib
for module in pkgutil.walk_packages(smdlib.__path__, "smdlib."):
    importlib.import_module(module.name)
after = state()
changed = [key for key in before if before[key] != after[key]]
sys.exit(f"importing smdlib changed: {changed}" if changed else 0)
"""


def test_import_registers_and_patches_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORT_CHANGES_NOTHING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
