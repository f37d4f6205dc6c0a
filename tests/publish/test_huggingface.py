"""Folders for Hugging Face's kernel-builder: its rules for names and files, the operator, and the Python package."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import Launch
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.export.exported_files import export
from outblas.export.huggingface import write_folder
from outblas.export.target import Target, find_targets
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.captured_products import CapturedProduct, CapturedProducts
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from support.cli_fixture import assert_refused, outblas

#: Edition 5 of build.toml has these keys; others are refused. Source: kernels-data/src/config of
#: https://github.com/huggingface/kernels.
KEYS = {
    "general": {"name", "version", "edition", "license", "upstream", "backends", "cuda", "hub"},
    "torch": {"include", "minver", "maxver", "pyext", "src", "stable-abi"},
    "kernel": {
        "backend", "cuda-capabilities", "cuda-flags", "cuda-minver", "cxx-flags", "depends", "include", "src",
    },
}  # fmt: skip
LARGE, SMALL = Sm90WgmmaConfig(128, 128, stages=4, consumers=2, cluster_m=2), Sm80MmaConfig(64, 64)
SHAPES = ((8, 128, 256), (256, 256, 256), (256, 512, 256), (64, 128, 256))


def library(layout: str = "TN", dtype: str = "fp16") -> Library:
    """A library in which two problems share a kernel, and one falls back."""
    rows = []
    for (m, n, k), config in zip(SHAPES, (SMALL, LARGE, LARGE, None), strict=True):
        problem = Problem(m, n, k, layout, dtype)  # type: ignore[arg-type]
        choice = None if config is None else LibraryChoice(config, 1.2, 1.1, 1.3)
        rows.append(LibraryRow(problem, "torch", plain=choice))
    return Library("h200", tuple(rows))


def targets(layout: str = "TN", dtype: str = "fp16", launch: Launch = "plain") -> list[Target]:
    known = library(layout, dtype)
    return find_targets([row.problem for row in known.rows], launch, known)


def texts_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_keeps_the_builders_rules(tmp_path: Path) -> None:
    written = write_folder(targets(), "outblas_llm_tn", tmp_path)
    texts = texts_of(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in written} == set(texts)
    build = tomllib.loads(texts["build.toml"])
    name = build["general"]["name"]
    assert re.fullmatch("[a-z][-a-z0-9]*[a-z0-9]", name) and name == "outblas-llm-tn"
    assert f"torch-ext/{name.replace('-', '_')}/__init__.py" in texts
    assert {"name", "version", "license", "backends"} <= set(build["general"]) <= KEYS["general"]
    (kernel,) = build["kernel"].values()
    assert set(build) == {"general", "torch", "kernel"}
    assert set(build["torch"]) <= KEYS["torch"] and {"backend", "depends", "src"} <= set(kernel) <= KEYS["kernel"]
    assert {*build["torch"]["src"], *kernel["src"]} == {p for p in texts if Path(p).suffix in (".cu", ".h", ".cpp")}
    assert "flake.nix" in texts and "Not tried" in texts["CARD.md"]
    assert build["general"]["edition"] == 5 and not re.search("{[{%#]", texts["CARD.md"]), (
        "it is a template of minijinja"
    )
    with_hub = re.sub("(?m)^# (?=\\[general.hub|repo-id)", "", texts["build.toml"])
    assert tomllib.loads(with_hub)["general"]["hub"] == {"repo-id": f"you/{name}"}
    assert not [path for path, text in texts.items() if re.search("@[A-Z_]+@", text)]
    rows = [line.split(" | ") for line in texts["CARD.md"].splitlines() if line.endswith(".h` |")]
    assert [tuple(int(cell.strip("| ")) for cell in row[:3]) for row in rows] == list(SHAPES[:3])
    assert all(row[4].strip("` |") in texts and "1.200x faster than torch.matmul" in row[3] for row in rows)


def test_python_files_keep_the_loaders_rules(tmp_path: Path) -> None:
    """Python 3.9, and no import but torch, the standard library and relative ones; tests may import pytest."""
    write_folder(targets(), "outblas_x", tmp_path)
    for path, text in texts_of(tmp_path).items():
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text, feature_version=(3, 9))):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                assert names <= {"torch"} | ({"pytest", "outblas_x"} if path.startswith("tests/") else set()), path
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 or node.module in sys.stdlib_module_names, path


def test_problems_that_share_a_kernel_share_its_file(tmp_path: Path) -> None:
    write_folder(targets(), "outblas_x", tmp_path)
    texts = texts_of(tmp_path / "gemm")
    assert sorted(path for path in texts if path.endswith(".cu")) == ["gemm.cu", "kernel_1.cu", "kernel_2.cu"]
    rows = re.findall(r"LAUNCHER\(outblas_(\d+_\d+_\d+)_tn_fp16_fp32_plain, outblas_(kernel_\d)\)", texts["gemm.cu"])
    assert rows == [("8_128_256", "kernel_1"), ("256_256_256", "kernel_2"), ("256_512_256", "kernel_2")]
    for number, family in ((1, "sm80_mma_gemm"), (2, "sm90_wgmma_gemm")):
        assert texts[f"kernel_{number}.cu"].startswith(f"#define {family} outblas_kernel_{number}_entry\n")


#: As much of torch and the CUDA runtime as the operator names.
STUBS = {
    "torch/all.h": """
        #pragma once
        #include <cstddef>
        #include <cstdint>
        #include <initializer_list>
        #include <stdexcept>
        #include <vector>
        template <class... T> std::runtime_error refused(const T&...) { return std::runtime_error("refused"); }
        #define TORCH_CHECK(condition, ...) if (!(condition)) throw refused(__VA_ARGS__)
        namespace at {
        enum ScalarType { kHalf, kBFloat16, kByte };
        struct Device { bool operator==(const Device&) const { return true; } };
        struct TensorOptions { TensorOptions dtype(ScalarType) const { return {}; } };
        struct Tensor {
          Device device() const; bool is_cuda() const; ScalarType scalar_type() const; int64_t dim() const;
          int64_t size(int64_t) const; std::vector<int64_t> sizes() const; bool is_contiguous() const;
          void* data_ptr() const; int get_device() const; TensorOptions options() const;
          Tensor narrow(int64_t, int64_t, int64_t) const; void zero_() const;
        };
        Tensor empty(std::initializer_list<int64_t>, TensorOptions);
        }
    """,
    "c10/cuda/CUDAGuard.h": """
        #pragma once
        #include <torch/all.h>
        namespace c10::cuda { struct CUDAGuard { explicit CUDAGuard(at::Device); ~CUDAGuard(); }; }
    """,
    "c10/cuda/CUDAStream.h": """
        #pragma once
        #include <cuda.h>
        namespace c10::cuda { struct CUDAStream { CUstream stream() const; }; CUDAStream getCurrentCUDAStream(); }
    """,
    "cuda_runtime.h": """
        #pragma once
        #include <cuda.h>
        enum cudaError_t { cudaSuccess };
        using cudaFunction_t = CUfunction;
        cudaError_t cudaGetFuncBySymbol(cudaFunction_t*, const void*);
        const char* cudaGetErrorString(cudaError_t);
    """,
}


@pytest.mark.parametrize(("layout", "dtype"), [("TN", "fp16"), ("NN", "bf16")])
def test_the_operator_compiles_without_a_warning(layout: str, dtype: str, tmp_path: Path) -> None:
    gpp = shutil.which("g++")
    if gpp is None:
        pytest.skip("no g++")
    write_folder(targets(layout, dtype), "outblas_x", tmp_path / "hub")
    for name, text in STUBS.items():
        (tmp_path / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stubs" / name).write_text(text)
    cuda = Path(__file__).parent.parent / "support" / "cuda_stub"
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path / 'stubs'}", f"-I{cuda}"]
    command = [gpp, *flags, "-x", "c++", str(tmp_path / "hub" / "gemm" / "gemm.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_of_one_family_link_together(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    known = [Problem(64, n, 256) for n in (64, 128)]
    rows = tuple(
        LibraryRow(problem, plain=LibraryChoice(Sm80MmaConfig(tile, 64), 1.2, 1.1, 1.3))
        for problem, tile in zip(known, (32, 64), strict=True)
    )
    write_folder(find_targets(known, "plain", Library("h200", rows)), "outblas_x", tmp_path)
    arch = ["-gencode", "arch=compute_90a,code=sm_90a"]
    command = [nvcc, "-std=c++17", *arch, "-Xcompiler", "-fPIC", "-shared", "-o", "x.so", "kernel_1.cu", "kernel_2.cu"]
    done = subprocess.run(command, cwd=tmp_path / "gemm", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the package as the loader imports it ----------------------------------------------------------------------------

#: What kernel-builder generates beside the package, on an operator that counts its calls.
OPS = """
import torch
torch.library.define("{name}::gemm", "(Tensor(a!) out, Tensor a, Tensor b) -> ()")
calls = []
@torch.library.impl("{name}::gemm", "CPU")
def gemm(out, a, b):
    calls.append(1)
    out.copy_(a @ {right})
