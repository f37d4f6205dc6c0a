"""Publish result files: summary.json, the pictures, and every generated block of a page, also those of the code.

A generated block stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. Its text comes from the committed
result files or from the code, and is the same every time.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from drawn_history import DRAWS

from outblas.core.config import KernelConfig, knob_schema, value_text
from outblas.core.errors import OutblasError, RecordError
from outblas.core.files import write_atomic
from outblas.kernels.families.registry import FAMILIES
from outblas.records.result_rows import Row
from outblas.records.results import Result, bench_files, read_result
from outblas.tune.agents import agent_registry
from outblas_lab.compare.compare_result import read_comparison
from outblas_lab.publish.summary import rows_of_results
from pages import notes
from pages.all_rows_table import markdown_table, notes_of_rows
from pages.any_shape_block import NOT_MEASURED, any_shape_text
from pages.blocks import with_block
from pages.card import current_picture
from pages.compare_block import (
    FULL_RECIPE,
    RECIPE,
    across_block,
    across_files,
    compare_block,
    comparison_of,
    recipe_block,
    uncut_block,
)
from pages.compare_block import PICTURE as COMPARE_PICTURE
from pages.compare_picture import compare_svg
from pages.engine_rows import VLLM, engine_rows
from pages.expert_tables import LAYERS, MODEL, PRODUCTS, expert_rows, layers_block, model_block, products_block
from pages.gpu_folders import gpu_folders, name_of_gpu, refuse_files_of_another_gpu
from pages.headline import HeadlineRow, headline_rows, headline_table, short_rows
from pages.headline_picture import headline_svg
from pages.rival_tables import (
    AMPERE,
    CUDA_L2,
    MODEL_STEPS,
    cutlass_table,
    each_table,
    transformer_table,
)
from pages.speedup_picture import speedup_svg
from pages.study_blocks import (
    ANSWERS,
    BUDGETS,
    KNOBS,
    answers_block,
    budgets_block,
    counters_text,
    draws_block,
    knobs_block,
    scale_block,
)
from pages.table_words import table_lines
from pages.weak_spots import gpus_with_library, weak_spots
from pages.whole_models_table import (
    COMPILED_MODELS,
    WHOLE_MODELS,
    vllm_block,
    whole_models_block,
)

PICTURES = Path("docs/img")
HEADLINE_IMAGE = "![Geometric mean of the speed-ups, by use, rival and GPU](../img/headline.svg)"
#: Of ``benchmarks/profile_regimes.py``, beside the result files.
COUNTERS = "ncu.json"


@dataclass(frozen=True)
class Measured:
    """All result files of one GPU, read once."""

    folder: Path

    @functools.cached_property
    def results(self) -> list[Result]:
        """The bench files, by name; an empty list if the GPU has none."""
        return [read_result(path) for path in bench_files(self.folder, missing_ok=True)]

    @functools.cached_property
    def summary(self) -> list[Row]:
        return rows_of_results(self.results)

    @functools.cached_property
    def headline(self) -> list[HeadlineRow]:
        """The rows of the small table and of its picture."""
        return headline_rows(self.folder, self.results)


def publish(folder: Path, root: Path = Path()) -> list[Path]:
    """Write each GPU's ``summary.json``, the pictures and every generated block; return the paths.

    Args:
        folder: result files of the GPU that comes first and has the pictures. The folders of other GPUs lie beside it,
            and their tables follow on the same pages.
        root: folder with README.md and docs/.

    Raises:
        RecordError: a result file cannot be read, is of another GPU than its folder, a page lacks its markers, or the
            disk refuses a file. Everything is computed before anything is written.
    """
    return [write_atomic(path, text.encode()) for path, text in _wanted(Path(folder), Path(root)).items()]


def check_published(folder: Path, root: Path = Path()) -> list[str]:
    """Return one line for each published file that is missing or stale.

    Raises:
        RecordError: as :func:`publish`.
    """
    lines = (why_stale(path, text) for path, text in _wanted(Path(folder), Path(root)).items())
    return [line for line in lines if line]


def generated_blocks(measured: Measured, *beside: Measured) -> dict[tuple[str, str], Callable[[], str]]:
    """Return (page, name of the block) -> the block's text, for every page from the root of the repository."""
    folder, gpus = measured.folder, (measured, *beside)
    benched = [gpu for gpu in gpus if gpu.results]
    compared = comparison_of(folder)
    blocks: dict[tuple[str, str], Callable[[], str]] = {
        ("README.md", "results"): lambda: _headline(
            gpus, lambda gpu: short_rows(gpu.folder, gpu.results), linked=False
        ),
        ("docs/results/index.md", "results"): lambda: (
            f"{HEADLINE_IMAGE}\n\n{_headline(gpus, lambda gpu: gpu.headline)}"
        ),
        ("docs/results/tables.md", "tables"): lambda: _each(
            benched, functools.partial(_table_with_picture, folder), "## "
        ),
        ("docs/results/whole-models.md", "transformer"): lambda: _each_with(MODEL_STEPS, gpus, transformer_table),
        ("docs/results/whole-models.md", "whole_models"): lambda: _each_with(WHOLE_MODELS, gpus, whole_models_block),
        ("docs/results/whole-models.md", "compiled_models"): lambda: _each_with(
            COMPILED_MODELS, gpus, lambda folder: whole_models_block(folder, COMPILED_MODELS)
        ),
        ("docs/results/other-kernels.md", "cutlass"): lambda: _each_with(notes.CUTLASS.name, gpus, cutlass_table),
        ("docs/results/other-kernels.md", "ampere"): lambda: each_table(folder.parent, AMPERE),
        ("docs/results/other-kernels.md", "cuda-l2"): lambda: each_table(folder.parent, CUDA_L2),
        ("docs/use/when-not.md", "weak"): lambda: _weak(benched),
        ("docs/use/matmul.md", "any_shapes"): lambda: _any_shapes(gpus),
        ("docs/use/engines.md", "vllm"): lambda: _each_with(VLLM, gpus, vllm_block),
        ("docs/use/experts.md", "products"): lambda: _each_with(PRODUCTS, gpus, products_block),
        ("docs/use/experts.md", "layers"): lambda: _each_with(LAYERS, gpus, layers_block),
        ("docs/use/experts.md", "model"): lambda: _each_with(MODEL, gpus, model_block),
        ("docs/develop/build-the-library.md", "scale"): lambda: scale_block(folder),
        ("docs/kernels/cost-model.md", "ncu"): lambda: _each_with(
            COUNTERS, gpus, lambda folder: counters_text(folder / COUNTERS)
        ),
        ("docs/reference/knobs.md", "knobs"): lambda: "\n\n".join(
            f"## {family}\n\n{knob_table(family)}" for family in FAMILIES
        ),
        ("docs/search/agents.md", "agents"): agent_table,
        ("docs/search/agents.md", "budgets"): lambda: budgets_block(folder / BUDGETS),
        ("docs/llm/evolve.md", "answers"): lambda: answers_block(folder / ANSWERS),
        ("docs/search/environments.md", "uncut"): lambda: uncut_block(folder),
        ("docs/llm/train.md", "knobs"): lambda: knobs_block(folder / KNOBS),
        ("docs/search/ppo.md", "recipe"): lambda: recipe_block(folder / RECIPE),
        ("docs/search/ppo.md", "full-recipe"): lambda: recipe_block(folder / FULL_RECIPE),
    }
    across = across_files(folder.parent)
    if (folder.parent / DRAWS).exists():
        blocks["docs/results/tables.md", "draws"] = lambda: draws_block(folder.parent / DRAWS)
    if across:
        blocks["docs/search/across-gpus.md", "across"] = lambda: across_block(across)
    if compared is not None:
        picture = f"../img/{COMPARE_PICTURE}"
        blocks["docs/search/agents.md", "compare"] = lambda: compare_block(read_comparison(compared), picture)
    for place, text in _listed_blocks():
        blocks[place] = functools.partial(_each, benched, text)
    for family in FAMILIES:
        page = f"docs/kernels/{family.replace('_', '-')}.md"
        blocks[page, "knobs"] = functools.partial(knob_table, family)
    return blocks


