"""What the API reference documents: each package's `__all__`, and of a class its own public members.

Kept apart from `conf.py` so that the tests can ask the same questions without running Sphinx.
"""

import importlib
import inspect
import pkgutil

import smdlib


def packages() -> list[str]:
    """The public subpackages of smdlib that exist, by full name."""
    found = pkgutil.iter_modules(smdlib.__path__, prefix="smdlib.")
    return [module.name for module in found if module.ispkg and not module.name.rpartition(".")[2].startswith("_")]


def public_names() -> dict[str, list[str]]:
    """Full package name -> its `__all__`, sorted."""
    return {name: sorted(importlib.import_module(name).__all__) for name in packages()}


def own_members(package: str, name: str) -> list[str]:
    """Public methods and properties that smdlib itself wrote for a class; of a function or a constant there are none.

    A TensorClass or an `nn.Module` brings along hundreds of foreign members, and tensordict's decorator even writes
    them into the class, so where a member was *defined* decides, not where it is found.
    """
    obj = getattr(importlib.import_module(package), name)
    if not inspect.isclass(obj):
        return []
    members: dict[str, None] = {}
    for cls in obj.__mro__:
        if cls.__module__.partition(".")[0] == "smdlib":
            members |= {key: None for key, value in vars(cls).items() if not key.startswith("_") and _is_ours(value)}
    return list(members)


def constant_doc(package: str, name: str) -> list[str]:
    """Lines of the `#:` comment or of the string below a constant, in whichever module of the package assigns it."""
    from sphinx.pycode import ModuleAnalyzer  # here, because the tests use this file without Sphinx

    path = importlib.import_module(package).__path__
    modules = [package, *(module.name for module in pkgutil.walk_packages(path, f"{package}."))]
    for module in modules:
        doc = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
        if doc:
            return list(doc)
    return []


def _is_ours(member: object) -> bool:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    member = getattr(member, "func", member)  # functools.cached_property
    return inspect.isfunction(member) and member.__module__.partition(".")[0] == "smdlib"
