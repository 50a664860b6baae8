"""Policies of other installed packages, found by their entry points and loaded when they are asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from .errors import PolicyError

GROUP = "smdlib.policies"
"""Entry-point group in which a package names its policies."""


def plugin_names() -> set[str]:
    """Names of the policies that installed packages offer; none of them is imported."""
    return {point.name for point in entry_points(group=GROUP)}


def load_plugin(name: str) -> tuple[object, str] | None:
    """What another package's entry point of that name refers to, and words that say where it came from.

    Args:
        name: the policy's name.

    Returns:
        The loaded object and its origin, or None where no package offers the name.

    Raises:
        PolicyError: two packages offer the name, or the package fails to import. The message names the package.
    """
    points = {(point.value, _package(point)): point for point in entry_points(group=GROUP, name=name)}
    if not points:
        return None
    origins = [f"package {package} (entry point {name} = {value})" for value, package in points]
    if len(points) > 1:
        raise PolicyError(f"policy {name!r} is offered by {' and '.join(origins)}: uninstall one of them")
    (point,), (origin,) = points.values(), origins
    try:
        return point.load(), origin
    except Exception as error:
        raise PolicyError(f"policy {name!r} of {origin} fails to load: {type(error).__name__}: {error}") from error


def _package(point: EntryPoint) -> str:
    return "of unknown name" if point.dist is None else f"{point.dist.name} {point.dist.version}"
