"""Prove that a tag of this commit would build, install and pass ``outblas doctor``.

    python tools/release.py --check [--tag v0.2.0] [--cubins skip] [--python python3.12]

Both wheels are built of the committed files alone and installed in new environments: the user's, then the lab's beside
it. Each check is a printed line. The first that fails ends the run with 1. Needs the packages build and hatchling, and
NVRTC for the compiled kernels, unless ``--cubins skip`` leaves them out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Lines of a version's section in the changelog, and bytes of the user's wheel, at most.
CHANGELOG_LINES, WHEEL_BYTES = 150, 13_000_000
#: What the user's wheel brings, beside what these bring.
DEPENDENCIES = {"numpy", "pydantic", "rich", "typer"}
PACK = "outblas/data/cubins/kernels.pack"


class Failed(Exception):
    """A check failed. The text names the fault, the expected state and the remedy."""


def check(holds: bool, what: str, otherwise: str) -> None:
    """Print a check that holds.

    Raises:
        Failed: it does not hold, with the words ``otherwise``.
    """
    if not holds:
        raise Failed(otherwise)
    print(f"ok   {what}", flush=True)


def check_texts(root: Path, version: str, tag: str | None) -> None:
    """Check that the tag, the citation and the changelog are of a version, and that its section is dated and short.

    Args:
        root: folder of the committed files.
        version: that of ``core/version.py``.
        tag: the tag; None: it is not checked.
    """
    check(tag in (None, f"v{version}"), f"tag v{version}", f"tag {tag} of version {version}; tag v{version}")
    cited = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    check(cited == [version], "CITATION.cff", f"CITATION.cff names {cited}; write {version}")
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    title, lines = sections[0].splitlines()[0], sections[0].splitlines()
    wanted = rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d"
    check(
        bool(re.fullmatch(wanted, title)), f"changelog: {title}", f"CHANGELOG.md begins with {title!r}; date {version}"
    )
    long = f"the section has {len(lines)} lines; expected at most {CHANGELOG_LINES}; shorten it"
    check(len(lines) <= CHANGELOG_LINES, f"changelog: {len(lines)} lines", long)


def build(root: Path, out: Path, cubins: str) -> tuple[Path, Path]:
    """Build both wheels of committed files; return the user's and the lab's.

    Args:
        root: folder of the files.
        out: folder for the wheels.
        cubins: ``require``, or ``skip``: without compiled kernels.
    """
    own = {**os.environ, "OUTBLAS_BUILD_CUBINS": cubins}
    for folder in (root, root / "lab"):
        run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(folder)], own)
    users, labs = sorted(out.glob("outblas-*.whl")), sorted(out.glob("outblas_lab-*.whl"))
    check(len(users) == len(labs) == 1, "both wheels build", f"{out} has {[*users, *labs]}; expected one of each")
    return users[0], labs[0]


def check_wheels(user: Path, lab: Path, version: str, has_pack: bool) -> None:
    """Check the names, the size and the content of both wheels."""
    for wheel in (user, lab):
        named = wheel.name.split("-")[1]
        check(named == version, wheel.name, f"{wheel.name} is of {named}; expected {version}")
    size, names = user.stat().st_size, zipfile.ZipFile(user).namelist()
    check(size <= WHEEL_BYTES, f"{size / 1e6:.1f} MB", f"{user.name} has {size} bytes; expected {WHEEL_BYTES} at most")
    if has_pack:
        check(PACK in names, "compiled kernels are in it", f"{user.name} lacks {PACK}; install NVRTC")
    of_lab = [
        name for name in names if "outblas_lab" in name or "/data/recordings/" in name or "/data/policies/" in name
    ]
    check(not of_lab, "no part of the lab is in it", f"{user.name} has {of_lab[:3]}; move it to lab/")


def check_user(wheel: Path, environment: Path, python: str) -> None:
    """Install the user's wheel alone, and check what it brings and what it says."""
    run([python, "-m", "venv", str(environment)])
    before = distributions(environment)
    run([str(environment / "bin/python"), "-m", "pip", "install", "--quiet", str(wheel)])
    asked = direct_dependencies(environment)
    check(asked == DEPENDENCIES, f"brings {', '.join(sorted(asked))}", f"it asks for {asked}; expected {DEPENDENCIES}")
    brought = distributions(environment) - before
    check("pyarrow" not in brought and "torch" not in brought, f"{len(brought)} packages", f"it brings {brought}")
    for command in (["doctor"], ["list"], ["tune", "--help"]):
        said(environment, command)
    refused = said(environment, ["evolve"], good=False)
    check("outblas-lab" in refused, "`outblas evolve` names the package to install", f"it says {refused!r}")


def check_lab(wheel: Path, environment: Path) -> None:
    """Install the lab's wheel beside the user's, and check that its commands join."""
    run([str(environment / "bin/python"), "-m", "pip", "install", "--quiet", str(wheel)])
    for command in (["doctor"], ["compare", "--help"], ["evolve", "--help"]):
        said(environment, command)


def distributions(environment: Path) -> set[str]:
    """Return the names of the packages of an environment."""
    code = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    return set(run([str(environment / "bin/python"), "-c", code]).split())


def direct_dependencies(environment: Path) -> set[str]:
    """Return the names of the packages that outblas needs without an extra."""
    code = (
        "import importlib.metadata as m; print(*(r for r in m.requires('outblas') if 'extra ==' not in r), sep='\\n')"
    )
    lines = run([str(environment / "bin/python"), "-c", code]).split("\n")
    return {match[0] for line in lines if (match := re.match(r"[A-Za-z0-9_-]+", line))}


def said(environment: Path, command: Sequence[str], good: bool = True) -> str:
    """Run ``outblas`` of an environment; return what it printed.

    Raises:
        Failed: it failed, or if ``good`` is False did not.
    """
    words = [str(environment / "bin/outblas"), *command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=environment, check=False)
    text = done.stdout + done.stderr
    expected = "0" if good else "an error"
    told = f"`outblas {' '.join(command)}` ended with {done.returncode}; expected {expected}:\n{text[-2000:]}"
    check((done.returncode == 0) == good, f"`outblas {' '.join(command)}`", told)
    return text


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Run a command; return its output.

    Raises:
        Failed: it failed, with the end of its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def check_release(tag: str | None, cubins: str, python: str) -> None:
    """Run all checks on the committed files of this checkout.

    Raises:
        Failed: the first that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        tree, dist, environment = (Path(folder, name) for name in ("tree", "dist", "environment"))
        archive = Path(folder, "tree.tar")
        run(["git", "-C", str(ROOT), "archive", "--format", "tar", "--output", str(archive), "HEAD"])
        with tarfile.open(archive) as file:
            file.extractall(tree, filter="data")
        source = (tree / "src/outblas/core/version.py").read_text(encoding="utf-8")
        version = tomllib.loads(next(line for line in source.splitlines() if line.startswith("__version__")))
        check_texts(tree, version["__version__"], tag)
        user, lab = build(tree, dist, cubins)
        check_wheels(user, lab, version["__version__"], cubins == "require")
        check_user(user, environment, python)
        check_lab(lab, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", required=True, help="check; nothing is published")
    parser.add_argument("--tag", help="the tag that would be pushed, e.g. v0.2.0")
    parser.add_argument(
        "--cubins", choices=("require", "skip"), default="require", help="compiled kernels in the wheel"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    arguments = parser.parse_args()
    try:
        check_release(arguments.tag, arguments.cubins, arguments.python)
    except Failed as error:
        sys.exit(f"FAIL {error}")


if __name__ == "__main__":
    main()
