"""Exported kernels: the library's machine code, files that compile alone, the numbers that outblas.runtime.launch
has."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli import export as export_command
from outblas.cli.main import app
from outblas.core.config import config_name
from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch.unlisted_shapes import any_shape_chooser
from outblas.export import exported_files
from outblas.export.cpp import checking_program, launch_header
from outblas.export.cuda_source import inline_includes, standalone
from outblas.export.exported_files import export
from outblas.export.target import Target, find_target
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig
from outblas.kernels.families.sm90_wgmma.sm90_wgmma_gemm import FAMILY
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry import grid, launch_smem, workspace_bytes
from outblas.kernels.grouped.grouped_kernel import make_source as make_grouped_source
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.kernels.source import Source, make_source
from outblas.predict.grouped_choice import choose_grouped, measured_groups
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.runtime.nvrtc import compile_source
from outblas.runtime.sass import _code_sections
from support.gpus.known import H100, H200

pytestmark = pytest.mark.long
PACKAGED = Library.packaged("h200")
#: One of every family, way to split K and layout, and fp16 accumulation.
TARGETS: dict[str, Target] = {}
for _row in PACKAGED.rows:
    for _launch in ("plain", "pdl", "weights"):
        if (_choice := _row.choice(_launch)) is not None:
            _kind = (_choice.config.family, getattr(_choice.config, "split_kind", ""), _row.problem.layout)
            if not any(key.startswith("-".join(_kind) + "/") for key in TARGETS):
                _target = find_target(_row.problem, _launch, PACKAGED)
                TARGETS[f"{'-'.join(_kind)}/{_target.name}"] = _target
_HALF = Problem(256, 256, 256, "TN", "fp16", "fp16")
_CONFIG = Sm90WgmmaConfig(128, 128, stages=4, consumers=2, cluster_m=2)
TARGETS["half"] = find_target(
    _HALF, "plain", Library("h200", (LibraryRow(_HALF, plain=LibraryChoice(_CONFIG, 1.2, 1.1, 1.3)),))
)
_ODD = Problem(65, 131, 333, "NN")
_ODD_CONFIG = Sm90OddrowsConfig(64, 64, split_k=2)
TARGETS["odd"] = find_target(
    _ODD, "plain", Library("h200", (LibraryRow(_ODD, plain=LibraryChoice(_ODD_CONFIG, 1.2, 1.1, 1.3)),))
)

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


def test_the_sample_has_all_kinds() -> None:
    assert {t.config.family for t in TARGETS.values()} >= {"sm90_wgmma_gemm", "sm80_mma_gemm", "sm80_direct_gemm"}
    assert any(workspace_bytes(t.problem, t.config) for t in TARGETS.values())


@each_target
def test_the_standalone_source_is_the_librarys_kernel(target: Target) -> None:
    pytest.importorskip("cuda.bindings")
    text, source = standalone(target), make_source(target.problem, target.config)
    assert "#include" not in text and "#pragma once" not in text
    alone = compile_source(Source(text, source.entry, (), (), source.acc, source.family), cache=None)
    own = compile_source(source)
    assert list(_code_sections(alone.image)) == list(_code_sections(own.image))
    assert alone.registers == own.registers


@each_target
def test_its_comment_says_what_it_is_and_where_the_figures_come_from(target: Target) -> None:
    head = standalone(target).split("#pragma")[0]
    assert all(line.startswith("//") for line in head.strip().splitlines())
    assert config_name(target.config) in head and f"{target.choice.speedup:.3f}x faster than " in head
    words = " ".join(head.replace("//", "").split())
    for known in ("gpu", "driver", "date", "commit"):
        if target.provenance.get(known):
            assert str(target.provenance[known]) in words


def test_a_header_behind_a_false_condition_is_there_for_who_comes_later() -> None:
    headers = (("a.h", '#pragma once\n#include "b.h"\nint a;'), ("b.h", "#pragma once\nint b;"))
    main = '#if 0\n#include "a.h"\n#endif\n#include "b.h"\n#include "b.h"\n'
    text = inline_includes(Source(main, "e", headers, (), "fp32", "f"))
    assert text.count("int a;") == 1 and text.count("int b;") == 2 == text.count("#ifndef OUTBLAS_B_H")
    gpp = shutil.which("g++")
    if gpp is not None:
        command = [gpp, "-E", "-P", "-x", "c++", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["int", "b;"]


@each_target
def test_the_header_has_the_numbers_of_the_librarys_launch(target: Target) -> None:
    text, problem, config = launch_header(target), target.problem, target.config
    assert f"M = {problem.m}, N = {problem.n}, K = {problem.k};" in text
    assert "GRID[3] = {" + ", ".join(map(str, grid(problem, config, H200.sms))) + "}" in text
    assert f"SHARED_BYTES = {launch_smem(problem, config, H200.sms)}," in text
    assert f"WORKSPACE_BYTES = {workspace_bytes(problem, config)}," in text
    assert f"DEPENDENT = {str(config.pdl).lower()};" in text
    number = r"(\d+), "
    if config == _ODD_CONFIG:
        assert "MAPS_B[8] = {{42, 131, 1048, 0, 8, 64, CU_TENSOR_MAP_SWIZZLE_128B}, {42, 134, 1048, 256, 8," in text
    found = re.findall(rf"MAPS_[ABC]\[1\] = {{{{{number * 6}CU_TENSOR_MAP_SWIZZLE_(\w+)}}}}", text)
    if isinstance(config, Sm90WgmmaConfig):
        swizzles = {16: "NONE", 32: "32B", 64: "64B", 128: "128B"}
        boxes = FAMILY.tensor_boxes(problem, config)
        wanted = [(*map(str, (rows, cols, cols, 0, *box)), swizzles[2 * box[1]]) for rows, cols, *box in boxes]
        assert found == wanted
    else:
        assert found == [] and ("Tensor" in text) == (config == _ODD_CONFIG)
    assert ("&k, &workspace}" in text) == bool(workspace_bytes(problem, config))


STUB = (Path(__file__).parent.parent / "support" / "cuda_stub" / "cuda.h").parent
TOOLKITS = [Path(found).resolve() for found in ["/usr/local/cuda/include", *Path("/usr/local").glob("cuda-*/include")]]


def cuda_folders() -> list[Path]:
    """The stub, and the toolkit's own headers where there is one."""
    return [STUB, *(folder for folder in dict.fromkeys(TOOLKITS) if (folder / "cuda.h").is_file())]


