"""Launch probe kernels on a GPU through the driver, and time them by its events."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from outblas.bench.calibrate.probes import THREADS, Probe, empty_source
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.source import Source
from outblas.runtime.driver import check, driver
from outblas.runtime.nvrtc import compile_source

#: Largest cluster that a kernel may request.
_MOST_CLUSTER = 16
#: Least time of a timed launch, microseconds.
_LAUNCH_US = 2000.0


class ProbeRunner:
    """Runs probes on one GPU; a context manager that holds the GPU's primary context and a buffer.

    Args:
        gpu: the GPU as it is known so far.

    Raises:
        DeviceError: the GPU cannot be used, or its memory is full.
        ToolchainMissing: cuda.bindings or NVRTC is not installed.
        CompileError: a probe does not compile.
    """

    def __init__(self, gpu_index: int, gpu: Gpu) -> None:
        cu = driver()
        check("cuInit", cu.cuInit(0))
        self._gpu, self._device = gpu, check("cuDeviceGet", cu.cuDeviceGet(gpu_index))
        context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self._device))
        check("cuCtxSetCurrent", cu.cuCtxSetCurrent(context))
        self._stream = int(check("cuStreamCreate", cu.cuStreamCreate(1)))  # 1: it does not wait for stream 0
        self._events = [check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2)]
        self._buffer, self._buffer_bytes = 0, 0
        self._sink = int(check("cuMemAlloc", cu.cuMemAlloc(256)))
        self._functions: dict[Source, Any] = {}

    def __enter__(self) -> ProbeRunner:
        return self

    def __exit__(self, *_: object) -> None:
        cu = driver()
        for address in filter(None, (self._buffer, self._sink)):
            cu.cuMemFree(address)
        for event in self._events:
            cu.cuEventDestroy(event)
        cu.cuStreamDestroy(self._stream)
        cu.cuDevicePrimaryCtxRelease(self._device)

    def samples_us(self, probe: Probe, seconds: float) -> tuple[int, list[float]]:
        """Return (rounds of a launch, times of equal launches in microseconds) for some seconds.

        Args:
            seconds: seconds of launches; at least three are made.
        """
        self._reserve(probe.buffer_bytes)
        rounds = 4
        while (us := self._launch_us(probe, rounds)) < _LAUNCH_US and rounds < 1 << 24:
            rounds = max(rounds + 1, min(16 * rounds, int(rounds * 1.3 * _LAUNCH_US / max(us, 1.0))))
        samples: list[float] = []
        end = time.monotonic() + seconds
        while len(samples) < 3 or time.monotonic() < end:
            samples.append(self._launch_us(probe, rounds))
        return rounds, samples

    def graph_us(self, nodes: int) -> float:
        """Return the least time of a graph of empty kernels in 20 launches, microseconds."""
        cu, function = driver(), self._function(empty_source(), 0)

        def fill() -> None:
            for _ in range(nodes):
                self._enqueue(function, 1, 32, 0, 0, 0)

        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check("cuStreamBeginCapture", cu.cuStreamBeginCapture(self._stream, mode))
        fill()
        graph = check("cuStreamEndCapture", cu.cuStreamEndCapture(self._stream))
        executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))

        def launch() -> None:
            check("cuGraphLaunch", cu.cuGraphLaunch(executable, self._stream))

        try:
            launch()
            return min(self._timed_us(launch) for _ in range(20))
        finally:
            cu.cuGraphExecDestroy(executable)
            cu.cuGraphDestroy(graph)

    def clusters(self) -> tuple[int, ...]:
        """Return the resident clusters by size, 1 to 16 CTAs, at one CTA per SM; empty before sm_90.

        A size that the GPU refuses counts 0.
        """
        if self._gpu.arch < 90:
            return ()
        cu, function = driver(), self._function(empty_source(), self._gpu.smem_optin)
        allowed = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        check("cuFuncSetAttribute", cu.cuFuncSetAttribute(function, allowed, 1))
        found = []
        for size in range(1, _MOST_CLUSTER + 1):
            config, cluster = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
            config.gridDimX, config.gridDimY, config.gridDimZ = size * self._gpu.sms, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
            config.sharedMemBytes = self._gpu.smem_optin
            cluster.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = size, 1, 1
            config.attrs, config.numAttrs = [cluster], 1
            status, *count = cu.cuOccupancyMaxActiveClusters(function, config)
            found.append(int(count[0]) if int(status) == 0 else 0)
        return tuple(found)

    def _launch_us(self, probe: Probe, rounds: int) -> float:
        function = self._function(probe.source, probe.smem_bytes)
        return self._timed_us(
            lambda: self._enqueue(function, probe.ctas, THREADS, probe.smem_bytes, probe.buffer_bytes, rounds)
        )

    def _timed_us(self, work: Callable[[], None]) -> float:
        cu, (start, stop) = driver(), self._events
        check("cuEventRecord", cu.cuEventRecord(start, self._stream))
        work()
        check("cuEventRecord", cu.cuEventRecord(stop, self._stream))
        check("cuStreamSynchronize", cu.cuStreamSynchronize(self._stream))
        return 1000.0 * float(check("cuEventElapsedTime", cu.cuEventElapsedTime(start, stop)))

    def _enqueue(self, function: Any, ctas: int, threads: int, smem: int, data_bytes: int, rounds: int) -> None:
        values = ctypes.c_void_p(self._buffer), ctypes.c_ulonglong(data_bytes), ctypes.c_int(rounds)
        parameters = (*values, ctypes.c_void_p(self._sink))
        addresses = (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(value) for value in parameters))
        launched = driver().cuLaunchKernel(
            function, ctas, 1, 1, threads, 1, 1, smem, self._stream, ctypes.addressof(addresses), 0
        )
        check("cuLaunchKernel", launched)

    def _function(self, source: Source, smem: int) -> Any:
        """Return the loaded kernel of a source, which may request that much shared memory."""
        cu = driver()
        if source not in self._functions:
            cubin = compile_source(source, architecture(self._gpu))
            module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin.image))
            name = source.entry.encode()
            self._functions[source] = check("cuModuleGetFunction", cu.cuModuleGetFunction(module, name))
        function = self._functions[source]
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("cuFuncSetAttribute", cu.cuFuncSetAttribute(function, limit, smem))
        return function

    def _reserve(self, size: int) -> None:
        """Make the buffer at least that large; its content is zero."""
        cu = driver()
        if size <= self._buffer_bytes:
            return
        if self._buffer:
            check("cuMemFree", cu.cuMemFree(self._buffer))
            self._buffer, self._buffer_bytes = 0, 0
        self._buffer = int(check("cuMemAlloc", cu.cuMemAlloc(size)))
        self._buffer_bytes = size
        check("cuMemsetD8", cu.cuMemsetD8(self._buffer, 0, size))
