"""Choose a kernel for a shape that no library has, if it is surely predicted to beat torch.matmul.

An ensemble of small perceptrons predicts the speed-up over torch.matmul of each kernel of a short list. Its inputs are
the ranking model's results, and properties on which torch.matmul's time may depend. Its heuristic picks among cuBLAS'
kernels, so its time is no smooth function of the shape. The kernel with the highest lower bound is chosen if that
bound exceeds a margin. Bound and margin were fitted on unseen problems (`outblas fit any-shape`). The choice is
arithmetic on the shape: nothing is measured, compiled or run.
"""

from __future__ import annotations

import functools
import io
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_atomic
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.kernels.config_text import config_from_name
from outblas.kernels.cost.cost_model import predict_many
from outblas.kernels.legality import why_illegal
from outblas.learn.features import candidate_features
from outblas.learn.policy import Policy
from outblas.learn.posterior import Features, Regressor
from outblas.records.library_row import LibraryChoice

FORMAT = 1
#: torch computes a product whose N and K are multiples of the first and whose floor exceeds the second (us).
REGULAR_MULTIPLE, REGULAR_US = 64, 10.0
#: Kernels that are looked at, of those that are legal.
MAX_KERNELS_RANKED = 6
#: Tiles by whose waves cuBLAS' kernels are guessed.
_TILES = ((64, 64), (128, 128), (128, 256), (64, 256), (256, 128))
#: Largest power of two that is looked for in an extent.
_ALIGNED = 256


@dataclass(frozen=True)
class AnyShapeModel:
    """A fitted model.

    Attributes:
        kernels: the kernels on offer.
        nets: predicts the natural logarithm of each kernel's speed-up over torch.matmul.
        margin: least lower bound of a predicted speed-up for a choice, as a ratio, e.g. 1.12.
        sure: number of standard deviations from the prediction down to that bound.
        policy: the packaged policy. Its regressor selects the kernels to consider.
        about: data and date of the fit.
    """

    kernels: tuple[KernelConfig, ...]
    nets: Regressor
    margin: float
    sure: float
    policy: Policy
    about: str = ""

    @classmethod
    @functools.cache
    def load(cls, gpu_name: str) -> AnyShapeModel:
        """Load the packaged model of a GPU.

        Args:
            gpu_name: name of a GPU description, e.g. ``"h200"``; case matters.

        Raises:
            UsageError: the package has no model for it.
            RecordError: the file has another version, or is truncated.
        """
        path = resources.files("outblas") / "data" / "any_shape" / f"{gpu_name}.npz"
        if not path.is_file():
            raise UsageError(f"nothing for any shape on {gpu_name}", "a packaged GPU", "fit it: outblas fit any-shape")
        return cls.parse(path.read_bytes(), Policy.load(gpu_name), str(path))

    @classmethod
    def parse(cls, data: bytes, policy: Policy, name: str = "the data for any shape") -> AnyShapeModel:
        """Read a model from the bytes of a file that :meth:`save` wrote.

        Args:
            data: content of the file.
            policy: the policy to keep beside it. The file has none.
            name: the data's name in an error.

        Raises:
            RecordError: the data have another version, are truncated, or hold nets of other inputs.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                a = {name: file[name] for name in file.files}
            if int(a["format"]) != FORMAT:
                raise ValueError(f"format {int(a['format'])}")
            nets = Regressor.from_arrays(a)
            kernels = tuple(config_from_name(str(each)) for each in a["kernels"])
            _check_widths(nets)
            return cls(kernels, nets, float(a["margin"]), float(a["sure"]), policy, str(a["about"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise RecordError(
                f"{name} cannot be read ({error})",
                f"format {FORMAT}",
                "install the package again, or fit it: outblas fit any-shape",
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file that :meth:`parse` reads. A file at ``path`` is replaced as a whole or not at all.

        The policy is not written. ``path`` is taken as it is, without an added suffix.

        Raises:
            RecordError: the disk refuses.
        """
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            format=FORMAT,
            kernels=np.array([config_name(c) for c in self.kernels]),
            margin=self.margin,
            sure=self.sure,
            about=self.about,
            **self.nets.to_arrays(),
        )
        write_atomic(Path(path), buffer.getvalue())

    def choose(self, problem: Problem, gpu: Gpu) -> LibraryChoice | None:
        """Choose a kernel for ``problem``.

        Returns:
            The kernel, its predicted speed-up over torch.matmul, and the bounds ``sure`` standard deviations from it.
            None: leave the product to torch. No kernel is legal, or the best lower bound is below ``margin``. The same
                holds for :func:`is_vector_product`, :func:`is_left_to_cublas`, and any accumulator but fp32.
        """
        if is_vector_product(problem) or is_left_to_cublas(problem, gpu) or problem.acc != "fp32":
            return None
        legal = [c for c in self.kernels if not why_illegal(problem, c, gpu)]
        if not legal:
            return None
        legal = most_promising(self.policy, problem, legal, gpu)
        gain, deviation = self.nets.predict(network_inputs(problem, legal, gpu))
        low = gain - self.sure * deviation
        best = int(low.argmax())
        if not low[best] >= math.log(self.margin):  # nor what is no number
            return None
        high = gain[best] + self.sure * deviation[best]
        return LibraryChoice(legal[best], *(float(np.exp(x)) for x in (gain[best], low[best], high)))


