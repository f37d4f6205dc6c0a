"""Choose a kernel for a shape that no library has, if it is predicted to beat torch.matmul.

The choice is among the kernels for any shape and those that the packaged library installs for the layout and dtype.
The ranking model picks the likeliest. An ensemble of small perceptrons predicts their speed-ups over torch.matmul. Its
inputs are a kernel's features, the ranking model's result, and properties on which torch.matmul's time may depend.
One of these is the first answer of cuBLASLt's heuristic. The kernel with the
highest lower bound is chosen if that bound exceeds a margin. Bound and margin were fitted on unseen problems
(``outblas fit any-shape``). The choice is arithmetic on the host: nothing is measured, compiled or run.
"""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from outblas.core.config import KernelConfig, Launch, config_name, launch_allows
from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_atomic
from outblas.core.gpu_records import data_of_architecture, reference_gpu
from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.kernels.config_text import config_from_name
from outblas.kernels.cost.cost_model import predict_many
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import surely_illegal, why_illegal
from outblas.kernels.same_object import SameObject
from outblas.predict.features import Features, candidate_features
from outblas.predict.posterior import DAMAGED, Floats, Regressor, read_arrays, single
from outblas.records.library_row import LibraryChoice

#: Number of features of an answer.
ANSWER_FEATURES = 10
#: Algorithm of cuBLASLt's kernels for Hopper. It answers for aligned rows.
_HOPPER_ALGORITHM = 66
#: Tiles 1 to 35 of cublasLtMatmulTile_t (cublasLt.h of CUDA 13), rows x columns of the column-major output.
_FIRST_TILES = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 "
    "128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 "
    "256x32"
)
#: The other tiles follow two rules: steps of rows and columns, and the largest area of a tile.
_TILE_RULES = ((8, 64, 49152), (64, 8, 65536))
_LARGEST_EXTENT = 768
#: Columns of K in a stage of cuBLASLt's kernels for Hopper.
_STAGE_K = 64


def answer_features(problem: Problem, answer: str, gpu: Gpu) -> Features:
    """Return the features of a heuristic's first answer, float32[10], each of order one.

    The first two are flags: a readable answer, and cuBLASLt's algorithm for Hopper. Then come log2 of tile rows, tile
    columns, parts of K and waves. Three shares follow: waves over whole waves, SMs that the first wave uses, and the
    used part of the tiles. The last is log2 of the steps along K. All are 0 if the answer is empty, unreadable, or
    names an unknown tile.

    Args:
        answer: text of :func:`outblas.runtime.cublas.describe`, e.g. ``id=66 tile=10 splitk=1 ...``; empty: unknown.
    """
    fields = answer_fields(answer)
    tile = _tiles().get(fields.get("tile", 0))
    if tile is None:
        return np.zeros(ANSWER_FEATURES, dtype=np.float32)
    rows, columns = tile
    parts = max(1, fields.get("splitk", 1))
    # cuBLASLt computes the transpose: its rows are columns of our output.
    tiles = math.ceil(problem.n / rows) * math.ceil(problem.m / columns)
    waves = tiles * parts / gpu.sms
    values = [1.0, float(fields.get("id") == _HOPPER_ALGORITHM)]
    values += [math.log2(rows) / 4, math.log2(columns) / 4, math.log2(parts) / 2, math.log2(waves) / 4]
    values += [waves / math.ceil(waves), min(1.0, waves), problem.m * problem.n / (tiles * rows * columns)]
    values += [math.log2(max(1.0, problem.k / (_STAGE_K * parts))) / 4]
    return np.array(values, dtype=np.float32)


def answer_fields(answer: str) -> dict[str, int]:
    """Return name -> number of the words ``name=number`` of an answer; other words are skipped."""
    pairs = (word.partition("=") for word in answer.split())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


@functools.cache
def _tiles() -> dict[int, tuple[int, int]]:
    """Return number -> (rows, columns) of cublasLtMatmulTile_t."""
    found = [(int(rows), int(columns)) for rows, columns in (word.split("x") for word in _FIRST_TILES.split())]
    known = set(found)
    for step_rows, step_columns, area in _TILE_RULES:
        for rows in range(step_rows, _LARGEST_EXTENT + 1, step_rows):
            for columns in range(step_columns, _LARGEST_EXTENT + 1, step_columns):
                if rows * columns <= area and (rows, columns) not in known:
                    found.append((rows, columns))
                    known.add((rows, columns))
    return dict(enumerate(found, 1))


