"""Compiled kernels of CUDA-L2 in a folder that travels to a machine without its texts and without compilers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from rivals.carried_builds import CarriedBuilds
from rivals.cuda_l2_kernels import CudaL2Kernel, read_kernel

from outblas.core.errors import CompileError, ContractError, RecordError
from outblas.core.files import write_atomic
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas_lab.jail.build import BuiltKernel


class CudaL2Builds:
    """A folder of CUDA-L2's kernels: for each a compressed file with its text and facts, and its machine code.

    Args:
        folder: the folder; compiling creates it.
        gpu: target of the compilations.
    """

    def __init__(self, folder: Path, gpu: Gpu) -> None:
        self._folder, self._builds = folder, CarriedBuilds(folder, gpu)

    def path(self, whose: str, problem: Problem) -> Path:
        """Return the path of the file with a kernel's text and facts, or the reason for their lack.

        Args:
            whose: GPU of CUDA-L2's kernels, ``a100`` or ``h100``.
            problem: its M, N, K and accumulator count.
        """
        return self._folder / f"cuda_l2_{whose}_{problem.acc}_{problem.mnk}.json.gz"

    def compile(self, checkout: Path, whose: str, problem: Problem) -> str:
        """Compile a kernel unless the folder has it, and return a few words on it.

        Raises:
            CompileError: the compiler refuses it; the folder keeps the reason.
            ContractError: as :func:`rivals.cuda_l2_kernels.read_kernel`; the folder keeps the reason.
            UsageError: the checkout lacks it.
        """
        try:
            found = read_kernel(checkout, whose, problem)
            built = self._builds.build(found.kernel, found.problem)
        except (CompileError, ContractError) as error:
            self._write(whose, problem, {"refused": error.wrong})
            raise
        self._write(whose, problem, {"kernel": found.to_json()})
        return f"{built.cubin.registers} registers, sums in {' and '.join(built.cubin.facts.accumulators) or 'no MMA'}"

    def get(self, whose: str, problem: Problem) -> tuple[CudaL2Kernel, BuiltKernel] | str:
        """Return a kernel and its machine code, or the reason for their lack.

        Raises:
            RecordError: the kernel's file is damaged.
        """
        path = self.path(whose, problem)
        try:
            data = json.loads(gzip.decompress(path.read_bytes()))
            if "refused" in data:
                return f"not compiled: {data['refused']}"
            kernel = CudaL2Kernel.from_json(data["kernel"])
        except FileNotFoundError:
            return "not compiled"
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise RecordError(f"{path} cannot be read ({error})", "what compile writes", "compile anew") from error
        built = self._builds.get(kernel.kernel, kernel.problem)
        return "its machine code is missing or damaged" if built is None else (kernel, built)

    def _write(self, whose: str, problem: Problem, data: dict[str, object]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(whose, problem), gzip.compress(json.dumps(data).encode(), mtime=0))
