"""Noisy pointer chase: follow edges that are printed several times, some of them wrong.

A prompt prints the edges of a ring of nodes ``copies`` times over, one token an edge, each time in another order; a
copy is wrong with probability ``noise``. Its last token is the node to start from, and the response names the next
nodes. Since the start stands at the very end, no look-up can happen before keys are evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .tasks import Problems, shuffled


@dataclass(frozen=True)
class PointerChase:
    """See the module.

    Attributes:
        nodes: On the ring.
        copies: Of each edge.
        hops: Tokens of the response.
        noise: Share of the copies that lead to a random other node.
    """

    nodes: int = 16
    copies: int = 6
    hops: int = 6
    noise: float = 0.2
    name: str = "chase"

    @property
    def vocabulary(self) -> list[str]:
        """Edges first, then nodes, then the marks of a prompt."""
        names = [f"n{index}" for index in range(self.nodes)]
        return [f"{a}>{b}" for a in names for b in names] + names + ["<map>", "from", "the", "node"]

    @property
    def lesson(self) -> PointerChase:
        """Maps without wrong copies."""
        return replace(self, noise=0.0)

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Draw problems; prompts have ``nodes * copies + 5`` tokens."""
        ring = shuffled(self.nodes, count, generator)
        follower = torch.empty_like(ring).scatter_(1, ring, ring.roll(-1, 1))
        source = torch.arange(self.nodes).repeat(self.copies).expand(count, -1)
        target = follower.gather(1, source)
        away = torch.randint(1, self.nodes, target.shape, generator=generator)
        wrong = torch.rand(target.shape, generator=generator) < self.noise
        target = torch.where(wrong, (target + away) % self.nodes, target)
        # Each printing in an order of its own: then a window of the last records has seen every edge.
        order = shuffled(self.nodes, count * self.copies, generator).view(count, -1)
        order = order + torch.arange(self.copies).repeat_interleave(self.nodes) * self.nodes
        edges = (source * self.nodes + target).gather(1, order)
        first = self.nodes**2
        marks = first + self.nodes + torch.arange(4).expand(count, -1)
        prompts = torch.cat([marks[:, :1], edges, marks[:, 1:], first + ring[:, :1]], 1)
        return Problems(prompts, first + ring[:, 1 : self.hops + 1], follower)

    def right(self, responses: Tensor, problems: Problems) -> Tensor:
        """Judge hops: right where they follow an edge of the ring, from wherever the one before led to."""
        first = self.nodes**2
        nodes = torch.cat([problems.prompts[:, -1:], responses], 1) - first
        known = (nodes >= 0) & (nodes < self.nodes)
        follower = problems.truth.gather(1, nodes[:, :-1].clamp(0, self.nodes - 1))
        return (follower == nodes[:, 1:]) & known[:, :-1]
