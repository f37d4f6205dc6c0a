"""The probe kernels; launch them on a GPU through the driver, and time them by its events."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from outblas.core.roofline import Gpu, architecture
from outblas.kernels.source import Source
from outblas.runtime.driver import check, driver
from outblas.runtime.launch import launch_config
from outblas.runtime.nvrtc import compile_source

#: Largest cluster that a kernel may request.
_MOST_CLUSTER = 16
#: Least time of a timed launch, microseconds.
_LAUNCH_US = 2000.0


class ProbeRunner(AbstractContextManager["ProbeRunner"]):
    """Runs probes on one GPU; a context manager that holds the GPU's primary context and a buffer.

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
            config = launch_config((size * self._gpu.sms, 1, 1), (32, 1, 1), self._gpu.smem_optin, (size, 1, 1))
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


#: Threads of a CTA of every probe.
THREADS = 256
#: Tensor instructions of a warp or warpgroup in a round.
UNROLL = 8
#: Bytes that a thread of a reading probe loads at a time, and such loads in flight.
LOAD_BYTES, LOADS = 16, 8
#: Bytes that a CTA of a reading probe reads at a time.
UNIT_BYTES = THREADS * LOAD_BYTES * LOADS
#: Units by which a CTA moves on after a round. L2 has two halves, so a CTA that stayed would read from one of them.
_STRIDE = 37
#: Shared memory of the wgmma probe: A of 128 x 64 and B of 256 x 64 elements, and 1024 bytes for alignment.
WGMMA_SMEM = (128 + 256) * 64 * 2 + 1024
#: Columns of the wgmma instruction.
_WGMMA_N = 256

_HEAD = """
typedef unsigned u32;
typedef unsigned long long u64;
// Two halves of changing sign and size around 1, because equal operands would need too little power.
__device__ __forceinline__ u32 halves(u32 seed) {
  seed = seed * 1664525u + 1013904223u;
  seed ^= seed >> 13;
  return (seed & 0x83ff83ffu) | 0x3c003c00u;
}
"""


@dataclass(frozen=True)
class Probe:
    """A probe kernel and the work of a launch.

    Attributes:
        figure: the figure of the record that it measures, e.g. ``mma_tflops``.
        smem_bytes: dynamic shared memory of a CTA, bytes.
        buffer_bytes: size of the buffer, bytes; 0 for tensor probes.
        read_bytes: bytes that a round reads, all CTAs together; 0 for tensor probes.
        flop: FLOP of a round, all CTAs together; 0 for reading probes.
    """

    figure: str
    source: Source
    ctas: int
    smem_bytes: int
    buffer_bytes: int
    read_bytes: int
    flop: int

    def work(self, rounds: int) -> float:
        """Return FLOP or bytes of a launch with that many rounds."""
        return float(rounds) * (self.flop or self.read_bytes)


def tensor_probes(gpu: Gpu) -> list[Probe]:
    """Return the probes of tensor instructions that a GPU has: mma.sync everywhere, wgmma on sm_90.

    The figures are ``mma_tflops`` and ``mma_acc16``; on sm_90 also ``wgmma_tflops`` and ``wgmma_acc16``.
    """
    found = [_mma_probe(gpu, "mma_tflops", "fp32"), _mma_probe(gpu, "mma_acc16", "fp16")]
    if gpu.wgmma_tflops > 0:
        found += [_wgmma_probe(gpu, "wgmma_tflops", "fp32"), _wgmma_probe(gpu, "wgmma_acc16", "fp16")]
    return found