#: One target of each family: for the toolkit's own headers. Others take long, and hardly differ.
ONE_EACH = {target.config.family: name for name, target in TARGETS.items()}
LAUNCHERS = [
    pytest.param(name, folder, marks=() if name in ONE_EACH.values() else pytest.mark.slow)
    for folder in cuda_folders()
    for name in (TARGETS if folder == STUB else ONE_EACH.values())
]


@pytest.mark.parametrize(
    ("name", "folder"),
    LAUNCHERS,
    ids=lambda value: value if isinstance(value, str) else "stub" if value == STUB else "toolkit",
)
def test_the_launcher_and_its_test_compile_without_a_warning(name: str, folder: Path, tmp_path: Path) -> None:
    target = TARGETS[name]
    gpp = shutil.which("g++")
    if gpp is None:
        pytest.skip("no g++")
    (tmp_path / f"{target.name}.h").write_text(launch_header(target))
    (tmp_path / "t.cpp").write_text(checking_program(target))
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{folder}"]
    done = subprocess.run([gpp, *flags, "t.cpp"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ONE_EACH.values())
def test_the_compile_line_of_the_source_works_as_it_is_and_warns_of_nothing(name: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    target = TARGETS[name]
    (tmp_path / f"{target.name}.cu").write_text(standalone(target))
    (line,) = [line for line in standalone(target).splitlines() if line.startswith("// Compile: ")]
    command = shlex.split(line.removeprefix("// Compile: "))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert target.config.family.encode() in (tmp_path / f"{target.name}.cubin").read_bytes()


def test_all_formats_are_written(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    target = next(iter(TARGETS.values()))
    names = sorted(path.name for path in export(target, ["all"], tmp_path))
    assert names == sorted(target.name + end for end in (".cu", ".ptx", ".cubin", ".h", "_test.cpp"))
    ptx = (tmp_path / f"{target.name}.ptx").read_text()
    assert ".target sm_90a" in ptx and f".entry {target.config.family}" in ptx and "\0" not in ptx
    own = compile_source(make_source(target.problem, target.config)).image
    assert (tmp_path / f"{target.name}.cubin").read_bytes() == own
    with pytest.raises(UsageError, match="'exe'"):
        export(target, ["cu", "exe"], tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_without_nvrtc_the_other_formats_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(source: Source) -> Any:
        raise ToolchainMissing("NVRTC cannot be loaded", "its wheels", "pip install 'outblas[compile]'")

    monkeypatch.setattr(exported_files, "compile_ptx", no_compiler)
    monkeypatch.setattr(exported_files, "compile_tuned", no_compiler)
    result = outblas("--mnk", "64_4096_64", "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".cpp", ".cu", ".h"]
    assert sorted(result.stdout.split()) == sorted(map(str, tmp_path.iterdir()))
    for name in ("ptx", "cubin"):
        assert f"skipped {name}: NVRTC cannot be loaded; expected its wheels; pip install" in result.stderr
    named = outblas("--mnk", "64_4096_64", "--format", "all,cubin", "--out", str(tmp_path / "named"))
    assert named.exit_code == 2 and named.stderr.splitlines()[-1].startswith("error: NVRTC cannot be loaded")


def test_a_predicted_kernel_says_that_it_was_not_measured(tmp_path: Path) -> None:
    where = ("--mnk", "63_65_67", "--format", "cu,cpp", "--out", str(tmp_path))
    result = outblas(*where, "--predicted")
    assert result.exit_code == 0, result.stderr
    said = "Predicted, neither proven nor timed on this problem: 1."
    assert result.stderr.startswith(said) and "faster than torch.matmul (bounds 1." in result.stderr
    for file in tmp_path.iterdir():
        head = file.read_text().split("#")[0]
        assert said in head and "driver" not in head and "// For h200." in head, file


def test_a_predicted_kernel_is_what_matmul_would_choose(tmp_path: Path) -> None:
    problem, choose = Problem(63, 65, 67), any_shape_chooser("h200", PACKAGED)
    assert choose is not None
    choice = choose(problem, H200, "plain")
    assert isinstance(choice, LibraryChoice)
    result = outblas("--mnk", problem.mnk, "--predicted", "--format", "cu", "--out", str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert config_name(choice.config) in file.read_text() and f"{choice.speedup:.3f}x" in result.stderr


def test_what_the_library_has_is_not_predicted(tmp_path: Path) -> None:
    result = outblas("--mnk", "64_4096_64", "--predicted", "--format", "cu", "--out", str(tmp_path))
    assert result.exit_code == 0 and result.stderr.startswith("Measured: "), result.stderr


def test_a_grouped_kernel_is_one_file_with_the_same_code(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    for named, layout, dtype in (("128_1536_2048_4096", "tn", "bf16"), ("8_28672_4096_32768", "nn", "fp16")):
        result = outblas("--grouped", named, "--layout", layout, "--dtype", dtype, "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        text = Path(result.stdout.strip()).read_text()
        assert "#include" not in text and text.startswith("// SPDX-License-Identifier: Apache-2.0")
        groups, n, k, rows = map(int, named.split("_"))
        problem = GroupedProblem(groups, n, k, layout.upper(), dtype)  # type: ignore[arg-type]
        config = choose_grouped(problem, rows, measured_groups("sm_90a"), must=True)
        assert config is not None
        own = compile_source(make_grouped_source(problem, config))
        alone = compile_source(Source(text, own.entry, (), (), "fp32", own.entry), cache=None)
        assert list(_code_sections(alone.image)) == list(_code_sections(own.image))
    for wrong, words in (
        ("8_28672", "four positive"),
        ("8_28672_4096_x", "four"),
        ("8_100_64_9", "multiples"),
        ("8_64_64_0", "four"),
    ):
        result = outblas("--grouped", wrong, "--out", str(tmp_path))
        assert result.exit_code == 2 and words in result.stderr


# -- what cannot be exported -----------------------------------------------------------------------------------------


def outblas(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "200"})


def test_a_packaged_library_is_named_by_its_gpu(tmp_path: Path) -> None:
    row = next(row for row in Library.packaged("h100").rows if row.plain is not None)
    where = ("--mnk", row.problem.mnk, "--layout", row.problem.layout, "--format", "cu", "--out", str(tmp_path))
    result = outblas(*where, "--library", "h100")
    assert result.exit_code == 0 and result.stderr.endswith("\nlibrary: h100\n"), result.output
    (file,) = tmp_path.glob("*.cu")
    head = file.read_text().splitlines()[:12]
    assert head[0] == "// SPDX-License-Identifier: Apache-2.0" and any("H100" in line for line in head)
    assert any(line.startswith("// Compile: nvcc ") and line.endswith(f" {file.name}") for line in head)
    wrong = outblas(*where, "--library", "h1000")
    assert wrong.exit_code == 2 and "h1000 cannot be read" in wrong.stderr


@pytest.mark.parametrize(
    ("gpu", "line"),
    [
        (H100, "h100 (this machine's GPU)"),
        (replace(H100, name="h100-nvl"), "h200 (no GPU with a packaged one here; --library names another)"),
        (None, "h200 (no GPU with a packaged one here; --library names another)"),
    ],
)
def test_the_default_library_is_that_of_this_machine(
    gpu: Gpu | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_command, "gpu_count", lambda: int(gpu is not None))
    monkeypatch.setattr(export_command, "gpu_of_device", lambda index: gpu)
    result = outblas("--mnk", "64_4096_4096", "--format", "cu", "--out", str(tmp_path))
    assert result.exit_code == 0 and result.stderr.endswith(f"\nlibrary: {line}\n"), result.output


def test_a_row_that_falls_back_names_the_algorithm(tmp_path: Path) -> None:
    row = next(row for row in PACKAGED.rows if row.plain is None and row.fallback)
    p = row.problem
    where = ("--layout", p.layout, "--dtype", p.dtype, "--acc", p.acc, "--out", str(tmp_path / "x"))
    result = outblas("--mnk", p.mnk, *where)
    assert result.exit_code == 2 and row.fallback in result.stderr and row.baseline in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match=r"call torch\.matmul, as outblas\.matmul does"):
        find_target(p, "plain", Library("h200", (LibraryRow(p, "torch"),)))


def test_a_row_that_falls_back_names_the_launch_options_that_have_a_kernel() -> None:
    row = LibraryRow(_HALF, "torch", pdl=LibraryChoice(Sm80MmaConfig(64, 64, pdl=True), 1.2, 1.1, 1.3))
    with pytest.raises(UsageError, match="--launch pdl, which has one or pass --launch weights"):
        find_target(_HALF, "plain", Library("h200", (row,)))


def test_formats_may_be_separated_by_commas(tmp_path: Path) -> None:
    result = outblas("--mnk", "64_4096_64", "--format", "cu, cpp", "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".cpp", ".cu", ".h"]


def test_other_errors_are_one_line(tmp_path: Path) -> None:
    for arguments, word in (
        (("--mnk", "63_65_67"), "add --predicted for the kernel that outblas.matmul would choose, or"),
        (("--mnk", "17_6144_4096", "--predicted"), "none is predicted to be faster than torch"),
        (("--mnk", "64_64_64", "--launch", "fast"), "unknown launch option"),
        (("--mnk", "64_64_64", "--layout", "nn", "--format", "exe"), "format 'exe'"),
        (("--mnk", "64_64_64", "--library", str(tmp_path / "none.json")), "none.json"),
    ):
        result = outblas(*arguments, "--out", str(tmp_path / "x"))
        assert result.exit_code == 2 and word in result.stderr, result.stderr
    other = Library("l40", (LibraryRow(_HALF, plain=LibraryChoice(_CONFIG, 1.2, 1.1, 1.3)),))
    with pytest.raises(UsageError, match="'l40'"):
        find_target(_HALF, "plain", other)


@pytest.fixture(scope="module", params=["TN", "NN"])
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A layout, and the folder with its test program, on a driver that multiplies on the host."""
    gpp = shutil.which("g++")
    if gpp is None:
        pytest.skip("no g++")
    folder, problem = tmp_path_factory.mktemp("check"), Problem(32, 48, 64, request.param)
    config = Sm80MmaConfig(32, 16, wm=1, wn=1)
    target = find_target(
        problem, "plain", Library("h200", (LibraryRow(problem, plain=LibraryChoice(config, 1.2, 1.1, 1.3)),))
    )
    (folder / f"{target.name}.h").write_text(launch_header(target))
    program = checking_program(target)
    (folder / f"{target.name}_test.cpp").write_text(program)
    (folder / "k.cubin").write_text("not looked at")
    (line,) = [line for line in program.splitlines() if line.startswith("// g++ ")]
    toolkit = {"-I/usr/local/cuda/include": [f"-I{STUB}"], "-lcuda": [str(STUB / "on_the_host.cpp"), "-o", "check"]}
    words = shlex.split(line.removeprefix("// "))
    assert {*toolkit} < {*words}
    command = [part for word in words for part in toolkit.get(word, [word])]
    built = subprocess.run([*command, "-O1"], cwd=folder, capture_output=True, text=True)
    if "_Float16" in built.stderr:
        pytest.skip("this g++ has no _Float16")
    assert built.returncode == 0, built.stderr
    return request.param, folder


@pytest.mark.parametrize(
    ("defects", "status", "says"),
    [
        ((), 0, "PASS"),
        (("WRONG",), 1, "FAIL: C["),
        (("PAST",), 1, "behind C was written"),
        (("swapped",), 1, "FAIL: C["),
    ],
    ids=str,
)
def test_the_test_program_tells_right_from_wrong(
    checked: tuple[str, Path], defects: tuple[str, ...], status: int, says: str
) -> None:
    layout, folder = checked
    b_nk = (layout == "TN") != ("swapped" in defects)  # swapped: B is read in the other order
    told = dict.fromkeys([*defects, *(["B_NK"] if b_nk else [])], "1")
    done = subprocess.run(["./check", "k.cubin"], cwd=folder, capture_output=True, text=True, env=told)
    assert (done.returncode, done.stderr) == (status, "") and says in done.stdout
