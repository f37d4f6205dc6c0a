"""The learned policy, with numpy: a score for every candidate, from its features and from what is believed of it.

A score is minus the believed time behind the best untried, times a learned factor, plus a small perceptron's output.
Since it is made from features and not from an index, new kernels in a catalogue need no new network.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_atomic
from outblas.core.gpu_records import packaged_data
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.predict.features import (
    CANDIDATE_FEATURES,
    GPU_FEATURES,
    PROBLEM_FEATURES,
    Features,
    candidate_features,
    knob_columns,
    problem_features,
)
from outblas.predict.posterior import DAMAGED, NOISE_DEVIATION, Floats, Regressor, posterior, read_arrays, silu, single

FORMAT = 1
#: Inputs of a candidate beside its features, in log time. ``guess`` is the mean over nets, ``guess_spread`` its spread.
#: ``behind`` is the posterior mean less that of the best untried candidate; ``deviation`` is its deviation.
#: ``over_best`` is the posterior mean over the best measured time. ``tried`` is 1 for a measured candidate.
POSTERIOR_INPUTS = ("guess", "guess_spread", "behind", "deviation", "over_best", "tried")
#: Column of a candidate's inputs that the greedy score uses.
BEHIND_COLUMN = len(CANDIDATE_FEATURES) + POSTERIOR_INPUTS.index("behind")
#: Inputs about the search: measurements made (as a share of 16), and 1 if a proven one is among them.
SEARCH_INPUTS = ("made", "any_proven")
#: Measurements that count as many.
MEASUREMENTS_SCALE = 16.0
#: Log times are shown to the network in units of this.
LOG_TIME_UNIT = 0.05


def greedy_scorer() -> dict[str, Features]:
    """Return a scorer whose order is that of the believed times: its perceptron gives 0, and ``greed`` is 0.

    A training begins with this order.
    """
    inputs = len(CANDIDATE_FEATURES) + len(POSTERIOR_INPUTS) + len(PROBLEM_FEATURES) + len(SEARCH_INPUTS)
    shapes = {"w0": (inputs, 1), "b0": (1,), "w1": (1, 1), "b1": (1,), "w2": (1, 1), "b2": (1,), "greed": ()}
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Policy:
    """A trained search policy.

    Attributes:
        regressor: predicts the candidates' times before any measurement.
        scorer: arrays of the scoring perceptron by name: ``w0, b0, w1, b1, w2, b2``, and ``greed``, a logarithm. Empty:
            the policy has only the regressor, and :meth:`scores` raises KeyError.
        about: JSON text about the training, or empty.
    """

    regressor: Regressor
    scorer: Mapping[str, Features]
    about: str = ""

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Policy:
        """Read a policy by packaged name, e.g. ``h200``, or by path of an .npz file.

        A packaged name takes precedence over a file of the same name.

        Raises:
            UsageError: neither exists.
            RecordError: the file is truncated, has another version or other inputs, or predicts non-finite numbers.
        """
        text = os.fspath(path_or_name)
        packaged = packaged_data("policies") / f"{text}.npz"
        path = packaged if packaged.is_file() else Path(text)
        if not path.is_file():
            raise UsageError(f"unknown policy {text!r}", "a packaged policy or an .npz file", "run outblas train")
        try:
            arrays = read_arrays(path.read_bytes())
            version, inputs = int(single(arrays, "format")), str(single(arrays, "inputs"))
            if version != FORMAT or inputs != input_names():
                raise ValueError(f"it has format {version} or other inputs")
            regressor = Regressor.from_arrays(arrays, "regressor_")
            scorer = {name.removeprefix("scorer_"): a for name, a in arrays.items() if name.startswith("scorer_")}
            policy = cls(regressor, scorer, str(arrays["about"]))
            policy._try()
            return policy
        except DAMAGED as error:
            raise RecordError(
                f"policy {text} cannot be read ({error})", f"format {FORMAT}", "train it again with: outblas train"
            ) from error

    def _try(self) -> None:
        """Let both networks see one candidate of zeros. Raises ValueError and the like: the arrays do not fit."""
        nothing = np.zeros((1, len(CANDIDATE_FEATURES)), dtype=np.float32)
        about = self._known_gpu(np.zeros(len(PROBLEM_FEATURES), dtype=np.float32))
        guess, spread = self.regressor(about, nothing)
        view = CandidateView(about, nothing, guess, spread, knob_columns(nothing))
        scores = self.scores(view, (), (), ()) if self.scorer else ()  # a regressor that is kept alone has no scorer
        if not np.isfinite([*guess, *spread, *scores]).all():
            raise ValueError("its networks predict non-finite numbers")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file that :meth:`load` reads. The write is atomic and replaces an existing file.

        Raises:
            RecordError: the disk refuses the write.
        """
        sink = io.BytesIO()
        np.savez_compressed(
            sink,
            format=np.int64(FORMAT),
            inputs=np.array(input_names()),
            about=np.array(self.about),
            **self.regressor.to_arrays("regressor_"),
            **{f"scorer_{name}": array for name, array in self.scorer.items()},  # type: ignore[arg-type]
        )
        write_atomic(Path(path), sink.getvalue())

    def view(self, problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> CandidateView:
        """Return the inputs of a problem's candidates before any measurement, in the order of ``configs``.

        Early loads of B (knob ``early``) are newer than the recordings: a candidate with them gets the view of the same
        kernel without them.
        """
        known = [config.with_knobs(early=False) if config.early else config for config in configs]
        about, each = self._known_gpu(problem_features(problem, gpu)), candidate_features(problem, known, gpu)
        guess, spread = self.regressor(about, each)
        return CandidateView(about, each, guess, spread, knob_columns(each))

    def _known_gpu(self, about: Features) -> Features:
        """Return the features of a problem with the GPU's features as the networks can use them.

        A feature that never varied in training is 0: the networks learned nothing about it. Another one stays within
        the values of the training, because networks do not extrapolate.
        """
        net, at = self.regressor, GPU_FEATURES
        if net.limits is not None:
            about[at] = np.clip(about[at], net.limits[0, at], net.limits[1, at])
        about[[i for i in at if net.scale[i] == 0]] = 0
        return about

    def scores(
        self, view: CandidateView, tried: Sequence[int], proven: Sequence[int], log_us: Sequence[float]
    ) -> Floats:
        """Return float64[C]: candidates with higher scores should be tried first; tried ones have -inf. The arguments
        are those of :meth:`CandidateView.inputs`.
        """
        x, search = view.inputs(tried, proven, log_us)
        wide = np.broadcast_to(np.concatenate([view.problem, search]), (len(x), len(view.problem) + len(search)))
        net, h = self.scorer, np.concatenate([x, wide], axis=1)
        for layer in (0, 1):
            h = silu(h @ net[f"w{layer}"] + net[f"b{layer}"])
        out = (h @ net["w2"] + net["b2"])[:, 0] - float(np.exp(net["greed"])) * x[:, BEHIND_COLUMN]
        out = out.astype(np.float64)
        out[list(tried)] = -np.inf
        return out


@dataclass(frozen=True)
class CandidateView:
    """A problem and its C candidates as a regressor sees them.

    Attributes:
        problem: ``problem_features``, float32[19], with the GPU's features as the networks can use them.
        candidates: ``candidate_features``, float32[C, 47].
        guess: float64[C], predicted log time up to a constant; the mean over nets. Lower is faster.
        spread: float64[C], its standard deviation over nets.
        knobs: ``knob_columns`` of the candidates, float32[C, 30].
    """

    problem: Features
    candidates: Features
    guess: Floats
    spread: Floats
    knobs: Features

    def inputs(self, tried: Sequence[int], proven: Sequence[int], log_us: Sequence[float]) -> tuple[Features, Features]:
        """Return what the scorer sees after some measurements.

        Args:
            tried: indices of all candidates that were tried.
            proven: those of them that passed.
            log_us: natural logs of their times in us, in the order of ``proven``.

        Returns:
            float32[C, 53], a candidate's features and then :data:`POSTERIOR_INPUTS`. float32[2], :data:`SEARCH_INPUTS`.
        """
        mean, deviation = posterior(self.guess, self.knobs, proven, log_us)
        left = np.ones(len(mean), dtype=bool)
        left[list(tried)] = False
        best = mean[left].min() if left.any() else mean.min()
        over = mean - min(log_us) if len(log_us) else np.zeros(len(mean))
        posterior_columns = (
            (self.guess - self.guess.min()) / LOG_TIME_UNIT,
            self.spread / LOG_TIME_UNIT,
            (mean - best) / LOG_TIME_UNIT,
            (deviation - NOISE_DEVIATION) / LOG_TIME_UNIT,
            np.clip(over / LOG_TIME_UNIT, -20, 20),
            ~left,
        )
        x = np.concatenate([self.candidates, np.stack(posterior_columns, axis=1).astype(np.float32)], axis=1)
        return x, np.array([len(tried) / MEASUREMENTS_SCALE, len(log_us) > 0], dtype=np.float32)


def input_names() -> str:
    """Return the names of all inputs, separated by commas. A policy of others is not read."""
    return ",".join((*PROBLEM_FEATURES, *CANDIDATE_FEATURES, *POSTERIOR_INPUTS, *SEARCH_INPUTS))