def reading_probes(gpu: Gpu) -> list[Probe]:
    """Return the probes of reads: ``hbm_tbs`` over more than L2 holds, ``l2_tbs`` over a quarter of L2.

    The first reads 16 times the size of L2, but at most a quarter of the memory. Of a small buffer, several CTAs read
    the same part.
    """
    sizes = {"hbm_tbs": min(16 * gpu.l2_bytes, gpu.memory_bytes // 4), "l2_tbs": gpu.l2_bytes // 4}
    source, ctas = Source(_reading_text(), "probe_read", (), (), "fp32", "probe_read"), 8 * gpu.sms
    found = []
    for figure, size in sizes.items():
        units = max(1, size // UNIT_BYTES)
        read = ctas * max(1, units // ctas) * UNIT_BYTES
        found.append(Probe(figure, source, ctas, 0, units * UNIT_BYTES, read, 0))
    return found


def empty_source() -> Source:
    """Return the source of a kernel that does nothing, for the gap between launches and for clusters."""
    text = 'extern "C" __global__ void probe_empty(const void*, unsigned long long, int, float*) {}\n'
    return Source(text, "probe_empty", (), (), "fp32", "probe_empty")


def _mma_probe(gpu: Gpu, figure: str, acc: str) -> Probe:
    warps = THREADS // 32
    ctas = 2 * gpu.sms
    flop = 2 * 16 * 8 * 16 * UNROLL * warps * ctas
    return Probe(figure, Source(_mma_text(acc), "probe_mma", (), (), acc, "probe_mma"), ctas, 0, 0, 0, flop)


def _wgmma_probe(gpu: Gpu, figure: str, acc: str) -> Probe:
    flop = 2 * 64 * _WGMMA_N * 16 * 4 * 2 * gpu.sms  # four steps of K, two warpgroups
    source = Source(_wgmma_text(acc), "probe_wgmma", (), (), acc, "probe_wgmma")
    return Probe(figure, source, gpu.sms, WGMMA_SMEM, 0, 0, flop)


def _mma_text(acc: str) -> str:
    """Return the text of a probe with eight independent sums per warp, over four changing operands."""
    count, kind, letter = (4, "float", "f") if acc == "fp32" else (2, "u32", "r")
    word = "f32" if acc == "fp32" else "f16"
    sums = ", ".join(f"%{i}" for i in range(count))
    a, b = ", ".join(f"%{count + i}" for i in range(4)), ", ".join(f"%{count + 4 + i}" for i in range(2))
    out = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    used = " + ".join(f"(float)d[i][{i}]" for i in range(count))
    return f"""{_HEAD}
__device__ __forceinline__ void mma({kind}* d, const u32* a, const u32* b) {{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.{word}.f16.f16.{word} {{{sums}}}, {{{a}}}, {{{b}}}, {{{sums}}};"
               : {out} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
extern "C" __global__ void __launch_bounds__({THREADS}) probe_mma(const void*, u64, int rounds, float* sink) {{
  u32 seed = blockIdx.x * {THREADS} + threadIdx.x, a[4][4], b[2];
  {kind} d[{UNROLL}][{count}] = {{}};
  for (int i = 0; i < 16; i++) a[i / 4][i % 4] = halves(seed + 97 * i);
  for (int i = 0; i < 2; i++) b[i] = halves(seed + 31 * i + 7);
  for (int round = 0; round < rounds; round++) {{
#pragma unroll
    for (int i = 0; i < {UNROLL}; i++) mma(d[i], a[i % 4], b);
    for (int i = 0; i < 2; i++) b[i] ^= 0x80008000u;  // the other sign, so that the sums stay small
  }}
  float sum = 0;
  for (int i = 0; i < {UNROLL}; i++) sum += {used};
  if (sum == 1.2345e33f) *sink = sum;
}}
"""


def _wgmma_text(acc: str) -> str:
    """Return the text of a probe whose two warpgroups multiply 64 x 64 by 64 x 256 from shared memory, round by round.

    Shared memory holds changing halves in the 128-byte swizzle; which element lies where does not matter.
    """
    count, kind, letter = (_WGMMA_N // 2, "float", "f") if acc == "fp32" else (_WGMMA_N // 4, "u32", "r")
    word = "f32" if acc == "fp32" else "f16"
    sums = ", ".join(f"%{i}" for i in range(count))
    out = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    return f"""{_HEAD}
__device__ __forceinline__ void wgmma({kind}* d, u64 a, u64 b, int sign) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{_WGMMA_N}k16.{word}.f16.f16 "
               "{{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
               : {out} : "l"(a), "l"(b), "r"(sign));
}}
__device__ __forceinline__ u64 descriptor(u32 address) {{
  return (u64)(64u | 1u << 30) << 32 | (address & 0x3FFFF) >> 4 | 1u << 16;
}}
extern "C" __global__ void __launch_bounds__({THREADS}, 1) probe_wgmma(const void*, u64, int rounds, float* sink) {{
  extern __shared__ char raw[];
  u32 base = (u32)__cvta_generic_to_shared(raw);
  u32 start = (base + 1023) & ~1023u;
  u32* words = reinterpret_cast<u32*>(raw + (start - base));
  for (int i = threadIdx.x; i < {(WGMMA_SMEM - 1024) // 4}; i += {THREADS}) words[i] = halves(i + 8191 * blockIdx.x);
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  u64 a = descriptor(start + threadIdx.x / 128 * 8192), b = descriptor(start + 16384);
  {kind} d[{count}] = {{}};
  for (int round = 0; round < rounds; round++) {{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma(d, a + 2 * k, b + 2 * k, (round & 63) != 0 || k != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }}
  float sum = 0;
  for (int i = 0; i < {count}; i++) sum += (float)d[i];
  if (sum == 1.2345e33f) *sink = sum;
}}
"""


def _reading_text() -> str:
    """Return the text of a probe that reads a buffer through L2 once a round, past L1."""
    return f"""{_HEAD}
extern "C" __global__ void __launch_bounds__({THREADS}) probe_read(
    const void* data, u64 bytes, int rounds, float* sink) {{
  u32 sum = 0, units = bytes / {UNIT_BYTES}, each = units / gridDim.x > 0 ? units / gridDim.x : 1;
  for (int round = 0; round < rounds; round++)
    for (u32 i = 0; i < each; i++) {{
      u64 at = (u64)((blockIdx.x + i * gridDim.x + round * {_STRIDE}u) % units) * {UNIT_BYTES};
      const char* from = reinterpret_cast<const char*>(data) + at + threadIdx.x * {LOAD_BYTES};
      u32 x[{LOADS}][4];
#pragma unroll
      for (int i = 0; i < {LOADS}; i++)
        asm volatile("ld.global.cg.v4.u32 {{%0, %1, %2, %3}}, [%4];"
                     : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                     : "l"(from + i * {THREADS * LOAD_BYTES}));
#pragma unroll
      for (int i = 0; i < {LOADS}; i++) sum ^= x[i][0] ^ x[i][1] ^ x[i][2] ^ x[i][3];
    }}
  if (sum == 0x9e3779b9u) *sink = sum;
}}
"""
