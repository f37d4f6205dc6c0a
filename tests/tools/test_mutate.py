"""tools/mutate.py: which mutants are drawn, which tests they meet, what a kill leaves, and the report's arithmetic."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import RecordError, UsageError
from support.helpers import ROOT

TOY = '''"""Toy 1."""
from __future__ import annotations

LIMIT = 3


def total(n: int) -> int:
    """Add."""
    left = n
    found = 0
    while left > 0:
        left = left - 1
        found += 2
    return found


def unseen(n: int) -> int:
    return n + 5
'''
TOY_TEST = """from toy.core.sums import LIMIT, total


def test_total():
    assert total(2) == 4


def test_limit():
    assert LIMIT == 3
"""
TOTAL, LIMIT = "tests/core/test_sums.py::test_total", "tests/core/test_sums.py::test_limit"
FILE = "src/toy/core/sums.py"


@pytest.fixture(name="tool")
def tool_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    names = ("mutant_list", "covering_tests", "mutant_runs", "mutant_report")
    modules = {name: importlib.import_module(f"mutation.{name}") for name in names}
    return SimpleNamespace(**modules, mutate=importlib.import_module("mutate"))


@pytest.fixture(name="toy")
def toy_fixture(tmp_path: Path) -> Path:
    """A tree with one module and its tests."""
    root = tmp_path / "toy_tree"
    for name, text in {
        "src/toy/__init__.py": "",
        "src/toy/core/__init__.py": "",
        FILE: TOY,
        "tests/core/test_sums.py": TOY_TEST,
        "pytest.ini": "[pytest]\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def numbers(text: str) -> Iterator[tuple[str, int, int]]:
    """In the place of cosmic-ray's: every digit is one that could be another."""
    for index, found in enumerate(re.finditer(r"\d", text)):
        yield "Next", index, text.count("\n", 0, found.start()) + 1


def next_number(text: str, operator: str, occurrence: int) -> str | None:
    found = list(re.finditer(r"\d", text))
    if occurrence >= len(found):
        return None
    at = found[occurrence]
    return text[: at.start()] + str(int(at[0]) + 1) + text[at.end() :]


@pytest.fixture(name="plan")
def plan_fixture(tool: Any, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tool.mutant_list, "candidates", numbers)
    return tool.mutant_list.draw(toy, 99, 0, {FILE: "sums"}, next_number)


def covered(tool: Any, **more: dict[str, Any]) -> Any:
    """Seconds, outcome and lines of the toy's tests."""
    tests = {
        TOTAL: {"seconds": 0.2, "outcome": "passed", "lines": {FILE: [9, 10, 11, 12, 13, 14]}},
        LIMIT: {"seconds": 0.1, "outcome": "passed", "lines": {}},
    }
    return tool.covering_tests.Covered({**tests, **more})


@pytest.mark.parametrize(
    ("was", "becomes", "counts"),
    [
        ("x = 1", "x = 2", True),
        ("def f(a=1): pass", "def f(a=2): pass", True),
        ("@a\ndef f(): pass", "def f(): pass", True),
        ("def f(a: int | None): pass", "def f(a: int & None): pass", False),
        ("def f() -> int | None: pass", "def f() -> int + None: pass", False),
        ("x: int | None = 1", "x: int ^ None = 1", False),
        ("x: int = 1", "x: int = 2", True),
        ('"""One."""\nx = 1', '"""Two."""\nx = 1', False),
        ('__all__ = ["a" + "b"]', '__all__ = ["a" - "b"]', False),
        ("if TYPE_CHECKING:\n    x = 1", "if TYPE_CHECKING:\n    x = 2", False),
        ("if x:\n    y = 1", "if x:\n    y = 2", True),
        ("x = 1", "x =  1  # the same", False),
        ("def f(*, a): pass", "def f(+, a): pass", False),
    ],
)
def test_what_says_nothing_of_the_tests_is_left_out(tool: Any, was: str, becomes: str, counts: bool) -> None:
    assert bool(tool.mutant_list.why_left_out(was, becomes)) != counts


