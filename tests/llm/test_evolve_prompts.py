"""Counters, near problems and the limits on turns, in the recorded prompts of a run against a scripted server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records.store import Store
from outblas_lab.llm.archive import ArchiveShape
from outblas_lab.llm.evolve_journal import EvolveJournal, Question
from outblas_lab.llm.journal_lessons import lessons, nearest_lessons, read_lessons
from outblas_lab.llm.known_counters import KnownCounters, load_counters
from outblas_lab.llm.near_problems import SECTION_CHARS, NearProblems
from outblas_lab.llm.prompt import skeleton
from outblas_lab.llm.repair_chain import TurnLimits
from support.evolve_fixture import evolve, in_turn, key_fixture, outcomes, recording_fixture  # noqa: F401
from support.gpus.known import H200
from support.helpers import ROOT
from support.llm_kernels import PROBLEM, answer, kernel, passed, record
from support.llm_server import Say, serving

FIGURES = {
    "kernel": "gemm", "grid": "(8, 8, 1)", "block": "(128, 1, 1)", "time_ns": 4000.0, "tensor_pct": 41.5,
    "dram_pct": 12.5, "dram_read_bytes": 2e6, "dram_write_bytes": None, "l2_hit_pct": 77.25, "l2_bytes": 5e6,
    "occupancy_pct": 18.0, "instructions": 66000.0, "cycles": 7890.0, "stalls": [["long_scoreboard", 2.5], ["wait", 1]],
}  # fmt: skip
SHOWN = "tensor pipe 41.5%, HBM 12.5%, L2 hits 77.2%, occupancy 18.0%"
CONFIG = Sm80MmaConfig(64, 64)


def counters_file(path: Path, *names: str, launches: int = 1, gpu: str = "NVIDIA H200") -> Path:
    """A file as benchmarks/profile_regimes.py writes it, with one row for each kernel."""
    about = {"gpu": gpu, "driver": "580", "date": "2026-11-22", "commit": "0" * 40, "ncu": "2025.3"}
    head = {"group": "launch", "problem": PROBLEM.key, "l2": "warm", "side": "ours", "chosen_by": "library"}
    rows = [{**head, "name": name, "kernels": [FIGURES] * launches} for name in names]
    rows.append({**head, "side": "lt_auto", "name": "index=1", "kernels": [{**FIGURES, "tensor_pct": 99.0}]})
    path.write_text(json.dumps({"format": 1, "provenance": about, "rows": rows}))
    return path


def questions(folder: Path) -> list[Question]:
    with EvolveJournal(folder / "store.sqlite") as journal:
        return list(journal.questions())


def text_of(question: Question) -> str:
    return question.messages[-1]["content"]


def test_recorded_prompts_show_counters_and_near_problems(recording: Path, tmp_path: Path) -> None:
    counters = counters_file(tmp_path / "ncu.json", *(kernel(i).name for i in range(6)))
    near = Problem(512, 512, 640)
    record(recording.with_name("both.jsonl"), *(passed(kernel(i), 4.2 - 0.4 * i, p) for p in (PROBLEM, near)
                                               for i in range(6)))  # fmt: skip
    script = lambda request, number: Say(answer(kernel(number % 6).text))  # noqa: E731
    with serving(script) as server:
        evolve(server, recording.with_name("both.jsonl"), tmp_path / "run", 8, turns=2, problems=(PROBLEM, near),
               counters=counters, shape=ArchiveShape(islands=1))  # fmt: skip
    asked = questions(tmp_path / "run")
    first = [q for q in asked if q.turn == 0]
    begun, later = text_of(first[0]), [text_of(q) for q in first if q.problem == PROBLEM.key and len(q.parents) == 2]
    assert "tuned library" in begun and "Journal 00" in begun  # before this run has proven anything
    assert "(this run)" not in begun and "The slower" not in begun
    assert later and "(this run)" in later[-1] and f"{near.key}: " in later[-1]
    assert "First give the reason for the difference in speed" in later[-1]
    assert later[-1].index("reason for the difference") < later[-1].index("design a better")
    assert later[-1].count(f"Nsight Compute: {SHOWN}") == 2  # of both parents
    improve = [text_of(q) for q in asked if q.purpose == "proven" and q.problem == PROBLEM.key]
    assert improve and all(f"Nsight Compute: {SHOWN}" in text and "us, " in text for text in improve)
    assert all("long_scoreboard 2.50, wait 1.00" in text and "HBM read 2.0 MB" in text for text in improve)
    assert not any("HBM written" in text for text in improve)  # ncu did not report it
    others = [text_of(q) for q in asked if q.purpose == "proven" and q.problem == near.key]
    assert others and all("this kernel was not profiled on this GPU" in text and SHOWN not in text for text in others)
    assert not any("99.0%" in text for text in map(text_of, asked))  # a rival's


def test_nothing_near_is_shown_when_nothing_is_asked_for(recording: Path, tmp_path: Path) -> None:
    with serving(in_turn(Say(answer(kernel(0).text)))) as server:
        evolve(server, recording, tmp_path / "run", 1, nearest=0)
    assert "near problems" not in text_of(questions(tmp_path / "run")[0])


def words(evaluation: Any, known: KnownCounters | None = None) -> str:
    return (known or KnownCounters()).words(evaluation, H200)


def test_a_copy_of_the_kernel_of_a_short_prompt_is_a_duplicate(recording: Path, tmp_path: Path) -> None:
    copy = skeleton(PROBLEM).replace("float sum", "// my own\n    float sum")
    script = in_turn(*(Say(answer(text)) for text in (copy, kernel(1).text, copy)))
    with serving(script) as server:
        evolve(server, recording, tmp_path / "run", requests=3, prompt_tokens=4096)
    assert outcomes(tmp_path / "run") == [("duplicate", "code"), ("proven", "code"), ("duplicate", "code")]
    first, second, third = (question.messages for question in questions(tmp_path / "run")[:3])
    assert skeleton(PROBLEM) in first[1]["content"] and "it is the kernel that the prompt shows" in second[3]["content"]
    assert third[:2] == first and "my own" not in str(third[2:])


def test_what_was_not_profiled_is_said_and_an_estimate_is_marked(tmp_path: Path) -> None:
    free, ours = passed(kernel(1), 3.0), passed(CONFIG, 3.0)  # type: ignore[arg-type]
    assert words(free) == "Nsight Compute: this kernel was not profiled on this GPU."  # and nothing is invented
    assert "An estimate, not a measurement: the cost model expects" in words(ours)
    known = load_counters(counters_file(tmp_path / "a.json", config_name(CONFIG)), H200)
    assert SHOWN in words(ours, known) and "estimate" not in words(ours, known)
    assert SHOWN not in words(passed(CONFIG, 3.0, Problem(512, 512, 640)), known)  # type: ignore[arg-type]


def test_every_launch_of_a_kernel_has_its_counters(tmp_path: Path) -> None:
    known = load_counters(counters_file(tmp_path / "a.json", kernel(1).name, launches=2), H200)
    shown = words(passed(kernel(1), 3.0), known).splitlines()
    assert [line.partition(":")[0] for line in shown] == [f"Nsight Compute, launch {i} of 2" for i in (1, 2)]


def test_counters_come_from_a_folder_or_a_profiled_run(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    counters_file(tmp_path / "files" / "a.json", kernel(1).name)
    counters_file(tmp_path / "files" / "b.json", kernel(2).name)
    known = load_counters(tmp_path / "files", H200)
    assert {name for _, name in known.by_kernel} == {kernel(1).name, kernel(2).name}
    with Store(tmp_path / "run" / "store.sqlite") as store:
        store.begin("run", {})
        store.append("run", passed(CONFIG, 3.0))  # type: ignore[arg-type]
        store.add_counters("run", {(PROBLEM, CONFIG): {"tensor_pipe": 0.25}}, {"gpu": "NVIDIA H200"})
        assert store.profiled_on("run") == {"NVIDIA H200"} and store.profiled_on("other") == set()
    profiled: KernelConfig = CONFIG
    assert "tensor pipe 25.0%" in words(passed(profiled, 3.0), load_counters(tmp_path / "run", H200))  # type: ignore[arg-type]


def test_the_published_counters_can_be_shown() -> None:
    known = load_counters(ROOT / "results" / "h200" / "ncu.json", H200)
    assert len(known.by_kernel) == 8 and all(one["tensor_pipe"] > 0 for (one,) in known.by_kernel.values())


@pytest.mark.parametrize(
    ("name", "gpu", "error", "said"),
    [
        ("a.json", "NVIDIA H100 PCIe", UsageError, "is from NVIDIA H100 PCIe; expected counters from h200"),
        ("a.json", "A toaster", UsageError, "is from A toaster"),
        ("missing.json", "NVIDIA H200", RecordError, "does not exist"),
    ],
)
def test_counters_that_would_mislead_are_refused(
    tmp_path: Path, name: str, gpu: str, error: type[Exception], said: str
) -> None:
    counters_file(tmp_path / "a.json", kernel(1).name, gpu=gpu)
    with pytest.raises(error, match=said):
        load_counters(tmp_path / name, H200)


def test_counters_of_rivals_alone_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no counters of OutBLAS kernels"):
        load_counters(counters_file(tmp_path / "a.json"), H200)


def test_the_nearest_problems_come_first_and_the_section_is_bounded() -> None:
    from outblas_lab.llm.archive import Archive, Entry

    archive = Archive(ArchiveShape())
    for number, k in enumerate((4096, 640, 1024)):
        free = {"family": "free", "text": f"// {k}\n" + "x" * 20_000}
        archive.insert(Entry(Problem(512, 512, k).key, 0, str(k), free, 0.1, 3.0, number))
    near = NearProblems(H200, 3)
    assert [kernel.problem.k for kernel in near.kernels(PROBLEM, archive, ("code",))] == [640, 1024, 4096]
    assert near.kernels(PROBLEM, archive, ("config",))[0].candidate["family"] != "free"
    shown = near.text(PROBLEM, archive)
    assert len(shown) < SECTION_CHARS + 1000 and "characters left out" in shown
    assert all(kernel.problem.acc == "fp16" for kernel in near.kernels(Problem(512, 512, 512, acc="fp16"), archive))


def test_lessons_are_of_problems_like_this_one() -> None:
    page = "# t\n\n### 0007 A title {#0007}\n\n[0001](#0001) at 64x64x4096.\n\n### 0008 Other\n\nNone.\n\n## End\n"
    first, second = read_lessons(page)
    assert (first.number, first.title, first.text) == ("0007", "A title", "0001 at 64x64x4096.")
    assert first.distance(Problem(64, 128, 4096)) == 1.0 and second.distance(PROBLEM) == float("inf")
    split = nearest_lessons(Problem(256, 512, 12288), 2)
    assert [lesson.number for lesson in split] == ["0016", "0010"]  # both name this very problem
    assert '"../docs/journal" = "outblas_lab/llm/journal"' in (ROOT / "lab" / "pyproject.toml").read_text()  # of wheels
    assert len(lessons()) > 50 and len({lesson.number for lesson in lessons()}) == len(lessons())


@pytest.mark.parametrize(
    ("limits", "purposes", "outcome", "follows"),
    [
        (TurnLimits(3), ["new", "compile"], "wrong", True),
        (TurnLimits(2), ["new", "compile"], "wrong", False),
        (TurnLimits(9, repairs=2), ["new", "compile", "wrong"], "wrong", False),
        (TurnLimits(9, repairs=2), ["new", "compile", "wrong"], "proven", True),
        (TurnLimits(9, repairs=1), ["new", "compile", "proven"], "wrong", True),
        (TurnLimits(9, improvements=1), ["new", "proven"], "proven", False),
        (TurnLimits(9, improvements=0), ["new"], "proven", False),
    ],
)
def test_repairs_and_improvements_have_limits(
    limits: TurnLimits, purposes: list[str], outcome: str, follows: bool
) -> None:
    assert limits.allow(purposes, outcome) is follows


def test_a_kernel_is_repaired_and_then_improved_as_often_as_the_limits_say(recording: Path, tmp_path: Path) -> None:
    says = [kernel(53), kernel(1), kernel(50), kernel(2), kernel(3)]  # repaired, improved badly, repaired; then anew
    with serving(in_turn(*(Say(answer(one.text)) for one in says))) as server:
        evolve(server, recording, tmp_path / "run", 5, turns=9, repairs=1, improvements=1)
    asked = questions(tmp_path / "run")
    assert [(q.chain, q.purpose) for q in asked[:5]] == [
        (1, "new"), (1, "compile"), (1, "proven"), (1, "wrong"), (2, "new"),
    ]  # fmt: skip
