"""Stamp the packaged libraries with the hash of changed kernel files, if every shipped kernel compiles to the same
code.

::

    python tools/restamp.py --since e8eefce [--proved FILE.parquet]
    python tools/restamp.py --rehash
    python tools/restamp.py --new

Every kernel counts that a packaged library installs, or that is offered for any shape and was in the older commit.
That commit and the present one make its source. If a compiler reads different texts, one NVRTC compiles both. All
cubins have to be the same, at least in their code sections. Then the libraries, and results that name their kernels,
get the present hash (:func:`outblas.kernels.kernel_hash.kernels_sha`). A record beside it has the old hash, the date
and the counts. The table of equal kernels (:mod:`outblas.records.user_library`) keeps users' libraries valid.

``--proved`` names a bench of the present kernels. Kernels that it proved and timed may differ, and the record names
them. Published figures of these problems stay those of the earlier kernels, so look at the times first.

The stamp says that proofs and figures from the older commit on belong to kernels that compile to the shipped code. That
commit must have the kernels that the library names, if it names any.

``--rehash`` is for a new rule of hashing. Every recorded hash must be that of the present files by the old rule, with
comments. It compiles nothing. ``--new`` is for kernels that differ and were proved and timed again.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from outblas import __version__
from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import CompileError, OutblasError, UsageError
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas.kernels.epilogue import NO_EPILOGUE, STACKED_GATE
from outblas.kernels.kernel_hash import _sha, headers_sha, kernel_headers, kernels_sha, without_comments
from outblas.kernels.source import Source, make_source
from outblas.records.library import Library
from outblas.records.proved_kernels import unproved_intervals, unproved_tables
from outblas.records.provenance import utc_now
from outblas.records.result_rows import problem_of
from outblas.records.results import TABLE_KIND, read_meta, read_result, write_result
from outblas.records.user_library import TABLE_PATH, EqualKernels, KernelRelease
from outblas.runtime.cubin import Cubin
from outblas.runtime.nvrtc import compile_many, nvrtc_version
from outblas.runtime.sass import _code_sections
from outblas_lab.build.cubin_build import ARCHITECTURE, any_shape_files, packaged_libraries, pairs_for_any_shape

ROOT = Path(__file__).resolve().parents[1]
DATA, RESULTS, ANY_SHAPE = ROOT / "src" / "outblas" / "data", ROOT / "results", "src/outblas/data/any_shape"
#: Key of the hash in a provenance, and of the lists of records beside it.
HASH, RECORDS, REHASHED = "kernels", "restamped", "rehashed"
_INCLUDE = re.compile(r'#[ \t]*include[ \t]*["<]([^">]+)[">]')
#: What the older package is asked, in a process of its own: (problem, config) pairs in, their sources out.
_ASK = """
import importlib, json, sys
from outblas import __version__

def find(what):  # a name, at the newest of the places that it has had
    *modules, name = what.split()
    for module in modules:
        try:
            return getattr(importlib.import_module("outblas." + module), name)
        except (ImportError, AttributeError):
            continue

config_from_name = find("kernels.config_text kernels.families core.config config config_from_name")
problem_of = find("core.problem problem Problem").from_key
make_source = find("kernels.source source make_source")
sha = find("kernels.kernel_hash source kernels_sha")
headers = find("kernels.kernel_hash source kernel_headers") or find("source _kernel_headers")
shared, found = headers(), []
for key, name in json.load(sys.stdin):
    key, _, gate = key.partition("+")
    s = make_source(problem_of(key), config_from_name(name), *([find("kernels.epilogue STACKED_GATE")] if gate else []))
    assert s.headers[: len(shared)] == shared
    found.append([s.text, s.entry, s.headers[len(shared) :], s.options, s.acc, s.family])
