"""Device kernels run on the CPU (emulation.hpp): for their indices and their protocol where there is no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

from outblas.free.kernel import FreeKernel
from outblas.problem import Problem

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_SHARED = re.compile(r"^(\s*)__shared__\s+(?:__align__\((\d+)\)\s+)?((?:unsigned )?\w+)\s+([^;]+);", re.M)
_MAIN = """
int main(int argc, char** argv) {
  if (argc != 17) return 2;
  int v[17];
  for (int i = 1; i < 17; ++i) v[i] = std::atoi(argv[i]);
  const int M = v[1], N = v[2], K = v[3];
  const size_t sizes[3] = {static_cast<size_t>(M) * K, static_cast<size_t>(N) * K, static_cast<size_t>(M) * N};
  std::vector<u16> data[3];
  for (int i = 0; i < 3; ++i) data[i].assign(sizes[i] + 64, 0x7FFF);  // NaN, and behind C the canary
  for (int i = 0; i < 2; ++i)
    if (std::fread(data[i].data(), 2, sizes[i], stdin) != sizes[i]) return 2;
  std::vector<unsigned char> workspace(v[14] + 64, 0);
  const int rows[3] = {M, OUTBLAS_NN ? K : N, M}, cols[3] = {K, OUTBLAS_NN ? N : K, N};
  TensorMap maps[8];
  const int described[][4] = {@MAPS@{0, 0, 0, 0}};
  for (size_t i = 0; i + 1 < sizeof described / sizeof described[0]; ++i) {
    const int* d = described[i];
    const emu::Map map{data[d[0]].data(), rows[d[0]], cols[d[0]], d[1], d[2], d[3]};
    std::memcpy(maps + i, &map, sizeof map);
  }
  const auto dim = [&](int i) {
    return dim3{static_cast<u32>(v[i]), static_cast<u32>(v[i + 1]), static_cast<u32>(v[i + 2])};
  };
  for (int call = 0; call < v[15]; ++call)
    emu::launch(dim(4), dim(7), dim(10), [&] {
      @ENTRY@(reinterpret_cast<@TYPE@ const*>(data[0].data()), reinterpret_cast<@TYPE@ const*>(data[1].data()),
              reinterpret_cast<@TYPE@*>(data[2].data()), M, N, K, workspace.data() @ARGUMENTS@);
    });
  for (int i = 0; i < 64; ++i)
    if (data[2][sizes[2] + i] != 0x7FFF || workspace[v[14] + i] != 0) emu::fail("a write past the end");
  std::fwrite(data[2].data(), 2, sizes[2], stdout);
  return 0;
}
"""


def build(kernel: FreeKernel, layout: str, dtype: str, folder: Path) -> Path:
    """An executable of a kernel of form ``device`` that uses no CUTLASS, once per folder.

    Raises:
        subprocess.CalledProcessError: the compiler refuses it.
    """
    assert COMPILER is not None
    launch = kernel.launch
    operands = {"A": 0, "B": 1, "C": 2}
    described = "".join(f"{{{operands[m.operand]}, {m.box[0]}, {m.box[1]}, {m.swizzle}}}, " for m in launch.tensor_maps)
    arguments = "".join(f", maps[{i}]" for i in range(len(launch.tensor_maps)))
    kind = "Half" if "using Half" in kernel.text else "u16"
    main = _MAIN.replace("@MAPS@", described).replace("@ENTRY@", launch.entry)
    main = main.replace("@TYPE@", kind).replace("@ARGUMENTS@", arguments)
    source, program = folder / f"{kernel.name}.cpp", folder / f"{kernel.name}_{layout}_{dtype}"
    if program.exists():
        return program
    source.write_text('#include "emulation.hpp"\n' + _for_cpu(kernel.text) + main)
    macros = [f"-DOUTBLAS_BF16={int(dtype == 'bf16')}", f"-DOUTBLAS_NN={int(layout == 'NN')}"]
    flags = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", f"-I{HERE}"]
    command = [COMPILER, *flags, *macros, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def run(program: Path, kernel: FreeKernel, problem: Problem, a: np.ndarray, b: np.ndarray, late: bool) -> np.ndarray:
    """C as uint16[M, N], of two calls that share a workspace, of operands' bits (uint16).

    Args:
        late: what is asynchronous happens as late as it may, and CTAs run in the opposite order.
    """
    launch = kernel.launch
    sizes = [*launch.grid_of(problem), *launch.block, *launch.cluster]
    words = [problem.m, problem.n, problem.k, *sizes, 0, launch.workspace_of(problem), 2, 0]
    done = subprocess.run(
        [str(program), *map(str, words)],
        input=a.tobytes() + b.tobytes(),
        capture_output=True,
        timeout=120,
        env={"EMULATE_LATE": "1"} if late else {},
    )
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.uint16).reshape(problem.m, problem.n)


def _for_cpu(text: str) -> str:
    """The kernel without PTX of its own, and with shared memory that is a CTA's."""
    text = re.sub(
        r"(void wgmma_m64n(\d+)k16\([^{]*\{).*?\n\}\n",
        lambda found: f"{found[1]}\n  emu::wgmma(d, {found[2]}, a, b, accumulate);\n}}\n",
        text,
        flags=re.S,
    )
    text = re.sub(r'asm volatile\("barrier\.cluster\.arrive[^;]*;"[^;]*\);', "cluster_arrive();", text)
    text = re.sub(r"extern __shared__ [^;]*shared\[\];", "unsigned char* const shared = emu::dynamic_shared();", text)
    taken = [0]

    def static(found: re.Match[str]) -> str:
        lines = []
        for one in re.split(r",\s*(?=\w+\s*(?:\[|$))", found[4]):
            name, dims = re.fullmatch(r"(\w+)\s*(.*)", one.strip()).groups()  # type: ignore[union-attr]
            kind = f"{found[3]} (&{name}){dims}" if dims else f"{found[3]}& {name}"
            cast = f"{found[3]} (*){dims}" if dims else f"{found[3]}*"
            lines.append(f"{found[1]}{kind} = *reinterpret_cast<{cast}>(emu::static_shared({taken[0]}));")
            taken[0] += 64 * 1024  # a quarter of the window each; no kernel has dynamic shared memory beside it
        return "\n".join(lines)

    return _SHARED.sub(static, text)
