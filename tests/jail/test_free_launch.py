"""Free kernels as callables, over a driver that records; and what is looked at after they ran."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.core.errors import DeviceError, TensorError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.runtime import driver as driver_module  # noqa: E402
from outblas.runtime import launch as launching  # noqa: E402
from outblas.runtime import tensor_map  # noqa: E402
from outblas.runtime.cubin import Cubin, SassFacts  # noqa: E402
from outblas_lab.custom.free_kernel import FreeKernel  # noqa: E402
from outblas_lab.jail import free_launch, jailed_worker  # noqa: E402
from outblas_lab.jail.build import BuiltKernel  # noqa: E402
from outblas_lab.jail.free_launch import GuardedWorkspace  # noqa: E402
from support.free_fixture import BODY, block, device_text, exploit  # noqa: E402
from support.gpus.known import H200  # noqa: E402

P = Problem(128, 64, 96)
NO_FACTS = SassFacts(0, 0, 0, 0, 0, 0, 0, 0, ())


class Recorder:
    """The part of cuda.bindings.driver that a launch needs; it records its calls."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="big",
    )
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster")
    CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_FLOAT16=6)
    CUtensorMapSwizzle = SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_NONE=0, CU_TENSOR_MAP_SWIZZLE_128B=3)
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3)
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)
    cuuint32_t = cuuint64_t = int

    def __init__(self):
        self.attributes, self.launches, self.maps = [], [], []

    CUlaunchConfig = staticmethod(lambda: SimpleNamespace())

    @staticmethod
    def CUlaunchAttribute():
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuCtxGetCurrent(self):
        return 0, 1

    def cuModuleLoadData(self, image):
        return (0, "module") if image == b"cubin" else (SimpleNamespace(name="BAD", __int__=lambda s: 200), None)

    def cuModuleGetFunction(self, module, name):
        return 0, name.decode()

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((attribute, value))
        return (0,)

    def cuTensorMapEncodeTiled(self, kind, rank, address, dims, strides, box, steps, *how):
        self.maps.append((address, dims, strides, box, how))
        number = len(self.maps)
        return 0, SimpleNamespace(getPtr=lambda: 4096 + number)

    def cuLaunchKernelEx(self, config, function, params, extra):
        self.launches.append((config, function, params))
        return (0,)


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    for module in (free_launch, launching, tensor_map, driver_module):
        monkeypatch.setattr(module, "driver", lambda: made)
    monkeypatch.setattr(free_launch, "check_operands", lambda *a: None)
    free_launch.encode_map.cache_clear()
    return made


def built(text, image=b"cubin"):
    kernel = FreeKernel.parse(text)
    return BuiltKernel(kernel, Cubin(image, kernel.launch.entry, "sm_90a", 32, 0, 0, 0, NO_FACTS, 0.1, False, ""))


def operands():
    return torch.zeros(P.m, P.k).half(), torch.zeros(P.n, P.k).half(), torch.zeros(P.m, P.n).half()


def arguments(params, count):
    array = (ctypes.c_void_p * count).from_address(params)
    pointers = [ctypes.c_void_p.from_address(array[i]).value for i in range(3)]
    extents = [ctypes.c_int.from_address(array[i]).value for i in (3, 4, 5)]
    return pointers, extents, ctypes.c_void_p.from_address(array[6]).value, list(array[7:count])


def test_a_device_kernel_is_launched_as_its_block_says(recorder):
    maps = [{"operand": "A", "box": [64, 64], "swizzle": 128}, {"operand": "C", "box": [8, 8]}]
    text = device_text(
        cluster=[2, 2, 1], shared=50000, workspace="4 * M", tensor_maps=maps, grid=["N // 16", "M // 16", 2]
    )
    kernel = free_launch.DeviceKernel(built(text), H200)
    a, b, c = operands()
    call = kernel.bind(P, a, b, c)
    call(77)
    ((config, function, params),) = recorder.launches
    assert function == "gemm" and config.hStream == 77
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (4, 8, 2)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes) == (16, 16, 1, 50000)
    (attribute,) = config.attrs
    assert (attribute.id, vars(attribute.value.clusterDim)) == ("cluster", {"x": 2, "y": 2, "z": 1})
    assert recorder.attributes == [("shared", 50000)]
    pointers, extents, workspace, given = arguments(params, 9)
    assert pointers == [a.data_ptr(), b.data_ptr(), c.data_ptr()] and extents == [128, 64, 96]
    assert workspace % 64 == 0 and given == [4097, 4098]
    assert recorder.maps[0][:4] == (a.data_ptr(), [96, 128], [192], [64, 64]) and recorder.maps[0][4][1] == 3
    assert recorder.maps[1][:4] == (c.data_ptr(), [64, 128], [128], [8, 8])


def test_calls_of_one_stream_share_a_workspace_and_others_do_not(recorder):
    kernel = free_launch.DeviceKernel(built(device_text(workspace=64)), H200)
    calls = [*kernel.bind_many(P, [operands(), operands()]), kernel.bind(P, *operands())]
    for call in calls:
        call(0)
    first, second, third = (arguments(params, 7)[2] for _, _, params in recorder.launches)
    assert first == second != third
    assert not kernel.broken_workspace()
    ctypes.memset(third + 64, 0, 1)
    assert kernel.broken_workspace()
    kernel.release()
    assert not kernel.broken_workspace()


