"""The API reference has every public name, and every public name says what it is."""

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import smdlib

DOCS = Path(__file__).parents[1] / "docs"


def load_public():
    """`docs/_public.py`, which decides what the reference documents."""
    spec = importlib.util.spec_from_file_location("smdlib_docs_public", DOCS / "_public.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


public = load_public()
PUBLIC = public.public_names()
NAMES = [(package, name) for package, names in PUBLIC.items() for name in names]


def test_index_lists_every_package():
    listed = re.findall(r"^   (smdlib\.\w+)$", (DOCS / "api" / "index.rst").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC)


def test_top_level_names_are_documented_in_a_package():
    elsewhere = {name for names in PUBLIC.values() for name in names}
    assert set(smdlib.__all__) - {"__version__"} <= elsewhere


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_public_name_exists_and_is_described(package, name):
    obj = getattr(importlib.import_module(package), name)
    if inspect.isclass(obj) or inspect.isroutine(obj):
        doc = obj.__doc__ or ""
        # dataclass and TensorClass put the signature where there is no docstring, and TensorClass even where there is
        # one: set `Name.__doc__` below such a class.
        assert doc.strip() and not doc.startswith(f"{name}("), f"{package}.{name} has no docstring"
    else:
        pytest.importorskip("sphinx")
        assert public.constant_doc(package, name), f"say what {package}.{name} is in a string below it"
    for member in public.own_members(package, name):
        assert inspect.getdoc(inspect.getattr_static(obj, member)), f"{package}.{name}.{member} has no docstring"


@pytest.mark.slow
def test_built_reference_has_every_name(tmp_path):
    """The inventory of a real build, so that a template that drops something is noticed."""
    pytest.importorskip("sphinx")
    from sphinx.util.inventory import InventoryFile

    source = tmp_path / "docs"  # a copy: the build writes pages beside the sources
    for path in DOCS.rglob("*"):
        relative = path.relative_to(DOCS)
        if path.is_file() and relative.parts[0] != "_build" and "generated" not in relative.parts:
            (source / relative).parent.mkdir(parents=True, exist_ok=True)
            (source / relative).write_bytes(path.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-b", "html", source, tmp_path / "html"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    inventory = InventoryFile.loads((tmp_path / "html" / "objects.inv").read_bytes(), uri="")
    documented = {name for kind, entries in inventory.data.items() if kind.startswith("py:") for name in entries}
    expected = {f"{package}.{name}" for package, name in NAMES}
    expected |= {f"{package}.{name}.{own}" for package, name in NAMES for own in public.own_members(package, name)}
    assert expected <= documented, f"not in the reference: {sorted(expected - documented)}"
