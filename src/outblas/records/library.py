"""The tuned winners of one GPU: for every problem the kernel to use, or that the baseline is to be used.

Rule of install: a kernel is worth it if the lower bound of its speed-up over the fastest baseline is above
:data:`INSTALL_ABOVE`; or if it is above :data:`LEVEL_ABOVE` and the kernel is faster than torch.matmul by that margin.
Where none is, the row says so and names the baseline, whose algorithm a call then runs (:attr:`LibraryRow.fallback`).
A row has two winners, one without programmatic dependent launch and one where it is allowed (which may be the same
kernel), and sometimes a third, for a B that is promised to be constant.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name, launch_allows
from outblas.core.errors import ConfigError, OutblasError, RecordError, ToolchainMissing
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import write_json
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC
from outblas.kernels.config_text import config_from_name

if TYPE_CHECKING:
    from pydantic import BaseModel

FORMAT = 1
#: The same kernel on the same GPU differs by about a percent from process to process, which an interval
#: from one process cannot know: a win has to clear that too.
INSTALL_ABOVE = 1.01
#: A kernel whose lower bound is above this is level with the fastest baseline.
LEVEL_ABOVE = 0.99
#: Autotuned cuBLASLt within this of the fastest baseline is named beside it.
NEARLY_FASTEST_WITHIN = 1.01


@dataclass(frozen=True)
class LibraryChoice:
    """An installed kernel and its paired speed-up over the row's baseline (95% interval low..high)."""

    config: KernelConfig
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class LibraryRow:
    """The decision for one problem.

    Attributes:
        baseline: name of the fastest baseline ("" if none was timed). baseline_detail: its algorithm.
        source: where the figures come from (``cuda:0``, ``replay:h200``).
        plain: winner without PDL, None: use the baseline.
        pdl: winner where PDL is allowed, None: use the baseline.
        lt_auto_detail: as baseline_detail, of autotuned cuBLASLt where another baseline was the fastest, but not by
            more than 1%; else "".
        weights: winner where B is promised to be constant, too (:data:`outblas.core.config.Launch`); None: as ``pdl``.

    Raises:
        ConfigError: a kernel that needs constant weights in the place of one that must not.
    """

    problem: Problem
    baseline: str = ""
    baseline_detail: str = ""
    source: str = ""
    plain: LibraryChoice | None = None
    pdl: LibraryChoice | None = None
    lt_auto_detail: str = ""
    weights: LibraryChoice | None = None

    def __post_init__(self) -> None:
        for choice in (self.plain, self.pdl):
            if choice is not None and choice.config.early:
                raise ConfigError(
                    f"{self.problem.key} has {config_name(choice.config)} for operands that may still be written",
                    "a kernel without early loads of B",
                    "install it for constant weights only",
                )

    def choice(self, launch: Launch) -> LibraryChoice | None:
        """The winner where ``launch`` is allowed, None: use the baseline."""
        if launch == "weights" and self.weights is not None:
            return self.weights
        return self.plain if launch == "plain" else self.pdl

    @property
    def algorithm(self) -> str:
        """What autotuning cuBLASLt chose, unless it is slower than the fastest baseline; or ""."""
        return self.baseline_detail if self.baseline == LT_AUTO else self.lt_auto_detail

    @property
    def fallback(self) -> str:
        """The algorithm of cuBLASLt that a product takes where no kernel is used, in the words of
        :func:`outblas.runtime.cublas.describe`; "": torch.matmul.

        The fastest baseline's, where that was cuBLASLt; else autotuning's choice, which costs the host less than
        torch.matmul does, unless it was left out of the row for being slower (see :func:`is_nearly_fastest`).
        """
        detail = self.baseline_detail if self.baseline == LT_HEURISTIC else self.algorithm
        return re.sub(r"^index=\S+ ", "", detail)  # the place in a list that another cuBLAS orders otherwise


def is_nearly_fastest(auto_us: float | None, fastest_us: float | None) -> bool:
    """Whether autotuned cuBLASLt is as good as the fastest baseline, so that a row names it; False without its time."""
    return auto_us is not None and fastest_us is not None and auto_us <= NEARLY_FASTEST_WITHIN * fastest_us


