"""The result file of whole_models.py: its settings, its rows, and its bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.core.stats import geomean

FORMAT = "outblas-whole-models-2"
#: Parts of a result file beside its format.
_PARTS = {"settings", "models", "tuned", "rows", "bars"}
#: (variant, figure) -> the least geometric mean over a model's steps.
BARS = {("enable", "speedup"): 1.04, ("optimize", "speedup"): 1.10, ("optimize", "speedup_over_merged"): 1.05}
#: No step of these variants may be slower than this.
LEAST = 0.99


class WholeModelsFile:
    """The rows of a result file, one for each model, step and context. Every change is written at once.

    Args:
        path: the file; a new one is made by the first row.
        settings: everything but model, step and variant on which figures depend; JSON values.

    Attributes:
        data: content of the file.

    Raises:
        RecordError: the file exists but is not a result of whole_models.py.
        UsageError: it has other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        empty: dict[str, Any] = {"models": {}, "tuned": {}, "rows": [], "bars": []}
        self.data: dict[str, Any] = {"format": FORMAT, "settings": dict(settings), **empty}
        if not path.exists():
            return
        self.data = read_whole_models(path)
        for name, value in settings.items():
            known = self.data["settings"].get(name)
            if known != value:
                raise UsageError(f"{path} has {name} {known}, not {value}", "the same settings", "give another --out")

    def tuned(self, model: str, arrangement: str) -> dict[str, Any]:
        """Return ``rows``, the numbers of tokens tuned so far, and ``seconds``; :meth:`begin` writes changes of it.

        Args:
            model: name of the model.
            arrangement: of its weights.
        """
        return self.data["tuned"].setdefault(f"{model} {arrangement}", {"rows": [], "seconds": 0.0})

    def begin(self, model: str, layers: int, startup_s: Mapping[str, Mapping[str, float]]) -> None:
        """Enter a model, and write the file. Start-up times of an earlier run are replaced.

        Args:
            model: its name.
            layers: number of its layers.
            startup_s: variant -> part -> seconds that it takes once.

        Raises:
            RecordError: the disk refuses.
        """
        known = self.data["models"].setdefault(model, {"layers": layers, "startup_s": {}})["startup_s"]
        known.update((name, dict(parts)) for name, parts in startup_s.items())
        write_json(self.path, self.data)

    def missing(self, model: str, step: str, context: int, variants: Sequence[str]) -> list[str]:
        """Return the variants of a step that have no figures yet, in the given order."""
        row = self._row(model, step, context)
        return [name for name in variants if row is None or name not in row["variants"]]

    def add(
        self,
        model: str,
        step: str,
        context: int,
        variants: Mapping[str, Any],
        left_out: Mapping[str, str],
        provenance: Mapping[str, Any],
    ) -> None:
        """Add figures of a step, and write the file. Figures that it has already stay.

        Args:
            model: name of the model.
            step: name of the step.
            context: tokens in the cache before it.
            variants: name -> figures.
            left_out: name -> the reason why it has none.
            provenance: of these figures.

        Raises:
            RecordError: the disk refuses.
        """
        left = {"variants": dict(variants), "left_out": dict(left_out), "provenance": [dict(provenance)]}
        self._enter({"model": model, "step": step, "context": context, **left})
        self.data["bars"] = bars(self.data["rows"])
        write_json(self.path, self.data)

    def take(self, other: Path, models: Sequence[str] | None = None) -> None:
        """Add what another result file with the same settings has beyond this one, and write the file.

        Args:
            other: the file, e.g. of a run on another GPU of the machine.
            models: names of the models to take; None: all.

        Raises:
            RecordError: it is no result of whole_models.py, or the disk refuses.
            UsageError: it has other settings, or nothing that this file lacks.
        """
        more = WholeModelsFile(other, self.data["settings"]).data
        wanted = [row for row in more["rows"] if models is None or row["model"] in models]
        new = [row for row in wanted if self.missing(row["model"], row["step"], row["context"], [*row["variants"]])]
        if not new:
            raise UsageError(f"{other} adds nothing to {self.path}", "a row that it lacks", "leave the file out")
        for row in new:
            about, known = more["models"][row["model"]], self.data["models"]
            startup_s = known.setdefault(row["model"], {"layers": about["layers"], "startup_s": {}})["startup_s"]
            startup_s.update((name, parts) for name, parts in about["startup_s"].items() if name not in startup_s)
            self._enter(row)
        taken = {row["model"] for row in new}
        self.data["tuned"] = {k: v for k, v in more["tuned"].items() if k.split()[0] in taken} | self.data["tuned"]
        self.data["bars"] = bars(self.data["rows"])
        write_json(self.path, self.data)

    def _enter(self, new: Mapping[str, Any]) -> None:
        """Add the figures of a row that the file lacks."""
        row = self._row(new["model"], new["step"], new["context"])
        if row is None:
            row = {**new, "variants": {}, "left_out": {}, "provenance": []}
            self.data["rows"].append(row)
        row["variants"].update((name, each) for name, each in new["variants"].items() if name not in row["variants"])
        row["left_out"] = {
            name: reason
            for name, reason in {**row["left_out"], **new["left_out"]}.items()
            if name not in row["variants"]
        }
        row["provenance"] += new["provenance"]

    def _row(self, model: str, step: str, context: int) -> dict[str, Any] | None:
        wanted = (model, step, context)
        return next((row for row in self.data["rows"] if (row["model"], row["step"], row["context"]) == wanted), None)


def read_whole_models(path: Path) -> dict[str, Any]:
    """Return the content of a result file.

    Raises:
        RecordError: it cannot be read, has another format, or lacks a part.
    """
    expected = f"a whole_models.py result in format {FORMAT}, with {', '.join(sorted(_PARTS))}"
    data = read_object(path, expected, "measure it again", format=FORMAT)
    if not data.keys() >= _PARTS:
        raise RecordError(f"{path} is incomplete", expected, "measure it again")
    return data


def by_context(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Return context -> the rows of a model's table: its decode steps with this context, and all prefill steps.

    Args:
        rows: of one model. A prefill has context 0; if there is no other step, so has the table.
    """
    contexts = sorted({row["context"] for row in rows} - {0}) or [0]
    return {each: [row for row in rows if row["context"] in (0, each)] for each in contexts}


def bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars of each model and context: the geometric mean of its steps, the slower ones, and the verdict.

    A step is slower if its speed-up is below :data:`LEAST`. A bar holds for the steps that are measured.
    """
    tables = [
        (model, context, members)
        for model in dict.fromkeys(row["model"] for row in rows)
        for context, members in by_context([row for row in rows if row["model"] == model]).items()
    ]
    found = []
    for (model, context, members), ((variant, figure), bar) in product(tables, BARS.items()):
        measured = {row["step"]: row["variants"].get(variant, {}) for row in members}
        ratios = {step: figures[figure][0] for step, figures in measured.items() if figure in figures}
        if ratios:
            judged = _judged(ratios, bar)
            found.append({"model": model, "context": context, "variant": variant, "figure": figure, **judged})
    return found


def _judged(ratios: Mapping[str, float], bar: float) -> dict[str, Any]:
    """Return the verdict on the speed-ups of a model's steps."""
    mean, slower = geomean(ratios.values()), [step for step, ratio in ratios.items() if ratio < LEAST]
    passed = mean >= bar and not slower
    return {"geomean": mean, "bar": bar, "slower": slower, "steps": len(ratios), "passed": passed}
