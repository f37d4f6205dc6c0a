"""outblas without outblas-lab, in an interpreter that sees the dependencies of outblas alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outblas.cli.command_table import PARTS
from outblas.records.library import Library
from outblas_lab.cli import lab_commands
from support.base_packages import base_dependencies, isolated, link_packages

Run = Callable[..., "subprocess.CompletedProcess[str]"]
OWN = [name for part in PARTS for name in part.commands]
LABS = [name for part in lab_commands.PARTS for name in part.commands]
INSTALL = "pip install ./lab in an outblas checkout, or the outblas-lab wheel"
#: Calls the command line once for each argument.
EACH = """
import sys
from outblas.cli.main import app
for words in sys.argv[1:]:
    try:
        app(words.split(), "outblas")
    except SystemExit as end:
        sys.stdout.write(f"ended with {end.code or 0}\\n")
"""


def _run_with(packages: Path, home: Path) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command, environment = isolated(packages, home)
        return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, cwd=home)

    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_packages(tmp_path_factory.mktemp("base"), *base_dependencies())


@pytest.fixture(name="run")
def run_fixture(base: Path, tmp_path: Path) -> Run:
    return _run_with(base, tmp_path)


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pyarrow", reason="tuning needs pyarrow")
    return link_packages(tmp_path_factory.mktemp("tuning"), *base_dependencies(), "pyarrow")


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of an error, which must be one, after exit status 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.splitlines()


def test_the_dependencies_are_four() -> None:
    assert sorted(base_dependencies()) == ["numpy", "pydantic", "rich", "typer"]


def test_no_module_of_the_lab_can_be_imported_there(run: Run) -> None:
    done = run("-c", "import outblas_lab")
    assert done.returncode == 1 and "No module named 'outblas_lab'" in done.stderr


def test_the_help_lists_the_commands_of_outblas_alone(run: Run) -> None:
    done = run("-m", "outblas", "--help")
    listed = [line.split()[0] for line in done.stdout.partition("kernels:")[2].splitlines() if line.strip()]
    assert listed == OWN and done.returncode == 0 and not done.stderr


def test_every_command_of_outblas_explains_itself(run: Run) -> None:
    done = run("-c", EACH, *(f"{name} --help" for name in OWN))
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.count("Usage: ") == done.stdout.count("ended with 0\n") == len(OWN)


def test_a_command_of_the_lab_says_in_one_line_what_to_install(run: Run) -> None:
    done = run("-c", EACH, *LABS)
    assert done.stdout == "ended with 2\n" * len(LABS)
    lines = done.stderr.splitlines()
    assert [line.partition("; ")[0] for line in lines] == [
        f"error: command {name!r} does not exist without outblas-lab" for name in LABS
    ]
    assert all(INSTALL in line for line in lines)


def test_doctor_and_list_run(run: Run) -> None:
    done = run("-m", "outblas", "doctor")
    assert done.returncode == 0 and "jail" not in done.stdout
    assert INSTALL in " ".join(done.stdout.split())
    assert "can: list and explain, export kernels as CUDA and C++; cannot: replay" in done.stdout
    done = run("-m", "outblas", "list")
    assert done.returncode == 0 and "heuristic" in done.stdout and "regressor" not in done.stdout
    assert "recordings are in outblas-lab" in done.stdout and f"counters: {INSTALL}" in done.stdout


def test_a_kernel_is_exported(run: Run, tmp_path: Path) -> None:
    problem = next(row.problem for row in Library.packaged("h200").rows if row.plain is not None)
    options = ("--mnk", problem.mnk, "--layout", problem.layout, "--dtype", problem.dtype, "--acc", problem.acc)
    done = run("-m", "outblas", "export", *options, "--format", "cu", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").rglob("*.cu"))


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("tune", "--mnk", "64_64_64", "--device", "replay:h200", "--agent", "ppo"), "unknown agent 'ppo'"),
        (("tune", "--mnk", "64_64_64", "--device", "replay:h200"), "--device replay:h200 is part of outblas-lab"),
        (("tune", "--mnk", "64_64_64", "--workers", "local"), "--workers is part of outblas-lab"),
        (("eval", "--mnk", "64_64_64", "--file", "kernel.cu"), "--file is part of outblas-lab"),
        (("tune", "--mnk", "64_64_64"), "--device replay:h200 is part of outblas-lab"),
    ],
)
def test_an_option_that_needs_the_lab_says_in_one_line_what_to_install(
    arguments: tuple[str, ...], wrong: str, tuning: Path, tmp_path: Path
) -> None:
    (line,) = lines_of(_run_with(tuning, tmp_path)("-m", "outblas", *arguments))
    assert line.startswith(f"error: {wrong}") and INSTALL in line


def test_tuning_checks_its_arguments(tuning: Path, tmp_path: Path) -> None:
    run = _run_with(tuning, tmp_path)
    (line,) = lines_of(run("-m", "outblas", "tune", "--agent", "heuristic", "--budget", "0", "--mnk", "64_64_64"))
    assert "--budget is 0" in line


TORCH = """
import sys, torch, outblas
a = torch.arange(32.0).reshape(4, 8).half()
expected = a @ a.T
outblas.enable()
assert torch.equal(a @ a.T, expected)
outblas.disable()
try:
    outblas.matmul(a, a.T)
except outblas.OutblasError as error:
    print("matmul:", error)
model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False, dtype=torch.float16))
print(outblas.prepare(model))
print(outblas.optimize(model))
assert not [name for name in sys.modules if name.startswith("outblas_lab")]
"""


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="needs torch")
    return link_packages(tmp_path_factory.mktemp("torch"), *base_dependencies(), "torch")


def test_products_and_models_need_no_lab(with_torch: Path, tmp_path: Path) -> None:
    done = _run_with(with_torch, tmp_path)("-c", TORCH)
    assert done.returncode == 0, done.stderr
    assert "products on h200" in done.stdout


def test_a_program_is_captured(with_torch: Path, tmp_path: Path) -> None:
    code = "import torch; print(torch.ones(2, 2) @ torch.ones(2, 2))"
    run = _run_with(with_torch, tmp_path)
    done = run("-m", "outblas", "capture", "--out", "p.json", "--", sys.executable, "-S", "-c", code)
    assert done.returncode == 0 and (tmp_path / "p.json").is_file(), done.stderr
