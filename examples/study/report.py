"""The report: tables in reStructuredText, made from the results file alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .arms import ARMS, START
from .cells import NONE, difference_cell, figure_cell, list_table, mean_cell, worst_cell
from .claims import EVALUATIONS, MARGIN, MIN_SEEDS, Finding, cost_claims, findings, paper_claims, savings, verdict
from .grid import H2O, HIGH_RATE, LAMBDAS, LONG, MAIN, RANDOM, RATE, RATES, RECENT, SEVENTY, STEPS, TWENTY
from .setting import Eviction, Scale, Setting
from .statistics import short
from .table import Table, first_five


def settings_of(table: Table, arms: Iterable[str], at: Setting) -> list[Setting]:
    """The settings like ``at`` of all arms that have results there."""
    found = [at.but(arm=name) for name in arms]
    return [one for one in found if table.values(one, "dense")]


def accuracy(table: Table, at: Setting, title: str) -> str:
    """Solved problems of all arms at one setting: what training gained, and the difference to dense and naive."""
    if not table.runs(at.but(arm="smd")):
        return ""
    dense, naive = (table.values(at.but(arm=name), "dense") for name in ("dense", "naive"))
    before = {name: table.values(at.but(arm=START, rate=0.0), name) for name in EVALUATIONS}
    rows = []
    for one in settings_of(table, [*ARMS], at):
        cells = []
        for name, start in before.items():
            solved = table.values(one, name)
            cells += [mean_cell(solved), difference_cell(solved, _from_checkpoint(start, solved))]
        for name, other in (("dense", dense), ("naive", naive)):
            cells.append(NONE if one.arm == name else difference_cell(table.values(one, "dense"), other))
        rows.append([one.arm, *cells, mean_cell(table.figure(one, _point("reward")))])
    if rows:
        plain = [figure_cell(before[name], "{:.3f}").lstrip("0") for name in EVALUATIONS]
        rows.insert(0, ["before", plain[0], NONE, plain[1], NONE, NONE, NONE, NONE])
    header = ["arm"] + [text for words in EVALUATIONS.values() for text in (words, f"{words}, gain")]
    header += ["every key, against dense", "every key, against naive", "reward of the samples, last 10 updates"]
    return list_table(title, header, rows)


def _from_checkpoint(start: Mapping[int, float], seeds: Iterable[int]) -> dict[int, float]:
    """What the checkpoint that each seed started from solved."""
    count = Scale().initialisations
    return {seed: start[seed % count] for seed in seeds if seed % count in start}


def claim_rows(table: Table) -> list[list[str]]:
    """A row per claim: verdict, and the difference wherever it was looked at."""

    def cell(finding: Finding) -> str:
        mark = "+" if finding.holds else "x" if finding.opposite else "o"
        return f"{mark} {finding.where}, {finding.evaluation}: {finding.estimate}"

    looked = [(claim.text, findings(claim, table)) for claim in paper_claims(MAIN, SEVENTY, RANDOM, RATES)]
    looked += [(claim.text, savings(claim, table)) for claim in cost_claims(MAIN, RATES)]
    rows = []
    for text, found in looked:
        block = "\n".join(f"       | {cell(finding)}" for finding in found).lstrip()
        rows.append([text, f"**{verdict(found)}**", block])
    return rows


def _point(name: str, index: int = -1) -> Callable[[dict[str, Any]], float | None]:
    return lambda record: record["curve"][name][index] if name in record.get("curve", {}) else None


def _largest(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda record: max(record["curve"][name]) if name in record.get("curve", {}) else None


def mismatch(table: Table, at: Setting, title: str) -> str:
    """What the learner of each arm was off by over the last ten updates, and how its gradient grew."""
    columns: list[tuple[str, Callable[[dict[str, Any]], float | None], Callable]] = [
        ("KL k1, nats", _point("kl_approx"), figure_cell),
        ("KL k3, nats", _point("kl_approx_k3"), figure_cell),
        ("largest ratio of any token", _largest("max_ratio"), worst_cell),
        ("ESS", _point("ESS"), figure_cell),
        ("acceptance, 5th percentile", _point("acceptance_p5"), figure_cell),
        ("KL of dense and sparse policy, nats", _point("kl"), figure_cell),
        ("rejected", _point("rejected_fraction"), figure_cell),
        ("clipped", _point("clip_fraction"), figure_cell),
        ("gradient norm, first 10", _point("grad_norm", 0), figure_cell),
        ("gradient norm, last 10", _point("grad_norm"), figure_cell),
        ("gradient norm, largest of any update", lambda record: record["worst"]["grad_norm"], worst_cell),
        ("largest gap of any token, nats", lambda record: record["worst"]["max_mismatch"], worst_cell),
        ("largest RMS gap of any update", lambda record: record["worst"].get("rms_mismatch"), worst_cell),
    ]
    rows = [
        [arm, *(show(table.figure(at.but(arm=arm), read)) for _, read, show in columns)]
        for arm in ARMS
        if table.runs(at.but(arm=arm))
    ]
    return list_table(title, ["arm", *(name for name, _, _ in columns)], rows)


def replay(table: Table) -> str:
    """How far learner and sampler were apart over all runs of the file, for the arms that have to agree."""
    rows = []
    for arm in ARMS:
        for dtype in ("float32", "float64"):
            runs = [
                (Scale().updates * setting.length, record["worst"])
                for setting, record in zip(table.settings, table.records, strict=True)
                if (setting.arm, setting.dtype) == (arm, dtype) and "rms_mismatch" in record.get("worst", {})
            ]
            if runs:
                updates = sum(count for count, _ in runs)
                gaps = [f"{max(worst[name] for _, worst in runs):.1e}" for name in ("rms_mismatch", "max_mismatch")]
                rows.append([arm, dtype, str(len(runs)), f"{updates:,}", *gaps])
    header = ["arm", "computed in", "runs", "updates", "largest RMS of any update, nats", "largest of any token, nats"]
    return list_table("Sampler and learner apart, over all runs", header, rows)


def cost(table: Table, at: Setting, title: str) -> str:
    """Processor seconds and bytes of keys and values per update."""
    names = ("seconds", "rollout_seconds", "kv_bytes")
    rows = []
    for one in settings_of(table, [*ARMS], at):
        seconds, rollout, held = (table.figure(one, lambda record, name=name: record["cost"][name]) for name in names)
        megabytes = {seed: value / 1e6 for seed, value in held.items()}
        rows.append([one.arm, *(figure_cell(cells, "{:.2f}") for cells in (seconds, rollout, megabytes))])
    return list_table(title, ["arm", "seconds per update", "of which sampling", "KV, MB per update"], rows)


def factor(table: Table, title: str, name: str, arms: Sequence[str], levels: Sequence[tuple[str, Setting]]) -> str:
    """Accuracy of some arms (columns) at the levels of a factor (rows): with every key, and evicting."""
    rows = []
    for label, at in levels:
        for evaluation, words in EVALUATIONS.items():
            cells = [mean_cell(table.values(at.but(arm=one), evaluation)) for one in arms]
            if any(cell != NONE for cell in cells):
                rows.append([label, words, *cells])
    return list_table(title, [name, "evaluated with", *arms], rows)


def weights(table: Table, at: Setting, title: str) -> str:
    """Accuracy of SMD at each lambda in the first five seeds, and the difference to lambda 0 and to naive."""
    zero, naive = at.but(arm="smd_track1"), at.but(arm="naive")
    levels = [("0", zero), *((f"{coeff:g}", at.but(arm="smd", coeff=coeff)) for coeff in sorted((*LAMBDAS, 0.1)))]
    rows = []
    for label, one in levels:
        solved = {name: first_five(table.values(one, name)) for name in EVALUATIONS}
        if solved["dense"]:
            gaps = [
                NONE if one is zero and other is zero else difference_cell(values, table.values(other, name))
                for other in (zero, naive)
                for name, values in solved.items()
            ]
            rows.append([label, *map(mean_cell, solved.values()), *gaps])
    words = [*EVALUATIONS.values()]
    header = ["lambda", *words, *(f"{word}, against {other}" for other in ("0", "naive") for word in words)]
    return list_table(title, header, rows)


def everywhere(table: Table, levels: Sequence[tuple[str, Setting]]) -> str:
    """SMD against dense and naive in every setting that has all three, over the first five seeds."""
    rows = []
    for label, at in levels:
        smd = {name: first_five(table.values(at.but(arm="smd"), name)) for name in EVALUATIONS}
        cells = [
            difference_cell(values, table.values(at.but(arm=other), name))
            for name, values in smd.items()
            for other in ("dense", "naive")
        ]
        if smd["dense"]:
            rows.append([label, *cells])
    header = [f"{words}, against {other}" for words in EVALUATIONS.values() for other in ("dense", "naive")]
    return list_table("SMD in every setting, first five seeds", ["setting", *header], rows)


def tuned(table: Table, at: Setting, title: str) -> str:
    """Each arm at the better of the two learning rates: chosen by the first five seeds, alike for all arms."""

    def solved(arm: str, rate: float, evaluation: str) -> dict[int, float]:
        return first_five(table.values(at.but(arm=arm, rate=rate), evaluation))

    best: dict[str, float] = {}
    for arm in ARMS:
        means = {rate: sum(values) for rate in (RATE, HIGH_RATE) if (values := solved(arm, rate, "dense").values())}
        if len(means) == 2:
            best[arm] = max(means, key=lambda rate: means[rate])
    rows = []
    for arm, rate in best.items():
        gap = difference_cell(solved(arm, rate, "dense"), solved("dense", best.get("dense", RATE), "dense"))
        cells = [mean_cell(solved(arm, rate, evaluation)) for evaluation in EVALUATIONS]
        rows.append([arm, f"{rate:g}", *cells, NONE if arm == "dense" else gap])
    return list_table(title, ["arm", "rate", "every key", "evicting", "every key, against dense"], rows)


def tables(table: Table) -> str:
    """All tables of the report, in order."""

    def at(eviction: Eviction = MAIN, task: str = "chase", **fields: Any) -> Setting:
        return Setting("", task, eviction, RATES[task]).but(**fields)

    few = ("smd", "naive", "naive_sampler", "sparse_rl", "dense")
    parts = [
        list_table("The paper's claims", ["claim", "verdict", "differences"], claim_rows(table), "30 12 58"),
        f"""``+``: holds there, ``x``: the opposite does, ``o``: undecided. *Better*: the whole 95 % interval of the
