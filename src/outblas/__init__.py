"""OutBLAS: half-precision GEMM kernels for NVIDIA GPUs, searched, proven right and timed honestly.

``import outblas`` loads neither torch nor CUDA; ``outblas.matmul`` does when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outblas.core import first_use
from outblas.core.errors import OutblasError
from outblas.core.problem import Problem
from outblas.core.version import __version__

if TYPE_CHECKING:
    from outblas.adapt.learning.learning_switch import disable, enable, learned, settle
    from outblas.adapt.optimize import optimize, restore
    from outblas.dispatch.capture.session import capture
    from outblas.dispatch.enable import enabled, status, use
    from outblas.dispatch.gated import gated_linear, interleave_gate_up
    from outblas.dispatch.grouped.grouped import grouped_mm, moe_mlp
    from outblas.dispatch.linear import linear, warm
    from outblas.dispatch.matmul import explain, matmul, mm, use_library, use_workload
    from outblas.tune.prepare import prepare

#: Public name -> the module that defines it. These modules need torch, so each is imported on first access.
_LATER = {
    **dict.fromkeys(("explain", "matmul", "mm", "use_library", "use_workload"), "dispatch.matmul"),
    **dict.fromkeys(("disable", "enable", "learned", "settle"), "adapt.learning.learning_switch"),
    **dict.fromkeys(("enabled", "status", "use"), "dispatch.enable"),
    "capture": "dispatch.capture.session",
    **dict.fromkeys(("linear", "warm"), "dispatch.linear"),
    **dict.fromkeys(("gated_linear", "interleave_gate_up"), "dispatch.gated"),
    **dict.fromkeys(("grouped_mm", "moe_mlp"), "dispatch.grouped.grouped"),
    **dict.fromkeys(("optimize", "restore"), "adapt.optimize"),
    "prepare": "tune.prepare",
}
__all__ = [
    "OutblasError",
    "Problem",
    "__version__",
    "capture",
    "disable",
    "enable",
    "enabled",
    "explain",
    "gated_linear",
    "grouped_mm",
    "interleave_gate_up",
    "learned",
    "linear",
    "matmul",
    "mm",
    "moe_mlp",
    "optimize",
    "prepare",
    "restore",
    "settle",
    "status",
    "use",
    "use_library",
    "use_workload",
    "warm",
]
__getattr__, __dir__ = first_use.names_on_first_use(__name__, _LATER)
