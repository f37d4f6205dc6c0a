"""Question: how fast is CUDA-L2 on its own ground: its H100 kernels, their own problems, one clock?

Command:

    python benchmarks/cuda_l2.py compile --checkout CUDA-L2 [--jobs 8]   # anywhere with nvcc, no GPU
    python benchmarks/cuda_l2.py measure                                 # on an H100

Result file: results/h100/cuda_l2.json; `tools/published_pages.py` puts its table on docs/results/other-kernels.md.
Both steps take --carried, the folder of compiled kernels.

100 of CUDA-L2's 1,000 problems are drawn by a seed, stratified by regime. Its kernel of each, the library's kernel for
plain launches, autotuned cuBLASLt and torch.matmul are timed on the GPU, in the same interleaved rounds. The host's
clock times asynchronous calls; that of ours is `outblas.matmul`. A GPU without a library takes the H200's. Where the
library falls back, ours is what it runs there.
The machine code says which accumulator a kernel has. One with another accumulator than its text claims is proved by
the bound of its own, and its figures stand apart.

CUDA-L2's texts are compiled as they are, with a stand-in for torch's header. It sends launches to the clock's stream,
keeps freed memory for the next call, and does not wait for the GPU. Some kernels wait in each call; they are counted.
As in its own benchmark, operands are padded to a kernel's tile outside the timed part. A kernel that reads B row by row
makes its problem one of layout NN, for all. Every kernel is proved before it is timed, in a jailed worker process.
An interrupted run of either step resumes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from figures.rival_files import CUDA_L2_FORMAT, cuda_l2_groups
from rivals.compile_jobs import compile_jobs
from rivals.cuda_l2_builds import CudaL2Builds
from rivals.cuda_l2_rows import ROUNDS, make_handler
from rivals.journaled_rows import journaled_rows
from rivals.peer_arguments import peer_parser, peer_provenance, run_with_checkout
from rivals.row_worker import CUDA_L2, RowRequest, rows_of

from outblas.core.config import KernelConfig
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.core.suites import sample, suite
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.records.results import result_file
from outblas.runtime.cubin import Cubin
from outblas.workers.sandbox import factory_name

H100 = packaged_gpu("h100")
COUNT, WHOSE = 100, "h100"


def drawn(count: int, seed: int) -> list[Problem]:
    """Return the problems, stratified by regime. Raises UsageError for a count that the suite does not have."""
    return sample(suite("grid1000"), count, seed, gpu=H100)


def compile_all(arguments: Any) -> dict[str, str]:
    """Compile CUDA-L2's kernels of the problems; return name -> reason of those that were refused."""
    builds, problems = CudaL2Builds(arguments.carried, H100), drawn(arguments.count, arguments.seed)
    work = {p.key: functools.partial(builds.compile, arguments.checkout, WHOSE, p) for p in problems}
    return compile_jobs(work, arguments.jobs)


def requests(carried: Path, problems: Sequence[Problem], library: Library, gpu: Gpu) -> list[RowRequest]:
    """Return one request per problem, with the layout in which CUDA-L2's kernel reads B.

    A problem without a kernel of CUDA-L2 keeps its layout.

    Raises:
        CompileError: the library's kernel of a problem does not compile.
    """
    builds, found = CudaL2Builds(carried, H100), []
    for problem in problems:
        kernel = builds.get(WHOSE, problem)
        if isinstance(kernel, str):
            found.append(RowRequest(problem, refused={CUDA_L2: kernel}))
        else:
            found.append(RowRequest(replace(problem, layout=kernel[0].problem.layout), theirs=kernel))
    return [replace(each, ours=our_kernel(each.problem, library, gpu)) for each in found]


def our_kernel(problem: Problem, library: Library, gpu: Gpu) -> list[tuple[KernelConfig, Cubin]]:
    """Return the library's kernel for plain launches with its machine code; an empty list if the library falls back.

    Raises:
        CompileError: it does not compile.
    """
    from outblas.kernels.source import make_source
    from outblas.runtime.nvrtc import compile_source

    row = library.lookup(problem)
    choice = row.choice("plain") if row else None
    if choice is None:
        return []
    return [(choice.config, compile_source(make_source(problem, choice.config), architecture(gpu)))]


def our_library(gpu: Gpu) -> Library:
    """Return the GPU's packaged library; for one without, that of the H200, whose kernels run on any Hopper GPU."""
    own = Library.packaged(gpu.name, missing_ok=True)
    return own if own.rows else Library(gpu.name, Library.packaged("h200").rows)


def measure(arguments: Any) -> None:
    """All rows that the journal does not have, then the result file."""
    from outblas.runtime.device import gpu_of_device

    gpu = gpu_of_device(0)
    library = our_library(gpu)
    wanted = requests(arguments.carried, drawn(arguments.count, arguments.seed), library, gpu)
    settings = {
        "problems": [r.problem.key for r in wanted], "refused": [r.refused for r in wanted], "rounds": ROUNDS,
        "gpu": gpu.name, "kernels": kernels_sha(), "library": library.sha(),
    }  # fmt: skip

    def rows(keys: list[str]) -> Iterator[dict[str, Any]]:
        todo = [request for request in wanted if request.problem.key in keys]
        with tempfile.TemporaryDirectory() as folder:
            known = tuple(row for request in todo if (row := library.lookup(request.problem)) is not None)
            yield from rows_of(iter(todo), factory_name(make_handler), (folder, gpu, Library(gpu.name, known)))

    def content(found: list[dict[str, Any]]) -> dict[str, Any]:
        provenance = peer_provenance(arguments, "benchmarks/cuda_l2.py")
        return {"format": CUDA_L2_FORMAT, "provenance": provenance, "seed": arguments.seed, "rows": found}

    found = journaled_rows(arguments.out, settings, settings["problems"], rows, line, content)
    for words, means in cuda_l2_groups(found).items():
        for name, mean in means.items():
            print(f"sums {words}: {name.replace('_', ' ')}: {mean.ratio:.3f}x on {mean.problems} problems")
    print(f"result: {arguments.out}")


def line(row: dict[str, Any]) -> str:
    """Return words on a row for its line of progress."""
    if "lost" in row:
        return f"{row['problem']}: {row['lost']}"
    return f"{row['problem']}: " + ", ".join(f"{name} {us:.2f} us" for name, us in row["us"].items())


def main(given: Sequence[str] | None = None) -> None:
    parser = peer_parser(__doc__, "build/cuda_l2", result_file("cuda_l2.json"), COUNT)
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    run_with_checkout(parser, given, measure, compile_all)


if __name__ == "__main__":
    main()
