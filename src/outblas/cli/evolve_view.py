"""The view of ``outblas evolve`` while it runs: a live table on a terminal, else a line per outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outblas.cli.common import err, number
from outblas.llm.evolve_run import MakeProgress
from outblas.llm.feedback import OUTCOME_KINDS

if TYPE_CHECKING:
    from rich.console import Group

    from outblas.llm.budget import Budget, SpendingAccount
    from outblas.llm.client import Client
    from outblas.llm.evolve import Evolution
    from outblas.llm.evolve_journal import AnswerOutcome

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

    rows = Table("problem", "floor us", "baseline us", "best us", "speed-up", "chains", box=None)
    for s in evolution.problem_progress():
        rows.add_row(s.problem.key, number(s.floor_us), number(s.baseline_us), number(s.best_us),
                     number(s.best_ratio, 3), str(s.chains))  # fmt: skip
    counts = evolution.outcomes()
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOME_KINDS if counts[kind]) or "nothing yet"
    now = f"{account.reserved.requests} requests under way, {evolution.evaluating} candidates under evaluation"
    return Group(Text(title), rows, Text(f"outcomes: {kinds}"), Text(now), Text(spent_words(budget, account, client)))
