"""The library of one GPU: for every tuned problem the kernel to use, or the decision to use the baseline.

Rule of installation: a kernel needs a lower bound of its speed-up over the fastest baseline above
:data:`INSTALL_ABOVE`. A lower bound above :data:`LEVEL_ABOVE` is enough if the kernel is also faster than torch.matmul
by that first margin. If no kernel qualifies, the row names the baseline, whose algorithm a call then runs
(:attr:`LibraryRow.fallback`).

A row has two winners: one without programmatic dependent launch (PDL) and one with it; both may be the same kernel.
Some rows have a third winner, for a B that the caller promises to be constant.
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
from outblas.core.files import json_text, write_json
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC
from outblas.kernels.config_text import config_from_name

if TYPE_CHECKING:
    from pydantic import BaseModel

FORMAT = 1
#: The speed-up of a kernel differs by about 1% between processes. An interval from one process does not show this, so a
#: win must exceed it too.
INSTALL_ABOVE = 1.01
#: A kernel with a lower bound above this is level with the fastest baseline.
LEVEL_ABOVE = 0.99


@dataclass(frozen=True)
class LibraryChoice:
    """An installed kernel.

    Attributes:
        config: the kernel.
        speedup: paired speed-up over the row's baseline.
        low: lower end of the speed-up's 95% interval.
        high: upper end of the interval.
    """

    config: KernelConfig
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class LibraryRow:
    """The decision for one problem.

    Attributes:
        problem: the problem.
        baseline: name of the fastest baseline; empty if none was timed.
        baseline_detail: algorithm of that baseline. Empty if it is a cuBLASLt one that is level with torch.matmul.
        source: source of the times, e.g. ``cuda:0`` or ``replay:h200``.
        plain: winner without PDL; None: use the baseline.
        pdl: winner if PDL is allowed; None: use the baseline.
        lt_auto_detail: algorithm of autotuned cuBLASLt, if that was faster than torch.matmul, and another baseline was
            the fastest; else empty.
        weights: winner if B is also promised to be constant (:data:`outblas.core.config.Launch`); None: use ``pdl``.

    Raises:
        ConfigError: ``plain`` or ``pdl`` is a kernel that needs constant weights.
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
        """Return the winner for a caller who allows ``launch``; None: use the baseline.

        Example: ``choice("weights")`` is ``weights``, or ``pdl`` if that is None. ``choice("pdl")`` is ``pdl``, and
        ``choice("plain")`` is ``plain``.
        """
        if launch == "weights" and self.weights is not None:
            return self.weights
        return self.plain if launch == "plain" else self.pdl

    @property
    def algorithm(self) -> str:
        """Return the algorithm that autotuning cuBLASLt chose. Empty if it is not faster than torch.matmul, or not
        timed.
        """
        return self.baseline_detail if self.baseline == LT_AUTO else self.lt_auto_detail

    @property
    def fallback(self) -> str:
        """Return the cuBLASLt algorithm that runs if no kernel is used; an empty string means torch.matmul.

        The text is in the form of :func:`outblas.runtime.cublas.describe`. If the fastest baseline is a cuBLASLt one,
        it is that baseline's algorithm. Otherwise it is :attr:`algorithm`. Where torch.matmul was level, it is empty.
        """
        detail = self.baseline_detail if self.baseline == LT_HEURISTIC else self.algorithm
        return re.sub(r"^index=\S+ ", "", detail)  # drop the list index: it depends on the version


def runs_instead_of_torch(algorithm_us: float | None, torch_us: float | None) -> bool:
    """Return whether a fall-back runs an algorithm of cuBLASLt: if that is over 1% faster than torch.matmul.

    Where both are level, torch.matmul runs. False if ``algorithm_us`` is None, else True if ``torch_us`` is.

    Args:
        algorithm_us: time of the algorithm, microseconds.
        torch_us: time of torch.matmul, microseconds.
    """
    return algorithm_us is not None and (torch_us is None or torch_us > INSTALL_ABOVE * algorithm_us)


def choose_kernel(
    evaluations: Iterable[Evaluation], launch: Launch, above: float = INSTALL_ABOVE
) -> LibraryChoice | None:
    """Return the kernel to install for callers who allow ``launch``; None if no kernel qualifies.

    The highest lower bound wins among those of :func:`qualified_kernels`.

    Args:
        evaluations: evaluations of template candidates on one problem.
        launch: ``plain``, ``pdl`` or ``weights``.
        above: the bound; 1.01 by default (:data:`INSTALL_ABOVE`).
    """
    return max(qualified_kernels(evaluations, launch, above), key=_rank, default=None)


def qualified_kernels(evaluations: Iterable[Evaluation], launch: Launch, above: float) -> list[LibraryChoice]:
    """Return the kernels that may be installed for callers who allow ``launch``.

    Only evaluations that passed and that the launch option allows are candidates. One qualifies if the lower bound of
    its speed-up is above (not equal to) ``above``. A bound above :data:`LEVEL_ABOVE` is enough if the kernel is also
    faster than torch.matmul by more than 1%.

    Args:
        evaluations: evaluations of template candidates on one problem.
        launch: ``plain``, ``pdl`` or ``weights``.
        above: the bound.
    """
    found = []
    for e in evaluations:
        if e.status is not Status.PASSED or e.speedup is None or not launch_allows(launch, e.template):
            continue
        choice = LibraryChoice(e.template, e.speedup.ratio, e.speedup.low, e.speedup.high)
        if choice.low > above or (choice.low > LEVEL_ABOVE and _over_torch(e) > INSTALL_ABOVE):
            found.append(choice)
    return found


