"""A kernel for a shape that no library has, where it is predicted to beat torch.matmul by a margin; else none.

Of a short list of kernels the packaged policy chooses one, the ranking model says how long it takes, and an ensemble of
small perceptrons how long torch.matmul does (its heuristic picks among cuBLAS' kernels, so its time is no smooth
function of a shape). The margin was chosen on problems that the fit had not seen, so that hardly any product gets
slower (``scripts/any_shapes.py``). All of it is arithmetic on the shape: nothing is measured, compiled or run.
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
from typing import Any

import numpy as np

from outblas.belief import Features, Floats, silu
from outblas.config import KernelConfig, config_from_name, config_name
from outblas.errors import RecordError, UsageError
from outblas.features import candidate_features, problem_features
from outblas.files import write_atomic
from outblas.library import Choice
from outblas.model import predict_many
from outblas.policy import Policy
from outblas.problem import Problem
from outblas.roofline import Gpu, floor_us
from outblas.space import why_illegal

FORMAT = 1
#: Tiles by whose waves cuBLAS' kernels are guessed.
_TILES = ((64, 64), (128, 128), (128, 256), (64, 256), (256, 128))
#: Largest power of two that is looked for in an extent.
_ALIGNED = 256


@dataclass(frozen=True)
class TorchTime:
    """Perceptrons side by side: the time of torch.matmul over the floor.

    Attributes:
        mean, scale: float32[F], by which inputs are shifted and multiplied. weights: float32[nets, in, out] of each
        layer. biases: float32[nets, 1, out].
    """

    mean: Features
    scale: Features
    weights: tuple[Features, ...]
    biases: tuple[Features, ...]

    def log_us(self, problem: Problem, gpu: Gpu) -> tuple[float, float]:
        """Mean and standard deviation over the nets of the logarithm of microseconds."""
        each = self.over_floor(shape_features(problem, gpu)[None])[:, 0]
        return float(each.mean()) + math.log(floor_us(problem, gpu)), float(each.std())

    def over_floor(self, inputs: Features) -> Floats:
        """float32[P, F] -> float64[nets, P]: log of time over floor."""
        h: Any = ((inputs - self.mean) * self.scale)[None]
        for layer, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = h @ w + b
            if layer + 1 < len(self.weights):
                h = silu(h)
        return np.asarray(h[:, :, 0], dtype=np.float64)


@dataclass(frozen=True)
class AnyShape:
    """What was fitted.

    Attributes:
        kernels: those on offer. torch: the time to beat. margin: predicted speed-up from which a kernel is used.
        sure: largest deviation of ``torch`` (log) at which it is trusted. about: data and date of the fit.
    """

    kernels: tuple[KernelConfig, ...]
    torch: TorchTime
    margin: float
    sure: float
    policy: Policy
    about: str = ""

    @classmethod
    @functools.cache
    def load(cls, gpu_name: str) -> AnyShape:
        """What is packaged for a GPU.

        Raises:
            UsageError: nothing is. RecordError: the file is of another version, or truncated.
        """
        path = resources.files("outblas") / "data" / "any_shape" / f"{gpu_name}.npz"
        if not path.is_file():
            raise UsageError(f"nothing for any shape on {gpu_name}", "a packaged GPU", "fit it: scripts/any_shapes.py")
        return cls.parse(path.read_bytes(), Policy.load(gpu_name), str(path))

    @classmethod
    def parse(cls, data: bytes, policy: Policy, name: str = "") -> AnyShape:
        """What :meth:`save` wrote. Raises RecordError: it is of another version, or truncated."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                a = {name: file[name] for name in file.files}
            if int(a["format"]) != FORMAT:
                raise ValueError(f"format {int(a['format'])}")
            layers = range(int(a["layers"]))
            nets = TorchTime(
                a["mean"], a["scale"], tuple(a[f"w{i}"] for i in layers), tuple(a[f"b{i}"] for i in layers)
            )
            kernels = tuple(config_from_name(str(each)) for each in a["kernels"])
            return cls(kernels, nets, float(a["margin"]), float(a["sure"]), policy, str(a["about"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise RecordError(
                f"{name or 'the data for any shape'} cannot be read ({error})",
                f"format {FORMAT}",
                "install the package again, or fit it: scripts/any_shapes.py",
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write atomically."""
        nets, buffer = self.torch, io.BytesIO()
        arrays: dict[str, Any] = {f"w{i}": w for i, w in enumerate(nets.weights)}
        arrays |= {f"b{i}": b for i, b in enumerate(nets.biases)}
        np.savez_compressed(
            buffer,
            format=FORMAT,
            layers=len(nets.weights),
            mean=nets.mean,
            scale=nets.scale,
            kernels=np.array([config_name(c) for c in self.kernels]),
            margin=self.margin,
            sure=self.sure,
            about=self.about,
            **arrays,
        )
        write_atomic(Path(path), buffer.getvalue())

    def choose(self, problem: Problem, gpu: Gpu) -> Choice | None:
        """The kernel, with its predicted speed-up over torch.matmul, that ``problem`` is worth; None: torch's product.

        ``low`` of the choice is the prediction less the deviation of the ensemble, ``high`` the prediction and it.
        """
        found = self.first(problem, gpu)
        if found is None:
            return None
        config, ours = found
        torchs, deviation = self.torch.log_us(problem, gpu)
        gain = torchs - ours
        if deviation > self.sure or gain < math.log(self.margin):
            return None
        return Choice(config, *(math.exp(gain + step * deviation) for step in (0, -1, 1)))

    def first(self, problem: Problem, gpu: Gpu) -> tuple[KernelConfig, float] | None:
        """The best kernel on offer and the logarithm of its predicted microseconds; None: none is legal."""
        legal = [c for c in self.kernels if not why_illegal(problem, c, gpu)]
        if not legal:
            return None
        guess = self.guess(problem, legal, gpu)
        index = int(guess.argmin())
        return legal[index], float(np.log(predict_many(problem, legal[index : index + 1], gpu)[0]))

    def guess(self, problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> Floats:
        """float64[C]: the packaged policy's log time of each, up to a constant."""
        guess, _ = self.policy.regressor(problem_features(problem, gpu), candidate_features(problem, configs, gpu))
        return guess


def shape_features(problem: Problem, gpu: Gpu) -> Features:
    """float32[F]: what torch.matmul's time may depend on: extents, work, waves of likely tiles, alignment."""
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
