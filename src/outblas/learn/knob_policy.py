"""A policy that chooses kernels by the actions of a design, with numpy: its network, its file and its order."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_atomic
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.knobs import all_knobs
from outblas.learn.array_file import DAMAGED, read_arrays, single
from outblas.learn.features import PROBLEM_FEATURES, Features, problem_features
from outblas.learn.knob_designs.design_registry import DEFAULT_DESIGN, DESIGNS, make_design
from outblas.learn.knob_designs.knob_design import MAX_LOGIT, KnobDesign, Offer
from outblas.learn.knob_prior import KnobPrior
from outblas.learn.knob_view import KnobView
from outblas.learn.posterior import Regressor, silu

FORMAT = 1
#: Put before the names of the arrays of the prior's regressor.
_PRIOR = "prior_"


@dataclass(frozen=True)
class KnobPolicy:
    """A trained policy.

    Attributes:
        layers: (weights float32[in, out], biases float32[out]) of each layer. SiLU is between them, and the last has
            an output per action.
        fixed: bool[19]: problem features that never varied in the training. They are shown as they were.
        typical: float32[19]: problem features of a training problem, for ``fixed``.
        about: JSON text on the training, or empty.
        design: name of its design.
        prior: believed times with which the design begins; None for a design without a prior.
    """

    layers: tuple[tuple[Features, Features], ...]
    fixed: NDArray[np.bool_]
    typical: Features
    about: str = ""
    design: str = DEFAULT_DESIGN
    prior: KnobPrior | None = None

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
            if int(single(arrays, "knob_format")) != FORMAT or str(arrays["knobs"]) != KnobView(all_knobs()).text:
                raise ValueError("another format, or other knobs")
            count = sum(name.startswith("w") for name in arrays)
            layers = tuple((arrays[f"w{i}"], arrays[f"b{i}"]) for i in range(count))
            design = str(arrays.get("design", DEFAULT_DESIGN))  # files of the first design alone do not name it
            if design not in DESIGNS:
                raise ValueError(f"design {design!r}")
            policy = cls(
                layers, arrays["fixed"], arrays["typical"], str(arrays["about"]), design,
                _prior_of(arrays) if DESIGNS[design].prior else None,
            )  # fmt: skip
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
        if self.prior is not None and self.prior.regressor is not None:
            arrays |= {f"{_PRIOR}{name}": array for name, array in self.prior.regressor.to_arrays().items()}
        np.savez_compressed(
            sink, knob_format=np.int64(FORMAT), knobs=np.array(KnobView(all_knobs()).text), about=np.array(self.about),
            fixed=self.fixed, typical=self.typical, design=np.array(self.design), **arrays,
        )  # fmt: skip
        write_atomic(Path(path), sink.getvalue())

    def see(self, problem: Problem, gpu: Gpu) -> Features:
        """Return the problem features as the network knows them, float32[19]."""
        return np.where(self.fixed, self.typical, problem_features(problem, gpu)).astype(np.float32)

    def logits(self, observations: Features) -> Features:
        """Return float32[n, actions]: scores of all actions for observations, float32[n, size].

        With a prior, its logits at the end of an observation are added to the network's scores.
        """
        h = observations
        for i, (weights, biases) in enumerate(self.layers):
            h = h @ weights + biases
            if i + 1 < len(self.layers):
                h = silu(h)
        return h if self.prior is None else h + np.float32(MAX_LOGIT) * observations[:, -h.shape[1] :]

    def order(self, offer: Offer, n: int) -> list[int]:
        """Return up to ``n`` different rows of an offer, best first (:meth:`KnobDesign.order`)."""
        return self.made_design().order(self.logits, offer, n)

    def made_design(self) -> KnobDesign:
        """Return the policy's design, over all knobs."""
        return make_design(self.design)

    def _try(self) -> None:
        """Let the network see one observation of zeros. Raises ValueError and the like: the arrays do not fit."""
        design = self.made_design()
        if self.fixed.shape != self.typical.shape or self.fixed.shape != (len(PROBLEM_FEATURES),):
            raise ValueError("other problem features")
        scores = self.logits(np.zeros((1, design.size), np.float32))
        if scores.shape != (1, design.actions) or not np.isfinite(scores).all():
            raise ValueError("its network says no finite number per action")
        if self.prior is not None and self.prior.regressor is not None:
            nothing = np.zeros((1, len(self.prior.regressor.mean)), np.float32)
            if not np.isfinite(self.prior.regressor.predict(nothing)).all():
                raise ValueError("its regressor says no finite number")


def _prior_of(arrays: Mapping[str, Any]) -> KnobPrior:
    """Return the prior of a policy's arrays; without a regressor, it is the cost model."""
    own = {name.removeprefix(_PRIOR): array for name, array in arrays.items() if name.startswith(_PRIOR)}
    return KnobPrior(Regressor.from_arrays(own) if own else None)
