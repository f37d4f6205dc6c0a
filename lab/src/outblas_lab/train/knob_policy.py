"""A policy that chooses kernels knob by knob, with numpy: its network, its file and its order."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_atomic
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.predict.array_file import DAMAGED, read_arrays, single
from outblas.predict.features import PROBLEM_FEATURES, Features, problem_features
from outblas.predict.posterior import silu
from outblas_lab.train.knob_choice import Offer, log_probabilities
from outblas_lab.train.knob_view import every_knob

FORMAT = 1


@dataclass(frozen=True)
class KnobPolicy:
    """A trained policy.

    Attributes:
        layers: (weights float32[in, out], biases float32[out]) of each layer. SiLU is between them, and the last has
            an output per value of each knob.
        fixed: bool[19]: problem features that never varied in the training. They are shown as they were.
        typical: float32[19]: problem features of a training problem, for ``fixed``.
        about: JSON text on the training, or empty.
    """

    layers: tuple[tuple[Features, Features], ...]
    fixed: NDArray[np.bool_]
    typical: Features
    about: str = ""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KnobPolicy:
        """Read a policy from an .npz file.

        Raises:
            UsageError: there is no such file.
            RecordError: the file has another version or other knobs, is truncated, or gives no finite numbers.
        """
        file = Path(path)
        if not file.is_file():
            raise UsageError(f"no knob policy {str(path)!r}", "an .npz file", "train one: outblas train --env knobs")
        try:
            arrays = read_arrays(file.read_bytes())
            if int(single(arrays, "knob_format")) != FORMAT or str(arrays["knobs"]) != every_knob().text:
                raise ValueError("another format, or other knobs")
            count = sum(name.startswith("w") for name in arrays)
            layers = tuple((arrays[f"w{i}"], arrays[f"b{i}"]) for i in range(count))
            policy = cls(layers, arrays["fixed"], arrays["typical"], str(arrays["about"]))
            policy._try()
            return policy
        except DAMAGED as error:
            raise RecordError(
                f"knob policy {path} cannot be read ({error})",
                f"format {FORMAT}",
                "train it: outblas train --env knobs",
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file that :meth:`load` reads. A file at ``path`` is replaced as a whole or not at all.

        Raises:
            RecordError: the disk refuses.
        """
        sink = io.BytesIO()
        arrays: dict[str, Any] = {f"w{i}": w for i, (w, _) in enumerate(self.layers)}
        arrays |= {f"b{i}": b for i, (_, b) in enumerate(self.layers)}
        np.savez_compressed(
            sink, knob_format=np.int64(FORMAT), knobs=np.array(every_knob().text), about=np.array(self.about),
            fixed=self.fixed, typical=self.typical, **arrays,
        )  # fmt: skip
        write_atomic(Path(path), sink.getvalue())

    def see(self, problem: Problem, gpu: Gpu) -> Features:
        """Return the problem features as the network knows them, float32[19]."""
        return np.where(self.fixed, self.typical, problem_features(problem, gpu)).astype(np.float32)

    def logits(self, observations: Features) -> Features:
        """Return float32[n, values]: scores of all values of all knobs for observations, float32[n, size]."""
        h = observations
        for i, (weights, biases) in enumerate(self.layers):
            h = h @ weights + biases
            if i + 1 < len(self.layers):
                h = silu(h)
        return h

    def order(self, offer: Offer, n: int) -> list[int]:
        """Return up to ``n`` different rows of an offer, the likeliest kernels first."""
        likely = log_probabilities(every_knob(), self.logits, offer.state, offer.vectors[offer.rows])
        return [int(offer.rows[i]) for i in np.argsort(-likely, kind="stable")[:n]]

    def _try(self) -> None:
        """Let the network see one observation of zeros. Raises ValueError and the like: the arrays do not fit."""
        view = every_knob()
        if self.fixed.shape != self.typical.shape or self.fixed.shape != (len(PROBLEM_FEATURES),):
            raise ValueError("other problem features")
        scores = self.logits(np.zeros((1, view.size), np.float32))
        if scores.shape != (1, view.values) or not np.isfinite(scores).all():
            raise ValueError("its network says no finite number per value")
