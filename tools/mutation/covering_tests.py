"""Lines that each test runs, measured once, and the tests that a mutant must pass by it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mutation.mutant_list import Mutant, text_hash

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_json

PLUGINS = Path(__file__).resolve().parent
#: Threads of many processes side by side would mostly wait for each other.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Suite:
    """A set of tests: folders, a `-m` expression, and a folder that is left out."""

    name: str
    folders: tuple[str, ...]
    marker: str
    without: str = ""

    def test_files(self, tree: Path) -> list[str]:
        """Return the test files in a tree, as paths relative to it."""
        found: set[str] = set()
        for folder in self.folders:
            path = tree / folder
            found.update(
                f.relative_to(tree).as_posix() for f in ([path] if path.is_file() else path.rglob("test_*.py"))
            )
        return sorted(f for f in found if not (self.without and f.startswith(f"{self.without}/")))


@dataclass
class Covered:
    """Knowledge of each test: seconds, outcome, and the lines that it runs of each mutated file; the files' texts."""

    tests: Mapping[str, Mapping[str, Any]]
    texts: Mapping[str, str] = field(default_factory=dict)
    not_alone: set[str] = field(default_factory=set)  # tests that fail by themselves without any mutant

    def choose(self, mutant: Mutant, most_s: float) -> list[str]:
        """Return the tests of a mutant, no more of them than `most_s` allows: first those that run its lines.

        Child processes are not traced, so tests of the package that name the module follow. What an import runs is seen
        in one test only, so all tests of the package come last for it. Of each kind the quickest file goes first, in it
        the quickest test.
        """
        path = PurePosixPath(mutant.file)
        inner = path.parts[path.parts.index("src") + 2 :] if "src" in path.parts else ()
        package = inner[0] if len(inner) > 1 else ""
        named = tuple(f"tests/{package}/test_{part}" for part in (path.stem, *inner[1:-1]))

        def in_package(file: str) -> bool:
            return file.startswith(f"tests/{package}/")

        stem = re.compile(rf"\b{re.escape(path.stem)}\b")
        first, last = mutant.lines
        groups: tuple[dict[str, list[str]], ...] = (defaultdict(list), defaultdict(list), defaultdict(list))
        for test, said in self.tests.items():
            if said["outcome"] != "passed" or test in self.not_alone:
                continue
            file = test.partition("::")[0]
            if any(first <= line <= last for line in said["lines"].get(mutant.file, ())):
                groups[0][file].append(test)
            elif test.startswith(named) or (in_package(file) and stem.search(self.texts.get(file, ""))):
                groups[1][file].append(test)
            elif mutant.at_import and in_package(file):
                groups[2][file].append(test)
        ordered = [tests for group in groups for tests in sorted(group.values(), key=self.seconds)]
        kept: list[str] = []
        left = most_s
        for test in (t for tests in ordered for t in sorted(tests, key=lambda t: self.tests[t]["seconds"])):
            left -= self.tests[test]["seconds"]
            if left < 0 and kept:
                break
            kept.append(test)
        return kept

    def seconds(self, tests: Iterable[str]) -> float:
        """Return how long tests took without a mutant."""
        return sum(self.tests[test]["seconds"] for test in tests)


def environment(tree: Path, **more: str) -> dict[str, str]:
    """Return the environment of tests in a copy of the tree; of the tree that this tool is in nothing is imported."""
    here = PLUGINS.parents[1]
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and here not in Path(p).parents]
    path = [tree / "src", tree / "lab" / "src", tree / "tests", PLUGINS, *others]
    # The project's own tests run such tests, too; this process's options do not concern them.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MUTATION_")}
    return {**ours, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, path)), **more}


def pytest_command(suite: Suite, files: Sequence[str], *options: str) -> list[str]:
    """Return the command that runs tests of these files with our plugin."""
    plugins = ["-p", "chosen_tests", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-q", *plugins, "-m", suite.marker, *options, *files]


def measure(tree: Path, work: Path, suite: Suite, files: Iterable[str], jobs: int) -> Covered:
    """Return which tests run which lines of `files`; only test files that have changed are run again.

    Raises:
        RecordError: pytest itself failed; failing tests are no error, they are not used.
    """
    kept = work / f"coverage-{suite.name}.json"
    sources = text_hash(
        "".join(path.read_text() for part in ("lab", "src") for path in sorted((tree / part).rglob("*.py")))
    )
    known = _read(kept, sources)
    texts = {name: (tree / name).read_text() for name in suite.test_files(tree)}
    hashes = {name: text_hash(text) for name, text in texts.items()}
    if not hashes:
        raise UsageError(f"no test file in {', '.join(suite.folders)}", "folders or files of tests", "mend --tests")
    known = {name: was for name, was in known.items() if hashes.get(name) == was["hash"]}
    new = [name for name in hashes if name not in known]
    if new:
        print(f"{suite.name} tests: which lines each of {len(new)} files runs", flush=True)
        said = _run(tree, work, suite, new, list(files), jobs)
        known.update({name: {"hash": hashes[name], "tests": {}} for name in new})
        for test, what in said.items():
            known[test.partition("::")[0]]["tests"][test] = what
        write_json(kept, {"sources": sources, "files": known})
    return Covered({test: said for was in known.values() for test, said in was["tests"].items()}, texts)


def _read(kept: Path, sources: str) -> dict[str, Any]:
    try:
        found = json.loads(kept.read_text())
        return dict(found["files"]) if found["sources"] == sources else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _run(tree: Path, work: Path, suite: Suite, new: list[str], files: list[str], jobs: int) -> dict[str, Any]:
    folder = work / f"coverage-{suite.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    side_by_side = ["-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"] if jobs > 1 else []
    traced = json.dumps([str(tree / file) for file in files])
    with (work / f"coverage-{suite.name}.log").open("wb") as log:
        status = subprocess.run(
            pytest_command(suite, new, *side_by_side),
            cwd=tree,
            env=environment(tree, MUTATION_COVERAGE=str(folder), MUTATION_FILES=traced),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode
    if status not in (0, 1):
        raise RecordError(f"pytest ended with {status}", "tests that run", f"read {log.name}")
    said: dict[str, Any] = {}
    for file in folder.glob("*.json"):
        said.update(json.loads(file.read_text()))
    if not said:
        raise RecordError("no test said what it runs", "tests that run, and coverage installed", f"read {log.name}")
    return said
