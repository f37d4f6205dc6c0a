"""An evolution on disk: its folder, from the settings to the best kernels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outblas.core.config import config_name, config_to_json
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator
from outblas.core.files import lock_run_folder, write_atomic, write_json
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.config_text import config_from_json
from outblas.records.provenance import collect_provenance, utc_now
from outblas.records.store import Store
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.evaluation_file import Recorder
from outblas_lab.llm.budget import Budget, SpendingAccount
from outblas_lab.llm.client import AnswerOptions, Client, RetryPolicy, ServerError, check_server
from outblas_lab.llm.evaluators import EvaluatorChoice, open_chosen_evaluator
from outblas_lab.llm.evolve import Evolution, EvolveSettings
from outblas_lab.llm.evolve_folder import KIND, EvolveFiles, open_folder, without_passwords
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal
from outblas_lab.llm.known_counters import KnownCounters, load_counters
from outblas_lab.llm.models import Model
from outblas_lab.llm.rate_limits import RateLimiter

#: Called when the run begins, with the run, its budget and its account. Its result is called after every outcome.
MakeProgress = Callable[[Evolution, Budget, SpendingAccount, Client], Callable[[AnswerOutcome | None], None]]


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server. Example: ``ServerSettings("http://localhost:8000/v1", requests_per_minute=10)``.

    Attributes:
        base_url: address; None: see :class:`outblas_lab.llm.client.Client`.
        requests_per_minute: most requests per minute; None: no limit.
        tokens_per_minute: most tokens per minute, of prompts and answers together; None: no limit.
        temperature: temperature of sampling; None: the server's default.
    """

    base_url: str | None = None
    retry_policy: RetryPolicy = RetryPolicy()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class EvolveRequest:
    """Request for one call of :func:`run_evolve`.

    Attributes:
        place: evaluator of the kernels, of :func:`outblas_lab.llm.evaluators.parse_evaluator`.
        counters: file or folder of hardware counters that prompts show; None: none. See
            :func:`outblas_lab.llm.known_counters.load_counters`.
    """

    problems: Sequence[Problem]
    models: Sequence[Model]
    server: ServerSettings
    place: EvaluatorChoice
    budget: Budget
    settings: EvolveSettings
    path: Path
    command: str
    counters: Path | None = None


def run_evolve(request: EvolveRequest, make_progress: MakeProgress) -> tuple[str, EvolveFiles]:
    """Evolve into the folder of the request, or resume the run of the same settings there.

    Args:
        make_progress: called once, when the run begins, with (evolution, budget, account, client). It returns a
            function that is called after every outcome with that outcome.

    Returns:
        The reason of the end in words, and the paths of the files. The report is left to the caller.

    Raises:
        UsageError: the folder holds a run with other settings, a problem is given twice, or a budget in USD lacks
            prices. Also if no server is set, or the counters are of another GPU.
        ServerError: the server refuses or is gone, or no request was answered within the budget. The same command
            resumes.
        DeviceError: the evaluator's GPU cannot be used. The same command resumes.
        ToolchainMissing: the evaluator needs a package that is not installed. The same command resumes.
        RecordError: the folder cannot be written, or another process works in it. The same command resumes.
        KeyboardInterrupt: the user interrupts. The error says what is recorded.
    """
    if len(set(request.problems)) != len(request.problems):
        raise UsageError("a problem was passed twice", "each problem once", "remove the duplicate")
    if request.budget.usd is not None and any(not (m.price.prompt or m.price.answer) for m in request.models):
        wrong, do = "a budget in USD was passed, but a model has no price", "pass --price, e.g. --price 0.5,1.5"
        raise UsageError(wrong, "a price in USD per million tokens for each model", do)
    check_server(request.server.base_url)
    place, files = request.place, EvolveFiles(request.path)
    command = without_passwords(request.command)
    with open_chosen_evaluator(place) as evaluator, lock_run_folder(files.path):
        recorded = None if place.runs_kernels else getattr(evaluator, "provenance", None) or None
        counters = KnownCounters() if request.counters is None else load_counters(request.counters, evaluator.gpu)
        wanted = {**_identity(request), "gpu": evaluator.gpu.name}
        about = open_folder(files, wanted, {"source": evaluator.source, "recording": recorded, "command": command})
        with Store(files.store) as store:
            run_id = files.path.resolve().name
            store.begin(run_id, {"evolve": KIND, "source": evaluator.source, "seed": request.settings.seed})
            with EvolveJournal(files.store) as journal:
                before = journal.spent().requests
                reason = _evolve(request, evaluator, store, run_id, journal, counters, make_progress)
                silence = why_no_answer(journal, before)
                reason += f"; {silence}" if silence else ""
                _finish(files, journal, store.evaluations(), about, evaluator, place, command, reason)
    if silence:
        raise ServerError(
            silence,
            "a language model server that responds",
            "correct --base-url (or OPENAI_BASE_URL), or check that the server runs; then rerun the command, "
            "with a larger --budget; the run resumes",
        )
    return reason, files


