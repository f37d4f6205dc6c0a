"""Import every module of both packages under each supported Python that this machine has.

    python tools/import_all.py .venv/imports

A module may fail only for want of an optional package. Each interpreter gets a virtual environment with the package's
base dependencies in the folder given; it is made once. The interpreter that runs this file is used as it is. One that
cannot be used is printed with the reason. Exit status 1: a module fails that should not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
#: Modules of Python itself that came after the oldest version; there they are missing, and not optional.
LATER = frozenset({"compression", "annotationlib"})
#: Longest wait for a command, seconds: a registry that does not answer must not hang the tests.
TIMEOUT_S = 300
#: Prints what became of each module: [name, kind of error, missing module, words]; the kind of none is "".
_IMPORT = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
said = []
for name in json.load(sys.stdin):
    error = None
    try:
        importlib.import_module(name)
    except BaseException as e:
        error = e
    words = (str(error).strip().splitlines() or [""])[0]
    kind = "" if error is None else type(error).__name__
    said.append([name, kind, getattr(error, "name", None) or "", words])
sys.__stdout__.write("\\n" + json.dumps({"said": said, "own": sorted(sys.stdlib_module_names)}))
"""


@dataclass(frozen=True)
class Failed:
    """A module that could not be imported: the kind of the error, the module that it names, and its words."""

    module: str
    kind: str
    missing: str
    words: str


@dataclass(frozen=True)
class Outcome:
    """Outcome of one Python version.

    Attributes:
        version: as in "3.11".
        python: path of the interpreter, "" if none was found.
        not_tried: reason why nothing was imported, "" otherwise.
        imported: number of imported modules.
        wrong: modules that failed.
        optional: optional package -> number of modules that lack it.
    """

    version: str
    python: str = ""
    not_tried: str = ""
    imported: int = 0
    wrong: tuple[Failed, ...] = ()
    optional: Mapping[str, int] | None = None

    def lines(self) -> list[str]:
        """Return the outcome in words."""
        head = f"Python {self.version}" + (f" ({self.python})" if self.python else "")
        if self.not_tried:
            return [f"{head}: not tried: {self.not_tried}"]
        without = ", ".join(f"{name} {count}" for name, count in sorted((self.optional or {}).items()))
        tail = f"; without an optional package: {without}" if without else ""
        errors = [f"  {f.module}: {f.kind}: {f.words}" for f in self.wrong]
        return [f"{head}: {self.imported} modules imported, {len(errors)} wrong{tail}", *errors]


class NotTried(Exception):
    """An interpreter that cannot be used here; the text says why."""


def modules(source: Path) -> list[str]:
    """Return the names of all modules of the packages in a source folder."""
    names = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def base_dependencies(distribution: str = "outblas") -> list[str]:
    """Return what the package cannot do without, as its metadata names it."""
    required = importlib.metadata.requires(distribution) or []
    return sorted(line for line in required if "extra ==" not in line)


