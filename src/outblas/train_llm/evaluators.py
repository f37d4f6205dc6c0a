"""Who answers for the candidates of a training: ``compile``, ``cuda:0`` or a file of recorded free kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

from outblas.errors import UsageError
from outblas.llm.places import COMPILE, open_place, parse_place
from outblas.train_llm.judge import Judging
from outblas.verify import Level

__all__ = ["COMPILE", "evaluator_of"]


@contextmanager
def evaluator_of(device: str, proof: str = "full") -> Iterator[Judging]:
    """The evaluator that ``--device`` names, closed at the end; a GPU's worker is started: the first candidate must not
    pay for imports and a CUDA context.

    Args:
        device: ``compile``, ``cuda:<index>``, or the path of a recording of free kernels.
        proof: on a GPU: ``full`` or ``cell``, see :class:`outblas.worker.Options`.

    Raises:
        UsageError: none of them. DeviceError: no such GPU. RecordError: the file is no recording.
    """
    if proof not in get_args(Level):
        raise UsageError(f"--proof {proof!r}", " or ".join(get_args(Level)), "pass one of them")
    place = parse_place(device)
    if place.gpu_index is None:
        with open_place(place) as evaluator:
            yield evaluator
        return
    from outblas.baselines import RIVALS
    from outblas.device import gpu_of_device
    from outblas.evaluate import LiveEvaluator, Options

    index = place.gpu_index
    options = Options(index, gpu_of_device(index), level=proof, baselines=RIVALS)  # type: ignore[arg-type]
    with LiveEvaluator(index, options) as live:
        live.start()
        yield live
