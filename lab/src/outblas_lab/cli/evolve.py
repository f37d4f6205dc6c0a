"""``outblas evolve``: kernels written by language models, evaluated, and written again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from outblas_lab.llm.gguf_server import GgufServer, serving_gguf
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
#: Conversations at once, tokens of an answer and of a first prompt: elsewhere, and with a small model on this machine.
_DEFAULTS = (4, 16384, None), (1, 2048, 4096)
ModelOption = Annotated[
    str | None, typer.Option(help="Comma-separated names of models on the server. NAME=WEIGHT sets a model's share.")
]
GgufOption = Annotated[
    Path | None, typer.Option(help="GGUF file of a model that this machine's CPU serves, in place of --base-url.")
]
RunOption = Annotated[
    Path | None, typer.Option(help="Run directory; an existing run is resumed (default: named after the settings).")
]
ParallelOption = Annotated[
    int | None, typer.Option(help="Number of concurrent conversations (default: 4; with --gguf: 1).")
]
MaxTokensOption = Annotated[
    int | None, typer.Option(help="Maximum number of tokens per answer (default: 16384; with --gguf: 2048).")
]
PromptTokensOption = Annotated[
    int | None, typer.Option(help="Approximate maximum number of tokens of a first prompt (default with --gguf: 4096).")
]


def evolve(
    mnk: Annotated[list[str], typer.Option(help="Comma-separated problem sizes M_N_K. Repeatable.")],
    model: ModelOption = None,
    base_url: BaseUrlOption = None,
    gguf: GgufOption = None,
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
    parallel: ParallelOption = None,
    counters: CountersOption = None,
    nearest: NearestOption = 3,
    seed: Annotated[int, typer.Option(help="Random seed for sampling from the archive.")] = 0,
    max_tokens: MaxTokensOption = None,
    prompt_tokens: PromptTokensOption = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (default: the server's).")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Maximum number of requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Maximum number of tokens per minute.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without data before a request is retried.")] = 120,
    stall: Annotated[float, typer.Option(help="Total seconds before a request is aborted and retried.")] = 300,
    run: RunOption = None,
) -> None:
    """Evolve kernels that language models write: prove and time each one, feed the results back and keep the best."""
    from outblas_lab.llm.archive import ArchiveShape
    from outblas_lab.llm.evaluators import choose_workers
    from outblas_lab.llm.evolve import EvolveSettings
    from outblas_lab.llm.evolve_folder import folder_name
    from outblas_lab.llm.evolve_run import EvolveRequest

    problems = [Problem.from_mnk(one, layout, dtype, acc) for text in mnk for one in common.mnk_words(text)]
    name, (chats, answer, prompt) = _model_name(model, base_url, gguf), _DEFAULTS[gguf is not None]
    models = parse_models(name, price or [])
    limits = parse_budget(budget)
    plan = common.worker_plan(workers, device, gpus, worker_count, ray_address)
    place = _place(device) if plan is None else choose_workers(plan)
    settings = EvolveSettings(
        ArchiveShape(common.at_least("--islands", islands, 1)), seed, common.at_least("--turns", turns, 1),
        _limit("--parallel", parallel, 1) or chats, _kinds(answers), _limit("--max-tokens", max_tokens, 1) or answer,
        _limit("--repairs", repairs), _limit("--improvements", improvements), common.at_least("--nearest", nearest, 0),
        _limit("--prompt-tokens", prompt_tokens, 1) or prompt,
    )  # fmt: skip
    timeout, stall = (max(seconds, 1800.0 if gguf else 0.0) for seconds in (timeout, stall))  # a CPU is slow
    server = _server(base_url, requests_per_minute, tokens_per_minute, timeout, stall, temperature)
    path = run or Path("runs") / folder_name(problems, models[0].name, str(place))
    request = EvolveRequest(problems, models, server, place, limits, settings, path, common.command_line(), counters)
    _run(request, f"evolving {len(problems)} problems on {place} with {name}, budget {budget}", gguf)


def _model_name(model: str | None, base_url: str | None, gguf: Path | None) -> str:
    if gguf is not None and base_url is not None:
        raise UsageError("--gguf and --base-url are both given", "one server", "omit one of them")
    if model is None and gguf is None:
        raise UsageError("--model is missing", "a name of a model on the server", "pass --model, or --gguf FILE")
    return model or Path(str(gguf)).stem


def _place(device: str | None) -> EvaluatorChoice:
    """Return the evaluator of ``--device``. Without a GPU, ``compile`` must be asked for: answers cost money."""
    from outblas_lab.llm.evaluators import parse_evaluator

    place = parse_evaluator(device)
    if device is None and not place.runs_kernels:
        do = "run the command on a machine with a GPU, or pass --device compile to only compile the answers"
        raise DeviceError("no CUDA GPU was found to prove and time the kernels", "an NVIDIA GPU", do)
    return place


def _limit(option: str, value: int | None, least: int = 0) -> int | None:
    return None if value is None else common.at_least(option, value, least)


def _run(request: EvolveRequest, title: str, gguf: Path | None) -> None:
    """Evolve, say where everything lies, write the report."""
    from outblas_lab.llm.evolve_run import run_evolve
    from outblas_lab.publish.html.tune_page import page_of_run

    if request.place.runs_kernels and "code" in request.settings.kinds:
        say_what_holds()
    with ExitStack() as stack:
        local = None
        if gguf is not None:
            local = stack.enter_context(serving_gguf(gguf, request.settings))
            request = replace(request, server=replace(request.server, base_url=f"{local.address}/v1"))
        watch = stack.enter_context(progress_view(title, local))

        def begin(evolution: Evolution, *watched: Any) -> Callable[[AnswerOutcome | None], None]:
            if not request.place.runs_kernels:  # after all refusals, and before the first paid request
                which = "answers" if request.place.name == COMPILE_ONLY else "kernels that it lacks"
                words = f"device {request.place} runs nothing: {which} are compiled, but not proven or timed"
                err.print(words, markup=False)
            err.print(_cost_words(evolution.prompt_tokens(), request, local.rates() if local else None), markup=False)
            return watch(evolution, *watched)

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
    base_url: str | None, requests: int | None, tokens: int | None, timeout: float, stall: float,
    temperature: float | None,
) -> ServerSettings:  # fmt: skip
    """Return the server's settings from the options, whose ranges are checked."""
    from outblas_lab.llm.client import RetryPolicy
    from outblas_lab.llm.evolve_run import ServerSettings

    rates = _limit("--requests-per-minute", requests, 1), _limit("--tokens-per-minute", tokens, 1)
    retry_policy = RetryPolicy(common.positive("--timeout", timeout), common.positive("--stall", stall))
    if temperature is not None:
        common.positive("--temperature", temperature, or_zero=True)
    return ServerSettings(base_url, retry_policy, *rates, temperature)


