"""benchmarks/rivals/ without a GPU: texts of CUDA-L2 and their stand-in, padded operands, rows from a worker."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import importlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import CompileError, ContractError, DeviceError, RecordError, UsageError
from outblas.core.evaluation import Status, Verdict
from outblas.core.problem import Problem
from outblas.records.library_row import LibraryRow
from outblas.runtime.cubin import Cubin, SassFacts
from outblas_lab.jail.build import BuiltKernel
from support.fake_gpu import timing
from support.gpus.known import H100

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SUPPORT = Path(__file__).resolve().parents[1] / "support" / "rivals"
FOREIGN = (SUPPORT / "foreign_kernel.cu").read_text()
PROBLEM = Problem(100, 64, 40)
FACTS = SassFacts(0, 8, 0, 0, 0, 0, 0, 0, ("fp32",))


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of benchmarks/rivals, by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"rivals.{name}")


def built(kernel: Any) -> BuiltKernel:
    return BuiltKernel(kernel, Cubin(b"", "outblas_launch", "sm_90a", 40, 0, 0, 0, FACTS, 0.1, False, ""))


def test_a_text_says_its_layout_its_tile_and_its_waits(rivals: Any) -> None:
    wrap = rivals("cuda_l2_kernels").wrap
    found = wrap(FOREIGN, "product", PROBLEM)
    assert found.problem == PROBLEM, "the comment that reads B by rows does not count"
    assert found.padded == Problem(192, 64, 64) and found.waits
    assert found.kernel.launch.why_not(found.padded, H100) is None
    assert found.kernel.launch.why_not(PROBLEM, H100), "it computes the padded problem alone"
    assert "#include <torch" not in found.text
    rows = wrap(FOREIGN.replace("b_col_major.data_ptr", "b.data_ptr"), "product", PROBLEM)
    assert rows.problem.layout == rows.padded.layout == "NN"
    untiled = wrap(FOREIGN.replace("Int<", "Other<").replace("cudaDeviceSynchronize();", ""), "product", PROBLEM)
    assert untiled.padded == untiled.problem and not untiled.waits
    with pytest.raises(ContractError, match="both forms"):
        wrap(FOREIGN + "// \nvoid* other = b.data_ptr();", "product", PROBLEM)
    again = rivals("cuda_l2_kernels").CudaL2Kernel.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found and again.kernel == found.kernel


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_stand_in_sends_all_work_to_the_callers_stream(rivals: Any, tmp_path: Path) -> None:
    text = rivals("cuda_l2_kernels").wrap(FOREIGN, "product", PROBLEM).text
    source = text.replace("Int<", "Tile<").replace(
        "#include <cuda_fp16.h>", "template <int N> struct Tile {};\n#include <cuda_fp16.h>"
    )
    (tmp_path / "kernel.cpp").write_text(source + '\nextern "C" const char* seen() { return enqueued().c_str(); }\n')
    program = ["g++", "-std=c++17", "-shared", "-fPIC", "-DOUTBLAS_NN=0", f"-I{SUPPORT / 'cuda'}", "-o", "kernel.so"]
    subprocess.run([*program, "kernel.cpp"], cwd=tmp_path, check=True, capture_output=True)
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))
    library.seen.restype = ctypes.c_char_p
    library.outblas_launch.argtypes = [
        *(ctypes.c_void_p,) * 3, *(ctypes.c_int,) * 3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    ]  # fmt: skip
    right, output = (ctypes.c_uint16 * 2)(7, 8), (ctypes.c_uint16 * 1)(0)
    sizes = 192, 64, 64
    assert library.outblas_launch(None, right, output, *sizes, None, 0, 77) == 0
    assert library.outblas_launch(None, right, output, *sizes, None, 0, 78) == 0
    assert output[0] == 8, "B by columns is the caller's B"
    once = "memset@{0} configured@{0} launch@{0} event@{0} triple@{0} "
    assert library.seen().decode() == "malloc@0 " + once.format(77) + once.format(78), "no wait, no second malloc"


def test_operands_are_padded_with_zeros_and_the_proof_sees_its_part(
    rivals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    bound = []

    class Kernel:
        name = "wide"

        def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> Any:
            bound.append(problem)
            return lambda stream: c.copy_(a @ b.t())

    problem, wide = Problem(3, 5, 2), Problem(4, 8, 8)
    a, b, c = torch.randn(3, 2), torch.randn(5, 2), torch.full((3, 5), torch.nan)
    padded = rivals("bound_rivals").Padded
    padded(Kernel(), wide, None, copies_back=False).bind(problem, a, b, c)(0)
    assert c.isnan().all(), "a timed call writes padded memory only"
    padded(Kernel(), wide, None, copies_back=True).bind(problem, a, b, c)(0)
    assert torch.allclose(c, a @ b.t()) and bound == [wide, wide]
    c.fill_(torch.nan)
    padded(Kernel(), problem, None, copies_back=False).bind(problem, a, b, c)(0)
    assert torch.allclose(c, a @ b.t()) and bound[-1] == problem, "equal extents need no copies"


def test_the_shared_memory_of_a_captured_kernel_is_the_most_of_its_launches(
    rivals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of a false graph: (kind, function, dynamic bytes). A function of 0 is known by its kernel alone."""
    nodes = [(0, 11, 1000), (2, 0, 9999), (0, 0, 1500)]
    cu = SimpleNamespace(
        CUgraphNodeType=SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL=0),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static"),
        cuGraphGetNodes=lambda graph, count=0: (0, nodes[:count], len(nodes)),
        cuGraphNodeGetType=lambda node: (0, node[0]),
        cuGraphKernelNodeGetParams=lambda node: (
            0,
            SimpleNamespace(func=node[1], kern="kernel", sharedMemBytes=node[2]),
        ),
        cuKernelGetFunction=lambda kernel: (0, {"kernel": 12}[kernel]),
        cuFuncGetAttribute=lambda attribute, function: (0, {11: 600, 12: 64}[function]),
    )
    module = rivals("bound_rivals")
    monkeypatch.setattr(module, "driver", lambda: cu)
    monkeypatch.setattr(module, "check", lambda name, found: found[1] if len(found) == 2 else found[1:])
    kernel = module.SharedMemoryOf(SimpleNamespace(name="k", bind="bound"))
    assert kernel.shared_bytes == 0 and kernel.bind == "bound"
    kernel.change_graph("graph")
    assert kernel.shared_bytes == 1600