@pytest.mark.parametrize(
    ("marked", "function", "lines", "at_import"),
    [
        ("x = (1 +\n  HERE)", "", (1, 2), True),
        ("def f(a,\n  b=HERE):\n  pass", "", (1, 2), True),
        ("class A:\n  x = HERE", "A", (2, 2), True),
        ("class A:\n  def f(self):\n    if HERE:\n      pass", "A.f", (3, 3), False),
        ("def f():\n  try:\n    pass\n  except HERE:\n    pass", "f", (4, 4), False),
        ("def f():\n  for x in y:\n    pass\n  else:\n    g(\n HERE)", "f", (5, 6), False),
        ("@a\n@HERE\ndef f():\n  pass", "", (1, 3), True),
    ],
)
def test_a_line_is_placed_in_its_statement(
    tool: Any, marked: str, function: str, lines: tuple[int, int], at_import: bool
) -> None:
    ast.parse(marked)
    line = marked[: marked.index("HERE")].count("\n") + 1
    assert tool.mutant_list.place(marked, line) == (function, lines, at_import)


def test_the_sample_is_seeded_and_survives_on_disk(tool: Any, toy: Path, plan: Any, tmp_path: Path) -> None:
    assert {mutant.was for mutant in plan.mutants} == {
        "LIMIT = 3",
        "found = 0",
        "while left > 0:",
        "left = left - 1",
        "found += 2",
        "return n + 5",
    }
    assert plan.about["left_out"] == {"nothing that runs is changed": 1}  # the docstring's digit
    again = tool.mutant_list.draw(toy, 3, 0, {FILE: "sums"}, next_number)
    assert again.mutants == plan.mutants[:3]
    samples = {tool.mutant_list.draw(toy, 3, seed, {FILE: "sums"}, next_number).mutants for seed in range(4)}
    assert len(samples) > 1
    tool.mutant_list.write_plan(tmp_path, plan)
    assert tool.mutant_list.read_plan(tmp_path, toy).mutants == plan.mutants
    (toy / FILE).write_text(TOY + "\n")
    with pytest.raises(RecordError, match="not what the plan was drawn from"):
        tool.mutant_list.read_plan(tmp_path, toy)


def mutant_of(plan: Any, was: str) -> Any:
    return next(mutant for mutant in plan.mutants if mutant.was == was)


def test_a_mutant_meets_the_tests_of_its_lines_and_of_its_module(tool: Any, plan: Any) -> None:
    def test(seconds: float, *lines: int, outcome: str = "passed") -> dict[str, Any]:
        return {"seconds": seconds, "outcome": outcome, "lines": {FILE: list(lines)}}

    others = {
        "tests/cli/test_a.py::test_slow": test(9.0, 13),
        "tests/cli/test_b.py::test_quick": test(0.01, 13),
        "tests/cli/test_b.py::test_fails": test(0.01, 13, outcome="failed"),
        "tests/core/test_other.py::test_it": test(0.01),
    }
    known = covered(tool, **others)
    quick, slow, other = "tests/cli/test_b.py::test_quick", "tests/cli/test_a.py::test_slow", [*others][3]
    assert known.choose(mutant_of(plan, "found += 2"), 60.0) == [quick, TOTAL, slow, LIMIT]
    assert known.choose(mutant_of(plan, "found += 2"), 1.0) == [quick, TOTAL]
    assert known.choose(mutant_of(plan, "return n + 5"), 60.0) == [LIMIT, TOTAL]
    assert known.choose(mutant_of(plan, "LIMIT = 3"), 60.0) == [LIMIT, TOTAL, other]
    assert known.choose(replace(mutant_of(plan, "return n + 5"), file="src/toy/core/x.py"), 60.0) == []
    known.texts = {"tests/core/test_other.py": "import sums", "tests/cli/test_b.py": "import sums"}
    unseen = mutant_of(plan, "return n + 5")
    assert known.choose(unseen, 60.0) == [other, LIMIT, TOTAL], "a child process of that test may run it"


