"""The belief about candidates' times: a guess, corrected by the measurements on this problem.

The guess is the log of a time, up to a constant of the problem and the launch option. It is the mean of a few
perceptrons over problem and candidate features (:class:`Regressor`), or any other. The correction is a Gaussian process
on the guess's residuals at the measured candidates (Rasmussen and Williams, Gaussian Processes for Machine Learning,
2006, algorithm 2.1). It has an unknown constant, a part that candidates with similar knobs share, and noise. A learned
policy (``outblas_lab.train.policy``) has the belief among its inputs; the agent ``surrogate`` uses it alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.plain_files import ZIP_ERRORS, open_zip
from outblas.predict.features import Features

#: Errors of reading a damaged or crafted file, and of arrays that do not fit each other.
DAMAGED = (*ZIP_ERRORS, ArithmeticError, TypeError, MemoryError)
#: Most bytes of the arrays of a file together. The packaged ones have less than a megabyte.
_MOST_BYTES = 256 << 20


def read_arrays(data: bytes) -> dict[str, Any]:
    """Return name -> array of an .npz file. Nothing in it is unpickled.

    Raises:
        Exception: one of :data:`DAMAGED`. It is ValueError if the arrays have more than 256 MiB.
    """
    if not data.startswith(b"PK"):
        raise ValueError("it is not an .npz file")  # numpy would take it for a pickle, and propose to trust it
    with open_zip(data) as packed:
        size = sum(member.file_size for member in packed.infolist())  # zipfile unpacks at most this
    if size > _MOST_BYTES:
        raise ValueError(f"it unpacks to {size >> 20} MiB, more than {_MOST_BYTES >> 20} MiB")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def single(arrays: Mapping[str, Any], name: str) -> Any:
    """Return the one number or text of an array without dimensions.

    ``int`` and ``float`` refuse ``[[1.0]]`` since NumPy 2.5 alone.

    Raises:
        KeyError: there is no such array.
        ValueError: it has dimensions.
    """
    array = arrays[name]
    if array.ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions, not 0")
    return array.item()


Floats = NDArray[np.float64]

#: M * N * K up to which OpenBLAS computes a product with one thread: 4 * 65536 (its Makefile.rule and param.h).
_LARGEST_PRODUCT = 250_000
#: Rows from which a product is left to all cores: those of a search, and not of a choice for one call.
_FEW_ROWS = 256
#: Prior standard deviations, in log time: of the problem's constant, of what similar candidates share, of the noise.
CONSTANT_DEVIATION, SHARED_DEVIATION, NOISE_DEVIATION = 1.0, 0.05, 0.01
#: Euclidean distance in knobs (``features.knob_columns``) over which what is shared falls to e^-1/2.
CORRELATION_LENGTH = 0.5


@dataclass(frozen=True)
class Regressor:
    """Perceptrons of equal shape, evaluated together, with SiLU between layers and one output.

    A call with problem features [P] and candidate features [C, F] returns mean and standard deviation over the nets,
    float64[C] each. Each net's mean over the C candidates is taken off first.

    Attributes:
        mean: float32[F], subtracted from the inputs.
        scale: float32[F], factor of the shifted inputs; 0 if training saw one value only.
        weights: float32[nets, in, out] of each layer.
        biases: float32[nets, 1, out] of each layer.
        limits: float32[2, F], the least and the greatest value of each input in training; None: not known. A call does
            not use them.
    """

    mean: Features
    scale: Features
    weights: tuple[Features, ...]
    biases: tuple[Features, ...]
    limits: Features | None = None

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], prefix: str = "") -> Regressor:
        """Make a regressor of the arrays that :meth:`to_arrays` returned with the same prefix. Other keys are ignored.

        Raises:
            KeyError: an array is missing, e.g. by another prefix.
            ValueError: the number of layers has dimensions.
        """
        layers = range(int(single(arrays, "layers")))
        weights, biases = (tuple(arrays[f"{prefix}{letter}{i}"] for i in layers) for letter in "wb")
        return cls(arrays["mean"], arrays["scale"], weights, biases, arrays.get("limits"))

    def to_arrays(self, prefix: str = "") -> dict[str, Any]:
        """Return the arrays for an .npz file: ``layers`` (their number), ``mean``, ``scale``, ``w0``, ``b0``, ``w1``
        and so on. ``limits`` is among them if it is known.

        Args:
            prefix: put before the names of weights and biases, not before the others.
        """
        arrays: dict[str, Any] = {} if self.limits is None else {"limits": self.limits}
        arrays |= {f"{prefix}w{i}": w for i, w in enumerate(self.weights)}
        arrays |= {f"{prefix}b{i}": b for i, b in enumerate(self.biases)}
        return {"layers": np.int64(len(self.weights)), "mean": self.mean, "scale": self.scale, **arrays}

    def __call__(self, problem: Features, candidates: Features) -> tuple[Floats, Floats]:
        """Mean and standard deviation over the nets of the predicted log time, up to a constant: float64[C] each."""
        x = np.concatenate([np.broadcast_to(problem, (len(candidates), len(problem))), candidates], axis=1)
        each = self.predict_each(x)
        each -= each.mean(axis=1, keepdims=True)
        return each.mean(axis=0), each.std(axis=0)

    def predict(self, inputs: Features) -> tuple[Floats, Floats]:
        """Return mean and standard deviation over the nets, float64[C] each, for inputs float32[C, F].

        No mean over the candidates is taken off.
        """
        each = self.predict_each(inputs)
        return each.mean(axis=0), each.std(axis=0)

    def predict_each(self, inputs: Features) -> Floats:
        """Return the output of every net, float64[nets, C], for inputs float32[C, F]."""
        h = ((inputs - self.mean) * self.scale)[None]
        for layer, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = _on_one_core(h, w) + b
            if layer + 1 < len(self.weights):
                h = silu(h)
        return np.asarray(h[:, :, 0], dtype=np.float64)


def _on_one_core(h: Features, w: Features) -> Features:
    """Return ``h @ w``; of few rows, by products so small that OpenBLAS does not wake a thread on every core.

    Those threads spin for 50 ms after a product, beside a program that serves a model.
    """
    rows = max(1, _LARGEST_PRODUCT // (w.shape[1] * w.shape[2]))
    if not rows < h.shape[1] <= _FEW_ROWS:
        return h @ w
    return np.concatenate([h[:, i : i + rows] @ w for i in range(0, h.shape[1], rows)], axis=1)


def silu(x: Any) -> Any:
    """Return x * sigmoid(x), elementwise; a number or an array. ``silu(0.0)`` is 0.0, ``silu(1.0)`` is 0.731."""
    return x / (1 + np.exp(-np.clip(x, -60, 60)))


def posterior(
    guess: Floats, knobs: Features, measured: Sequence[int], log_us: Sequence[float]
) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of the log time of every candidate, given some measurements: float64[C] each.

    Without measurements, the mean is ``guess`` itself, and every deviation is 0.05 (``SHARED_DEVIATION``).

    Args:
        guess: float64[C], log times up to a constant.
        knobs: float32[C, K]; candidates with near rows share a part of the error.
        measured: indices of candidates, each once.
        log_us: their natural log times in that order, in whatever unit.
    """
    if not len(measured):
        return guess, np.full(len(guess), SHARED_DEVIATION)
    at = np.asarray(measured)
    square = np.square(knobs[:, None, :] - knobs[None, at, :]).sum(axis=2, dtype=np.float64)
    kernel = CONSTANT_DEVIATION**2 + SHARED_DEVIATION**2 * np.exp(-0.5 * square / CORRELATION_LENGTH**2)
    inner = kernel[at] + NOISE_DEVIATION**2 * np.eye(len(at))
    left = np.asarray(log_us) - guess[at]
    solved = np.linalg.solve(inner, np.concatenate([left[:, None], kernel.T], axis=1))
    variance = CONSTANT_DEVIATION**2 + SHARED_DEVIATION**2 - np.einsum("ij,ji->i", kernel, solved[:, 1:])
    return guess + kernel @ solved[:, 0], np.sqrt(np.maximum(variance, 0.0))


def expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """Return the expected improvement of a minimum, float64[C]: E[max(best - y, 0)] of y ~ N(mean, deviation^2).

    It is 0 or more. With deviation 0 it is max(best - mean, 0): for means [0, 1] and best 0.5 it is [0.5, 0].
    Closed form of Jones, Schonlau and Welch, Efficient Global Optimization of Expensive Black-Box Functions, 1998, eq.
    15.

    Args:
        mean: float64[C], expected values.
        deviation: float64[C], their standard deviations.
        best: the least value so far.
    """
    spread = np.maximum(deviation, 1e-12)
    z = (best - mean) / spread
    below = np.array([0.5 * math.erfc(-float(x) / math.sqrt(2)) for x in z])
    return np.maximum(spread * (z * below + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)), 0.0)