def _evolve(
    request: EvolveRequest, evaluator: Evaluator, store: Store, run_id: str, journal: EvolveJournal,
    counters: KnownCounters, make_progress: MakeProgress,
) -> str:  # fmt: skip
    """Run the loop; returns why it ended."""
    server, settings = request.server, request.settings
    account = SpendingAccount(request.budget, journal.spent())

    async def run() -> str:
        asyncio.get_running_loop().set_exception_handler(_tell_unless_interrupted)
        client = Client(
            server.base_url,
            account,
            journal,
            options=AnswerOptions(settings.max_tokens, server.temperature),
            retry_policy=server.retry_policy,
            limiter=RateLimiter(server.requests_per_minute, server.tokens_per_minute),
        )
        evolution = Evolution(request.problems, request.models, evaluator, store, run_id, journal, client, settings)
        evolution.counters = counters
        evolution.watch = make_progress(evolution, request.budget, account, client)
        return await evolution.run()

    try:
        return asyncio.run(run())
    except KeyboardInterrupt as error:
        done, spent = len(journal.outcomes()), journal.spent()
        raise KeyboardInterrupt(
            f"interrupted with {done} answers evaluated and {spent.requests} requests used, recorded in {journal.path}"
        ) from error


def _tell_unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio has to tell, except for a task that a second Ctrl-C ended."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


def _identity(request: EvolveRequest) -> dict[str, Any]:
    """Return the settings that two runs on one kind of GPU must share. Budget, address and parallelism may differ.

    So may counters, near problems and the length of prompts.
    """
    free = ("parallel", "nearest", "prompt_tokens")
    kept = {k: v for k, v in asdict(request.settings).items() if k not in free}
    return json.loads(json.dumps({
        "problems": [p.key for p in request.problems], "models": [asdict(m) for m in request.models],
        "device": str(request.place), "settings": kept,
    }))  # fmt: skip


def why_no_answer(journal: EvolveJournal, before: int = 0) -> str:
    """Return in words that no request of this session was answered; "" if one was, or none was ever sent.

    Args:
        before: number of requests of earlier sessions, which are skipped. They count only if this session sent none.
    """
    replies = islice(journal.replies(), before if journal.spent().requests > before else 0, None)
    count, last = 0, None
    for _, reply in replies:
        if reply.answered:
            return ""
        count, last = count + 1, reply
    return "" if last is None else f"none of {count} requests was answered (the last: {last.outcome}, {last.text})"


def _finish(
    files: EvolveFiles, journal: EvolveJournal, evaluations: Iterable[Evaluation], about: Mapping[str, Any],
    evaluator: Evaluator, place: EvaluatorChoice, command: str, reason: str,
) -> None:  # fmt: skip
    """The best kernels as files, the transcript, and what the run was."""
    best: dict[str, dict[str, Any]] = {}
    for entry in journal.entries():
        if entry.problem not in best or entry.score > best[entry.problem]["score"]:
            best[entry.problem] = {"candidate": entry.candidate, "score": entry.score, "us": entry.us}
    for key, found in best.items():
        candidate = config_from_json(found["candidate"])
        free = isinstance(candidate, FreeKernel)
        body = candidate.text if isinstance(candidate, FreeKernel) else json.dumps(config_to_json(candidate), indent=1)
        found["file"] = str(write_atomic(files.best / f"{key}.{'cu' if free else 'json'}", body.encode()).name)
        found["candidate"] = config_name(candidate)
    write_atomic(files.transcript, "".join(f"{json.dumps(one)}\n" for one in journal.transcript()).encode())
    spent = journal.spent()
    if place.workers is not None:
        provenance = evaluator.provenance(command)  # type: ignore[attr-defined]  # a pool, whose hosts say it
    else:
        provenance = collect_provenance(command, place.gpu_index)
    if place.runs_kernels:
        write_recording(files.recording, evaluations, evaluator.gpu, provenance)
    ended = {"finished": utc_now(), "ended": reason, "spent": asdict(spent), "best": best, "provenance": provenance}
    write_json(files.run, {**about, **ended})


def write_recording(path: Path, evaluations: Iterable[Evaluation], gpu: Gpu, provenance: dict[str, Any]) -> None:
    """Replace a file by evaluations as a recording (:mod:`outblas_lab.jail.evaluation_file`).

    Raises:
        RecordError: the disk refuses it; an earlier file is kept.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.unlink(missing_ok=True)
    with Recorder(scratch, gpu, provenance) as recorder:
        for evaluation in evaluations:
            recorder.append(evaluation)
    scratch.replace(path)
