"""Choose the kernel of a fused product that, without what follows it, is left to cuBLASLt or to torch.

It also chooses in place of a kernel whose machine code with the epilogue is refused, e.g. since its registers spill.

A fused kernel saves the kernels that would follow the product, and their passes over memory. That outweighs a product
that is a few percent slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outblas.core.config import KernelConfig, Launch
from outblas.core.errors import OutblasError
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.dispatch.decide import Decision
from outblas.dispatch.unlisted_shapes import predicted_kernels
from outblas.kernels.epilogue import NO_EPILOGUE, Epilogue, why_not_fused
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow

#: Microseconds that a kernel of torch takes in a CUDA graph, beside its traffic: a guess.
_KERNEL_US = 1.5


def kernel_despite_fallback(fallback: Decision, row: LibraryRow | None, launch: Launch, gpu: Gpu | None) -> Decision:
    """Choose a kernel for a product that the library leaves to cuBLASLt.

    For fused callers: a fused epilogue saves more than the few percent that cuBLASLt is faster. The choice is the row's
    kernel for another launch option. Early loads and programmatic dependent launch are switched off unless ``launch``
    allows them. The speed of the kernel without them was not measured.

    Returns:
        A decision with a kernel. ``fallback`` itself if the row has no kernel that is legal without these options.
    """
    choice = None if row is None else row.plain or row.pdl or row.weights
    problem = fallback.problem
    if choice is None or problem is None or gpu is None:
        return fallback
    config = choice.config.with_knobs(pdl=choice.config.pdl and launch != "plain")
    config = FAMILIES[config.family].without_early(config)
    if why_illegal(problem, config, gpu) is not None:
        return fallback
    figures = f"{choice.speedup:.3f} times {row.baseline or 'the baseline'}" if row is not None else ""
    return Decision(config, problem, f"with another launch option it was measured at {figures}")


def kernel_to_fuse(
    problem: Problem,
    epilogue: Epilogue,
    gpu: Gpu,
    library: Library,
    launch: Launch,
    answer: str,
    has_failed: Callable[[KernelConfig], bool],
) -> Decision | None:
    """Choose a kernel for a product whose own cannot be fused or is not ours, if a fused one is expected to gain.

    It is the nearest one of the library's row (:attr:`LibraryRow.nearest`). If the row has none, it is that with the
    highest lower bound of :func:`outblas.dispatch.unlisted_shapes.predicted_kernels` that can have the epilogue. It
    gains if its bound plus :func:`saved_us` over its own time exceeds 1.

    Args:
        answer: first answer of cuBLASLt's heuristic for the product; empty: unknown.
        has_failed: says whether a kernel with this epilogue did not compile before.

    Returns:
        A decision with a kernel. None if none is expected to gain, or the package has no predictions for the GPU.
    """
    try:
        from outblas.kernels.cost.cost_model import predict_many  # with numpy

        known = _known_kernels(problem, gpu, library, launch, answer)
        fit = (one for one in known if why_not_fused(problem, one[0].config, epilogue) is None)
        found = next((one for one in fit if not has_failed(one[0].config)), None)
        if found is None:
            return None
        choice, words = found
        own = float(predict_many(problem, [choice.config], gpu)[0])
    except (OutblasError, ImportError, OSError):  # of which the chooser of unlisted shapes has warned
        return None
    saved = saved_us(problem, epilogue, gpu)
    if choice.low + saved / own <= 1.0:
        return None
    figures = f"{choice.speedup:.2f} times {words}, surely {choice.low:.2f}"
    return Decision(choice.config, problem, f"{figures}; the epilogue saves about {saved:.1f} us")


def _known_kernels(
    problem: Problem, gpu: Gpu, library: Library, launch: Launch, answer: str
) -> Iterator[tuple[LibraryChoice, str]]:
    """Yield (kernel, its rival and where its speed is known from): the measured one first, then the predicted ones."""
    from outblas.predict.any_shape import is_narrow

    row = library.lookup(problem)
    if row is not None and row.nearest is not None:
        yield row.nearest, f"{row.baseline or 'the baseline'} by measurement"
    if not is_narrow(problem):
        for one in predicted_kernels(gpu, library, problem, launch, answer, deviations=-1):
            yield one, "torch.matmul by prediction"


def saved_us(problem: Problem, epilogue: Epilogue, gpu: Gpu) -> float:
    """Return an estimate of the microseconds that a fused epilogue saves.

    These are the kernels of torch that compute it from a product, by their number and traffic. Torch adds a bias within
    the product.
    """
    kernels = int(epilogue.activation != NO_EPILOGUE.activation) + int(epilogue.residual or epilogue.gated)
    product = problem.m * problem.n * ELEMENT_BYTES
    rate = gpu.l2_tbs if product <= gpu.l2_bytes else gpu.hbm_tbs
    # Each reads the product and writes as much; the halves of a gated one lie in the same lines.
    return kernels * (_KERNEL_US + 2 * product / (rate * 1e6))
