"""Operands that a kernel must not be given; descriptors and launches themselves need a GPU (tests/gpu)."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import DeviceError, TensorError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.geometry import geometry, grid, launch_smem  # noqa: E402
from outblas.runtime import launch, tensor_map  # noqa: E402
from outblas.runtime.launch import check_operands  # noqa: E402
from outblas.runtime.tensor_map import encode_map  # noqa: E402
from support.gpus.known import H200  # noqa: E402

P = Problem(16, 24, 32)


class OnGpu(torch.Tensor):  # type: ignore[misc, name-defined]
    """A CPU tensor that says it is on a GPU."""

    @property
    def device(self) -> Any:
        return torch.device("cuda:0")


def operands(problem: Problem = P, cls: type = OnGpu) -> list[Any]:
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    shapes = (problem.m, problem.k), problem.b_shape, (problem.m, problem.n)
    return [torch.empty(shape, dtype=dtype).as_subclass(cls) for shape in shapes]


@pytest.mark.parametrize("problem", [P, Problem(16, 24, 32, "NN", "bf16"), Problem(1, 1, 1)])
def test_what_bind_documents_is_accepted(problem: Problem) -> None:
    check_operands(problem, *operands(problem))


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(TensorError, match="a is on cpu; expected a, b and c on the same CUDA device"):
        check_operands(P, *operands(cls=torch.Tensor))


@pytest.mark.parametrize("which", range(3))
def test_one_operand_elsewhere_is_refused(which: int) -> None:
    tensors = operands()
    tensors[which] = tensors[which].as_subclass(torch.Tensor)
    with pytest.raises(TensorError, match="is on "):
        check_operands(P, *tensors)


@pytest.mark.parametrize(
    ("which", "shape", "message"),
    [(0, (16, 31), r"a has shape \(16, 31\)"), (1, (32, 24), r"b has shape \(32, 24\)"), (2, (24, 16), "c has shape")],
)
def test_shapes_must_be_the_problems(which: int, shape: tuple[int, int], message: str) -> None:
    tensors = operands()
    tensors[which] = torch.empty(shape, dtype=torch.float16).as_subclass(OnGpu)
    with pytest.raises(TensorError, match=message + ".*16_24_32_TN"):
        check_operands(P, *tensors)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
def test_dtypes_must_be_the_problems(which: int, dtype: Any) -> None:
    tensors = operands()
    tensors[which] = torch.empty(tensors[which].shape, dtype=dtype).as_subclass(OnGpu)
    with pytest.raises(TensorError, match=f"{'abc'[which]} has dtype {dtype}; expected torch.float16"):
        check_operands(P, *tensors)


@pytest.mark.parametrize("which", range(3))
def test_strides_must_be_contiguous(which: int) -> None:
    tensors = operands()
    rows, cols = tensors[which].shape
    tensors[which] = torch.empty((rows, 2 * cols), dtype=torch.float16)[:, :cols].as_subclass(OnGpu)
    with pytest.raises(TensorError, match=f"{'abc'[which]} has strides"):
        check_operands(P, *tensors)


@pytest.mark.parametrize("shift", [0, 1, 16 * 32 - 1, -1, 1 - 16 * 32])
def test_an_output_on_an_input_is_refused(shift: int) -> None:
    square = Problem(16, 32, 32)
    flat = torch.empty(4 * 16 * 32, dtype=torch.float16)
    a = flat[512:1024].view(16, 32).as_subclass(OnGpu)
    c = flat[512 + shift : 1024 + shift].view(16, 32).as_subclass(OnGpu)
    b = torch.empty(32, 32, dtype=torch.float16).as_subclass(OnGpu)
    with pytest.raises(TensorError, match="c overlaps a"):
        check_operands(square, a, b, c)


def test_neighbours_in_memory_are_no_overlap() -> None:
    flat = torch.empty(4 * 512, dtype=torch.float16)
    parts = [flat[512 * i : 512 * (i + 1)].view(16, 32).as_subclass(OnGpu) for i in range(3)]
    b = torch.empty(32, 32, dtype=torch.float16).as_subclass(OnGpu)
    for c in (parts[0], parts[2]):
        check_operands(Problem(16, 32, 32), parts[1], b, c)
    with pytest.raises(TensorError, match="c overlaps b"):
        check_operands(Problem(32, 32, 32), torch.empty(32, 32, dtype=torch.float16).as_subclass(OnGpu), b, b)


def test_inputs_may_be_the_same_tensor() -> None:
    square = torch.empty(32, 32, dtype=torch.float16).as_subclass(OnGpu)
    check_operands(Problem(32, 32, 32), square, square, torch.empty_like(square).as_subclass(OnGpu))


def test_descriptors_are_encoded_once_per_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """They depend on nothing but the arguments; encoding costs more than a launch."""

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: args

    class Status(IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1

    calls: list[int] = []

    class Driver(Anything):
        CUtensorMapDataType = CUtensorMapInterleave = CUtensorMapSwizzle = Anything()
        CUtensorMapL2promotion = CUtensorMapFloatOOBfill = Anything()

        def cuTensorMapEncodeTiled(self, dtype: Any, rank: int, address: int, *rest: Any) -> tuple[Status, str]:
            calls.append(address)
            return (Status.CUDA_SUCCESS if address else Status.CUDA_ERROR_INVALID_VALUE), f"map of {address}"

    monkeypatch.setattr(tensor_map, "driver", Driver)
    encode_map.cache_clear()
    try:
        assert encode_map(4096, 64, 64, 64, 64, "fp16") == "map of 4096"
        encode_map(4096, 64, 64, 64, 64, "fp16")
        encode_map(8192, 64, 64, 64, 64, "fp16")
        assert calls == [4096, 8192]
        for _ in range(2):  # a refusal is not remembered as an answer
            with pytest.raises(DeviceError, match="64x32 in boxes of 64x16.*CUDA_ERROR_INVALID_VALUE"):
                encode_map(0, 64, 32, 64, 16, "fp16")
        assert calls == [4096, 8192, 0, 0]
    finally:
        encode_map.cache_clear()


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let kernels load without a GPU; return the list of values given to the shared-memory attribute of functions."""
    real = pytest.importorskip("cuda.bindings.driver")
    values: list[int] = []
    smem = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def cuCtxGetCurrent(self) -> Any:
            return real.CUresult.CUDA_SUCCESS, real.CUcontext(7)

        def cuModuleLoadData(self, image: bytes) -> Any:
            return real.CUresult.CUDA_SUCCESS, real.CUmodule(5)

        def cuModuleGetFunction(self, module: Any, entry: bytes) -> Any:
            return real.CUresult.CUDA_SUCCESS, real.CUfunction(3)

        def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> Any:
            values.extend([value] if attribute == smem else [])
            return (real.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(launch, "driver", Driver)
    monkeypatch.setattr(launch, "gpu_of_device", lambda index: H200)
    return values


def test_a_call_amid_another_leaves_it_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may interrupt a launch at any step; here during the look-up of the driver's function."""
    real = pytest.importorskip("cuda.bindings.driver")
    launched: list[tuple[int, int]] = []
    amid: list[int] = []

    class Driver:
        @property
        def cuLaunchKernelEx(self) -> Any:
            while amid:
                call(amid.pop())
            return self.launch

        def launch(self, config: Any, function: Any, params: int, extra: int) -> Any:
            launched.append((int(config.hStream), config.gridDimX))
            return (real.CUresult.CUDA_SUCCESS,)

    def make() -> Any:
        config = real.CUlaunchConfig()
        config.gridDimX = 3
        return config

    monkeypatch.setattr(launch, "driver", Driver)
    configs = launch.StreamConfigs(make)
    call = launch.KernelCall(3, configs, [1], (), ())
    for stream in (7, 0, 7):
        amid[:] = [9]
        call(stream)
    assert launched == [(9, 3), (7, 3), (9, 3), (0, 3), (9, 3), (7, 3)] and sorted(configs) == [0, 7, 9]


def test_configurations_of_few_streams_are_kept() -> None:
    made: list[SimpleNamespace] = []
    configs = launch.StreamConfigs(lambda: made.append(SimpleNamespace()) or made[-1])
    streams = range(configs.KEPT + 3)
    assert [configs[stream].hStream for stream in streams] == [*streams] and len(configs) == 3
    assert configs[configs.KEPT] is made[configs.KEPT] and configs[0] is made[-1]


def loaded(config: KernelConfig) -> launch.LoadedKernel:
    return launch.LoadedKernel(SimpleNamespace(image=b"", entry="gemm"), config)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [Sm80MmaConfig(16, 16, 64, 3, 1, 1, 4), Sm80DirectConfig(16, 16, wk=4)])