def _over_torch(e: Evaluation) -> float:
    """Return the speed-up over torch.matmul by the medians of the same rounds; 0 if either was not timed."""
    torch = e.baselines_us.get("torch")
    return torch / e.timing.median_us if torch is not None and e.timing is not None else 0.0


def _rank(choice: LibraryChoice) -> tuple[float, float, str]:
    """Return a sort key: lower bound, then speed-up, then name."""
    return choice.low, choice.speedup, config_name(choice.config)


@dataclass(frozen=True)
class Library:
    """The rows of one GPU.

    Attributes:
        gpu: short name, e.g. ``h200``.
        rows: at most one row per problem.
        provenance: origin of the figures; JSON values.
    """

    gpu: str
    rows: Sequence[LibraryRow]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _by_problem(self) -> dict[Problem, LibraryRow]:
        return {row.problem: row for row in self.rows}

    def lookup(self, problem: Problem) -> LibraryRow | None:
        """Return the row of a problem; None if it was not tuned."""
        return self._by_problem.get(problem)

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Return the launch options in which rows differ; ``weights`` only if a row has a kernel for it."""
        return LAUNCHES if any(row.weights is not None for row in self.rows) else LAUNCHES[:2]

    def geomean(self, launch: Launch) -> float:
        """Return the geometric mean of the speed-ups. A row that uses the baseline counts as 1; no rows give 1."""
        if not self.rows:
            return 1.0
        choices = (row.choice(launch) for row in self.rows)
        return math.exp(sum(math.log(c.speedup) for c in choices if c) / len(self.rows))

    def fallbacks(self, launch: Launch) -> int:
        """Return the number of rows without a kernel for ``plain``, ``pdl`` or ``weights``; they use the baseline."""
        return sum(row.choice(launch) is None for row in self.rows)

    def installed(self) -> dict[Problem, list[KernelConfig]]:
        """Return problem -> installed kernels, plain, PDL and constant weights in this order; a kernel may occur
        several times.

        A row that falls back has an empty list.
        """
        return {row.problem: [c.config for c in map(row.choice, LAUNCHES) if c] for row in self.rows}

    def restricted_to(self, problems: Iterable[Problem]) -> Library:
        """Return the library with only the rows of some problems, in the order of ``problems``; those without a row are
        skipped.
        """
        return replace(self, rows=tuple(row for p in problems if (row := self.lookup(p)) is not None))

    def sha(self) -> str:
        """Return the SHA-256 (64 hex digits) of the content; equal libraries have equal hashes."""
        return self._sha

    @cached_property
    def _sha(self) -> str:
        return hashlib.sha256(json.dumps(self._to_json(), sort_keys=True).encode()).hexdigest()

    def _to_json(self) -> dict[str, Any]:
        rows = [_row_to_json(row) for row in self.rows]
        return {"format": FORMAT, "gpu": self.gpu, "rows": rows, "provenance": dict(self.provenance)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file atomically: readers see the old file or the new one.

        Raises:
            RecordError: the disk refuses. The old file is kept.
        """
        write_json(Path(path), self._to_json())

    def to_bytes(self) -> bytes:
        """Return the content of the library's file."""
        return json_text(self._to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Library:
        """Read a library file.

        Raises:
            RecordError: the file is missing, truncated, of another version, or has invalid content.
            ToolchainMissing: pydantic is not installed.
        """
        try:
            text = read_plain_file(Path(path)).decode()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror or error) if isinstance(error, OSError) else "not UTF-8 text"
            raise RecordError(
                f"library {path} cannot be read ({reason})", "a library file", "make one with: outblas tune"
            ) from error
        return parse_library(text, str(path))

    @classmethod
    def packaged(cls, gpu: str, missing_ok: bool = False) -> Library:
        """Return the library of a GPU that comes with the package.

        Args:
            gpu: short name of the GPU.
            missing_ok: return an empty library if the package has none.

        Raises:
            RecordError: the package has no library for this GPU and ``missing_ok`` is False.
        """
        file = resources.files("outblas") / "data" / "libraries" / f"{gpu}.json"
        if file.is_file():
            return parse_library(file.read_text(encoding="utf-8"), str(file))
        if missing_ok:
            return cls(gpu, ())
        raise RecordError(
            f"no packaged library for GPU {gpu!r}",
            "a GPU that this release was tuned on",
            "make one with: outblas tune",
        )


def _row_to_json(row: LibraryRow) -> dict[str, Any]:
    """Return a row as the file spells it: one set of columns per launch option; ``weights`` only if present."""
    data: dict[str, Any] = {"problem": row.problem.key}
    choices = {"": row.plain, "_pdl": row.pdl, **({} if row.weights is None else {"_weights": row.weights})}
    for suffix, choice in choices.items():
        data[f"config{suffix}"] = None if choice is None else config_name(choice.config)
        for figure in ("speedup", "low", "high"):
            data[f"{figure}{suffix}"] = None if choice is None else getattr(choice, figure)
    data |= {"baseline": row.baseline, "baseline_detail": row.baseline_detail, "source": row.source}
    return {**data, "lt_auto_detail": row.lt_auto_detail} if row.lt_auto_detail else data


def parse_library(text: str, where: str) -> Library:
    """Return the library of a file's text; ``where`` names the file in errors.

    Raises:
        RecordError: the content is damaged, of another format, or has a problem twice.
        ToolchainMissing: pydantic is not installed.
    """
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
    """Return a row of the file's model; ``configs`` caches parsed names. Raises RecordError for a kernel without
    figures.
    """

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
    """Return the pydantic schema of the file. Pydantic is imported only here and in :func:`parse_library`."""
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
