"""An evolution on disk: its folder, from the settings to the best kernels and the report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outblas.config import config_name, config_to_json
from outblas.errors import RecordError, UsageError
from outblas.evaluation import Evaluation
from outblas.files import sole_run, write_atomic, write_json
from outblas.free.evaluators import FreeEvaluator
from outblas.free.kernel import FreeKernel
from outblas.free.recorded import Recorder
from outblas.kernels.config_text import config_from_json
from outblas.llm.budget import Account, Budget
from outblas.llm.client import Client, Patience, check_server
from outblas.llm.evolve import Evolution, Settings
from outblas.llm.ledger import Ledger, Outcome
from outblas.llm.limits import RateLimiter
from outblas.llm.models import Model
from outblas.llm.places import Place, open_place
from outblas.llm.run_folder import KIND, EvolveFiles, open_folder, without_passwords
from outblas.problem import Problem
from outblas.provenance import collect, utc_now
from outblas.roofline import Gpu
from outblas.store import Store

#: Called when the run begins, with what may be watched; what it returns is called after every outcome.
Watching = Callable[[Evolution, Budget, Account, Client], Callable[[Outcome | None], None]]


@dataclass(frozen=True)
class Server:
    """How the server is asked: its address (None: see :class:`Client`), patience, limits per minute, temperature."""

    base_url: str | None = None
    patience: Patience = Patience()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    temperature: float | None = None


def run_evolve(
    problems: Sequence[Problem], models: Sequence[Model], server: Server, place: Place, budget: Budget,
    settings: Settings, path: Path, command: str, watching: Watching,
) -> tuple[str, EvolveFiles]:  # fmt: skip
    """Evolve into the folder ``path``, or go on with the run of the same settings that is there.

    Returns:
        Why it ended, and where everything lies.

    Raises:
        UsageError: a folder with another run or something else; no price with a budget in USD; no server.
        ServerError: the server refuses or is gone. DeviceError, ToolchainMissing: the evaluator cannot work.
        RecordError: the folder cannot be written, or another process works in it. After each of them the same
            command resumes.
    """
    if len(set(problems)) != len(problems):
        raise UsageError("a problem is given twice", "every problem once", "remove the repeated one")
    if budget.usd is not None and any(not (m.price.prompt or m.price.answer) for m in models):
        raise UsageError("a budget in USD and a model without a price", "US dollars per million tokens of each",
                         "pass --price, e.g. --price 0.5,1.5")  # fmt: skip
    check_server(server.base_url)  # before anything is written
    files, command = EvolveFiles(path), without_passwords(command)
    with open_place(place) as evaluator, sole_run(path):
        recorded = getattr(evaluator, "provenance", None) or None
        wanted = {**_identity(problems, models, place, settings), "gpu": evaluator.gpu.name}
        about = open_folder(files, wanted, {"source": evaluator.source, "recording": recorded, "command": command})
        with Store(files.store) as store:
            run_id = path.resolve().name
            store.begin(run_id, {"evolve": KIND, "source": evaluator.source, "seed": settings.seed})
            with Ledger(files.store) as ledger:
                reason = _evolve(problems, models, server, evaluator, budget, settings, store, run_id, ledger,
                                 watching)  # fmt: skip
                reason += unheard(ledger)
                _finish(files, ledger, store.evaluations(), about, evaluator, place, command, reason)
    from outblas.report import write_report

    write_report(path, files.report)
    return reason, files


def _evolve(
    problems: Sequence[Problem], models: Sequence[Model], server: Server, evaluator: FreeEvaluator, budget: Budget,
    settings: Settings, store: Store, run_id: str, ledger: Ledger, watching: Watching,
) -> str:  # fmt: skip
    account = Account(budget, ledger.spent())

    async def run() -> str:
        client = Client(
            server.base_url, account, ledger, max_tokens=settings.max_tokens, temperature=server.temperature,
            patience=server.patience, limiter=RateLimiter(server.requests_per_minute, server.tokens_per_minute),
        )  # fmt: skip
        told: list[Callable[[Outcome | None], None]] = []
        evolution = Evolution(problems, models, evaluator, store, run_id, ledger, client, settings,
                              lambda outcome: told[0](outcome))  # fmt: skip
        told.append(watching(evolution, budget, account, client))
        return await evolution.run()

    try:
        return asyncio.run(run())
    except KeyboardInterrupt as error:
        done, spent = len(ledger.outcomes()), ledger.spent()
        raise KeyboardInterrupt(
            f"interrupted with {done} answers evaluated and {spent.requests} requests spent, recorded in {ledger.path}"
        ) from error


def _identity(problems: Sequence[Problem], models: Sequence[Model], place: Place, settings: Settings) -> dict[str, Any]:
    """What makes two runs of one kind of GPU the same; the budget, the address and how many ask at once may change."""
    kept = {k: v for k, v in asdict(settings).items() if k != "parallel"}
    return json.loads(json.dumps({
        "problems": [p.key for p in problems], "models": [asdict(m) for m in models], "device": str(place),
        "settings": kept,
    }))  # fmt: skip


def unheard(ledger: Ledger) -> str:
    """What to add to why a run ended where no request was ever answered: most likely it is not for the budget."""
    count, last = 0, None
    for _, reply in ledger.replies():
        if reply.answered:
            return ""
        count, last = count + 1, reply
    return "" if last is None else f"; none of {count} requests was answered (the last: {last.outcome}, {last.text})"


def _finish(
    files: EvolveFiles, ledger: Ledger, evaluations: Iterable[Evaluation], about: Mapping[str, Any],
    evaluator: FreeEvaluator, place: Place, command: str, reason: str,
) -> None:  # fmt: skip
    """The best kernels as files, the transcript, and what the run was."""
    best = _best(ledger)
    for key, found in best.items():
        candidate = config_from_json(found["candidate"])
        free = isinstance(candidate, FreeKernel)
        body = candidate.text if isinstance(candidate, FreeKernel) else json.dumps(config_to_json(candidate), indent=1)
        found["file"] = str(write_atomic(files.best / f"{key}.{'cu' if free else 'json'}", body.encode()).name)
        found["candidate"] = config_name(candidate)
    _write_transcript(files.transcript, ledger)
    spent = ledger.spent()
    provenance = collect(command, place.gpu_index)
    if place.gpu_index is not None:
        write_recording(files.recording, evaluations, evaluator.gpu, provenance)
    ended = {"finished": utc_now(), "ended": reason, "spent": asdict(spent), "best": best, "provenance": provenance}
    write_json(files.run, {**about, **ended})


def _write_transcript(path: Path, ledger: Ledger) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(entry)}\n" for entry in ledger.transcript())
        scratch.replace(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be written ({error.strerror})", "free disk space", "repeat the command"
                          ) from error  # fmt: skip


def write_recording(path: Path, evaluations: Iterable[Evaluation], gpu: Gpu, provenance: dict[str, Any]) -> None:
    """Evaluations as a recording (:mod:`outblas.free.recorded`), published whole.

    Raises:
        RecordError: the disk refuses it; what was there is kept.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.unlink(missing_ok=True)
    with Recorder(scratch, gpu, provenance) as recorder:
        for evaluation in evaluations:
            recorder.append(evaluation)
    scratch.replace(path)


def _best(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Problem key -> its best archived kernel."""
    best: dict[str, dict[str, Any]] = {}
    for entry in ledger.entries():
        if entry.problem not in best or entry.score > best[entry.problem]["score"]:
            best[entry.problem] = {"candidate": entry.candidate, "score": entry.score, "us": entry.us}
    return best