def test_an_even_kernel_is_launched_with_what_each_problem_asks_for(config: KernelConfig, allowed: list[int]) -> None:
    """The allowed shared memory rises if a problem needs more than all before, and never falls."""
    even, asked = replace(config, pdl=True, even=True), []
    kernel = loaded(even)
    for n in (8192, 4096, 65536, 512, 4096):
        problem = Problem(16, n, 512)
        _, _, c = operands(problem)
        made = kernel.prepared(problem, c)
        asked.append(made.shared_bytes)
        assert made.shared_bytes == launch_smem(problem, even, H200.sms) >= geometry(problem, even).smem_bytes
        assert made.dependent and made.grid == grid(problem, even, H200.sms)
        assert kernel._plan(problem, 0).launch.sharedMemBytes == made.shared_bytes, "what a bound call launches"
    assert asked[2] < asked[0] < asked[1] == asked[4] < asked[3] == 232448
    assert allowed == [asked[0], asked[1], asked[3]]


def test_other_kernels_ask_once_for_what_they_use(allowed: list[int]) -> None:
    for config in (Sm80MmaConfig(32, 32, pdl=True), Sm80DirectConfig(16, 8)):
        kernel, used = loaded(config), geometry(P, config).smem_bytes
        made = [kernel.prepared(p, operands(p)[2]) for p in (P, Problem(16, 8192, 512))]
        assert [m.shared_bytes for m in made] == [used, used] and allowed.pop() == used and not allowed


def test_the_descriptors_of_combs_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Made:
        def __init__(self, byte: int) -> None:
            self.kept = (ctypes.c_ubyte * 128)(*[byte] * 128)

        def getPtr(self) -> int:
            return ctypes.addressof(self.kept)

    def encode(address: int, extents: Any, box: Any, dtype: str, swizzle: str, pitch: int) -> Made:
        asked.append((address, *extents, *box, dtype, swizzle, pitch))
        return Made(len(asked))

    monkeypatch.setattr(tensor_map, "encode_boxes", encode)
    tensor_map.encode_combs.cache_clear()
    try:
        found = tensor_map.encode_combs(4096, 20, 9, 2, 64, "bf16")
        assert tensor_map.encode_combs(4096, 20, 9, 2, 64, "bf16") is found
    finally:
        tensor_map.encode_combs.cache_clear()
    assert asked[:2] == [(4096, 3, 9, 2, 64, "bf16", "128B", 72), (4112, 3, 10, 2, 64, "bf16", "128B", 72)]
    assert bytes(found) == b"".join(bytes([i] * 128) for i in range(1, 9))
