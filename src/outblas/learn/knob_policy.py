"""A policy that chooses a kernel knob by knob, with numpy: its inputs, its network, and the order that it gives.

The network sees the problem, the GPU, the values chosen so far and the best kernel so far. It scores every value of the
next knob. A kernel's probability is the product over its knobs, each among the values that some offered kernel has
together with those before. So offered kernels alone have a probability above 0.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import LAUNCHES, KernelConfig, Launch
from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_atomic
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.knobs import Knobs, all_knobs
from outblas.learn.array_file import DAMAGED, read_arrays
from outblas.learn.features import PROBLEM_FEATURES, Features, problem_features
from outblas.learn.posterior import silu

FORMAT = 1
#: The last measured time is shown as a log ratio to the best, within this.
MAX_LOG_GAP = 1.0
#: Measurements that count as many.
MEASUREMENTS_SCALE = 16.0
Vectors = NDArray[np.int16]


@dataclass(frozen=True)
class SearchState:
    """The state of a search before the next kernel is chosen.

    Attributes:
        problem: ``problem_features``, float32[19].
        launch: the launch option.
        made: number of measurements so far.
        best: vector of the fastest proven kernel, int16[knobs]; None if none is proven yet.
        gap: log of (last time / best time), 0 or more; 0 if unknown.
    """

    problem: Features
    launch: Launch
    made: int = 0
    best: Vectors | None = None
    gap: float = 0.0


class KnobView:
    """The inputs of the network for a list of knobs.

    Args:
        knobs: the choices.

    Attributes:
        knobs: the choices.
        values: number of all values of all knobs, V.
        starts: int64[knobs], index of each knob's first value among all V.
        size: length of an observation.
    """

    def __init__(self, knobs: Knobs) -> None:
        self.knobs, self.values = knobs, int(knobs.nvec.sum())
        self.starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(knobs.nvec)[:-1]))
        count = len(knobs.nvec)
        self._state = len(PROBLEM_FEATURES) + len(LAUNCHES) + 2
        self.size = self._state + 2 * count + 2 * self.values
        families = knobs.knobs[0].values
        self._has = np.array([[name in knob.families for knob in knobs.knobs] for name in families])
        self._amount = np.zeros((count, int(knobs.nvec.max())), np.float32)
        for i, knob in enumerate(knobs.knobs):
            for j, value in enumerate(knob.values):
                self._amount[i, j] = j if isinstance(value, str) else math.log2(1 + int(value)) / 4

    @property
    def text(self) -> str:
        """Return all knobs and values as one text: a policy of others is not read."""
        return ";".join(f"{k.name}={','.join(map(str, k.values))}" for k in self.knobs.knobs)

    def observe(self, state: SearchState, vectors: Vectors, knob: int) -> Features:
        """Return what the network sees before it chooses a knob, float32[n, size].

        - problem [19], launch option one-hot [3], measurements made and the gap [2];
        - the next knob, one-hot [knobs];
        - amounts of the chosen values [knobs]: log2(1 + value) / 4, or the index of a word;
        - the chosen values, one-hot [V], and those of the best kernel, one-hot [V].

        Args:
            state: the search.
            vectors: int16[n, knobs]; the entries before ``knob`` are the chosen values, and the others do not count.
            knob: index of the next knob.
        """
        n, count = len(vectors), len(self.knobs.nvec)
        out = np.zeros((n, self.size), np.float32)
        made = math.log1p(state.made) / math.log1p(MEASUREMENTS_SCALE)
        launch = [float(state.launch == each) for each in LAUNCHES]
        out[:, : self._state] = [*state.problem, *launch, made, min(MAX_LOG_GAP, state.gap)]
        at = self._state
        out[:, at + knob] = 1
        chosen = np.arange(count) < knob
        has = self._has[vectors[:, 0]] & chosen if knob else np.zeros((n, count), np.bool_)
        amounts, hot = out[:, at + count : at + 2 * count], out[:, at + 2 * count : at + 2 * count + self.values]
        row, column = np.nonzero(has)
        index = vectors[row, column]
        amounts[row, column] = self._amount[column, index]
        hot[row, self.starts[column] + index] = 1
        if state.best is not None:
            out[:, at + 2 * count + self.values :][:, self._hot(state.best)] = 1
        return out

    def encode(self, config: KernelConfig) -> Vectors:
        """Return the vector of a config, int16[knobs], as :meth:`Knobs.encode`.

        A number that the knob lacks becomes the nearest one. A word that it lacks raises UsageError.
        """
        near = {}
        for knob in self.knobs.knobs[1:]:
            if config.family in knob.families:
                value = getattr(config, knob.name)
                if value not in knob.values and isinstance(value, int):
                    near[knob.name] = min(knob.values, key=lambda known: (abs(known - value), known))
        return self.knobs.encode(config.with_knobs(**near) if near else config).astype(np.int16)

    def _hot(self, vector: Vectors) -> NDArray[np.int64]:
        """Return the indices among all V of the values of one whole vector."""
        has = self._has[vector[0]]
        return (self.starts + vector)[has]


@dataclass(frozen=True)
class KnobPolicy:
    """A trained policy.

    Attributes:
        layers: (weights float32[in, out], biases float32[out]) of each layer. SiLU is between them, and the last has
            an output per value.
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
            if int(arrays["knob_format"]) != FORMAT or str(arrays["knobs"]) != KnobView(all_knobs()).text:
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
            sink, knob_format=np.int64(FORMAT), knobs=np.array(KnobView(all_knobs()).text), about=np.array(self.about),
            fixed=self.fixed, typical=self.typical, **arrays,
        )  # fmt: skip
        write_atomic(Path(path), sink.getvalue())

    def see(self, problem: Problem, gpu: Gpu) -> Features:
        """Return the problem features as the network knows them, float32[19]."""
        return np.where(self.fixed, self.typical, problem_features(problem, gpu)).astype(np.float32)

    def logits(self, observations: Features) -> Features:
        """Return float32[n, V]: scores of all values for observations, float32[n, size]."""
        h = observations
        for i, (weights, biases) in enumerate(self.layers):
            h = h @ weights + biases
            if i + 1 < len(self.layers):
                h = silu(h)
        return h

    def log_probabilities(self, view: KnobView, state: SearchState, vectors: Vectors) -> NDArray[np.float64]:
        """Return float64[n]: log probability of each offered kernel, if the policy chooses among these alone.

        A knob for which the chosen values leave one value is not chosen and costs nothing.

        Args:
            view: the knobs of the training.
            state: the search.
            vectors: int16[n, knobs], n offered kernels. Equal rows share a probability, which each of them gets.
        """
        found = np.zeros(len(vectors))
        group = np.zeros(len(vectors), np.int64)  # equal for rows whose values before the knob are equal
        for knob in range(vectors.shape[1]):
            values = vectors[:, knob].astype(np.int64)
            if (values == values[0]).all():
                continue
            pairs, first, again = np.unique(group * 4096 + values, return_index=True, return_inverse=True)
            prefix, sizes = np.unique(pairs // 4096, return_counts=True)
            for_choice = prefix[sizes > 1]
            if len(for_choice):
                of_pair = np.searchsorted(for_choice, pairs // 4096)
                chosen = np.isin(pairs // 4096, for_choice)
                rows = first[chosen]
                of_row, value = of_pair[chosen], pairs[chosen] % 4096
                one = np.full(len(for_choice), -1, np.int64)
                one[of_row] = rows
                scores = self.logits(view.observe(state, vectors[one], knob))
                picked = scores[of_row, view.starts[knob] + value].astype(np.float64)
                top = np.full(len(for_choice), -np.inf)
                np.maximum.at(top, of_row, picked)
                total = np.zeros(len(for_choice))
                np.add.at(total, of_row, np.exp(picked - top[of_row]))
                logs = np.zeros(len(pairs))
                logs[chosen] = picked - top[of_row] - np.log(total[of_row])
                found += logs[again]
            group = again
        return found

    def _try(self) -> None:
        """Let the network see one observation of zeros. Raises ValueError and the like: the arrays do not fit."""
        view = KnobView(all_knobs())
        if self.fixed.shape != self.typical.shape or self.fixed.shape != (len(PROBLEM_FEATURES),):
            raise ValueError("other problem features")
        scores = self.logits(np.zeros((1, view.size), np.float32))
        if scores.shape != (1, view.values) or not np.isfinite(scores).all():
            raise ValueError("its network says no finite number per value")
