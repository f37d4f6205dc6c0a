"""The baseline of nvMatmulHeuristics' choices."""

from __future__ import annotations

from typing import Any

from outblas.core.config import KernelConfig, KernelKind, config_name, kernel_kind
from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall
from outblas.core.roofline import architecture
from outblas.judge.matmul_heuristics import nvmmh_configs
from outblas.runtime.device import gpu_of_device


class NvMatmulHeuristics:
    """Baseline "nvmmh": nvMatmulHeuristics' first choice, built with our own family.

    :mod:`outblas.judge.matmul_heuristics` makes the choice. ``detail(problem)`` is the name of the config; an empty
    string if no config is legal. ``bind`` loads into the current CUDA context, whatever ``gpu_index`` is.
    """

    name = "nvmmh"

    def __init__(self, gpu_index: int = 0) -> None:
        self._gpu = gpu_index
        self._loaded: dict[KernelKind, Any] = {}
        self._configs: dict[Problem, KernelConfig | None] = {}

    def set_configs(self, configs: dict[Problem, KernelConfig | None]) -> None:
        """Take choices made beforehand in one batch, by :func:`outblas.judge.matmul_heuristics.nvmmh_configs`.

        Args:
            configs: problem -> config, or None if the problem has no legal config. They replace earlier ones.
        """
        self._configs.update(configs)

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call, ``call(stream)``, of the kernel that nvMatmulHeuristics proposes, on these operands.

        The kernel is compiled on first use. A, B and C are as for :meth:`outblas.core.rivals.Bindable.bind`.

        Raises:
            DeviceError: no proposal can be built by the GEMM family for this problem.
            CompileError: the kernel does not compile.
            ToolchainMissing: a compiler or the package is not installed.
        """
        from outblas.kernels.source import make_source
        from outblas.runtime.launch import load
        from outblas.runtime.nvrtc import compile_source

        config = self._config(problem)
        if config is None:
            raise DeviceError(
                f"nvMatmulHeuristics' choice for {problem.key} has no legal form in our family",
                "a tile that it can build",
                "leave this baseline out",
            )
        key = kernel_kind(problem, config)
        if key not in self._loaded:
            self._loaded[key] = load(
                compile_source(make_source(problem, config), architecture(gpu_of_device(self._gpu))), config
            )
        return self._loaded[key].bind(problem, a, b, c)

    def detail(self, problem: Problem) -> str:
        config = self._config(problem)
        return "" if config is None else config_name(config)

    def _config(self, problem: Problem) -> KernelConfig | None:
        if problem not in self._configs:
            self._configs.update(nvmmh_configs([problem], gpu_of_device(self._gpu)))
        return self._configs[problem]