paired difference is above 0, the opposite below it; *as good*: above and below -{short(MARGIN)}. *dense*: decoded with
every key, *sparse*: with evictions. *Share saved* is of the other arm's cost, negative where SMD costs more; *less than
10 %* holds where all of the interval is above -.100. In round brackets the number of seeds; from fewer than {MIN_SEEDS}
nothing is concluded. Differences are always of the same seeds; means next to each other may not be.
""",
    ]
    for task in RATES:
        for eviction in (MAIN, SEVENTY, RANDOM):
            parts.append(accuracy(table, at(eviction, task), f"{task}, {eviction.label}: share of problems solved"))
    settings = [(f"{task} {one.label}", at(one, task)) for task in RATES for one in (MAIN, SEVENTY)]
    settings += [(f"chase {one.label}", at(one)) for one in (TWENTY, RANDOM, H2O, RECENT, STEPS)]
    settings += [("chase snapkv-50, rate 3e-4", at(rate=HIGH_RATE)), ("chase snapkv-50, groups of 16", at(group=16))]
    settings += [(f"chase snapkv-50, {Scale().updates * LONG} updates", at(length=LONG))]
    parts += [everywhere(table, settings), replay(table)]
    parts += [mismatch(table, at(task=task), f"{task}, {MAIN.label}: sampler and learner") for task in RATES]
    parts += [mismatch(table, at(one), f"chase, {one.label}: sampler and learner") for one in (TWENTY, SEVENTY)]
    parts += [cost(table, at(task=task), f"{task}, {MAIN.label}: cost of an update of 128 rows") for task in RATES]
    selections = [(one.label, at(one)) for one in (MAIN, RANDOM, H2O, RECENT)]
    compressions = [(f"{round(100 * (1 - one.keep))} %", at(one)) for one in (TWENTY, MAIN, SEVENTY)]
    rates = [(f"{rate:g}", at(rate=rate)) for rate in (RATE, HIGH_RATE)]
    groups = [(str(group), at(group=group)) for group in (8, 16)]
    lengths = [(f"{Scale().updates * length}", at(length=length)) for length in (1, LONG)]
    steps = [("after the prompt", at()), ("and after every token", at(STEPS))]
    parts += [
        factor(table, "chase: selection", "selection", few, selections),
        factor(table, "chase: compression", "compression", few, compressions),
        weights(table, at(), "chase: lambda of SMD; 0 is Track 1 alone; first five seeds"),
        factor(table, "chase: learning rate", "rate", [*ARMS], rates),
        factor(table, "chase: length of the run", "updates", few, lengths),
        tuned(table, at(), "chase: each arm at its better learning rate"),
        factor(table, "chase: group size, 128 rows per update", "group", ("dense", "smd"), groups),
        factor(table, "chase: when keys are evicted", "evicted", few[:-1], steps),
    ]
    return "\n".join(part for part in parts if part)


def arms_table() -> str:
    """What each arm does: the first column of the registry, in its order."""
    rows = [[f"``{one.name}``", " ".join(one.about.split())] for one in ARMS.values()]
    return list_table("Arms", ["arm", "what it does"], rows, "20 80")


def images(table: Table, figures: Mapping[str, str]) -> str:
    """Directives of the figures, for a page in the folder above the tables'; nothing without results."""
    parts = [f".. image:: {path}\n   :alt: {words}\n" for path, words in figures.items()]
    return "\n".join(parts) if table.records else ""