@pytest.mark.slow  # one command draws, runs and reports below
def test_mutants_are_killed_or_survive_and_a_cut_line_is_run_again(tool: Any, toy: Path, plan: Any) -> None:
    tool.mutant_runs.compile_tree(toy)
    results = toy.parent / "results-0of1.jsonl"
    results.write_text('{"id": "cut sho')  # by a kill
    suite = tool.covering_tests.Suite("cpu", ("tests",), "not gpu")
    known = covered(tool)
    chosen = [mutant_of(plan, was) for was in ("LIMIT = 3", "found += 2", "return n + 5", "found = 0")]
    before = (toy / FILE).stat()
    said: list[Any] = []
    tool.mutant_runs.Runs(suite, known, results, 60.0, next_number).run(chosen, [toy], said.append)
    found = tool.mutant_runs.read_results(toy.parent)
    assert [(found[mutant.id, "cpu"].outcome, found[mutant.id, "cpu"].by) for mutant in chosen] == [
        ("killed", LIMIT),
        ("killed", TOTAL),
        ("survived", ""),
        ("killed", TOTAL),
    ]
    assert len(said) == len(found) == 4
    after = (toy / FILE).stat()
    assert (toy / FILE).read_text() == TOY and after.st_mtime_ns == before.st_mtime_ns