FORMAT = 3
#: torch computes a product whose N and K are multiples of the first and whose floor exceeds the second (us).
REGULAR_MULTIPLE, REGULAR_US = 64, 100.0
#: The most kernels whose speed-up is predicted, and the longest time among them by the ranking model, as a multiple of
#: the shortest. Recordings measured the kernels within this multiple.
MAX_LIKELIEST, WITHIN = 64, 1.35
#: Rankings that are kept.
MAX_RANKINGS = 512
#: Tiles by whose waves cuBLAS' kernels are guessed.
_TILES = ((64, 64), (128, 128), (128, 256), (64, 256), (256, 128))
#: Largest power of two that is looked for in an extent.
_ALIGNED = 256


@dataclass(frozen=True)
class BoundedNets:
    """Fitted nets that predict speed-ups, and the bound that a prediction must clear.

    Attributes:
        nets: predicts the natural logarithm of a speed-up.
        margin: least lower bound of a predicted speed-up for a choice, as a ratio, e.g. 1.04.
        sure: number of standard deviations from the prediction down to that bound, where rows are aligned.
        sure_unaligned: the same for problems with unaligned rows, of which predictions are less exact.
        about: data and date of the fit.
    """

    nets: Regressor
    margin: float
    sure: float
    sure_unaligned: float
    about: str = ""
    #: Version of the files, folder of the packaged ones, and their name in errors.
    version: ClassVar[int]
    folder: ClassVar[str]
    words: ClassVar[str]

    @classmethod
    @functools.cache
    def load(cls, gpu_name: str) -> Self:
        """Load the packaged model of a GPU, or of the nearest one of its architecture.

        The nets' inputs hold the GPU's rates, so a model serves more GPUs than its own.

        Args:
            gpu_name: name of a GPU description, e.g. ``"h200"``; case matters.

        Raises:
            UsageError: the package has no model for it.
            RecordError: the file has another version, or is damaged.
        """
        path = data_of_architecture(gpu_name, cls.folder)
        if path is None:
            expected = "a GPU model with packaged data"
            raise UsageError(f"no {cls.words} for {gpu_name}", expected, "run outblas fit any-shape")
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, data: bytes, name: str = "") -> Self:
        """Read a model from the bytes of a file that :meth:`save` wrote.

        Raises:
            RecordError: the data have another version, are damaged, or hold nets of other inputs.
        """
        try:
            arrays = read_arrays(data)
            version = int(single(arrays, "format"))
            if version != cls.version:
                raise ValueError(f"format {version}")
            nets = Regressor.from_arrays(arrays)
            # Raise ValueError where the nets do not have a number of inputs, or do not fit each other.
            wide = cls.input_count()
            sizes = [wide, *(w.shape[2] for w in nets.weights)]
            right = len(nets.mean) == len(nets.scale) == wide and sizes[-1] == 1
            for i, (w, b) in enumerate(zip(nets.weights, nets.biases, strict=True)):
                right = right and w.shape[1] == sizes[i] and b.shape[1:] == (1, w.shape[2]) and len(w) == len(b)
            if not right:
                raise ValueError(f"nets have {len(nets.mean)} inputs, not {wide}")
            margin, sure, unaligned = (float(single(arrays, field)) for field in ("margin", "sure", "sure_unaligned"))
            return cls(nets, margin, sure, unaligned, str(single(arrays, "about")), **cls.more_fields(arrays))
        except DAMAGED as error:
            wrong, do = f"{name or 'the ' + cls.words} cannot be read ({error})", "reinstall the package, or recreate"
            raise RecordError(wrong, f"format {cls.version}", f"{do} the file with: outblas fit any-shape") from error

    @classmethod
    def input_count(cls) -> int:
        raise NotImplementedError

    @classmethod
    def more_fields(cls, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return a subclass's own fields from the arrays of a file."""
        return {}

    def more_arrays(self) -> dict[str, Any]:
        """Return the arrays of a subclass's own fields."""
        return {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file that :meth:`parse` reads. A file at ``path`` is replaced as a whole or not at all.

        ``path`` is taken as it is, without an added suffix.

        Raises:
            RecordError: the disk refuses.
        """
        numbers = {"margin": self.margin, "sure": self.sure, "sure_unaligned": self.sure_unaligned}
        arrays = {"format": self.version, **self.more_arrays(), **numbers, "about": self.about, **self.nets.to_arrays()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        write_atomic(Path(path), buffer.getvalue())

    def surest(self, problem: Problem, gain: Floats, deviation: Floats) -> tuple[int, float, float] | None:
        """Return (index, lower bound, deviations below) of the highest lower bound; None: it is below the margin.

        Args:
            gain: predicted natural logs of speed-ups, one or more.
        """
        sure = self.sure if problem.rows_aligned else self.sure_unaligned
        low = gain - sure * deviation
        best = int(low.argmax())
        # nor what is no number
        return (best, float(low[best]), sure) if low[best] >= math.log(self.margin) else None


@dataclass(frozen=True)
class AnyShapeModel(BoundedNets):
    """A fitted model of each kernel's speed-up over torch.matmul.

    Attributes:
        kernels: the kernels for any shape, which ship in both layouts and dtypes.
    """

    kernels: tuple[KernelConfig, ...] = ()
    version, folder, words = FORMAT, "any_shape", "unlisted-shape data"

    @classmethod
    def input_count(cls) -> int:
        return network_inputs(Problem(8, 8, 8), [], reference_gpu()).shape[1]  # any GPU has as many

    @classmethod
    def more_fields(cls, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"kernels": tuple(config_from_name(str(name)) for name in arrays["kernels"])}

    def more_arrays(self) -> dict[str, Any]:
        return {"kernels": np.array([config_name(c) for c in self.kernels])}

    @staticmethod
    def kernels_of(data: bytes) -> tuple[KernelConfig, ...]:
        """Return the kernels of a file that :meth:`save` wrote, also if its nets have other inputs than today's.

        Raises:
            RecordError: the data are damaged.
        """
        try:
            return tuple(config_from_name(str(each)) for each in read_arrays(data)["kernels"])
        except DAMAGED as error:
            wrong = f"the unlisted-shape data cannot be read ({error})"
            raise RecordError(wrong, "a file from outblas fit any-shape", "move the file elsewhere") from error

    def offered(self, launch: Launch, installed: Iterable[KernelConfig] = ()) -> tuple[KernelConfig, ...]:
        """Return the kernels on offer for a launch option: those for any shape, then the others, each once.

        Args:
            launch: launch option that the call allows; kernels that need more are left out.
        """
        return tuple(c for c in dict.fromkeys((*self.kernels, *installed)) if launch_allows(launch, c))

    def predict(
        self, problem: Problem, gpu: Gpu, offered: Sequence[KernelConfig], answer: str = ""
    ) -> tuple[tuple[KernelConfig, ...], Floats, Floats]:
        """Predict the likeliest kernels' speed-ups over torch.matmul.

        The last results are kept, as learning asks for those of choices.

        Args:
            offered: kernels of :meth:`offered`, legal or not; the sequence must not change later.
            answer: first answer of cuBLASLt's heuristic, as for :func:`network_inputs`.

        Returns:
            (kernels of :func:`likeliest`, natural log of each one's speed-up, its standard deviation); float64[kernels]
            each.
        """
        return _predicted(SameObject(self), problem, SameObject(offered), gpu, answer)

    def choose(
        self, problem: Problem, gpu: Gpu, offered: Sequence[KernelConfig], answer: str = ""
    ) -> LibraryChoice | None:
        """Choose a kernel for ``problem``.

        Args:
            offered: kernels of :meth:`offered`, legal or not.
            answer: first answer of cuBLASLt's heuristic, as for :func:`network_inputs`.

        Returns:
            The kernel, its predicted speed-up over torch.matmul, and the bounds some standard deviations from it.
            None: leave the product to torch. No kernel is legal, or the best lower bound is below ``margin``. The same
                holds for :func:`is_left_to_torch` and any accumulator but fp32.
        """
        if is_left_to_torch(problem, gpu) or problem.acc != "fp32":
            return None
        configs, gain, deviation = self.predict(problem, gpu, offered, answer)
        if not configs:
            return None
        if (surest := self.surest(problem, gain, deviation)) is None:
            return None
        best, low, sure = surest
        high = gain[best] + sure * deviation[best]
        return LibraryChoice(configs[best], *(float(np.exp(x)) for x in (gain[best], low, high)))


def likeliest(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> list[KernelConfig]:
    """Return the legal kernels that the ranking model predicts to be fastest, fastest first.

    They are at most 64, all within 1.35 times the shortest predicted time. Legality is checked in the order of the
    predictions, so few checks are needed. The last rankings are kept: learning asks for those of choices.

    Args:
        configs: kernels, legal or not, in a sequence that does not change later.
    """
    return list(_likeliest(problem, SameObject(configs), gpu)[0])


@functools.lru_cache(maxsize=MAX_RANKINGS)
def _likeliest(problem: Problem, same: SameObject, gpu: Gpu) -> tuple[tuple[KernelConfig, ...], Floats]:
    """Return the kernels of :func:`likeliest` and their predicted times, microseconds, float64[kernels]."""
    configs: Sequence[KernelConfig] = same.value
    with np.errstate(all="ignore"):  # the time of an illegal kernel has no meaning
        times = predict_many(problem, configs, gpu)
    found: list[int] = []
    longest = math.inf
    ranked = np.argsort(times, kind="stable")
    if isinstance(configs, tuple):  # the kernels on offer, most of which no odd extents can use
        ranked = ranked[~surely_illegal(problem, configs, gpu)[ranked]]
    for index in ranked:
        if not times[index] <= longest or len(found) == MAX_LIKELIEST:
            break
        config = configs[index]
        # Kernels for unaligned rows are legal for all rows, but no fit has seen them there.
        if problem.rows_aligned and FAMILIES[config.family].for_unaligned_rows or why_illegal(problem, config, gpu):
            continue
        longest = longest if found else WITHIN * float(times[index])
        found.append(index)
    return tuple(configs[i] for i in found), times[found]


@functools.lru_cache(maxsize=MAX_RANKINGS)
def _predicted(
    model: SameObject, problem: Problem, offered: SameObject, gpu: Gpu, answer: str
) -> tuple[tuple[KernelConfig, ...], Floats, Floats]:
    configs, times = _likeliest(problem, offered, gpu)
    if not configs:
        return (), np.empty(0), np.empty(0)
    nets: Regressor = model.value.nets
    return configs, *nets.predict(network_inputs(problem, configs, gpu, answer, times))


def is_narrow(problem: Problem) -> bool:
    """Return True if N or K is too small: cuBLAS has other kernels for N = 1 and for K below 8."""
    return problem.n == 1 or problem.k < ROW_ALIGN_BYTES // ELEMENT_BYTES


def is_left_to_torch(problem: Problem, gpu: Gpu) -> bool:
    """Return True if no kernel is chosen: N or K is too small (:func:`is_narrow`), or the product is long and regular.

    N and K of a regular product are multiples of 64. Long ones gain little: 1.002 in the suites, from 1e11 FLOP on. The
    test saves the host's time for prompts of any length.
    """
    regular = problem.n % REGULAR_MULTIPLE == 0 and problem.k % REGULAR_MULTIPLE == 0
    return is_narrow(problem) or (regular and floor_us(problem, gpu) > REGULAR_US)


def network_inputs(
    problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu, answer: str = "", times: Floats | None = None
) -> Features:
    """Return the inputs of the nets, float32[len(configs), F], one row per kernel.

    A row is :func:`shape_features`, then ``answer_features``, then the kernel's ``candidate_features``. The last of
    these is left out, as it depends on the other kernels. Then come the flag of early loads, and the logarithm of the
    ranking model's time over the roofline floor.

    Args:
        answer: first answer of cuBLASLt's heuristic (:func:`outblas.runtime.cublas.describe`); empty: unknown.
        times: the ranking model's times, microseconds, float64[len(configs)]; None: they are predicted here.
    """
    times = predict_many(problem, configs, gpu) if times is None else times
    shared = np.concatenate([shape_features(problem, gpu), answer_features(problem, answer, gpu)])
    parts = (
        np.broadcast_to(shared, (len(configs), len(shared))),
        candidate_features(problem, configs, gpu)[:, :-1],
        np.array([config.early for config in configs], dtype=np.float32)[:, None],
        np.log(times / floor_us(problem, gpu))[:, None],
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
