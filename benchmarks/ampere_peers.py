"""Question: is `sm80_pipelined_gemm` as fast as other kernels of its instructions: CUTLASS 2.x's and CUDA-L2's?

Command:

    python benchmarks/ampere_peers.py compile --checkout CUDA-L2 [--jobs 8]   # anywhere with nvcc, no GPU
    python benchmarks/ampere_peers.py measure                                 # on a Hopper GPU

Result file: results/h100/ampere_peers.json; `tools/published_pages.py` puts its table on docs/results/other-kernels.md.
Both steps take --carried, the folder of compiled kernels.

The family is meant for an A100. A Hopper GPU stands in, because it runs the same machine instructions. Only kernels
count whose CTAs have the shared memory of an A100 (163 KiB). A second table has those of 99 KiB, as on an A10, L40S or
GeForce. 60 problems of grid1000 are taken (TN, fp16), 15 of them with M up to 64, with sums in fp32 and in fp16.

Ours is the fastest of the candidates that the cost model ranks first, 24 for each limit. CUTLASS is the fastest of 32
instances of `cutlass::gemm::device::GemmUniversal`. Both are chosen by the same quick pass. CUDA-L2 has one kernel per
problem, compiled from its text for A100. The chosen ones are then timed in the same interleaved rounds.

CUTLASS' instances are proved in full once, on a ragged problem. Every kernel is proved on the timed operands. All run
in a jailed worker process, which is replaced if a kernel breaks it. An interrupted run of either step resumes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from figures.rival_files import AMPERE_FORMAT, LIMITS, ampere_means
from rivals.ampere_rows import RAGGED, ROUNDS, SEED, make_handler
from rivals.carried_builds import CarriedBuilds
from rivals.compile_jobs import compile_jobs
from rivals.cuda_l2_builds import CudaL2Builds
from rivals.cutlass_instances import cutlass_instances
from rivals.journaled_rows import journaled_rows
from rivals.peer_arguments import peer_parser, peer_provenance, run_with_checkout
from rivals.row_worker import CUDA_L2, RowRequest, rows_of

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import CompileError, UsageError
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Acc, Problem
from outblas.core.roofline import Gpu, architecture
from outblas.core.suites import sample, suite
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import geometry
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.legality import why_illegal
from outblas.records.results import result_file
from outblas.runtime.cubin import Cubin
from outblas.workers.sandbox import factory_name
from outblas_lab.jail.build import BuiltKernel

H100 = packaged_gpu("h100")
FAMILY, WHOSE = "sm80_pipelined_gemm", "a100"
#: Problems; those of them with at most this many rows of A; the problem that has a bar of its own.
COUNT, FEW, FEW_ROWS, SQUARE = 60, 15, 64, (4096, 4096, 4096)
#: Candidates of ours for each limit.
TRIED = 24


def drawn(count: int) -> list[Problem]:
    """Return the problems, with fp32 sums: a quarter has few rows, the square one is always there.

    Raises:
        UsageError: ``count`` is below 8, or larger than the suite has problems.
    """
    whole = suite("grid1000")
    few = [p for p in whole if p.m <= FEW_ROWS]
    many = [p for p in whole if p.m > FEW_ROWS and (p.m, p.n, p.k) != SQUARE]
    share = count * FEW // COUNT
    if count < 8 or share > len(few) or count - share - 1 > len(many):
        raise UsageError(f"{count} problems", "8 or more, as the suite has", "pass another --count")
    chosen = {Problem(*SQUARE), *sample(few, share, SEED, gpu=H100), *sample(many, count - share - 1, SEED, gpu=H100)}
    return [problem for problem in whole if problem in chosen]


def with_both_accumulators(problems: Sequence[Problem]) -> list[Problem]:
    """Return every problem with sums in fp32, then every problem with sums in fp16."""
    return [Problem(p.m, p.n, p.k, p.layout, p.dtype, acc) for acc in get_args(Acc) for p in problems]


def our_candidates(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the family's candidates: for each limit the 24 that the cost model ranks first, without duplicates."""
    family = FAMILIES[FAMILY]
    offered = dict.fromkeys([*family.pool(), *family.special_candidates(problem, gpu)])
    legal = [config for config in offered if why_illegal(problem, config, gpu) is None]
    found: dict[KernelConfig, None] = {}
    for most in LIMITS.values():
        small = [config for config in legal if geometry(problem, config).smem_bytes <= most]
        found.update(dict.fromkeys(small[index] for index in rank(problem, small, gpu)[:TRIED]))
    return list(found)


