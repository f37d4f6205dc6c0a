"""``outblas recording``: a recording as a data set, and scores of agent files on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli import common
from outblas.cli.common import RecordingNameOption, err, out, with_json
from outblas.core.errors import RecordError, UsageError
from outblas.core.plain_files import read_plain_file

if TYPE_CHECKING:
    from outblas_lab.compare.compare_result import Figure
    from outblas_lab.compare.compare_run import Score, ScoreRequest

recording = typer.Typer(
    help="Export a recording as a data set, or score an agent file on it (needs no GPU).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

#: Seeds of splits are below this.
MAX_SEED = 2**63


@recording.command("export", short_help="Export a recording as a data set")
@with_json
def export_dataset(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory, which must be empty or not exist.")],
    name: RecordingNameOption = common.DEFAULT_RECORDING,
    kernel_tuner: Annotated[
        int, typer.Option(help="Number of held-out problems to export for Kernel Tuner, stratified by regime.")
    ] = 10,
) -> None:
    """Export a recording as Parquet with a data sheet, for Hugging Face datasets and Kernel Tuner (needs no GPU).

    Example: ``outblas recording export gemm-h200``.
    """
    from outblas_lab.publish.dataset.dataset_export import CARD, SHEET, export_recording
    from outblas_lab.recordings.recording import Recording

    with common.progress_bar("export") as progress:
        sheet = export_recording(Recording.load(name), name, folder, kernel_tuner, progress)
    size = sum(file["bytes"] for file in sheet["files"].values()) / 1e6
    out.print(f"{sheet['problems']} problems, {sheet['candidates']} kernels, {size:.1f} MB: {folder}", markup=False)
    out.print(f"card: {folder / CARD}\nsheet: {folder / SHEET}", markup=False)
    out.print(f'use it: datasets.load_dataset("{folder}", "cells")', markup=False)
    written = {"folder": folder, "card": folder / CARD, "sheet": folder / SHEET}
    common.print_result(
        "recording export", written, problems=sheet["problems"], candidates=sheet["candidates"], megabytes=size
    )


@recording.command("score", short_help="Score an agent file on held-out problems")
@with_json
def score(
    agent_file: Annotated[Path, typer.Argument(metavar="AGENT_FILE", help="Python file that defines one agent class.")],
    name: RecordingNameOption = common.DEFAULT_RECORDING,
    baselines: Annotated[
        str, typer.Option(help="Comma-separated baseline agents, or none. The agent regressor needs torch (extra rl).")
    ] = "random,nearest,regressor",
    sample: Annotated[
        int | None, typer.Option(help="Number of held-out problems to search, stratified by regime (default: all).")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for each stochastic agent.")] = 3,
    split_seed: Annotated[int | None, typer.Option(help="Seed for the split (default: 0, the public split).")] = None,
    split_seed_file: Annotated[
        Path | None, typer.Option(help="File with the random seed for a private split; the seed is never printed.")
    ] = None,
    run: Annotated[Path, typer.Option(help="Directory for scores; existing scores are reused.")] = Path("runs/score"),
    jobs: Annotated[int, typer.Option(help="Number of parallel search processes.")] = 1,
    resume: Annotated[bool, typer.Option(help="Reuse existing scores; --no-resume searches again.")] = True,
) -> None:
    """Score an agent file against baselines, by regret after 0, 1, 2, 4 and 8 measurements on held-out problems.

    The file defines one subclass of ``outblas.tune.agents.base.Agent``. You need no checkout of the repository.
    The file runs without a sandbox, so score only files that you trust.
    Example: ``outblas recording score my_agent.py --sample 40``.
    """
    if split_seed is not None and split_seed_file is not None:
        raise UsageError("--split-seed conflicts with --split-seed-file", "only one of them", "omit one")

    from outblas_lab.compare.compare_run import ScoreRequest, score_agent
    from outblas_lab.compare.splits import PUBLIC_SEED

    seed = PUBLIC_SEED if split_seed is None else split_seed
    if split_seed_file is not None:
        seed = _private_seed(split_seed_file)
    names = [] if baselines == "none" else [word.strip() for word in baselines.split(",") if word.strip()]
    request = ScoreRequest(agent_file, name, common.command_line(), names, seed, sample, seeds, run, jobs, resume)
    with common.progress_bar("score") as progress:
        found = score_agent(request, progress, lambda line: err.print(line, markup=False))
    _print_score(found, request, split_seed_file is not None)


def _private_seed(path: Path) -> int:
    """Return the seed in a file. Its content is in no error text."""
    do = "write one integer into the file"
    try:
        seed = int(read_plain_file(path).decode())
    except OSError as error:
        wrong = f"{path} cannot be read ({error.strerror or error})"
        raise RecordError(wrong, "a readable file with a seed", do) from error
    except ValueError:
        raise UsageError(f"{path} contains no seed", f"an integer from 0 to {MAX_SEED - 1}", do) from None
    if not 0 <= seed < MAX_SEED:
        raise UsageError(f"the seed in {path} is out of range", f"an integer from 0 to {MAX_SEED - 1}", do)
    return seed


def _print_score(found: Score, request: ScoreRequest, private: bool) -> None:
    from rich.table import Table

    from outblas_lab.compare.compare_result import FIRST_CHOICE, figures, noise_regret
    from outblas_lab.compare.splits import PUBLIC_SPLIT

    parts = [found.agent] if found.baselines is None else [found.agent, found.baselines]
    rows = [figure for part in parts for figure in figures(part, PUBLIC_SPLIT).values()]
    if common.wants_json():
        _print_document(found, request, private, rows)
    size = found.agent.meta["splits"][PUBLIC_SPLIT]
    which = "private split" if private else f"split seed {request.split_seed}"
    out.print(
        f"regret after a number of measurements, with 95% intervals over problems; {which}, "
        f"{size['searched']} of {size['held_out']} held-out problems, {size['training']} training problems",
        markup=False,
    )
    table = Table("agent", *map(str, found.agent.budgets), box=None, pad_edge=False)
    for agent in dict.fromkeys(f.agent for f in rows):
        cells = [f"{f.regret:.2%} [{1 / f.high - 1:.2%}, {1 / f.low - 1:.2%}]" for f in rows if f.agent == agent]
        table.add_row(agent, *cells)
    common.print_table(table)
    out.print(FIRST_CHOICE)
    out.print(f"noise floor: {noise_regret(found.agent):.2%}; smaller regrets are not resolved", markup=False)
    for part in parts:
        out.print(f"result: {part.path}", markup=False)


def _print_document(found: Score, request: ScoreRequest, private: bool, rows: Sequence[Figure]) -> None:
    """Print the score as one JSON document; the seed of a private split is not in it."""
    from outblas_lab.cli.lab_documents import ScoreDocument, ScoreFigure
    from outblas_lab.compare.compare_result import noise_regret
    from outblas_lab.compare.splits import PUBLIC_SPLIT

    size = found.agent.meta["splits"][PUBLIC_SPLIT]
    scores = [
        ScoreFigure(
            agent=f.agent, measurements=f.budget, regret=f.regret, low=1 / f.high - 1, high=1 / f.low - 1, found=f.found
        )
        for f in rows
    ]  # fmt: skip
    document = ScoreDocument(
        agent=str(request.agent), agent_sha256=found.agent_sha, recording=request.recording,
        recording_sha256=found.agent.meta["recording"]["sha256"], split=PUBLIC_SPLIT,
        split_seed=None if private else request.split_seed, training=size["training"], searched=size["searched"],
        noise_regret=noise_regret(found.agent), scores=scores,
    )  # fmt: skip
    common.print_document(document)