def test_a_run_within_a_run_is_told_nothing_of_it(tool: Any, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTATION_COVERAGE", "outer")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), "elsewhere"]))
    inner = tool.covering_tests.environment(toy, MUTATION_TESTS="inner")
    assert {name: value for name, value in inner.items() if name.startswith("MUTATION_")} == {"MUTATION_TESTS": "inner"}
    path = inner["PYTHONPATH"].split(os.pathsep)
    assert path[0] == str(toy / "src") and path[-1] == "elsewhere" and str(ROOT / "src") not in path


def test_a_test_that_fails_alone_kills_nothing(tool: Any, toy: Path, plan: Any) -> None:
    (toy / "tests/core/test_sums.py").write_text(TOY_TEST + "\n\ndef test_wrong():\n    assert False\n")
    wrong = "tests/core/test_sums.py::test_wrong"
    known = covered(tool, **{wrong: {"seconds": 0.0, "outcome": "passed", "lines": {}}})
    suite = tool.covering_tests.Suite("cpu", ("tests",), "not gpu")
    runs = tool.mutant_runs.Runs(suite, known, toy.parent / "results-0of1.jsonl", 60.0, next_number)
    result = runs.run_one(mutant_of(plan, "return n + 5"), toy)
    assert (result.outcome, result.tests, known.not_alone) == ("survived", 2, {wrong})


def test_a_mutant_that_never_ends_is_timed_out(
    tool: Any, toy: Path, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.mutant_runs, "SPARE_S", 1.0)
    suite = tool.covering_tests.Suite("cpu", ("tests",), "not gpu")

    def endless(text: str, operator: str, occurrence: int) -> str:
        return text.replace("left - 1", "left + 0")

    runs = tool.mutant_runs.Runs(suite, covered(tool), toy.parent / "results-0of1.jsonl", 60.0, endless)
    assert runs.run_one(mutant_of(plan, "left = left - 1"), toy).outcome == "timed out"


def test_the_report_counts_each_mutant_once(tool: Any, plan: Any) -> None:
    first, second, third, fourth, fifth, _ = plan.mutants
    areas = replace(plan, mutants=(replace(first, area="a"), *plan.mutants[1:]))

    def result(mutant: Any, outcome: str, suite: str = "cpu", tests: int = 2) -> Any:
        return tool.mutant_runs.MutantResult(mutant.id, outcome, "", tests, 1.5, suite, 0.0)

    ran = [
        result(first, "killed"),
        result(second, "timed out"),
        result(third, "survived"),
        result(fourth, "survived", tests=0),
        result(fourth, "killed", "gpu"),
        result(fifth, "killed"),
    ]
    listed = {third.key: "the same", fifth.key: "thought to be the same", ("gone",): "of code that went"}
    found = tool.mutant_report.report(areas, {(r.id, r.suite): r for r in ran}, listed)
    counts = {name: found["all"][name] for name in tool.mutant_report.OUTCOMES}
    assert counts == {"killed": 2, "timed out": 1, "survived": 1, "equivalent": 1, "not run": 1}
    assert found["all"]["rate"] == 0.75 and found["areas"]["a"]["rate"] == 1.0
    assert [(row["id"], row["gpu"]) for row in found["survivors"]] == [(fourth.id, "killed")]
    assert found["no_test"] == 1 and found["seconds"] == 7.5
    assert found["killed_though_listed"] == [fifth.id] and found["listed_not_drawn"] == [["gone"]]
    text = tool.mutant_report.report_text(found)
    assert f"survived: {fourth.id} (0 tests; gpu: killed)\n{fourth.diff}" in text and third.diff not in text


def test_an_equivalent_mutant_needs_a_reason(tool: Any, tmp_path: Path) -> None:
    entry = dict.fromkeys(tool.mutant_report.KEY_FIELDS, "x")
    path = tmp_path / "equivalent.json"
    for bad in ([entry], [{**entry, "reason": " "}], {"a": 1}, [1]):
        path.write_text(json.dumps(bad))
        with pytest.raises(RecordError):
            tool.mutant_report.read_equivalent(path)
    path.write_text(json.dumps([{**entry, "reason": "it is the same"}]))
    assert tool.mutant_report.read_equivalent(path) == {("x",) * 5: "it is the same"}
    assert isinstance(tool.mutant_report.read_equivalent(tool.mutant_report.EQUIVALENT), dict)


def test_every_area_has_its_files(tool: Any) -> None:
    files = tool.mutant_list.files_of(ROOT)
    assert set(files.values()) == set(tool.mutant_list.AREAS) and "src/outblas/judge/gates.py" in files


def test_areas_are_names_or_folders(tool: Any) -> None:
    areas = tool.mutant_list.areas_of(["lab/jail", "adapt/learning", "pool"])
    files = tool.mutant_list.files_of(ROOT, areas)
    assert set(files.values()) == {"lab/jail", "adapt/learning", "pool"} and len(files) > 40
    assert files["lab/src/outblas_lab/jail/elf.py"] == "lab/jail"
    assert "src/outblas/dispatch/fusion/plans.py" not in files
    assert tool.mutant_list.areas_of([]) == tool.mutant_list.AREAS
    with pytest.raises(UsageError, match="src/outblas/jails"):
        tool.mutant_list.files_of(ROOT, tool.mutant_list.areas_of(["jails"]))


def test_one_command_draws_runs_and_reports(
    tool: Any, toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed (extra mutation)")
    pytest.importorskip("coverage", reason="coverage is not installed (extra mutation)")
    monkeypatch.setattr(tool.mutate, "ROOT", toy)
    monkeypatch.setattr(tool.mutant_runs, "SPARE_S", 5.0)  # some never end
    monkeypatch.setattr(tool.mutate, "files_of", lambda root, areas: dict.fromkeys([FILE], *areas))
    monkeypatch.setenv("OUTBLAS_COMMIT", "abc")
    command = ["--work", str(toy / "build"), "--mutants", "4", "--tests", "tests", "--area", "core"]
    assert tool.mutate.main(command) == 0
    found = json.loads((toy / "build" / "report.json").read_text())
    assert found["about"]["commit"] == "abc" and found["all"]["not run"] == 0 and found["mutants"] == 4
    lines = (toy / "build" / "results-0of1.jsonl").read_text().splitlines()
    assert len(lines) == 4 and tool.mutate.main(command) == 0
    assert (toy / "build" / "results-0of1.jsonl").read_text().splitlines() == lines
    for other in (["--seed", "1"], ["--area", "cli"]):
        assert tool.mutate.main([*command, *other]) == 2
    assert "choose another --work" in capsys.readouterr().err
    assert (toy / FILE).read_text() == TOY


def test_the_page_has_each_draw_as_its_file_says() -> None:
    page = (ROOT / "docs/develop/testing.md").read_text()
    files = sorted((ROOT / "results/mutation").glob("*.json"))
    assert files and page.count("(`results/mutation/") == len(files)
    for file in files:
        data = json.loads(file.read_text())
        about, found = data["about"], data["all"]
        (line,) = [line for line in page.splitlines() if file.relative_to(ROOT).as_posix() in line]
        low, high = found["low"], found["high"]
        cells = (
            f"seed {about['seed']}", about["commit"][:8], str(data["mutants"]), ", ".join(about["areas"]),
            f"| {found['killed'] + found['timed out']} | {found['survived']} | {found['rate']:.3f} |",
            f"| {low:.3f} to {high:.3f} |",
        )  # fmt: skip
        assert all(cell in line for cell in cells), line
