"""How every script measures: ways in turn, medians, ratios of pairs, live bytes.

Needs nothing but torch, so that peers measure alike in environments of their own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.cache.allocations import Allocations

Way = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        claim: What is measured.
        case: Of what.
        seconds: Median of one call; ``None`` where no time is measured.
        ratio: The number that the goal limits.
        of: What the ratio is of.
        goal: What the ratio may be at most, or has to be ``exactly``.
        bytes: Of memory; the claim says which.
        at: Where on the horizontal axis of a growth curve.
        pairs: Paired repetitions behind the ratio; 0 where it is no matter of time.
        spread: First and third quartile of the paired ratios.
    """

    claim: str
    case: str
    seconds: float | None = None
    ratio: float | None = None
    of: str = ""
    goal: float | None = None
    exactly: bool = False
    bytes: int | None = None
    at: float | None = None
    pairs: int = 0
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; ``None`` where there is none."""
        if self.goal is None or self.ratio is None:
            return None
        return self.ratio == self.goal if self.exactly else self.ratio <= self.goal


@dataclass
class Times:
    """Seconds of every way, one entry a round; rounds are comparable, since each runs all ways."""

    seconds: dict[str, list[float]]
    warmup: int = 0

    def result(
        self, claim: str, name: str, peer: str, goal: float | None = None, period: int = 1, **fields: Any
    ) -> Result:
        """Row of a way: its median, and the median of its ratios to the peer in the same rounds.

        Args:
            claim: Of the row.
            name: The way.
            peer: What the ratio is of.
            goal: Of the ratio.
            period: Where every ``period``-th call does more than the others (it evicts), the mean over a period is
                wanted. One slow round would spoil it, so it is put together from the medians of both kinds of calls.
            **fields: Other fields of the row.
        """
        own = self.seconds[name]
        ratios = [a / b for a, b in zip(own, self.seconds[peer], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
        return Result(
            claim=claim,
            case=fields.pop("case", name),
            seconds=self._typical(own, period),
            ratio=self._typical(ratios, period),
            of=fields.pop("of", peer),
            goal=goal,
            pairs=len(ratios),
            spread=(quartiles[0], quartiles[2]),
            **fields,
        )

    def _typical(self, values: list[float], period: int) -> float:
        """Median, or mean over a period of the medians of its calls."""
        kinds: tuple[list[float], list[float]] = ([], [])
        for turn, value in enumerate(values, start=self.warmup + 1):
            kinds[turn % period == 0].append(value)
        rare = statistics.median(kinds[True])
        return rare if period == 1 else ((period - 1) * statistics.median(kinds[False]) + rare) / period


def synchronize(device: str) -> None:
    """Wait for an accelerator; a processor never runs ahead."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


def seconds(call: Way, device: str) -> float:
    """Time one call."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def alternate(
    ways: Mapping[str, Way],
    *,
    device: str,
    repeats: int,
    warmup: int = 1,
    before: Mapping[str, Way] | None = None,
    label: str = "",
) -> Times:
    """Time all ways in turn.

    Every other round goes backwards, so that none is always the one after the slowest.

    Args:
        ways: To be called ``warmup + repeats`` times each.
        device: Where they run.
        repeats: Rounds that count.
        warmup: Rounds that do not.
        before: Called before a way of that name, untimed.
        label: Of the progress bar.
    """
    times = Times({name: [] for name in ways}, warmup)
    order = list(ways)
    for turn in rounds(warmup + repeats, label):
        for name in order if turn % 2 == 0 else reversed(order):
            (before or {}).get(name, lambda: None)()
            taken = seconds(ways[name], device)
            if turn >= warmup:
                times.seconds[name].append(taken)
    return times


def peak(call: Way) -> Allocations:
    """Live bytes of tensors that came into being in one call, at the peak and by operator."""
    with Allocations() as measured:
        call()
    return measured


def rounds(number: int, label: str) -> Iterator[int]:
    """Count, with a progress bar where someone looks on."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ModuleNotFoundError:
        yield from range(number)
        return
    console = Console(stderr=True)
    yield from track(range(number), label, console=console, transient=True, disable=not console.is_terminal)