ops = torch.ops.{name}
def add_op_namespace_prefix(op):
    return "{name}::" + op
"""


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_the_package_runs_what_has_a_kernel_and_leaves_the_rest_to_torch(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch: Any = pytest.importorskip("torch")
    name = f"outblas_hub_{layout.lower()}"
    write_folder(targets(layout), name, tmp_path)
    variant = tmp_path / "build" / "torch213-cxx11-cu130-x86_64-linux"
    shutil.copytree(tmp_path / "torch-ext" / name, variant)
    right = "b.t()" if layout == "TN" else "b"
    (variant / "_ops.py").write_text(OPS.format(name=name, right=right))
    spec: Any = importlib.util.spec_from_file_location(f"{name}_1a2b", variant / "__init__.py")
    package = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, package)
    spec.loader.exec_module(package)
    calls = sys.modules[f"{spec.name}._ops"].calls  # type: ignore[attr-defined]
    assert set(SHAPES[:3]) == package.SHAPES and package.DTYPE is torch.float16

    def operands(m: int, n: int, k: int, **options: Any) -> tuple[Any, Any]:
        options = {"dtype": torch.float16, **options}
        return torch.ones(m, k, **options), torch.ones((n, k) if layout == "TN" else (k, n), **options)

    a, b = operands(8, 128, 256)
    assert not package.has_kernel(a, b)  # on a CPU
    assert torch.equal(package.gemm(a, b), torch.full((8, 128), 256.0, dtype=torch.float16)) and not calls
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        assert all(package.has_kernel(*operands(*shape, device="cuda")) for shape in SHAPES[:3])
        assert not package.has_kernel(*operands(*SHAPES[3], device="cuda"))
        assert not package.has_kernel(*operands(*SHAPES[0], device="cuda", dtype=torch.bfloat16))
        transposed = torch.empty_strided((8, 256), (1, 8), dtype=torch.float16, device="cuda")
        assert not package.has_kernel(transposed, operands(8, 128, 256, device="cuda")[1])
        on_gpu, weight = operands(8, 128, 256, device="cuda")
        with monkeypatch.context() as shifted:  # a view that begins at an odd place; fake tensors of CUDA have none
            shifted.setattr(fake.FakeTensor, "storage_offset", lambda self: 1, raising=False)
            assert not package.has_kernel(on_gpu, weight)
        out = package.gemm(on_gpu, weight)  # the fake operator, as torch.compile traces it
        assert tuple(out.shape) == (8, 128) and out.device.type == "cuda"
    package.has_kernel = lambda a, b: True
    out = torch.empty(8, 128, dtype=torch.float16)
    assert package.gemm(a, b, out) is out and torch.equal(out, a @ (b.t() if layout == "TN" else b)) and calls == [1]


def test_one_kernel_is_a_folder_of_one(tmp_path: Path) -> None:
    target = targets()[0]
    written = export(target, ["hf"], tmp_path)
    folder = tmp_path / f"{target.name}_hf"
    assert written and all(path.is_relative_to(folder) for path in written)
    assert tomllib.loads((folder / "build.toml").read_text())["general"]["name"] == target.name.replace("_", "-")
    assert (folder / "torch-ext" / target.name / "__init__.py").is_file()


# -- sets of problems ------------------------------------------------------------------------------------------------


def test_kernels_of_several_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="NN/fp16/fp32 and TN/fp16/fp32"):
        write_folder([*targets("TN"), *targets("NN")], "outblas_x", tmp_path / "x")
    with pytest.raises(UsageError, match="no kernel"):
        write_folder([], "outblas_x", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match="none of the 1 problems has a kernel for --launch plain in the h200 library"):
        find_targets([Problem(*SHAPES[3])], "plain", library())


@pytest.fixture(name="own")
def own_fixture(tmp_path: Path) -> str:
    """The file of a library that has the four shapes and one of suite llm_tp."""
    shard = Problem(16, 1280, 8192)
    rows = (*library().rows, LibraryRow(shard, plain=LibraryChoice(SMALL, 1.2, 1.1, 1.3)))
    Library("h200", rows).save(tmp_path / "own.json")
    return str(tmp_path / "own.json")


def test_the_command_packages_a_suite(own: str, tmp_path: Path) -> None:
    result = outblas("export", "--suite", "llm_tp", "--library", own, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "1 of 435 problems have a kernel; torch computes the rest" in result.stderr
    folder = tmp_path / "out" / "outblas_llm_tp_tn_fp16_fp32_plain_hf"
    assert tomllib.loads((folder / "build.toml").read_text())["general"]["name"] == "outblas-llm-tp-tn-fp16-fp32-plain"
    assert result.stdout == f"{folder}\n" and f"{len(texts_of(folder))} files; CARD.md lists" in result.stderr


def test_the_command_packages_captured_problems(own: str, tmp_path: Path) -> None:
    products = [(*SHAPES[1], "TN"), (*SHAPES[3], "TN"), (*SHAPES[1], "NN")]
    counts = {CapturedProduct(m, n, k, layout, "fp16", "cuda:0", "mm"): 3 for m, n, k, layout in products}
    CapturedProducts(counts, ({"command": "test"},)).save(tmp_path / "p.json")
    command = ("export", "--captured", str(tmp_path / "p.json"), "--library", own, "--out", str(tmp_path / "out"))
    result = outblas(*command)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "skipped 1 problems with another layout, dtype or accumulator" in result.stderr
    assert "1 of 2 problems have a kernel" in result.stderr
    assert (tmp_path / "out" / "outblas_captured_tn_fp16_fp32_plain_hf" / "gemm" / "gemm.cu").is_file()
    assert_refused(outblas(*command, "--dtype", "bf16"), "has no TN/bf16/fp32 matmul", "pass another --layout")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "0 of --mnk, --suite, --captured and --grouped are given; expected exactly one"),
        (("--mnk", "64_64_64", "--suite", "llm"), "2 of --mnk, --suite, --captured and --grouped are given"),
        (("--suite", "llm", "--format", "cu,hf"), "--format cu,hf needs --mnk; expected --format hf"),
        (("--suite", "lm"), "unknown suite 'lm'"),
        (("--captured", "none.json"), "none.json"),
    ],
)
def test_wrong_uses_are_one_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert_refused(outblas("export", *arguments, "--out", str(tmp_path / "x")), words)
    assert not (tmp_path / "x").exists()