def test_a_folder_carries_kernels_and_the_reasons_of_those_that_failed(
    rivals: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = rivals("cuda_l2_builds")
    checkout, folder = tmp_path / "checkout", tmp_path / "carried"
    texts = checkout / "kernels" / "h100_F32F16F16F32"
    texts.mkdir(parents=True)
    (texts / "100_64_40.cu").write_text(FOREIGN)
    (texts / "1_64_40.cu").write_text(FOREIGN + "auto x = b.data_ptr();")
    (texts / "2_64_40.cu").write_text(FOREIGN + "int refused;")
    compiled = []

    def build(kernel: Any, problem: Problem, gpu: Any) -> BuiltKernel:
        if "refused" in kernel.text:
            raise CompileError("nvcc refuses it", "C++", "correct it")
        compiled.append(problem)
        return built(kernel)

    monkeypatch.setattr("rivals.carried_builds.build", build)
    monkeypatch.setattr("rivals.carried_builds.cubins", lambda image: [])
    builds, bad, refused = module.CudaL2Builds(folder, H100), replace(PROBLEM, m=1), replace(PROBLEM, m=2)
    assert builds.get("h100", PROBLEM) == "not compiled"
    jobs = {p.key: lambda p=p: builds.compile(checkout, "h100", p) for p in (PROBLEM, bad, refused)}
    found = rivals("compile_jobs").compile_jobs(jobs, 2)
    assert set(found) == {bad.key, refused.key} and "both forms" in found[bad.key]
    assert builds.compile(checkout, "h100", PROBLEM) == "40 registers, sums in fp32"
    assert compiled == [PROBLEM], "a second run compiles nothing"
    kernel, carried = builds.get("h100", PROBLEM)
    assert kernel.padded == Problem(192, 64, 64) and carried.kernel == kernel.kernel
    assert builds.get("h100", refused) == "not compiled: nvcc refuses it"
    with pytest.raises(UsageError, match="checkout"):
        builds.compile(checkout, "h100", replace(PROBLEM, m=9))
    builds.path("h100", PROBLEM).write_bytes(gzip.compress(b"[]"))
    with pytest.raises(RecordError):
        builds.get("h100", PROBLEM)


def test_a_lost_row_is_measured_again_without_the_foreign_kernel(rivals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = rivals("row_worker")
    kernel = rivals("cuda_l2_kernels").wrap(FOREIGN, "product", PROBLEM)
    made = []

    def requests() -> Any:
        for m in (64, 128, 256, 512):
            made.append(m)
            yield worker.RowRequest(Problem(m, 64, 64), (), (kernel, built(kernel.kernel)), {"x": "wrong"})

    rows = worker.rows_of(requests(), "support.rivals.fake_rows:make_handler", ())
    first = next(rows)
    assert first == {"problem": Problem(64, 64, 64).key, "ours": 0, "theirs": True, "refused": {"x": "wrong"}}
    assert made == [64, 128], "the next request was made meanwhile"
    second, third, fourth = rows
    assert second["theirs"] is False and second["refused"]["x"] == "wrong"
    assert "exit code 3" in second["refused"][worker.CUDA_L2]
    assert third == {"problem": Problem(256, 64, 64).key, "lost": "exited: the worker ended with exit code 3"}
    assert "unreadable message" in fourth["lost"], "a time that is not finite is no row"


def test_a_run_whose_first_rows_are_all_lost_ends_and_yields_none_of_them(rivals: Any) -> None:
    worker = rivals("row_worker")
    lost = worker.RowRequest(Problem(256, 64, 64))
    with pytest.raises(DeviceError, match="first 3 problems were lost.*exit code 3"):
        list(worker.rows_of(iter([lost] * 4), "support.rivals.fake_rows:make_handler", ()))
    rows = list(worker.rows_of(iter([lost] * 2), "support.rivals.fake_rows:make_handler", ()))
    assert [set(row) for row in rows] == [{"problem", "lost"}] * 2, "too few to tell"


def test_an_instance_that_cannot_be_launched_takes_no_part(rivals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(kernel: str, *_: Any) -> Verdict:
        if kernel == "refuses":
            raise DeviceError("outblas_launch returned -1", "0", "look")
        return Verdict(Status.PASSED if kernel == "good" else Status.WRONG, (), "an error of 3")

    monkeypatch.setattr("outblas.judge.gates.prove", prove)
    found = rivals("proofs").unproved({name: name for name in ("good", "bad", "refuses")}, PROBLEM)
    assert set(found) == {"bad", "refuses"} and "returned -1" in found["refuses"]


def test_kernels_that_are_wrong_are_named_and_not_tried_twice(rivals: Any) -> None:
    proofs = rivals("proofs")
    verdicts = {"good": Verdict(Status.PASSED), "bad": Verdict(Status.WRONG, (), "an error of 3")}
    clock = SimpleNamespace(operands=lambda index: ("a", "b", "c"))
    prover = SimpleNamespace(call=lambda call: verdicts[call])

    def kernel(name: str, broken: bool = False) -> Any:
        def bind(problem: Problem, *operands: str) -> str:
            if name == "refuses":
                raise CompileError("no room", "some", "make some")
            return name

        return SimpleNamespace(bind=bind, broken_workspace=lambda: broken)

    kernels = {name: kernel(name) for name in ("good", "bad", "refuses", "unfit")} | {"leaks": kernel("good", True)}
    refused = {"unfit": "failed the full proof"}
    assert list(proofs.passed(kernels, PROBLEM, clock, prover, refused)) == ["good"]
    assert refused["bad"].endswith("an error of 3") and "no room" in refused["refuses"]
    assert refused["leaks"] == "it wrote past its workspace" and refused["unfit"] == "failed the full proof"


@pytest.mark.parametrize("changed", ["gpu", "driver", "toolchain", "commit"])
def test_rows_of_another_driver_toolchain_or_commit_do_not_share_a_file(
    rivals: Any, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, out = rivals("journaled_rows"), tmp_path / "r.json"
    here = {"gpu": "a GPU", "driver": "1", "toolchain": "one"}

    def under(commit: str, **conditions: str) -> None:
        monkeypatch.setattr(module, "shared_conditions", lambda: {**here, **conditions})
        monkeypatch.setattr(module, "source_commit", lambda: commit)

    def measure(keys: list[str]) -> Any:
        yield {"problem": keys[0]}
        if len(keys) > 1:
            raise KeyboardInterrupt

    def rows() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = module.journaled_rows(out, {"rounds": 3}, ["x", "y"], measure, str, list)
        return found

    under("first")
    with pytest.raises(KeyboardInterrupt):
        rows()
    under("second" if changed == "commit" else "first", **({} if changed == "commit" else {changed: "another"}))
    with pytest.raises(UsageError, match="other settings"):
        rows()
    under("first")
    assert rows() == [{"problem": "x"}, {"problem": "y"}]


def test_where_the_library_has_no_kernel_ours_is_its_own_fall_back_and_not_the_best_rival(
    rivals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = LibraryRow(PROBLEM, "lt_auto", "index=2/8 id=66 tile=20", "cuda:0")
    fall_back = rivals("fall_back").fall_back
    assert fall_back(PROBLEM, named)._named == {PROBLEM: "id=66 tile=20"}
    assert fall_back(PROBLEM, None)._named == {PROBLEM: ""}, "torch"
    kind = importlib.import_module("cutlass_peer").Peer
    peer = kind.__new__(kind)  # without a GPU
    peer.gpu = H100
    us = {"torch": 4.0, "cublas": 2.0, "cutlass": 3.0, "ours": 4.1}
    timings = {name: timing(time, 11) for name, time in us.items()}
    row = peer._row(PROBLEM, None, timings, {"an instance": 3.0}, {})
    assert row["config"] is None and row["ours"]["ratio"] == pytest.approx(2.0 / 4.1)
    assert row["ours_over_cutlass"]["ratio"] == pytest.approx(3.0 / 4.1)
