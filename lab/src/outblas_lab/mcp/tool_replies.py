"""Answers of the tools as JSON values: verdicts, figures, texts of compilers, and errors."""

from __future__ import annotations

from typing import Any

from outblas.core.clean_text import clean_text
from outblas.core.config import KernelConfig, config_name, launch_of
from outblas.core.errors import OutblasError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.roofline import Gpu, floor_us
from outblas.kernels.geometry import launch_smem
from outblas.records.library_row import INSTALL_ABOVE, choose_kernel
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.compact import write_config
from outblas_lab.llm.feedback import clipped, kind_of
from outblas_lab.mcp.kernel_folder import SourcedEvaluation

#: Counters that a compilation gives.
_MACHINE_CODE = ("hgmma", "hmma", "ldl", "stl", "utmaldg")
#: Most characters of each part of an error.
_PART_CHARS = 1500


def compile_reply(evaluation: Evaluation, gpu: Gpu) -> dict[str, Any]:
    """Return the answer on a compiled candidate.

    Keys: ``problem``, ``name``, ``target``, ``status``, ``compiled``, ``detail``, ``log``. After a compilation there
    are also ``registers``, ``spill_bytes``, ``stack_bytes``, ``static_shared_bytes``, ``dynamic_shared_bytes`` and
    ``sass``. The last one counts instructions in the machine code. Dynamic shared memory is null for form ``host``.
    """
    counters = evaluation.counters
    figures: dict[str, Any] = {}
    if counters:
        figures = {name: int(counters[name]) for name in ("registers", "spill_bytes", "stack_bytes")}
        figures["static_shared_bytes"] = int(counters["static_shared"])
        figures["dynamic_shared_bytes"] = _dynamic_shared(evaluation, gpu)
        figures["sass"] = {name: int(counters[name]) for name in _MACHINE_CODE}
    return {
        **_head(evaluation),
        "target": gpu.name,
        "compiled": evaluation.status is Status.LEFT_OUT,
        **figures,
        "log": clipped(evaluation.log.strip()),
    }


def proof_reply(found: SourcedEvaluation) -> dict[str, Any]:
    """Return the answer on the proof of a candidate, without times.

    Keys: ``problem``, ``name``, ``status``, ``detail``, ``proven``, ``outcome``, ``gates_passed``,
    ``largest_error_over_bound``, ``source`` and ``log``. ``gates_passed`` is empty if a recording answers, because it
    holds the verdict only.
    """
    evaluation, verdict = found.evaluation, found.evaluation.verdict
    outcome = kind_of(evaluation, found.gpu)
    return {
        **_head(evaluation),
        "proven": outcome == "proven",
        "outcome": outcome,
        "gates_passed": [] if verdict is None else list(verdict.gates),
        "largest_error_over_bound": None if verdict is None else verdict.max_err_ratio,
        "source": found.source,
        "log": clipped(evaluation.log.strip()),
    }


def time_reply(found: SourcedEvaluation) -> dict[str, Any]:
    """Return the answer on the time of a candidate. Times are null unless it is proven.

    Keys: those of :func:`proof_reply` without the gates, ``us``, ``floor_us``, ``tflops``, ``baselines_us``,
    ``speedup`` (``over``, ``ratio``, ``low``, ``high``) and ``library_would_install``. The last is null for a free
    kernel, because libraries hold template kernels only.
    """
    proof, evaluation = proof_reply(found), found.evaluation
    del proof["gates_passed"], proof["largest_error_over_bound"]
    timed = evaluation.timing if proof["proven"] else None
    speedup = evaluation.speedup if proof["proven"] else None
    return {
        **proof,
        "us": None if timed is None else round(timed.median_us, 3),
        "floor_us": round(floor_us(evaluation.problem, found.gpu), 3),
        "tflops": None if timed is None else round(evaluation.problem.flops / timed.median_us / 1e6, 1),
        "baselines_us": {name: round(us, 3) for name, us in evaluation.baselines_us.items()},
        "speedup": None
        if speedup is None
        else {
            "over": speedup.baseline,
            "ratio": round(speedup.ratio, 4),
            "low": round(speedup.low, 4),
            "high": round(speedup.high, 4),
        },
        "library_would_install": _would_install(evaluation) if proof["proven"] else False,
        "rule": f"a library installs a template kernel if speedup.low is above {INSTALL_ABOVE}, "
        "or if it is level and beats torch",
    }


def config_reply(config: KernelConfig) -> dict[str, Any]:
    """Return a template kernel as its ``name``, its ``config`` (knobs that differ from defaults) and its ``launch``."""
    return {"name": config_name(config), "config": write_config(config), "launch": launch_of(config)}


def error_text(error: OutblasError) -> str:
    """Return the text of an error: the mistake, the expected input and the remedy, on a line each."""
    parts = (" ".join(clean_text(part, _PART_CHARS).split()) for part in (error.wrong, error.expected, error.do))
    return "\n".join(f"{name}: {part}" for name, part in zip(("error", "expected", "do"), parts, strict=True))


def _head(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "problem": evaluation.problem.key,
        "name": config_name(evaluation.config),
        "status": evaluation.status.value,
        "detail": evaluation.detail,
    }


def _dynamic_shared(evaluation: Evaluation, gpu: Gpu) -> int | None:
    """Return the bytes that a launch requests; None for a kernel that launches by itself."""
    config = evaluation.config
    if isinstance(config, KernelConfig):
        return launch_smem(evaluation.problem, config, gpu.sms)
    assert isinstance(config, FreeKernel)
    return config.launch.shared if config.launch.form == "device" else None


def _would_install(evaluation: Evaluation) -> bool | None:
    if not isinstance(evaluation.config, KernelConfig):
        return None
    return choose_kernel([evaluation], launch_of(evaluation.config)) is not None