def _kinds(text: str) -> tuple[str, ...]:
    from outblas_lab.llm.answer import CODE, CONFIG

    kinds = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    if not kinds or not set(kinds) <= {CODE, CONFIG}:
        raise UsageError(f"--answers is {text!r}", f"{CODE}, {CONFIG} or both", f"pass e.g. --answers {CODE},{CONFIG}")
    return kinds


#: Seconds between two pictures of a live view; without one, between two lines on answers under way.
_TICK_S, _LINE_S = 0.5, 10.0


@contextmanager
def progress_view(title: str, local: GgufServer | None = None) -> Iterator[MakeProgress]:
    """Show the progress of ``outblas evolve`` on stderr: a live table on a terminal, else a line per outcome.

    Yields:
        A function that the run calls once with (evolution, budget, account, client). It returns the function to call
        after each outcome, with the outcome or None.
    """
    if not err.is_terminal:
        yield lambda *watched: _plain(title, local, *watched)
        return
    from rich.live import Live

    with Live(console=err, auto_refresh=False, transient=True) as live:

        def watch(evolution: Evolution, *rest: Any) -> Callable[[AnswerOutcome | None], None]:
            loop = asyncio.get_running_loop()

            def tick() -> None:  # in the loop's thread, which alone changes what is shown
                now = local.progress() if local else ""
                live.update(table(f"{title}\n{now}".strip(), evolution, *rest), refresh=True)
                loop.call_later(_TICK_S, tick)

            loop.call_soon(tick)
            return lambda outcome: live.update(table(title, evolution, *rest), refresh=True)

        yield watch


def _plain(
    title: str, local: GgufServer | None, evolution: Evolution, budget: Budget, account: SpendingAccount, client: Client
) -> Callable[[AnswerOutcome | None], None]:
    err.print(title, markup=False)

    def tick() -> None:
        if local is not None and (words := local.progress()):
            err.print(words, markup=False)
        loop.call_later(_LINE_S, tick)

    loop = asyncio.get_running_loop()
    loop.call_soon(tick)

    def print_outcome(outcome: AnswerOutcome | None) -> None:
        if outcome is not None:
            speed = f", {outcome.us:.2f} us, {number(outcome.ratio, 3)}x" if outcome.us is not None else ""
            err.print(
                f"question {outcome.question}: {outcome.answer or 'no candidate'}, {outcome.kind}{speed}; "
                f"{spent_words(budget, account, client)}", markup=False,
            )  # fmt: skip

    return print_outcome


def _cost_words(prompt: int, request: EvolveRequest, rates: tuple[float, float] | None) -> str:
    """The cost of a question before any is asked: tokens, dollars at a price, seconds at rates (tokens/s)."""
    answer, requests = request.settings.max_tokens, request.budget.requests
    words = f"a question: about {prompt} tokens of prompt, at most {answer} of answer"
    if usd := max(model.price.usd(prompt, answer) for model in request.models):
        words += f", {usd:.4f} USD"
    if rates is None:
        return words
    seconds = prompt / rates[0] + answer / rates[1]
    total = "" if requests is None else f", {requests} questions {requests * seconds / 60:.1f} min"
    return (f"{words}; measured now: {rates[0]:.0f} tokens/s read, {rates[1]:.1f} written, so at most about "
            f"{seconds:.0f} s{total}")  # fmt: skip


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