def test_a_workspace_has_a_limit_that_a_bench_can_raise(recorder):
    large = built(device_text(workspace="264000 * M"))  # 33,792,000 bytes: more than 32 MiB
    with pytest.raises(DeviceError, match="at most 33554432"):
        free_launch.load(large, "", None, H200).bind(P, *operands())
    call = free_launch.load(large, "", None, H200, 64 << 20).bind(P, *operands())
    call(0)
    assert arguments(recorder.launches[0][2], 7)[2] is not None


@pytest.mark.parametrize(("cluster", "asks"), [([16, 1, 1], True), ([3, 2, 2], True), ([2, 2, 2], False)])
def test_a_kernel_without_a_workspace_gets_a_null_pointer_and_large_clusters_ask(recorder, cluster, asks):
    kernel = free_launch.DeviceKernel(built(device_text(cluster=cluster, grid=cluster)), H200)
    call = kernel.bind(P, *operands())
    call(0)
    assert arguments(recorder.launches[0][2], 7)[2] is None and recorder.attributes == [("big", 1)] * asks


@pytest.mark.parametrize("size", [1, 2, 255, 256, 1000])
def test_a_workspace_is_zero_between_guards(size):
    made = GuardedWorkspace(size, "cpu")
    assert bytes((ctypes.c_char * size).from_address(made.address)) == b"\0" * size and not made.broken()
    ctypes.memset(made.address, 1, size)
    assert not made.broken()
    for place in (-1, size + size % 2):
        ctypes.memset(made.address + place, 0, 1)
        assert made.broken(), place
        made = GuardedWorkspace(size, "cpu")


HOST = block(form="host", acc="fp32")


class Function:
    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def __call__(self, *given):
        self.asked.append(given)
        return self.answer


@pytest.fixture
def library(monkeypatch, recorder, tmp_path):
    """A loaded library with these functions; None if the file is not the built one."""

    def make(launch=0, workspace=None):
        functions = {"outblas_launch": Function(launch)}
        if workspace is not None:
            functions["outblas_workspace"] = Function(workspace)

        def load(path, mode=0):
            assert path.endswith(".so") and Path(path).read_bytes() == b"library"
            return SimpleNamespace(**functions)

        monkeypatch.setattr(free_launch, "_needed", lambda image, cudart: [])
        monkeypatch.setattr(free_launch.ctypes, "CDLL", load)
        return free_launch.HostKernel(built(HOST + BODY, b"library"), tmp_path, None, H200), functions

    return make


def test_a_host_kernel_is_called_with_its_workspace(library, tmp_path):
    kernel, functions = library(workspace=512)
    a, b, c = operands()
    kernel.bind(P, a, b, c)(99)
    (given,) = functions["outblas_launch"].asked
    assert given[:6] == (a.data_ptr(), b.data_ptr(), c.data_ptr(), 128, 64, 96)
    assert given[6] % 64 == 0 and given[7:] == (512, 99)
    assert list(tmp_path.iterdir()) == [], "its file is gone as soon as it is loaded"


def test_a_host_kernels_error_is_an_error(library):
    kernel, _ = library(launch=9)
    with pytest.raises(DeviceError, match="outblas_launch returned 9"):
        kernel.bind(P, *operands())(0)
    kernel, _ = library(workspace=1 << 40)
    with pytest.raises(DeviceError, match="workspace"):
        kernel.bind(P, *operands())


def test_a_library_that_cannot_be_loaded_is_an_error(recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(free_launch, "_needed", lambda image, cudart: [])
    with pytest.raises(DeviceError, match="cannot be loaded"):
        free_launch.load(built(HOST + BODY, b"no library"), tmp_path, None, H200)


def test_operands_are_checked_as_everywhere(recorder, monkeypatch):
    monkeypatch.undo()
    made = Recorder()
    monkeypatch.setattr(free_launch, "driver", lambda: made)
    monkeypatch.setattr(launching, "driver", lambda: made)
    monkeypatch.setattr(tensor_map, "driver", lambda: made)
    with pytest.raises(TensorError):
        free_launch.DeviceKernel(built(device_text()), H200).bind(P, *operands())


def test_conduct_notices_timers_handlers_and_files(tmp_path):
    before = jailed_worker.snapshot()
    assert jailed_worker.what_changed(before) == ""
    with (tmp_path / "secret").open("w"):
        assert "secret" in jailed_worker.what_changed(before)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    try:
        assert "timer" in jailed_worker.what_changed(before)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    was = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert "signals" in jailed_worker.what_changed(before)
    finally:
        signal.signal(signal.SIGUSR2, was)
    assert jailed_worker.what_changed(before) == ""


def test_conduct_notices_changed_machine_code():
    before = jailed_worker.snapshot()
    code = before["changed the code that measures it"]
    assert code, "at least the C library or Python"
    name, (rights, crc) = next(iter(code.items()))
    other = {**before, "changed the code that measures it": {**code, name: (rights, crc ^ 1)}}
    assert "changed the code" in jailed_worker.what_changed(other)


def test_exploits_of_the_workspace_are_what_the_guards_see():
    assert FreeKernel.parse(exploit("past_its_workspace")).launch.workspace_of(P, H200) == 1024