def _listed_blocks() -> Iterator[tuple[tuple[str, str], Callable[[Measured], str]]]:
    """Yield (page, name of the block) and its text by GPU, from ``BLOCKS`` of the modules in this folder."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        yield from getattr(import_module(f"{__package__}.{module.name}"), "BLOCKS", {}).items()


def _headline(gpus: Sequence[Measured], rows_of: Callable[[Measured], list[HeadlineRow]], linked: bool = True) -> str:
    """Return the small table of all GPUs, with the rows that a function gives for each."""
    rows = [row for gpu in gpus for row in rows_of(gpu)]
    return headline_table(rows, [gpu.folder for gpu in gpus], linked)


def _each(gpus: Sequence[Measured], text: Callable[[Measured], str], heading: str = "") -> str:
    """Return the texts of some GPUs; each below the GPU's name if there are several.

    Args:
        heading: marks of a heading, e.g. ``"## "``; empty: the name is bold.
    """
    if len(gpus) == 1:
        return text(gpus[0])
    names = {gpu.folder: name_of_gpu(gpu.folder) for gpu in gpus}
    titles = {path: f"{heading}{name}" if heading else f"**{name}**" for path, name in names.items()}
    return "\n\n".join(f"{titles[gpu.folder]}\n\n{text(gpu)}" for gpu in gpus)


def _each_with(file: str, gpus: Sequence[Measured], text: Callable[[Path], str]) -> str:
    """Return the texts of the GPUs whose folder has a file; if no folder has it, what the text of the first says."""
    there = [gpu for gpu in gpus if (gpu.folder / file).exists()]
    return _each(there or gpus[:1], lambda gpu: text(gpu.folder))


def _any_shapes(gpus: Sequence[Measured]) -> str:
    """Return the sentences on unlisted shapes, of the GPUs that have such a file."""
    texts = {gpu.folder: any_shape_text(gpu.folder) for gpu in gpus}
    there = [gpu for gpu in gpus if texts[gpu.folder] != NOT_MEASURED]
    return _each(there or gpus[:1], lambda gpu: texts[gpu.folder])


def _table_with_picture(first: Path, gpu: Measured) -> str:
    """Return all rows of a GPU below its picture of speed-ups."""
    picture = f"![Sorted speed-ups on the {name_of_gpu(gpu.folder)}](../img/{_speedup_name(gpu, first)})"
    table = markdown_table(gpu.summary, [*notes_of_rows(gpu.results), *_notes(gpu)])
    return f"{picture}\n\n{table}"


def _speedup_name(gpu: Measured, first: Path) -> str:
    """Return the file name of a GPU's picture; the first GPU's is in README.md."""
    return "speedup.svg" if gpu.folder == first else f"speedup-{gpu.folder.name}.svg"


def _weak(gpus: Sequence[Measured]) -> str:
    """Return where OutBLAS does not pay, by GPU."""
    ends = [f" on {name_of_gpu(gpu.folder)}" if len(gpus) > 1 else "" for gpu in gpus]
    parts = [weak_spots(gpu.folder, gpu.results, end) for gpu, end in zip(gpus, ends, strict=True)]
    return "\n\n".join([gpus_with_library(), *parts])


def _notes(gpu: Measured) -> list[str]:
    folder = gpu.folder
    about_library = [*notes.notes_of_replaced(folder, gpu.results), *notes.notes_of_earlier_kernels(folder)]
    return [*about_library, *(line for file in notes.NOTED for line in file.lines(folder))]


def _wanted(folder: Path, root: Path) -> dict[Path, str]:
    """Return path -> text of every published file; a page that is not there has no block."""
    bench_files(folder)  # it must have some
    measured, *beside = (Measured(path) for path in gpu_folders(folder))
    for gpu in (measured, *beside):
        refuse_files_of_another_gpu(gpu.folder)
    wanted = {
        gpu.folder / "summary.json": text_of_rows([*gpu.summary, *engine_rows(gpu.folder), *expert_rows(gpu.folder)])
        for gpu in (measured, *beside)
        if gpu.results
    }
    pictures = {_speedup_name(gpu, folder): picture_text(gpu) for gpu in (measured, *beside) if gpu.results}
    rows = [row for gpu in (measured, *beside) for row in gpu.headline]
    if rows:
        pictures["headline.svg"] = headline_svg(rows)
    compared = comparison_of(folder)
    if compared is not None:
        pictures[COMPARE_PICTURE] = compare_svg(read_comparison(compared))
    for name, picture in pictures.items():
        path = root / PICTURES / name
        wanted[path] = current_picture(_read(path), picture) if path.exists() else picture
    for (page, name), text in generated_blocks(measured, *beside).items():
        path = root / page
        if path in wanted or path.exists():
            wanted[path] = with_block(wanted.get(path) or _read(path), name, _block(text, name, folder), page)
    return wanted


def _block(text: Callable[[], str], name: str, folder: Path) -> str:
    """Return a block's text; raise RecordError if a result file lacks a field or has another type in it."""
    try:
        return text()
    except OutblasError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        wrong = f"block {name} cannot be generated from the result files in {folder} ({type(error).__name__}: {error})"
        raise RecordError(wrong, "complete result files", "restore the incomplete file, or measure again") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror}", "a file in the repository", "run the command from its root"
        ) from error