json.dump({"outblas": __version__, "kernels": sha(), "shared": shared, "sources": found}, sys.stdout)
"""


@dataclass(frozen=True)
class Older:
    """The shipped kernels as an older commit makes them.

    Attributes:
        commit: in full.
        kernels: hash of its kernel files by the present rule.
        sources: of the shipped kernels.
        named: name of its kernels in a user's library.
    """

    commit: str
    kernels: str
    sources: list[Source]
    named: KernelRelease = KernelRelease(None, None)


@dataclass(frozen=True)
class Compared:
    """Counts of kernels of equal source, equal cubin or equal code sections only, and a line for every other one."""

    source: int
    whole: int
    code: int
    differences: tuple[str, ...]


def offered_before(commit: str) -> set[tuple[Problem, KernelConfig]]:
    """The kernels for any shape of a commit. No figure of that commit is of others that are on offer now."""
    names = _git("ls-tree", "--name-only", f"{commit}:{ANY_SHAPE}").decode().split()
    return set(pairs_for_any_shape({n.removesuffix(".npz"): _git("show", f"{commit}:{ANY_SHAPE}/{n}") for n in names}))


def packaged_pairs(before: Container[tuple[Problem, KernelConfig]] | None = None) -> list[tuple[str, str]]:
    """(problem, config) by name, one of each distinct kernel that ships; for any shape only those in ``before``.

    The name of a problem whose kernel has a gate ends in ``+gate``.
    """
    libraries = [Library.packaged(gpu) for gpu in packaged_libraries()]
    installed = ((p, config) for each in libraries for p, configs in each.kernels().items() for config in configs)
    offered = pairs_for_any_shape(any_shape_files())
    found = chain(installed, (pair for pair in offered if before is None or pair in before))
    named = [(problem.key, config_name(config)) for problem, config in found]
    named += [(f"{p.key}+gate", config_name(config)) for each in libraries for p, config in each.gate_kernels()]
    return list({source_of(key, name): (key, name) for key, name in reversed(named)}.values())


def source_of(key: str, name: str) -> Source:
    """The source of a kernel by its names in :func:`packaged_pairs`."""
    key, _, gate = key.partition("+")
    return make_source(Problem.from_key(key), config_from_name(name), STACKED_GATE if gate else NO_EPILOGUE)


def older(commit: str, pairs: Sequence[tuple[str, str]]) -> Older:
    """The sources of the same kernels by the package of a commit.

    Raises:
        UsageError: no such commit in this checkout, or its package cannot make them.
    """
    full = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", full, "src/outblas"))) as archive:
            archive.extractall(folder, filter="data")
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            input=json.dumps(pairs),
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(folder, "src"))},
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise UsageError(
            f"the package of {full[:12]} makes no sources of the shipped kernels ({last[:200]})",
            "a commit that knows them all",
            "name a later one",
        )
    said = json.loads(done.stdout)
    shared = tuple((name, text) for name, text in said["shared"])
    sources = [
        Source(text, entry, (*shared, *((n, t) for n, t in own)), tuple(options), acc, family)
        for text, entry, own, options, acc, family in said["sources"]
    ]
    return Older(full, headers_sha(shared), sources, KernelRelease(said["outblas"], said["kernels"]))


def compare(
    names: Sequence[str],
    before: Sequence[Source],
    now: Sequence[Source],
    build: Callable[[Sequence[Source]], list[Any]],
) -> Compared:
    """Compare sources, and the cubins of those that differ; ``build`` gives a cubin or a CompileError each."""
    pairs = list(zip(names, before, now, strict=True))
    differ = [pair for pair in pairs if read_by_compiler(pair[1]) != read_by_compiler(pair[2])]
    whole = code = 0
    differences = []
    built = zip(build([old for _, old, _ in differ]), build([new for _, _, new in differ]), strict=True)
    for (name, _, _), (old, new) in zip(differ, built, strict=True):
        if isinstance(old, CompileError) or isinstance(new, CompileError):
            sides = [f"{side}: {e}" for side, e in (("before", old), ("now", new)) if isinstance(e, CompileError)]
            differences.append(f"{name}: does not compile ({'; '.join(sides)})")
        elif old.image == new.image:
            whole += 1
        elif list(_code_sections(old.image)) == list(_code_sections(new.image)) and _same_resources(old, new):
            code += 1
        else:
            differences.append(f"{name}: another machine code ({old.registers} registers before, {new.registers} now)")
    return Compared(len(pairs) - len(differ), whole, code, tuple(differences))


def read_by_compiler(source: Source) -> tuple[object, ...]:
    """Return everything of the source that a compiler reads; equal values mean equal machine code.

    Headers count if an ``#include`` reaches them, under whatever condition. Comments are left out.
    """
    known, todo, reached = dict(source.headers), [source.text], dict[str, str]()
    while todo:
        for name in _INCLUDE.findall(todo.pop()):
            if name in known and name not in reached:
                reached[name] = without_comments(known[name])
                todo.append(known[name])
    return source.entry, source.options, without_comments(source.text), tuple(sorted(reached.items()))


def with_kernels(provenance: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a library's provenance in which a hash of kernel sources replaces one of equal kernels, in tables, too."""

    def renamed(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return with_kernels(value, old, new)
        return new if (key, value) == ("kernels", old) else value

    return {key: renamed(key, value) for key, value in provenance.items()}


def stamped(provenance: Mapping[str, Any], record: Mapping[str, Any], kernels: str) -> dict[str, Any]:
    """A provenance of the present kernels, with what it said before in a record beside."""
    said = {**record, "replaced": provenance.get(HASH)}
    renamed = with_kernels(provenance, record["kernels_of_that_commit"], kernels)
    return {**renamed, HASH: kernels, RECORDS: [*provenance.get(RECORDS, ()), said]}


def proved_anew(path: Path, kernels: str) -> dict[str, Any]:
    """Return what a bench of the present kernels proved and timed, for the record; a row without a config fell back.

    Returns:
        GPU and date of the bench, and ``rows`` of [problem, config, microseconds].

    Raises:
        UsageError: the bench is of other kernels.
    """
    result = read_result(path)
    provenance, rows = result.provenance, [row for row in result.rows if row["config"]]
    if provenance.get(HASH) != kernels:
        wrong = f"{path.name} is of kernels {str(provenance.get(HASH))[:12]}, the present ones are {kernels[:12]}"
        raise UsageError(wrong, "a bench of the present kernels", "run it again")
    return {
        **{name: provenance.get(name) for name in ("gpu", "date")},
        "rows": [[problem_of(row).key, row["config"], row["ours_us"]] for row in rows],
    }


def restamp(record: Mapping[str, Any], kernels: str, data: Path, results: Path) -> list[Path]:
    """Write the hash and the record into every packaged library, and into the published results that have a hash.

    Raises:
        UsageError: one of them is of other kernels than those that were compared; then nothing is written.
    """
    found = _of_other_kernels(kernels, data, results)
    for path, (provenance, _) in found.items():
        named, compared = provenance.get(HASH), record["kernels_of_that_commit"]
        if named not in (None, compared):
            raise UsageError(
                f"{path.name} is of kernels {named[:12]}, compared were {compared[:12]}",
                "a commit with the kernels that it names",
                "give that by --since, or prove and time it again",
            )
    for provenance, save in found.values():
        save(stamped(provenance, record, kernels))
    return list(found)


def headers_sha_as_written(headers: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 (64 hex digits) of kernel files as written, comments included: the rule until version 0.2.0.

    Args:
        headers: (name as included, text) pairs; their order counts.
    """
    return _sha(list(headers))


def rehash(headers: Sequence[tuple[str, str]], data: Path, results: Path) -> list[Path]:
    """Write the hash by the present rule where the one by the old rule is recorded, and an entry in the table.

    Args:
        headers: the present kernel files, (name, text) pairs.
        data: folder of the libraries and the table.
        results: folder of the published results.

    Raises:
        UsageError: a recorded hash is not of these files by the old rule; then nothing is written.
    """
    old, new = headers_sha_as_written(headers), headers_sha(headers)
    found = _of_other_kernels(new, data, results)
    for path, (provenance, _) in found.items():
        if (named := provenance.get(HASH)) != old:
            raise UsageError(
                f"{path.name} is of kernels {str(named)[:12]}, the present files were {old[:12]} by the old rule",
                "a hash of the present kernel files",
                "use --since with a commit that has the kernels of this file",
            )
    if not found:
        return []
    table = write_table(
        data, KernelRelease(__version__, new), KernelRelease(__version__, old), old
    )  # first: a second run mends
    for provenance, save in found.values():
        record = {"date": utc_now(), "replaced": old}
        save({**provenance, HASH: new, REHASHED: [*provenance.get(REHASHED, ()), record]})
    return [table, *found]


def write_table(data: Path, now: KernelRelease, proved: KernelRelease, compared: str) -> Path:
    """Write the table of equal kernels, made if need be; arguments as :func:`extended` has them."""
    path = data / TABLE_PATH.name
    table = EqualKernels.load(path) if path.exists() else EqualKernels(now)
    extended(table, now, proved, compared).save(path)
    return path


def extended(table: EqualKernels, now: KernelRelease, proved: KernelRelease, compared: str) -> EqualKernels:
    """Return the table for later kernels whose cubins were found equal to those of earlier kernels.

    Args:
        proved: the earlier kernels, as a library file of their release names them.
        compared: hash of the earlier kernel files by the present rule. If this table is for that hash or for
            ``now``, its entries are kept.
    """
    kept: Iterable[KernelRelease] = (*table.before, table.now) if now == table.now or table.now.sha == compared else ()
    before = dict.fromkeys((*kept, proved))
    before.pop(now, None)
    return EqualKernels(now, tuple(before))


def _of_other_kernels(kernels: str, data: Path, results: Path) -> dict[Path, tuple[Any, Callable[..., object]]]:
    """Files of the packaged libraries and published results with another hash: provenance, and what saves a new one."""
    found: dict[Path, tuple[Any, Callable[..., object]]] = {}
    for path in sorted((data / "libraries").glob("*.json")):
        library = Library.load(path)
        if library.provenance.get(HASH) != kernels:
            found[path] = library.provenance, partial(_save_library, path, library)
    for path in filter(is_result, sorted(results.glob("*/*.parquet"))):
        result = read_result(path)
        if result.provenance.get(HASH, kernels) != kernels:
            found[path] = result.provenance, partial(_save_result, path, result)
    return found


def is_result(path: Path) -> bool:
    """Return whether ``outblas bench`` wrote a file. Files of benchmarks with other metadata do not count.

    Raises:
        RecordError: the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if b"outblas" not in (pq.read_schema(path).metadata or {}):
            return False
    except (pa.ArrowException, OSError, ValueError):
        pass  # said by read_meta
    return bool(read_meta(path).get("kind") == TABLE_KIND)


def _save_library(path: Path, library: Library, provenance: dict[str, Any]) -> None:
    replace(library, provenance=provenance).save(path)


def _save_result(path: Path, result: Any, provenance: dict[str, Any]) -> None:
    write_result(result.rows, {**result.meta, "provenance": provenance}, path)


def _same_resources(old: Cubin, new: Cubin) -> bool:
    names = ("entry", "registers", "spill_bytes", "stack_bytes", "static_smem")
    return all(getattr(old, name) == getattr(new, name) for name in names)


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()[:200]
        raise UsageError(f"git {arguments[0]} fails: {why}", "a checkout with the commit", "run it in one")
    return done.stdout


def _build(sources: Sequence[Source], jobs: int | None, what: str) -> list[Any]:
    found: list[Any] = [None] * len(sources)

    def tell(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"{what}: {done} of {total} kernels", file=sys.stderr, flush=True)

    for index, result in compile_many(sources, ARCHITECTURE, jobs, tell):
        found[index] = result
    return found


def _report(written: Sequence[Path]) -> None:
    for path in written:
        print(f"wrote {path.relative_to(ROOT)}")


def begin_table(libraries: Sequence[Library], path: Path) -> None:
    """Write a table of equal kernels without earlier ones.

    Args:
        libraries: the packaged libraries.
        path: the table.

    Raises:
        UsageError: a table of a library was proved with other kernels.
    """
    unproved = [str(t) for each in libraries for t in (*unproved_tables(each), *unproved_intervals(each))]
    if unproved:
        raise UsageError(
            f"{', '.join(unproved)} were proved with other kernels",
            "packaged libraries that were proved with the present ones",
            "bench these tables in mode offline by `outblas build-library`, and package its library",
        )
    EqualKernels(KernelRelease(__version__, kernels_sha())).save(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--since", metavar="COMMIT", help="whose kernels are known to be right")
    what.add_argument("--rehash", action="store_true", help="the files are the same, the rule of hashing is new")
    what.add_argument("--new", action="store_true", help="the kernels differ and were proved again: forget equal ones")
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    parser.add_argument("--proved", type=Path, metavar="FILE", help="bench of kernels that may differ")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    options = parser.parse_args(arguments)
    try:
        if options.rehash:
            _report(rehash(kernel_headers(), DATA, RESULTS))
            return 0
        if options.new:
            begin_table([Library.packaged(gpu) for gpu in packaged_libraries()], TABLE_PATH)
            _report([TABLE_PATH])
            return 0
        anew = proved_anew(options.proved, kernels_sha()) if options.proved else {"rows": []}
        excused = {source_of(key, name) for key, name, _ in anew["rows"]}
        made = {pair: source_of(*pair) for pair in packaged_pairs(offered_before(options.since))}
        pairs = [pair for pair, source in made.items() if source not in excused]
        past = older(options.since, pairs)
        now = [made[pair] for pair in pairs]
        sides = iter(("before", "now"))
        found = compare([n for _, n in pairs], past.sources, now, lambda s: _build(s, options.jobs, next(sides)))
        if found.differences:
            print("\n".join(found.differences))
            print(f"{len(found.differences)} of {len(pairs)} kernels differ; nothing is written")
            return 1
        record = {
            "date": utc_now(), "since": past.commit, "kernels_of_that_commit": past.kernels,
            "compared": len(pairs), "identical_sources": found.source, "identical_cubins": found.whole,
            "identical_code_sections_only": found.code,
            "nvrtc": nvrtc_version(), "architecture": ARCHITECTURE,
            **({"proved_anew": anew} if anew["rows"] else {}),
        }  # fmt: skip
        print(json.dumps(record))
        if not options.check:
            _report(restamp(record, kernels_sha(), DATA, RESULTS))
            _report([write_table(DATA, KernelRelease(__version__, kernels_sha()), past.named, past.kernels)])
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