def compile_all(arguments: Any) -> dict[str, str]:
    """Compile CUTLASS' instances, then CUDA-L2's kernels; return name -> reason of those that were refused."""
    builds, theirs = CarriedBuilds(arguments.carried, H100), CudaL2Builds(arguments.carried, H100)
    problems = with_both_accumulators(drawn(arguments.count))
    work = {
        each.name: functools.partial(_compile_instance, builds, each.kernel(), RAGGED[acc])
        for acc in get_args(Acc)
        for each in cutlass_instances(acc)
    }
    work |= {f"{CUDA_L2} {p.key}": functools.partial(theirs.compile, arguments.checkout, WHOSE, p) for p in problems}
    return compile_jobs(work, arguments.jobs)


def _compile_instance(builds: CarriedBuilds, kernel: Any, problem: Problem) -> str:
    return f"{builds.build(kernel, problem).cubin.registers} registers"


def carried_instances(carried: Path) -> dict[Acc, dict[str, BuiltKernel]]:
    """Return accumulator -> name -> compiled instance of CUTLASS.

    Raises:
        UsageError: the folder lacks all instances of an accumulator.
    """
    builds, found = CarriedBuilds(carried, H100), {}
    for acc in get_args(Acc):
        each = {i.name: builds.get(i.kernel(), RAGGED[acc]) for i in cutlass_instances(acc)}
        found[acc] = {name: built for name, built in each.items() if built is not None}
        if not found[acc]:
            raise UsageError(f"{carried} has no instance of CUTLASS for {acc}", "compiled ones", "run the step compile")
    return found


def requests(carried: Path, problems: Sequence[Problem], gpu: Gpu) -> Iterator[RowRequest]:
    """Yield what a row needs, problem after problem: our candidates, compiled on all cores, and CUDA-L2's kernel."""
    theirs = CudaL2Builds(carried, H100)
    for problem in problems:
        found = theirs.get(WHOSE, problem)
        ours, refused = our_cubins(problem, gpu)
        if isinstance(found, str):
            yield RowRequest(problem, ours, None, {**refused, CUDA_L2: found})
        else:
            yield RowRequest(problem, ours, found, refused)


def our_cubins(problem: Problem, gpu: Gpu) -> tuple[list[tuple[KernelConfig, Cubin]], dict[str, str]]:
    """Return our candidates of a problem with their machine code, and name -> reason of those that do not compile."""
    from outblas.kernels.source import make_source
    from outblas.runtime.nvrtc import compile_many

    configs = our_candidates(problem, gpu)
    compiled = dict(compile_many([make_source(problem, config) for config in configs], architecture(gpu)))
    found, refused = [], {}
    for index, config in enumerate(configs):
        cubin = compiled[index]
        if isinstance(cubin, CompileError):
            refused[config_name(config)] = cubin.wrong
        else:
            found.append((config, cubin))
    return found, refused


def measure(arguments: Any) -> None:
    """All rows that the journal does not have, then the result file."""
    from outblas.runtime.device import gpu_of_device

    gpu, problems = gpu_of_device(0), with_both_accumulators(drawn(arguments.count))
    instances = carried_instances(arguments.carried)
    names = {acc: sorted(each) for acc, each in instances.items()}
    settings = {
        "problems": [p.key for p in problems], "instances": names, "tried": TRIED, "rounds": ROUNDS,
        "gpu": gpu.name, "kernels": kernels_sha(),
    }  # fmt: skip

    def rows(keys: list[str]) -> Iterator[dict[str, Any]]:
        todo = [problem for problem in problems if problem.key in keys]
        with tempfile.TemporaryDirectory() as folder:
            made = requests(arguments.carried, todo, gpu)
            yield from rows_of(made, factory_name(make_handler), (folder, gpu, instances))

    def content(found: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "format": AMPERE_FORMAT,
            "provenance": peer_provenance(arguments, "benchmarks/ampere_peers.py"),
            "instances": {acc: len(each) for acc, each in names.items()},
            "rows": found,
        }

    found = journaled_rows(arguments.out, settings, settings["problems"], rows, line, content)
    for limit, acc, rival, mean in ampere_means(found):
        print(f"{limit} KiB, sums in {acc}: {mean.ratio:.3f}x {rival} on {mean.problems} problems")
    print(f"result: {arguments.out}")


def line(row: dict[str, Any]) -> str:
    """Return words on a row for its line of progress."""
    if "lost" in row:
        return f"{row['problem']}: {row['lost']}"
    ratios = row["ratios"].get("163", {})
    return f"{row['problem']}: " + ", ".join(f"{each['ratio']:.3f}x {name}" for name, each in ratios.items())


def main(given: Sequence[str] | None = None) -> None:
    parser = peer_parser(__doc__, "build/ampere_peers", result_file("ampere_peers.json"), COUNT)
    run_with_checkout(parser, given, measure, compile_all)


if __name__ == "__main__":
    main()
