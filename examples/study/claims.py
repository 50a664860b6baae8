"""Each of the paper's claims as a comparison of arms, with a verdict that the intervals decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .setting import Eviction, Setting
from .statistics import Estimate, bootstrap, paired
from .table import Table

MARGIN = 0.03
"""Two arms count as equally good when the interval of their difference lies above minus this."""

MIN_SEEDS = 5
"""Below so many pairs an interval says nothing, and no verdict is given."""

EVALUATIONS = {"dense": "every key", "sparse": "evicting"}
"""Of greedy decoding: name in the records, and words for the keys that it has."""

Kind = Literal["better", "as good"]


@dataclass(frozen=True)
class Claim:
    """``one`` is better than, or as good as, ``other``.

    Attributes:
        text: What is claimed.
        one: The arm that it is claimed of.
        other: The arm it is compared with.
        kind: ``better`` holds where the whole interval of the difference is above 0, ``as good`` where it is above
            ``-MARGIN``.
        where: Settings it is looked at in, whatever their arm and seed.
    """

    text: str
    one: str
    other: str
    kind: Kind
    where: tuple[Setting, ...]


@dataclass(frozen=True)
class Finding:
    """One difference: where, in which evaluation, how large.

    Attributes:
        where: Task and eviction.
        evaluation: ``dense`` or ``sparse``.
        estimate: Of the difference.
        bound: What the difference has to be above.
    """

    where: str
    evaluation: str
    estimate: Estimate
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the whole interval is above the bound."""
        return self.estimate.low > self.bound

    @property
    def opposite(self) -> bool:
        """Whether the whole interval is below it."""
        return self.estimate.high < self.bound


def findings(claim: Claim, table: Table) -> list[Finding]:
    """Compare the arms wherever both were run."""
    found = []
    for setting in claim.where:
        for evaluation in EVALUATIONS:
            one = table.values(setting.but(arm=claim.one), evaluation)
            other = table.values(setting.but(arm=claim.other), evaluation)
            if len(one.keys() & other.keys()) >= MIN_SEEDS:
                bound = 0.0 if claim.kind == "better" else -MARGIN
                found.append(Finding(setting.place, evaluation, paired(one, other), bound))
    return found


@dataclass(frozen=True)
class CostClaim:
    """An update of ``one`` saves more than ``bound`` of what an update of ``other`` costs.

    Attributes:
        text: What is claimed.
        one: The arm that it is claimed of.
        other: The arm it is compared with.
        cost: Name in the records.
        bound: A share of the other's cost; negative where ``one`` may cost more.
        where: Settings it is looked at in.
    """

    text: str
    one: str
    other: str
    cost: Literal["seconds", "kv_bytes"]
    bound: float
    where: tuple[Setting, ...]


def savings(claim: CostClaim, table: Table) -> list[Finding]:
    """Compare the costs wherever both arms were run."""
    found = []
    for setting in claim.where:
        one, other = (
            table.figure(setting.but(arm=arm), lambda record: record["cost"][claim.cost])
            for arm in (claim.one, claim.other)
        )
        saved = {seed: 1 - one[seed] / other[seed] for seed in one.keys() & other.keys()}
        if len(saved) >= MIN_SEEDS:
            found.append(Finding(setting.place, "share saved", bootstrap(list(saved.values())), claim.bound))
    return found


def verdict(found: Sequence[Finding]) -> str:
    """``holds`` everywhere, ``partly``, or ``not seen here``; then the places where it holds, the opposite, neither."""
    if not found:
        return "not run"
    held, opposite = sum(one.holds for one in found), sum(one.opposite for one in found)
    word = "holds" if held == len(found) else "partly" if held else "not seen here"
    return f"{word}: +{held} x{opposite} o{len(found) - held - opposite}"


def cost_claims(main: Eviction, rates: Mapping[str, float]) -> list[CostClaim]:
    """Return the paper's claims of memory and time."""
    where = tuple(Setting("", task, main, rate) for task, rate in rates.items())
    longer = "SMD's update takes less than 10 % longer than"
    return [
        CostClaim("SMD at 50 % holds less than 60 % of dense's KV bytes", "smd", "dense", "kv_bytes", 0.4, where),
        CostClaim(f"{longer} dense's", "smd", "dense", "seconds", -0.1, where),
        CostClaim(f"{longer} that of Track 1 alone", "smd", "smd_track1", "seconds", -0.1, where),
        CostClaim(f"{longer} naive's with the sampler's ratio", "smd", "naive_sampler", "seconds", -0.1, where),
    ]


def paper_claims(main: Eviction, seventy: Eviction, random: Eviction, rates: Mapping[str, float]) -> list[Claim]:
    """Return the claims of arXiv 2605.06850, and the questions that come with them."""

    def at(*evictions: Eviction) -> tuple[Setting, ...]:
        return tuple(Setting("", task, one, rate) for one in evictions for task, rate in rates.items())

    def over_naive(text: str, one: str) -> tuple[Claim, Claim]:
        where = at(main, random, seventy)
        sampler = Claim(f"{text} naive with the sampler's ratio", one, "naive_sampler", "better", where)
        return Claim(f"{text} naive", one, "naive", "better", where), sampler

    return [
        Claim("SMD is as good as dense at 50 %", "smd", "dense", "as good", at(main)),
        Claim("SMD is as good as dense at 70 %", "smd", "dense", "as good", at(seventy)),
        *over_naive("SMD is better than", "smd"),
        Claim("SMD is better than TIS", "smd", "tis", "better", at(main, random, seventy)),
        Claim("SMD is better than Sparse-RL at 50 %", "smd", "sparse_rl", "better", at(main, random)),
        Claim("SMD is better than Sparse-RL at 70 %", "smd", "sparse_rl", "better", at(seventy)),
        *over_naive("Sparse-RL is better than", "sparse_rl"),
        *over_naive("Track 1 alone improves on", "smd_track1"),
        Claim("Track 2 alone improves on naive", "track2", "naive", "better", at(main, random, seventy)),
        Claim("SMD is better than Track 1 alone", "smd", "smd_track1", "better", at(main, random, seventy)),
        Claim("SMD is better than Track 2 alone", "smd", "track2", "better", at(main, random, seventy)),
        Claim("Random selection: SMD is as good as dense", "smd", "dense", "as good", at(random)),
        Claim("The KL alone, without sparse rollouts, is as good as SMD", "dense_kl", "smd", "as good", at(main)),
        Claim("The KL alone, without sparse rollouts, improves on dense", "dense_kl", "dense", "better", at(main)),
    ]
