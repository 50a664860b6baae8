"""Live bytes of tensors, counted at every operator."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(tree):
    leaves = (leaf for leaf in tree_leaves(tree) if hasattr(leaf, "untyped_storage"))
    return {storage._cdata: storage for storage in (leaf.untyped_storage() for leaf in leaves)}


@dataclass
class Operator:
    """One call: its name and the bytes of storage that its results brought into being."""

    name: str
    allocated: int
    output_bytes: int


class Allocations(TorchDispatchMode):
    """Counts storages that operators create, until the last tensor on them is gone.

    Storages that were there before are not counted (an operator that returns a view of one created nothing), nor is
    what a kernel allocates and frees within itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.operators: list[Operator] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = _storages((args, kwargs))
        result = func(*args, **(kwargs or {}))
        after, allocated = _storages(result), 0
        for address, storage in after.items():
            if address not in before and address not in self._known:
                allocated += storage.nbytes()
                self._known.add(address)
                weakref.finalize(storage, self._released, address, storage.nbytes()).atexit = False
        self.live += allocated
        self.peak = max(self.peak, self.live)
        output_bytes = sum(leaf.nbytes for leaf in tree_leaves(result) if hasattr(leaf, "nbytes"))
        self.operators.append(Operator(str(func), allocated, output_bytes))
        return result

    def _released(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self.live -= nbytes

    def restart_peak(self) -> int:
        """Let the peak be the present, and return it."""
        self.peak = self.live
        return self.live
