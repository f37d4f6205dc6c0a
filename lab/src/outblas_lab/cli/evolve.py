"""``outblas evolve``: kernels written by language models, evaluated, and written again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import err, number, out
from outblas.core.errors import DeviceError, UsageError
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas_lab.cli.eval_free import say_what_holds
from outblas_lab.llm.budget import parse_budget
from outblas_lab.llm.evaluators import COMPILE_ONLY
from outblas_lab.llm.evolve_run import MakeProgress
from outblas_lab.llm.feedback import OUTCOME_KINDS
from outblas_lab.llm.models import parse_models

if TYPE_CHECKING:
    from rich.console import Group

    from outblas_lab.llm.budget import Budget, SpendingAccount
    from outblas_lab.llm.client import Client
    from outblas_lab.llm.evaluators import EvaluatorChoice
    from outblas_lab.llm.evolve import Evolution
    from outblas_lab.llm.evolve_journal import AnswerOutcome
    from outblas_lab.llm.evolve_run import EvolveRequest, ServerSettings

BaseUrlOption = Annotated[
    str | None,
    typer.Option(
        help="URL of an OpenAI-compatible server, e.g. http://localhost:8000/v1 (default: OPENAI_BASE_URL, else the "
        "OpenAI API). The API key is read from OPENAI_API_KEY."
    ),
]
BudgetOption = Annotated[
    str, typer.Option(help="Comma-separated spending limits, e.g. '50 requests', '2M tokens', '3 USD' or '600 s'.")
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(help="USD per million prompt (IN) and completion (OUT) tokens: IN,OUT or MODEL=IN,OUT. Repeatable."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Evaluator: cuda:N, compile (only compiles) or a file of recorded kernels (default: cuda:0)."),
]
ImprovementsOption = Annotated[
    int | None,
    typer.Option(help="Maximum number of attempts per conversation to improve proven kernels (default: --turns)."),
]
CountersOption = Annotated[
    Path | None,
    typer.Option(
        help="Hardware counters for prompts: a file from benchmarks/profile_regimes.py, a directory of such files, "
        "or the directory of a tuning run profiled with `outblas profile`."
    ),
]
NearestOption = Annotated[
    int,
    typer.Option(
        help="Maximum number of kernels for similar problems per prompt; the same limit applies to journal lessons."
    ),
]


def evolve(
    mnk: Annotated[list[str], typer.Option(help="Comma-separated problem sizes M_N_K. Repeatable.")],
    model: Annotated[
        str,
        typer.Option(help="Comma-separated names of models on the server. NAME=WEIGHT sets a model's share."),
    ],
    base_url: BaseUrlOption = None,
    layout: common.LayoutOption = "tn",
    dtype: common.DtypeOption = "fp16",
    acc: common.AccOption = "fp32",
    budget: BudgetOption = "50 requests",
    price: PriceOption = None,
    device: DeviceOption = None,
    workers: common.WorkersOption = None,
    gpus: common.GpusOption = None,
    worker_count: Annotated[int | None, typer.Option(help="Number of Ray workers (default: one per GPU).")] = None,
    ray_address: common.RayAddressOption = None,
    answers: Annotated[str, typer.Option(help="Comma-separated kinds of answers to request: code, config.")] = (
        "code,config"
    ),
    islands: Annotated[int, typer.Option(help="Number of separate populations per problem.")] = 3,
    turns: Annotated[int, typer.Option(help="Maximum number of turns per conversation, including the first.")] = 4,
    repairs: Annotated[int | None, typer.Option(help="Maximum number of repairs in a row (default: --turns).")] = None,
    improvements: ImprovementsOption = None,
    parallel: Annotated[int, typer.Option(help="Number of concurrent conversations.")] = 4,
    counters: CountersOption = None,
    nearest: NearestOption = 3,
    seed: Annotated[int, typer.Option(help="Random seed for sampling from the archive.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 16384,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (default: the server's).")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Maximum number of requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Maximum number of tokens per minute.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without data before a request is retried.")] = 120,
    stall: Annotated[float, typer.Option(help="Total seconds before a request is aborted and retried.")] = 300,
    run: Annotated[
        Path | None, typer.Option(help="Run directory; an existing run is resumed (default: named after the settings).")
    ] = None,
) -> None:
    """Evolve kernels that language models write: prove and time each one, feed the results back and keep the best."""
    from outblas_lab.llm.archive import ArchiveShape
    from outblas_lab.llm.evaluators import choose_workers
    from outblas_lab.llm.evolve import EvolveSettings
    from outblas_lab.llm.evolve_folder import folder_name
    from outblas_lab.llm.evolve_run import EvolveRequest

    problems = [Problem.from_mnk(one, layout, dtype, acc) for text in mnk for one in common.mnk_words(text)]
    models = parse_models(model, price or [])
    limits = parse_budget(budget)
    plan = common.worker_plan(workers, device, gpus, worker_count, ray_address)
    place = _place(device) if plan is None else choose_workers(plan)
    settings = EvolveSettings(
        ArchiveShape(common.at_least("--islands", islands, 1)), seed, common.at_least("--turns", turns, 1),
        common.at_least("--parallel", parallel, 1), _kinds(answers), common.at_least("--max-tokens", max_tokens, 1),
        _limit("--repairs", repairs), _limit("--improvements", improvements), common.at_least("--nearest", nearest, 0),
    )  # fmt: skip
    server = _server(base_url, requests_per_minute, tokens_per_minute, timeout, stall, temperature)
    path = run or Path("runs") / folder_name(problems, models[0].name, str(place))
    request = EvolveRequest(problems, models, server, place, limits, settings, path, common.command_line(), counters)
    _run(request, f"evolving {len(problems)} problems on {place} with {model}, budget {budget}")


def _place(device: str | None) -> EvaluatorChoice:
    """Return the evaluator of ``--device``. Without a GPU, ``compile`` must be asked for: answers cost money."""
    from outblas_lab.llm.evaluators import parse_evaluator

    place = parse_evaluator(device)
    if device is None and not place.runs_kernels:
        do = "run the command on a machine with a GPU, or pass --device compile to only compile the answers"
        raise DeviceError("no CUDA GPU was found to prove and time the kernels", "an NVIDIA GPU", do)
    return place


def _limit(option: str, value: int | None) -> int | None:
    return None if value is None else common.at_least(option, value, 0)


def _run(request: EvolveRequest, title: str) -> None:
    """Evolve, say where everything lies, write the report."""
    from outblas_lab.llm.evolve_run import run_evolve
    from outblas_lab.publish.html.tune_page import page_of_run

    if request.place.runs_kernels and "code" in request.settings.kinds:
        say_what_holds()
    with progress_view(title) as watch:

        def begin(*watched: Any) -> Callable[[AnswerOutcome | None], None]:
            if not request.place.runs_kernels:  # after all refusals, and before the first paid request
                which = "answers" if request.place.name == COMPILE_ONLY else "kernels that it lacks"
                words = f"device {request.place} runs nothing: {which} are compiled, but not proven or timed"
                err.print(words, markup=False)
            return watch(*watched)

        reason, files = run_evolve(request, begin)
    best = files.best if files.best.is_dir() else None
    out.print(f"ended:        {reason}\nbest kernels: {best or 'none proven'}", markup=False)
    page = page_of_run(files.path, files.report)
    out.print(f"transcript:   {files.transcript}\nreport:       {page}\nstore:        {files.store}", markup=False)
    if common.wants_json():
        about = read_object(files.run, "a file from `outblas evolve`", "repeat the command")
        report = files.report if page == str(files.report) else None
        written = {"best": best, "transcript": files.transcript, "report": report, "store": files.store}
        common.print_result("evolve", written, **{name: about[name] for name in ("ended", "spent", "best")})


def _server(
    base_url: str | None, requests_per_minute: int | None, tokens_per_minute: int | None, timeout: float,
    stall: float, temperature: float | None,
) -> ServerSettings:  # fmt: skip
    """Return the server's settings from the options.

    Raises:
        UsageError: a number is out of its range.
    """
    from outblas_lab.llm.client import RetryPolicy
    from outblas_lab.llm.evolve_run import ServerSettings

    for option, value in (("--requests-per-minute", requests_per_minute), ("--tokens-per-minute", tokens_per_minute)):
        if value is not None:
            common.at_least(option, value, 1)
    retry_policy = RetryPolicy(common.positive("--timeout", timeout), common.positive("--stall", stall))
    if temperature is not None:
        common.positive("--temperature", temperature, or_zero=True)
    return ServerSettings(base_url, retry_policy, requests_per_minute, tokens_per_minute, temperature)


def _kinds(text: str) -> tuple[str, ...]:
    from outblas_lab.llm.answer import CODE, CONFIG

    kinds = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if not kinds or not set(kinds) <= {CODE, CONFIG}:
        raise UsageError(f"--answers is {text!r}", f"{CODE}, {CONFIG} or both", f"pass e.g. --answers {CODE},{CONFIG}")
    return kinds


#: Seconds between two pictures of a live view.
_TICK_S = 0.5


@contextmanager
def progress_view(title: str) -> Iterator[MakeProgress]:
    """Show the progress of ``outblas evolve`` on stderr: a live table on a terminal, else a line per outcome.

    Yields:
        A function that the run calls once with (evolution, budget, account, client). It returns the function to call
        after each outcome, with the outcome or None.
    """
    if not err.is_terminal:
        yield lambda *watched: _plain(title, *watched)
        return
    from rich.live import Live

    with Live(console=err, auto_refresh=False, transient=True) as live:

        def watch(evolution: Evolution, *rest: Any) -> Callable[[AnswerOutcome | None], None]:
            loop = asyncio.get_running_loop()

            def tick() -> None:  # in the loop's thread, which alone changes what is shown
                live.update(table(title, evolution, *rest), refresh=True)
                loop.call_later(_TICK_S, tick)

            loop.call_soon(tick)
            return lambda outcome: live.update(table(title, evolution, *rest), refresh=True)

        yield watch


def _plain(
    title: str, evolution: Evolution, budget: Budget, account: SpendingAccount, client: Client
) -> Callable[[AnswerOutcome | None], None]:
    err.print(title, markup=False)

    def print_outcome(outcome: AnswerOutcome | None) -> None:
        if outcome is not None:
            speed = f", {outcome.us:.2f} us, {number(outcome.ratio, 3)}x" if outcome.us is not None else ""
            err.print(
                f"question {outcome.question}: {outcome.answer or 'no candidate'}, {outcome.kind}{speed}; "
                f"{spent_words(budget, account, client)}", markup=False,
            )  # fmt: skip

    return print_outcome


def spent_words(budget: Budget, account: SpendingAccount, client: Client) -> str:
    """Return the spent budget in words, with the time that the rest will last at this session's rate.

    Example: ``"spent 5 requests, 1200 tokens, 0.0300 USD (10% of the budget, about 90 s left)"``. Money is left out if
    none was spent.
    """
    spent, seconds = account.spent, client.seconds
    share = budget.share(spent, seconds)
    now = share - budget.share(account.before, 0.0)
    left = f", about {seconds * (1 - share) / now:.0f} s left" if now > 0 else ""
    money = f", {spent.usd:.4f} USD" if spent.usd else ""
    return f"spent {spent.requests} requests, {spent.tokens} tokens{money} ({share:.0%} of the budget{left})"


def table(title: str, evolution: Evolution, budget: Budget, account: SpendingAccount, client: Client) -> Group:
    """Return the live view, an object that rich prints: the title, then a line per problem.

    Outcomes by kind, work under way, and the spent budget follow.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table("problem", "floor us", "baseline us", "best us", "speedup", "chains", box=None)
    for s in evolution.problem_progress():
        rows.add_row(s.problem.key, number(s.floor_us), number(s.baseline_us), number(s.best_us),
                     number(s.best_ratio, 3), str(s.chains))  # fmt: skip
    counts = evolution.outcomes()
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOME_KINDS if counts[kind]) or "nothing yet"
    now = f"{account.reserved.requests} requests in flight, {evolution.evaluating} candidates under evaluation"
    return Group(Text(title), rows, Text(f"outcomes: {kinds}"), Text(now), Text(spent_words(budget, account, client)))
