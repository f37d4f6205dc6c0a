"""A pytest plugin of the mutation run: it runs chosen tests in a given order, and says what they did.

It imports nothing of the package: in a mutant's process the package may be broken. The environment says what to do:

- `MUTATION_TESTS`: a JSON list of the tests to run, in this order.
- `MUTATION_SAID`: a file for the failed tests, one a line.
- `MUTATION_COVERAGE`: a folder for which lines of which files each test ran (`MUTATION_FILES`: their absolute paths,
  JSON). Lines that child processes run are not seen.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_TRACED: Any = None
_TESTS: dict[str, dict[str, Any]] = defaultdict(lambda: {"seconds": 0.0, "outcome": "passed", "lines": {}})

if "MUTATION_COVERAGE" in os.environ:  # before anything of the package is imported
    os.environ.setdefault("COVERAGE_CORE", "ctrace")  # its other ways of tracing may see a line once only
    import coverage

    _TRACED = coverage.Coverage(data_file=None, include=json.loads(os.environ["MUTATION_FILES"]), config_file=False)
    _TRACED.start()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the chosen tests. Where a mutant has renamed one, all tests of its file are kept."""
    if "MUTATION_TESTS" not in os.environ:
        return
    wanted = json.loads(Path(os.environ["MUTATION_TESTS"]).read_text())
    there = {item.nodeid for item in items}
    whole = {name.partition("::")[0] for name in wanted if name not in there}
    rank = {name: index for index, name in enumerate(wanted)}
    chosen = [item for item in items if item.nodeid in rank or item.nodeid.partition("::")[0] in whole]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = sorted(chosen, key=lambda item: rank.get(item.nodeid, len(rank)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count the lines that run from here on as this test's."""
    if _TRACED is not None:
        _TRACED.switch_context(item.nodeid)
    yield
    if _TRACED is not None:
        _TRACED.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what a test came to and how long it took; under pytest-xdist each process does so for its own."""
    test = _TESTS[report.nodeid]
    test["seconds"] += report.duration
    if report.outcome != "passed":
        test["outcome"] = report.outcome
    if report.failed and "MUTATION_SAID" in os.environ:
        with open(os.environ["MUTATION_SAID"], "a") as file:
            file.write(report.nodeid + "\n")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what this process has seen; the one that only hands out tests has seen none."""
    if _TRACED is None or getattr(session.config.option, "numprocesses", None):
        return
    _TRACED.stop()
    data = _TRACED.get_data()
    root = Path.cwd()
    for file in data.measured_files():
        name = Path(file).relative_to(root).as_posix()
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                if test in _TESTS:
                    _TESTS[test]["lines"].setdefault(name, []).append(line)
    (Path(os.environ["MUTATION_COVERAGE"]) / f"{os.getpid()}.json").write_text(json.dumps(_TESTS))
