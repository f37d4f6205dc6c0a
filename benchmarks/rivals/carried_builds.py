"""Compiled free kernels in a folder, to carry to a machine with a GPU and without compilers (or with slower ones)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from outblas.core.errors import CompileError, ContractError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.files import write_atomic
from outblas.core.plain_files import read_own_file
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.kernel_hash import kernel_headers, kernels_sha
from outblas.runtime.cubin import decode, encode
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.build import BuiltKernel, build
from outblas_lab.jail.elf import cubins
from outblas_lab.jail.jailed_evaluator import JailedEvaluator
from outblas_lab.jail.static_gate import check_built, examine


class CarriedBuilds:
    """A folder of compiled free kernels: one checksummed file per kernel, layout, dtype and architecture.

    ``get`` reads a kernel, ``put`` writes one, and ``build`` reads it or else compiles and writes it. The attribute
    ``folder`` is a Path. A kernel that includes the package's kernel files is kept for their present version. Unlike
    the compile cache's keys, these do not depend on this machine's compiler or CUTLASS.

    Args:
        folder: the folder; :meth:`put` creates it.
    """

    def __init__(self, folder: str | Path, gpu: Gpu) -> None:
        self.folder, self._gpu = Path(folder), gpu

    def path(self, kernel: FreeKernel, problem: Problem) -> Path:
        """Return the path of a kernel's file, ``<folder>/<kernel name>_<layout>_<dtype>.kernel``."""
        return self.folder / f"{kernel.name}_{problem.layout}_{problem.dtype}.kernel"

    def get(self, kernel: FreeKernel, problem: Problem) -> BuiltKernel | None:
        """Return the compiled kernel of the folder, without compiling.

        Returns:
            The kernel; None if its file is missing, damaged, another user's, or of other kernel files.
        """
        try:
            data = read_own_file(self.path(kernel, problem))
        except OSError:  # not there, or another user's machine code
            return None
        cubin = decode(data, self._key(kernel, problem))
        if cubin is None:
            return None
        try:
            cubins(cubin.image)
        except CompileError:  # made by somebody who makes checksums, too
            return None
        return BuiltKernel(kernel, cubin)

    def put(self, built: BuiltKernel, problem: Problem) -> None:
        """Write a compiled kernel to its :meth:`path`, in place of an earlier file.

        Args:
            problem: a problem of the layout and dtype of its compilation.

        Raises:
            RecordError: the disk refuses.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        key = self._key(built.kernel, problem)
        write_atomic(self.path(built.kernel, problem), encode(built.cubin, key))

    def build(self, kernel: FreeKernel, problem: Problem) -> BuiltKernel:
        """Return the compiled kernel from the folder; compile and keep it if it is missing.

        Raises:
            CompileError: as :func:`outblas_lab.jail.build.build`.
            ContractError: as :func:`outblas_lab.jail.build.build`.
            ToolchainMissing: as :func:`outblas_lab.jail.build.build`.
            RecordError: as :meth:`put`.
        """
        if (found := self.get(kernel, problem)) is None:
            found = build(kernel, problem, self._gpu)
            self.put(found, problem)
        return found

    def _key(self, kernel: FreeKernel, problem: Problem) -> str:
        includes_ours = any(name in kernel.text for name, _ in kernel_headers())
        headers = kernels_sha() if includes_ours else ""
        parts = [kernel.name, problem.layout, problem.dtype, architecture(self._gpu), headers]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class CarriedLiveEvaluator(JailedEvaluator):
    """A :class:`outblas_lab.jail.jailed_evaluator.JailedEvaluator` that compiles only what a folder does not have.

    Its constructor's arguments are those of that class. Example: ``evaluator.carried = CarriedBuilds("builds")`` before
    the first ``evaluate``.

    Attributes:
        carried: the folder; set it after the constructor. None, the default: everything is compiled.
    """

    carried: CarriedBuilds | None = None

    def _examined(self, problem: Problem, kernels: Sequence[FreeKernel]) -> Iterator[BuiltKernel | Evaluation]:
        for kernel in kernels:
            yield self._one(problem, kernel)

    def _one(self, problem: Problem, kernel: FreeKernel) -> BuiltKernel | Evaluation:
        """Return the result of :func:`outblas_lab.jail.static_gate.examine`.

        No compiler runs if the folder has the kernel.
        """
        gpu = self._options.gpu
        built = None if self.carried is None else self.carried.get(kernel, problem)
        if built is None:
            found = examine(problem, kernel, gpu)
            if isinstance(found, BuiltKernel) and self.carried is not None:
                self.carried.put(found, problem)
            return found
        try:
            reason = kernel.launch.why_not(problem, gpu)
            if reason is not None:
                return Evaluation(problem, kernel, Status.ILLEGAL, reason, Verdict(Status.ILLEGAL, (), reason))
            reason = check_built(built)
        except (CompileError, ContractError) as error:
            reason = str(error)
        if reason is not None:
            status = Status.STATIC_REJECTED
            return Evaluation(problem, kernel, status, reason, Verdict(status, (), reason), counters=built.counters())
        return built