def choose_kernel(evaluations: Iterable[Evaluation], launch: Launch) -> LibraryChoice | None:
    """The kernel to install where ``launch`` is allowed: of the proven ones that are worth it (see the module's text)
    the highest lower bound."""
    best: LibraryChoice | None = None
    for e in evaluations:
        if e.status is not Status.PASSED or e.speedup is None or not launch_allows(launch, e.template):
            continue
        found = LibraryChoice(e.template, e.speedup.ratio, e.speedup.low, e.speedup.high)
        worth = found.low > INSTALL_ABOVE or (found.low > LEVEL_ABOVE and _over_torch(e) > INSTALL_ABOVE)
        if worth and (best is None or _rank(found) > _rank(best)):
            best = found
    return best


def _over_torch(e: Evaluation) -> float:
    """Speed-up over torch.matmul by the medians of the same rounds; 0 where either was not timed."""
    torch = e.baselines_us.get("torch")
    return torch / e.timing.median_us if torch is not None and e.timing is not None else 0.0


def _rank(choice: LibraryChoice) -> tuple[float, float, str]:
    return choice.low, choice.speedup, config_name(choice.config)


@dataclass(frozen=True)
class Library:
    """Rows of one GPU (short name, e.g. ``h200``), at most one per problem."""

    gpu: str
    rows: Sequence[LibraryRow]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _by_problem(self) -> dict[Problem, LibraryRow]:
        return {row.problem: row for row in self.rows}

    def lookup(self, problem: Problem) -> LibraryRow | None:
        """The row of a problem, None if it was not tuned."""
        return self._by_problem.get(problem)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launch options in which rows differ: the third only if some row has a kernel for constant weights."""
        return LAUNCHES if any(row.weights is not None for row in self.rows) else LAUNCHES[:2]

    def geomean(self, launch: Launch) -> float:
        """Geometric mean of the speed-ups, where a row that uses the baseline counts as 1."""
        if not self.rows:
            return 1.0
        choices = (row.choice(launch) for row in self.rows)
        return math.exp(sum(math.log(c.speedup) for c in choices if c) / len(self.rows))

    def fallbacks(self, launch: Launch) -> int:
        """How many rows use the baseline."""
        return sum(row.choice(launch) is None for row in self.rows)

    def installed(self) -> dict[Problem, list[KernelConfig]]:
        """The kernels of every row, launch options in their order."""
        return {row.problem: [c.config for c in map(row.choice, LAUNCHES) if c] for row in self.rows}

    def restricted_to(self, problems: Iterable[Problem]) -> Library:
        """The rows of some problems, those that there are."""
        return replace(self, rows=tuple(row for p in problems if (row := self.lookup(p)) is not None))

    def without_kernels(self, kernels: Iterable[tuple[Problem, Launch]]) -> Library:
        """The library less the kernels of these (problem, launch option): there the baseline is used, or, instead of a
        kernel for constant weights, the row's for PDL."""
        lost = set(kernels)

        def rest(row: LibraryRow) -> LibraryRow:
            left: dict[str, Any] = {n: None for n in LAUNCHES if (row.problem, n) in lost}
            return replace(row, **left)

        return replace(self, rows=tuple(map(rest, self.rows)))

    def sha(self) -> str:
        """SHA-256 (hex) of the content: equal hashes, equal libraries."""
        return self._sha

    @cached_property
    def _sha(self) -> str:
        return hashlib.sha256(json.dumps(self._to_json(), sort_keys=True).encode()).hexdigest()

    def _to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "gpu": self.gpu,
            "rows": [_row_to_json(row) for row in self.rows],
            "provenance": dict(self.provenance),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file; by atomic rename, so that readers see the old file or the new one.

        Raises:
            RecordError: it could not be written; a file of that name is then as it was.
        """
        write_json(Path(path), self._to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Library:
        """Read a library file.

        Raises:
            RecordError: the file is missing, truncated, of another version or holds what no release writes.
        """
        try:
            text = read_plain_file(Path(path)).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "not UTF-8 text"
            raise RecordError(
                f"library {path} cannot be read ({reason})", "a library file", "make one with: outblas tune"
            ) from error
        return _parse(text, str(path))

    @classmethod
    def packaged(cls, gpu: str, missing_ok: bool = False) -> Library:
        """The library that comes with the package for a GPU (short name); empty if ``missing_ok``.

        Raises:
            RecordError: there is none for this GPU and ``missing_ok`` is false.
        """
        file = resources.files("outblas") / "data" / "libraries" / f"{gpu}.json"
        if file.is_file():
            return _parse(file.read_text(encoding="utf-8"), str(file))
        if missing_ok:
            return cls(gpu, ())
        raise RecordError(
            f"no packaged library for GPU {gpu!r}",
            "a GPU that this release was tuned on",
            "make one with: outblas tune",
        )


def _row_to_json(row: LibraryRow) -> dict[str, Any]:
    data: dict[str, Any] = {"problem": row.problem.key}
    choices = {"": row.plain, "_pdl": row.pdl, **({} if row.weights is None else {"_weights": row.weights})}
    for suffix, choice in choices.items():
        data[f"config{suffix}"] = None if choice is None else config_name(choice.config)
        for figure in ("speedup", "low", "high"):
            data[f"{figure}{suffix}"] = None if choice is None else getattr(choice, figure)
    data |= {"baseline": row.baseline, "baseline_detail": row.baseline_detail, "source": row.source}
    return {**data, "lt_auto_detail": row.lt_auto_detail} if row.lt_auto_detail else data


def _parse(text: str, where: str) -> Library:
    try:
        import pydantic
    except ImportError as error:
        raise ToolchainMissing("pydantic is not installed", "pydantic", "pip install pydantic") from error
    wrong = f"library {where} cannot be used"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(wrong, "a whole JSON file", f"it is truncated or damaged ({error}); make it again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise RecordError(
            f"library {where} is of format {found!r}",
            f"format {FORMAT}",
            "use the release that wrote it, or tune again",
        )
    try:
        file: Any = _file_model().model_validate(data)
        configs: dict[str, KernelConfig] = {}
        rows = tuple(_row_from_file(row, configs) for row in file.rows)
    except (pydantic.ValidationError, OutblasError) as error:
        reason = str(error)
        if isinstance(error, pydantic.ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise RecordError(f"{wrong} ({reason})", f"a library of format {FORMAT}", "tune again") from error
    library = Library(file.gpu, rows, file.provenance)
    if len(library._by_problem) != len(rows):
        raise RecordError(f"{wrong} (a problem has two rows)", "one row per problem", "tune again")
    return library


def _row_from_file(row: Any, configs: dict[str, KernelConfig]) -> LibraryRow:
    def choice(suffix: str) -> LibraryChoice | None:
        name = getattr(row, f"config{suffix}")
        if name is None:
            return None
        figures = [getattr(row, f"{figure}{suffix}") for figure in ("speedup", "low", "high")]
        if None in figures:
            raise RecordError(f"{row.problem} has a kernel without figures", "speedup, low and high", "tune again")
        if name not in configs:
            configs[name] = config_from_name(name)
        return LibraryChoice(configs[name], *figures)

    named = row.baseline, row.baseline_detail, row.source
    return LibraryRow(
        Problem.from_key(row.problem), *named, choice(""), choice("_pdl"), row.lt_auto_detail, choice("_weights")
    )


@lru_cache(maxsize=1)
def _file_model() -> type[BaseModel]:
    """The schema of the file; pydantic is met at this boundary only."""
    from pydantic import BaseModel, ConfigDict, PositiveFloat

    class LibraryRow(BaseModel):
        model_config = ConfigDict(allow_inf_nan=False)

        problem: str
        config: str | None
        speedup: PositiveFloat | None
        low: PositiveFloat | None
        high: PositiveFloat | None
        config_pdl: str | None
        speedup_pdl: PositiveFloat | None
        low_pdl: PositiveFloat | None
        high_pdl: PositiveFloat | None
        baseline: str
        baseline_detail: str
        source: str
        lt_auto_detail: str = ""
        config_weights: str | None = None
        speedup_weights: PositiveFloat | None = None
        low_weights: PositiveFloat | None = None
        high_weights: PositiveFloat | None = None

    class LibraryFile(BaseModel):
        format: int
        gpu: str
        rows: list[LibraryRow]
        provenance: dict[str, Any]

    return LibraryFile
