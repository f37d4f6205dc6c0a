"""Question: how fast is the kernel of each chapter of *Learn Hopper GEMM*?

Command:

    python benchmarks/learn_hopper_gemm.py                   # on a GPU
    python benchmarks/learn_hopper_gemm.py --page-only       # anywhere: write the tables again from the result file

Result file: results/<gpu>/learn_hopper_gemm.json.

Each kernel is proven on each problem, then timed in rounds that alternate it with every rival. The last chapter has the
kernel that the packaged library names for the problem. If the library falls back there, it has the ranking model's
first choice. The chapters' tables are written between their markers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profile_regimes import choose

from outblas.core.config import Candidate, config_name
from outblas.core.errors import OutblasError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import write_atomic, write_json
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.core.roofline import Gpu
from outblas.judge.bench_cell import Options
from outblas.records.library import Library
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.runtime.device import gpu_of_device
from outblas.tune.live_evaluator import LiveEvaluator
from outblas_lab.custom.examples.example_kernels import example
from outblas_lab.custom.free_kernel import FreeKernel

#: Page of a chapter -> its example; the last chapter has the library's kernel.
CHAPTERS = {
    "one-stage": "wgmma_one_stage",
    "ring": "wgmma_ring",
    "multicast": "wgmma_multicast",
    "persistent": "wgmma_persistent",
    "production": "",
}
PROBLEMS = ("512_512_512", "2048_2048_2048", "8192_8192_8192")
BEGIN, END = "<!-- {} speed:begin -->", "<!-- {} speed:end -->"
FORMAT = 1


def kernel_of(chapter: str, problem: Problem, library: Library, gpu: Gpu) -> tuple[Candidate, str]:
    """Return the kernel of a chapter for a problem, and who chose it: ``chapter``, ``library`` or ``model``."""
    return (example(CHAPTERS[chapter]), "chapter") if CHAPTERS[chapter] else choose(problem, library, gpu)


def measure(problems: list[Problem], rounds: int) -> list[dict[str, Any]]:
    """Prove and time the kernel of every chapter on every problem; return one row for each pair."""
    gpu = gpu_of_device(0)
    library = Library.packaged(gpu.name)
    rows = []
    with LiveEvaluator(0, Options(0, gpu, rounds=rounds, baselines=RIVALS)) as live:
        for problem in problems:
            for chapter in CHAPTERS:
                kernel, chosen_by = kernel_of(chapter, problem, library, gpu)
                (found,) = live.evaluate([(problem, kernel)])
                rows.append({**row_of(chapter, problem, kernel, found), "chosen_by": chosen_by})
                print(f"{problem.mnk} {chapter}: {rows[-1]}", flush=True)
    return rows


def row_of(chapter: str, problem: Problem, kernel: Candidate, found: Evaluation) -> dict[str, Any]:
    """Return what the result file keeps of an evaluation.

    Raises:
        OutblasError: the kernel did not pass the proof.
    """
    if found.status is not Status.PASSED or found.timing is None or found.speedup is None:
        raise OutblasError(
            f"{chapter} on {problem.mnk}: {found.status} {found.detail}", "a kernel that passes", "mend it first"
        )
    return {
        "chapter": chapter,
        "problem": problem.key,
        "kernel": kernel.name if isinstance(kernel, FreeKernel) else config_name(kernel),
        "us": found.timing.median_us,
        "tflops": problem.flops / found.timing.median_us / 1e6,
        "rival": found.speedup.baseline,
        "speedup": found.speedup.ratio,
        "low": found.speedup.low,
        "high": found.speedup.high,
    }


def table(result: Mapping[str, Any], chapter: str) -> str:
    """Return a chapter's table in Markdown: its kernel on every problem, the chapter before beside it."""
    chapters = list(CHAPTERS)
    before = chapters[chapters.index(chapter) - 1] if chapter != chapters[0] else ""
    rows = {(row["chapter"], row["problem"]): row for row in result["rows"]}
    head = ["M = N = K", "time", "TFLOP/s", "of the fastest rival's speed"] + (["chapter before"] if before else [])
    lines = ["| " + " | ".join(head) + " |", "|" + " ---: |" * len(head)]
    for key in dict.fromkeys(row["problem"] for row in result["rows"]):
        row = rows[chapter, key]
        cells = [key.split("_")[0], f"{row['us']:.1f} µs", f"{row['tflops']:.0f}", f"{row['speedup']:.2f}×"]
        if before:
            cells.append(f"{rows[before, key]['us']:.1f} µs")
        lines.append("| " + " | ".join(cells) + " |")
    made = result["provenance"]
    where = f"{made['gpu']}, driver {made['driver']}, {made['date'][:10]}, commit {made['commit'][:7]}"
    return "\n".join([*lines, "", f"TN, fp16, fp32 sums, without PDL; {where}; `results/h200/learn_hopper_gemm.json`."])


def page_with_table(text: str, result: Mapping[str, Any], chapter: str) -> str:
    """Return the page's text with a chapter's table between the chapter's markers.

    Raises:
        OutblasError: the page does not have each marker once.
    """
    begin, end = BEGIN.format(chapter), END.format(chapter)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise OutblasError(f"chapter {chapter} has no place for its table", f"{begin} and {end}", "add the two lines")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table(result, chapter)}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Measure unless told otherwise, then write the chapters' tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), help="M_N_K, all TN fp16 fp32")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of each kernel")
    parser.add_argument("--out", type=Path, default=result_file("learn_hopper_gemm.json"), help="result file")
    parser.add_argument("--page", type=Path, default=Path("docs/kernels/learn-hopper-gemm.md"), help="the tutorial")
    parser.add_argument("--page-only", action="store_true", help="write the tables from the result file")
    arguments = parser.parse_args()
    try:
        if not arguments.page_only:
            rows = measure([Problem(*map(int, mnk.split("_"))) for mnk in arguments.problems], arguments.rounds)
            about = collect_provenance(script_command("benchmarks/learn_hopper_gemm.py"))
            write_json(arguments.out, {"format": FORMAT, "provenance": about, "rows": rows})
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
        text = arguments.page.read_text(encoding="utf-8")
        for chapter in CHAPTERS:
            text = page_with_table(text, result, chapter)
        write_atomic(arguments.page, text.encode())
    except OutblasError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