def picture_text(measured: Measured) -> str:
    """Return the SVG picture of the speed-ups of grid1000 TN fp16 fp32 offline; without that bench, of the first bench.

    Of several files with it the one with most rows counts.
    """
    kind_of = operator.itemgetter("layout", "dtype", "acc", "mode")
    usual = ("TN", "fp16", "fp32", "offline")
    result, kind = min(
        ((result, kind) for result in measured.results for kind in dict.fromkeys(map(kind_of, result.rows))),
        key=lambda found: (found[0].suite != "grid1000", found[1] != usual, -len(found[0].rows)),
    )
    # Without and with PDL: constant weights are the table's.
    return speedup_svg(result, [row for row in result.rows if kind_of(row) == kind and not row["early"]])


def knob_table(family: str) -> str:
    """Return a family's knobs in Markdown: values, default and meaning."""
    config: type[KernelConfig] = FAMILIES[family].config
    meanings = attribute_texts(inspect.getdoc(config) or "")
    lines = table_lines(["knob", "values", "default", "meaning"], 4, [])
    for knob in knob_schema(config):
        default = "–" if knob.default is None else f"`{value_text(knob.default)}`"
        meaning = _markdown(meanings.get(knob.name, "")).replace("|", "\\|")
        values = ", ".join(f"`{value_text(value)}`" for value in knob.all_values) or "an integer"
        lines.append(f"| `{knob.name}` | {values} | {default} | {meaning} |")
    return "\n".join(lines)