def _check_widths(nets: Regressor) -> None:
    """Raise ValueError where the nets are not of the inputs that :func:`network_inputs` makes, or not of each other."""
    problem = Problem(8, 8, 8)
    gpu = reference_gpu()  # any GPU has as many inputs
    wide = len(shape_features(problem, gpu)) + candidate_features(problem, [], gpu).shape[1] + 1
    sizes = [wide, *(w.shape[2] for w in nets.weights)]
    right = len(nets.mean) == len(nets.scale) == wide and sizes[-1] == 1
    for i, (w, b) in enumerate(zip(nets.weights, nets.biases, strict=True)):
        right = right and w.shape[1] == sizes[i] and b.shape[1:] == (1, w.shape[2]) and len(w) == len(b)
    if not right:
        raise ValueError(f"nets of {len(nets.mean)} inputs, not of {wide}")


def most_promising(policy: Policy, problem: Problem, legal: Sequence[KernelConfig], gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of ``legal`` that the regressor predicts to be fastest, at most 6, fastest first.

    A larger number would let luck choose: the margin was fitted with this one.

    Args:
        policy: the policy; its regressor predicts.
        problem: the problem.
        legal: kernels that are legal for it, at least one.
        gpu: the GPU.
    """
    guess = policy.view(problem, legal, gpu).guess
    return [legal[i] for i in np.argsort(guess, kind="stable")[:MAX_KERNELS_RANKED]]


def is_left_to_cublas(problem: Problem, gpu: Gpu) -> bool:
    """Return True if N and K are multiples of 64 and the roofline floor exceeds 10 us.

    cuBLAS almost always wins on such shapes: 2 of 433 random ones had a chosen kernel. Prompts of any length in a
    model's layers are such shapes; the test saves host time.
    """
    return (
        problem.n % REGULAR_MULTIPLE == 0 and problem.k % REGULAR_MULTIPLE == 0 and floor_us(problem, gpu) > REGULAR_US
    )


def is_vector_product(problem: Problem) -> bool:
    """Return True if M or N is 1, or K is below 8.

    cuBLAS has other kernels for such products, and their times are not predicted.
    """
    return min(problem.m, problem.n) == 1 or problem.k < ROW_ALIGN_BYTES // ELEMENT_BYTES


def network_inputs(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> Features:
    """Return the inputs of the nets, float32[len(configs), F], one row per kernel.

    A row is :func:`shape_features`, then the kernel's ``candidate_features``. The last is the logarithm of the ranking
    model's time over the roofline floor.
    """
    shape = shape_features(problem, gpu)
    time = np.log(predict_many(problem, configs, gpu) / floor_us(problem, gpu))
    parts = (
        np.broadcast_to(shape, (len(configs), len(shape))),
        candidate_features(problem, configs, gpu),
        time[:, None],
    )
    return np.concatenate(parts, axis=1).astype(np.float32)


def shape_features(problem: Problem, gpu: Gpu) -> Features:
    """Return properties of the shape on which torch.matmul's time may depend, float32[36].

    They are logarithms of extents, floor, FLOP and bytes, then waves of likely tiles, and alignment of the extents. M =
    1 and M <= 16 have a flag each. A dtype or accumulator has none.
    """
    p = problem
    values = [math.log2(p.m), math.log2(p.n), math.log2(p.k), math.log2(floor_us(p, gpu)), float(p.layout == "NN")]
    values += [math.log2(p.flops), math.log2(p.bytes), math.log2(p.flops / p.bytes)]
    for bm, bn in _TILES:
        tiles = -(-p.m // bm) * -(-p.n // bn)
        waves = tiles / gpu.sms
        filled = math.ceil(waves) / waves if waves > 1 else 1.0
        values += [math.log2(tiles), filled, min(1.0, waves), p.m * p.n / (tiles * bm * bn)]
    values += [math.log2(math.gcd(extent, _ALIGNED)) for extent in (p.m, p.n, p.k)]
    values += [float(p.m % 8 == 0), float(p.n % 8 == 0), float(p.k % 8 == 0), float(p.m <= 16), float(p.m == 1)]
    return np.array(values, dtype=np.float32)
