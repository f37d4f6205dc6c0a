"""``outblas compare``: agents on held-out problems of a recording, with no GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.common import ProgressFn, err, out
from outblas.core.errors import UsageError

if TYPE_CHECKING:
    from outblas_lab.compare.compare_result import Comparison, Figure

BudgetsOption = Annotated[
    str,
    typer.Option(
        help="Comma-separated numbers of measurements after which to compare the agents' choices. After 0 or 1 "
        "measurements, an agent's choice is its first proposal, unless that kernel fails."
    ),
]
UnitOption = Annotated[
    str, typer.Option(help="Unit of --budgets: measurements, or gpu-ms for modelled milliseconds of the GPU.")
]
SplitsOption = Annotated[
    str,
    typer.Option(
        help="Comma-separated splits, named after what they hold out: shapes (M, N, K), families (N, K), layout "
        "(all but TN) or an extent such as k=64."
    ),
]


def compare(
    agents: Annotated[str, typer.Option(help="Comma-separated agents; see `outblas list agents`.")] = (
        "random,heuristic,evolution"
    ),
    budgets: BudgetsOption = "0,1,2,4,8,16,32",
    unit: UnitOption = "measurements",
    seeds: Annotated[int, typer.Option(help="Number of seeds for each stochastic agent.")] = 5,
    held_out: Annotated[float, typer.Option(help="Fraction of shapes or families to hold out, between 0 and 1.")] = 0.2,
    splits: SplitsOption = "shapes,families",
    split_seed: Annotated[int, typer.Option(help="Random seed for the splits and for --sample.")] = 0,
    sample: Annotated[
        int | None,
        typer.Option(help="Number of held-out problems to search per split, stratified by regime (default: all)."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Recording to search, as replay:NAME.")
    ] = f"replay:{common.DEFAULT_RECORDING}",
    across: Annotated[
        str | None,
        typer.Option(
            help="Recording of another GPU; compare agents trained on it, on the --device recording, or on both."
        ),
    ] = None,
    learn_from: Annotated[
        str | None,
        typer.Option(help="Comma-separated training sources for --across: other, other-all, both, own (default: all)."),
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", help="Result file (Parquet) to write.")] = Path("compare.parquet"),
    jobs: Annotated[int, typer.Option(help="Number of parallel search processes.")] = 1,
    resume: Annotated[
        bool,
        typer.Option(
            help="Resume from the journal next to the --out file; --no-resume starts over and overwrites results."
        ),
    ] = True,
) -> None:
    """Compare agents on held-out problems of a recording, with small measurement budgets (needs no GPU)."""
    recording = common.recording_name(device)
    from outblas_lab.compare.compare_result import read_comparison
    from outblas_lab.compare.compare_run import CompareRequest, run_compare
    from outblas_lab.compare.held_out import Plan

    plan = Plan(
        recording, common.integers("--budgets", budgets), held_out, split_seed, sample,
        across and across.removeprefix("replay:"), unit,
    )  # fmt: skip
    with common.progress_bar("compare") as progress:
        request = CompareRequest(
            plan, common.words(splits), common.words(agents), seeds, out_file, common.command_line(), jobs, resume,
            _sources(learn_from, across),
        )  # fmt: skip
        run_compare(request, _with_estimate(progress), lambda line: err.print(line, markup=False))
    _print_comparison(read_comparison(out_file), out_file)
    out.print(f"result:  {out_file}\nshow it: outblas report {out_file}", markup=False)


def _with_estimate(progress: ProgressFn) -> ProgressFn:
    """Return a progress function that adds the seconds left to the note, unless a bar estimates them."""
    begun: list[tuple[float, int]] = []

    def update(done: int, total: int, note: object = "") -> None:
        now = monotonic()
        if not begun:
            begun.append((now, done))
        start, first = begun[0]
        if not err.is_terminal and done > first:
            note = f"{note}, about {(now - start) * (total - done) / (done - first):.0f} s left"
        progress(done, total, note)

    return update


def _print_comparison(comparison: Comparison, file: Path) -> None:
    """Print a table and the best agent of each budget per split, then the verdict over all; or the document."""
    from outblas_lab.compare.compare_result import (
        FIRST_CHOICE,
        best_agents,
        budget_words,
        figures,
        level_with,
        overall_regret,
        seed_half_widths,
    )

    of_splits = {split: figures(comparison, split) for split in comparison.splits}
    for split, made in of_splits.items():
        size = comparison.meta["splits"][split]
        out.print(
            f"split {split}: {size['training']} training problems, {size['searched']} of {size['held_out']} held-out "
            "problems searched; geomean of best time / chosen time, ± half of its 95% interval; CPU time",
            markup=False,
        )
        for line in _lines(comparison, made):
            out.print(line, markup=False)
        for budget in comparison.budgets:
            best, level = best_agents(made, budget)
            others = f"; not significantly better than {', '.join(f.agent for f in level)}" if level else ""
            after = f"{budget}{'' if comparison.unit == 'measurements' else ' ms'}"
            out.print(f"budget {after}: {best.agent}, regret {best.regret:.2%}{others}", markup=False)
        for line in (*_source_lines(comparison, split), *_seed_lines(comparison, split)):
            out.print(line, markup=False)
        out.print()
    if {0, 1} <= set(comparison.budgets) and comparison.unit == "measurements":
        out.print(FIRST_CHOICE)
    (best_agent, regret), *_ = overall_regret(list(of_splits.values()))
    equals = level_with(list(of_splits.values()), best_agent)
    words = f"{best_agent}, mean regret {regret:.2%} (budgets {budget_words(comparison.budgets)}, all splits)"
    verdict = f"no agent is significantly best: {words}, level with {', '.join(equals)}"
    out.print(verdict if equals else f"best agent overall: {words}", markup=False)
    over_seeds = {split: seed_half_widths(comparison, split) for split in of_splits}
    rows = [
        {"split": s, **asdict(one), "regret": one.regret, "over_seeds": over_seeds[s].get((one.agent, one.budget))}
        for s, made in of_splits.items()
        for one in made.values()
    ]
    common.print_result("compare", {"result": file}, rows, best=best_agent, mean_regret=regret, level_with=equals)


def _source_lines(comparison: Comparison, split: str) -> list[str]:
    """Return a line on each source that agents learned from, with its number of problems; empty for one GPU."""
    from outblas_lab.compare.splits import SOURCES, arm_parts

    across = comparison.meta.get("across")
    if not across:
        return []
    used = {arm_parts(agent)[1] for agent in comparison.agents}
    learned = across["learned"][split]
    return [f"@{name}: {words}; {learned[name]} problems" for name, words in SOURCES.items() if name in used]


def _seed_lines(comparison: Comparison, split: str) -> list[str]:
    """Return a line on each agent with several seeds: half of the interval over them at each budget."""
    from outblas_lab.compare.compare_result import seed_half_widths

    widths = seed_half_widths(comparison, split)
    return [
        f"over seeds: {agent} " + ", ".join(f"±{widths[agent, b]:.3f}" for b in comparison.budgets)
        for agent in comparison.agents
        if (agent, comparison.budgets[0]) in widths
    ]


def _lines(comparison: Comparison, made: dict[tuple[str, int], Figure]) -> list[str]:
    """The table as text, as wide as it is: rich would cut figures off where the terminal is narrow."""
    mark = "b={}" if comparison.unit == "measurements" else "{} ms"
    cells = [["agent", *(mark.format(b) for b in comparison.budgets), "ms/task", "s to prepare"]]
    for agent in comparison.agents:
        found, cost = [made[agent, b] for b in comparison.budgets], comparison.meta["costs"][agent]
        figures = [f"{f.quality:.3f} ±{f.half_width:.3f}" for f in found]
        cells.append([agent, *figures, f"{cost['task_ms']:.1f}", f"{cost['prepare_s']:.1f}"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([c[0].ljust(widths[0]), *map(str.rjust, c[1:], widths[1:])]) for c in cells]


def _sources(learn_from: str | None, across: str | None) -> list[str]:
    """Return the sources of ``--learn-from``, all by default."""
    from outblas_lab.compare.splits import SOURCES

    if learn_from is None:
        return list(SOURCES)
    if across is None:
        wrong = "--learn-from was passed without --across"
        raise UsageError(wrong, "--across as well", "add --across or omit --learn-from")
    return common.words(learn_from)