def attribute_texts(doc: str) -> dict[str, str]:
    """Return attribute -> text of the section ``Attributes:`` of a docstring; empty without such a section."""
    section = re.search(r"^(?:Attributes|Args):\n((?:[ \t]+.*\n?|\n)+)", doc, re.M)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if section else ():
        entry = re.match(r"^    (\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.strip():
            for name in names:
                found[name] += " " + line.strip()
    return found


def _markdown(text: str) -> str:
    """Return a docstring's text on one line in Markdown: a role such as ``:data:`Launch``` keeps the last name only."""
    joined = " ".join(text.split())
    return re.sub(r":\w+:`[~\w.]*?(\w+)`", r"`\1`", joined).replace("``", "`")


def agent_table() -> str:
    """Return every search agent with the first sentence of its docstring and the extra that it needs."""
    summaries, extras = agent_registry.agent_summaries().items(), agent_registry.agent_extras()
    rows = [(f"`{name}`", _markdown(summary), extras.get(name, "–")) for name, summary in summaries]
    return "\n".join(table_lines(["agent", "method", "extra"], 3, rows))


def text_of_rows(rows: Sequence[Row]) -> str:
    """Return the content of a ``summary.json`` with these rows."""
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def why_stale(path: Path, want: str) -> str | None:
    """Return one line if the file ``path`` is missing or differs from the text ``want``; else None."""
    if not path.exists():
        return f"{path} is missing; run `python tools/published_pages.py --write`"
    if path.read_text(encoding="utf-8") != want:
        return f"{path} is stale: it differs from the result files; run `python tools/published_pages.py --write`"
    return None