def candidates(version: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the places where an interpreter of a version may be, likely ones first. Some are shims that fail."""
    home = Path(environment.get("HOME") or "/")
    for folder in environment.get("PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder, f"python{version}")
    pyenv = [Path(named)] if (named := environment.get("PYENV_ROOT")) else []
    for root in (*pyenv, home / ".pyenv"):
        yield from sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)
    yield from sorted(home.glob(f".local/share/uv/python/cpython-{version}.*/bin/python{version}"), reverse=True)
    for folder in ("/usr/bin", "/usr/local/bin", f"/opt/python/{version}/bin"):
        yield Path(folder, f"python{version}")


def find(version: str, environment: Mapping[str, str]) -> Path | None:
    """Return the first interpreter of a version that runs, None without one."""
    if version == _version_of(sys.version_info):
        return Path(sys.executable)
    tried = set()
    for path in candidates(version, environment):
        if path not in tried and path.is_file() and _runs(path, version):
            return path
        tried.add(path)
    return None


def environment_of(python: Path, folder: Path, dependencies: Sequence[str]) -> Path:
    """Return the interpreter of a virtual environment with the dependencies; made where it is not there.

    Raises:
        NotTried: it cannot be made, or the packages cannot be had.
    """
    made, inside = folder / "made.json", folder / "bin" / "python"
    wanted = json.dumps([str(python.resolve()), *dependencies])
    if made.is_file() and made.read_text() == wanted and inside.exists():
        return inside
    shutil.rmtree(folder, ignore_errors=True)
    # This interpreter's uv or pip installs, which saves the making of one in each.
    _run([str(python), "-m", "venv", "--without-pip", str(folder)], "no virtual environment")
    install = [sys.executable, str(ROOT / "tools" / "install.py"), "--python", str(inside), "--only-binary=:all:"]
    _run([*install, *dependencies], "the base dependencies cannot be installed")
    made.write_text(wanted)
    return inside


def imported(python: Path, names: Sequence[str], source: Path | str) -> tuple[list[Failed], set[str]]:
    """Import modules with an interpreter; return those that failed, and the names of its own library's modules.

    Raises:
        NotTried: it does not come to an end.
    """
    environment = {**os.environ, "PYTHONPATH": str(source)}
    text = _run([str(python), "-c", _IMPORT], "the imports end too early", json.dumps(names), environment)
    told = json.loads(text.splitlines()[-1])
    return [Failed(*each) for each in told["said"] if each[1]], set(told["own"])


def is_optional(failed: Failed, own: set[str], base: set[str]) -> bool:
    """Return whether a module may fail so: it says what is missing, or an optional package of others is.

    Args:
        failed: the module and its error.
        own: names of the modules of Python's own library, of any version.
        base: names of the modules of the base dependencies.
    """
    if failed.kind == "ToolchainMissing":
        return True
    top = failed.missing.partition(".")[0]
    return (
        failed.kind == "ModuleNotFoundError"
        and bool(top)
        and top not in {*own, *base, *LATER, "outblas", "outblas_lab"}
    )


def try_version(
    version: str, folder: Path, names: Sequence[str], dependencies: Sequence[str], source: Path | str
) -> Outcome:
    """Find the interpreter of a version, and import all modules with it."""
    python = find(version, os.environ)
    if python is None:
        return Outcome(version, not_tried="no interpreter that runs was found")
    try:
        current = version == _version_of(sys.version_info)
        inside = python if current else environment_of(python, folder / version, dependencies)
    except NotTried as reason:
        return Outcome(version, str(python), str(reason))
    try:
        failed, own = imported(inside, names, source)
    except NotTried as reason:  # tried, and a module ended the process
        return Outcome(version, str(python), wrong=(Failed("all modules", "no answer", "", str(reason)),))
    own |= sys.stdlib_module_names
    base = {re.split(r"[^\w-]", line.strip())[0].replace("-", "_") for line in dependencies}
    wrong = tuple(f for f in failed if not is_optional(f, own, base))
    optional = Counter(f.missing.partition(".")[0] or f.kind for f in failed if f not in wrong)
    return Outcome(version, str(python), "", len(names) - len(failed), wrong, optional)


def main(arguments: Sequence[str] | None = None, report: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the virtual environments are kept")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="X.Y")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--here", action="store_true", help="only the version that runs this file")
    which.add_argument("--others", action="store_true", help="only the other versions")
    options = parser.parse_args(arguments)
    current = _version_of(sys.version_info)
    versions = [v for v in options.versions if not (options.others and v == current or options.here and v != current)]
    sources = (ROOT / "src", ROOT / "lab" / "src")
    names, dependencies = [name for source in sources for name in modules(source)], base_dependencies()
    path = os.pathsep.join(map(str, sources))
    lock, wrong = threading.Lock(), []

    def one(version: str) -> None:
        outcome = try_version(version, options.folder.resolve(), names, dependencies, path)
        with lock:
            report("\n".join(outcome.lines()))
            wrong.extend(outcome.wrong)

    with ThreadPoolExecutor(max(len(versions), 1)) as pool:
        list(pool.map(one, versions))
    return 1 if wrong else 0


def _version_of(info: Sequence[object]) -> str:
    return f"{info[0]}.{info[1]}"


def _runs(python: Path, version: str) -> bool:
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return _run([str(python), "-c", ask], "").strip() == version
    except NotTried:
        return False


def _run(
    command: Sequence[str], trouble: str, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Return the output of a command. Raises NotTried: it fails, is not there or does not end."""
    try:
        done = subprocess.run(
            command, input=text or "", capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotTried(f"{trouble} ({error})") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NotTried(f"{trouble} ({last[:200]})")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
