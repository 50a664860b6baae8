"""Sphinx configuration: an API reference that follows each package's `__all__` and needs no network.

`autosummary` writes one page a package and one a name. What belongs on them is computed here and handed to the
templates in `_templates/autosummary`, so no list of names is kept by hand.
"""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _public import constant_doc, own_members, public_names

project = "smdlib"
author = "smdlib authors"
copyright = "2026, smdlib authors"
release = version = installed_version("smdlib")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]
# `name` is code, and a link where it is a public name.
default_role = "py:obj"

_public = public_names()
autosummary_context = {
    "public": _public,
    "own": {f"{package}.{name}": own_members(package, name) for package, names in _public.items() for name in names},
}

autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = f"smdlib {release}"
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_show_sourcelink = False


def _document_constant(app, what, name, obj, options, lines):
    """A constant has no docstring of its own, and autodoc would print that of `int`: take the one in the source."""
    if what == "data":
        lines[:] = constant_doc(*name.rpartition(".")[::2])


def setup(app):
    app.connect("autodoc-process-docstring", _document_constant)
