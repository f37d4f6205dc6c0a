"""Device kernels run on the CPU (emulation.hpp): for their indices and their protocol where there is no GPU."""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.epilogue import NO_EPILOGUE, STACKED_GATE, Epilogue
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import geometry, grid, workspace_bytes
from outblas.kernels.source import Source, make_source
from outblas_lab.custom.free_kernel import FreeKernel
from support.gpus.known import H200

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_SHARED = re.compile(r"^(\s*)__shared__\s+(?:__align__\((\d+)\)\s+)?((?:unsigned )?\w+)\s+([^;]+);", re.M)
_KERNEL = """
namespace emu {
const bool nn = OUTBLAS_NN;
const int described[][5] = {@MAPS@{0, 0, 0, 0, 0}}, described_count = @COUNT@;
void run_kernel(const void* A, const void* B, void* C, int M, int N, int K, void* workspace, const TensorMap* maps) {
  using Type = @TYPE@;
  @ENTRY@(@OPERANDS@, M, N, K, workspace@MORE@);
}
}  // namespace emu
"""
_ADDRESSES = "static_cast<const Type*>(A), static_cast<const Type*>(B), static_cast<Type*>(C)"
_MAPS = "maps[0], maps[1], maps[2], static_cast<u16*>(C)"
_COMBS = (
    "reinterpret_cast<const CombMaps*>(maps)[0], reinterpret_cast<const CombMaps*>(maps)[1],"
    " static_cast<const u16*>(B), static_cast<u16*>(C)"
)
_FLAGS = ("-std=c++17", "-O1", "-w", "-Wno-psabi", "-fno-strict-aliasing", "-ffp-contract=off", f"-I{HERE}")


def build(kernel: FreeKernel, layout: str, dtype: str, folder: Path) -> Path:
    """An executable of a kernel of form ``device`` that uses no CUTLASS, once per folder.

    Raises:
        subprocess.CalledProcessError: the compiler refuses it.
    """
    source, program = folder / f"{kernel.name}.cpp", folder / f"{kernel.name}_{layout}_{dtype}"
    if program.exists():
        return program
    launch = kernel.launch
    maps = "".join(
        f"{{{'ABC'.index(m.operand)}, {m.box[0]}, {m.box[1]}, {m.swizzle}, -1}}, " for m in launch.tensor_maps
    )
    text = _KERNEL.replace("@MAPS@", maps).replace("@COUNT@", str(len(launch.tensor_maps)))
    text = text.replace("@ENTRY@", launch.entry).replace("@OPERANDS@", _ADDRESSES)
    text = text.replace("@TYPE@", "Half" if "using Half" in kernel.text else "u16")
    text = text.replace("@MORE@", "".join(f", maps[{i}]" for i in range(len(launch.tensor_maps))))
    source.write_text('#include "emulation.hpp"\n' + _for_cpu(kernel.text) + text)
    macros = [f"-DOUTBLAS_BF16={int(dtype == 'bf16')}", f"-DOUTBLAS_NN={int(layout == 'NN')}"]
    _compile(*macros, str(source), str(_machine()), "-o", str(program))
    return program


def run(program: Path, kernel: FreeKernel, problem: Problem, a: np.ndarray, b: np.ndarray, late: bool) -> np.ndarray:
    """C as uint16[M, N], of two calls that share a workspace, of operands' bits (uint16).

    Args:
        late: what is asynchronous happens as late as it may, and CTAs run in the opposite order.
    """
    launch = kernel.launch
    sizes = [*launch.grid_of(problem, H200), *launch.block, *launch.cluster]
    return _run(program, problem, [*sizes, launch.workspace_of(problem, H200)], (a, b), _how(late))


def build_template(problem: Problem, config: KernelConfig, folder: Path, epilogue: Epilogue = NO_EPILOGUE) -> Path:
    """An executable of a template kernel with or without a stacked gate; ``folder`` is the kernel's own.

    Raises:
        subprocess.CalledProcessError: the compiler refuses it.
    """
    source = make_source(problem, config, epilogue)
    for name, text in source.headers:
        if not name.startswith("ptx/"):  # those are the emulation's
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_for_cpu(text))
    more = ", static_cast<unsigned char*>(workspace)" if workspace_bytes(problem, config) else ""
    more += ", nullptr, nullptr, 0" if epilogue.on else ""
    family = FAMILIES[config.family]
    boxes = family.tensor_boxes(problem, config)
    places = [(i, box, s) for i, (_, _, *box) in enumerate(boxes) for s in range(family.combs)]
    if family.combs == 1:
        turn = family.rows_of_a_turn(config) if epilogue.stacked else 0
        places = [(i, box, -1 - turn * (i == 1)) for i, box, _ in places]
    maps = [f"{{{i}, {rows}, {cols}, {cols * 2}, {s}}}" for i, (rows, cols), s in places]
    operands = _ADDRESSES if not maps else _COMBS if family.combs > 1 else _MAPS
    text = _KERNEL.replace("@MAPS@", "".join(f"{each}, " for each in maps)).replace("@COUNT@", str(len(maps)))
    text = text.replace("@OPERANDS@", operands).replace("@ENTRY@", source.entry)
    text = text.replace("@TYPE@", "u16").replace(", workspace@MORE@", more)
    file, program = folder / "kernel.cpp", folder / "kernel"
    file.write_text('#include "emulation.hpp"\n' + source.text + text)
    macros = [f"-DOUTBLAS_BF16={int(problem.dtype == 'bf16')}", f"-DOUTBLAS_NN={int(problem.layout == 'NN')}"]
    _compile(*macros, f"-I{folder}", str(file), str(_machine()), "-o", str(program))
    return program


def run_template(
    program: Path, problem: Problem, config: KernelConfig, operands: tuple[np.ndarray, np.ndarray], sms: int, late: bool
) -> np.ndarray:
    """C as :func:`run`, of a kernel of :func:`build_template` on a GPU of ``sms`` SMs. Bank conflicts fail."""
    shape = geometry(problem, config)
    sizes = [*grid(problem, config, sms), shape.threads, 1, 1, shape.cluster, 1, 1]
    return _run(
        program,
        problem,
        [*sizes, workspace_bytes(problem, config)],
        operands,
        {**_how(late), "EMULATE_STRICT_BANKS": "1"},
    )


def exact_product(
    problem: Problem, config: KernelConfig, folder: Path, sms: int, late: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(C, expected C) in fp32, of :func:`run_template`. Inputs are small integers and an Inf: exact in any order.

    The kernel is built once per folder.
    """
    import torch

    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-3, 4, (problem.m, problem.k), generator=generator).to(dtype)
    b = torch.randint(-3, 4, problem.b_shape, generator=generator).to(dtype)
    a[problem.m - 1, problem.k - 1] = float("inf")
    right = b.float() if problem.layout == "NN" else b.float().T
    left_bits, right_bits = (t.view(torch.int16).numpy().view(np.uint16) for t in (a, b))
    program = folder / "kernel"
    program = program if program.exists() else build_template(problem, config, folder)
    c = run_template(program, problem, config, (left_bits, right_bits), sms, late)
    got = torch.from_numpy(c.view(np.int16).copy()).view(dtype)
    return got.float().numpy(), (a.float() @ right).to(dtype).float().numpy()


def gated_product(
    problem: Problem, config: KernelConfig, folder: Path, sms: int, late: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(C, expected C, bits behind C) of :func:`run_template` with a stacked gate; the first two in fp32.

    Sums are exact in any order. The bits behind C are of the memory that the product without a gate would take.
    """
    import torch

    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-3, 4, shape, generator=generator) for shape in ((problem.m, problem.k), problem.b_shape))
    left, right = (a / 16).to(dtype), b.to(dtype)
    program = build_template(problem, config, folder, STACKED_GATE)
    bits = tuple(t.view(torch.int16).numpy().view(np.uint16) for t in (left, right))
    c = run_template(program, problem, config, bits, sms, late).ravel()
    gate, up = (left.float() @ right.float().T).chunk(2, dim=1)
    got = torch.from_numpy(c[: gate.numel()].view(np.int16).copy()).view(dtype).view(gate.shape)
    want = (torch.nn.functional.silu(gate) * up).to(dtype)
    return got.float().numpy(), want.float().numpy(), c[gate.numel() :]


def spoiled_source(right: str, wrong: str) -> Callable[[Problem, KernelConfig], Source]:
    """A ``make_source`` whose headers have ``wrong`` in place of ``right``; one that finds no such text fails."""
    source = make_source  # the result takes its place

    def spoiled(problem: Problem, config: KernelConfig, epilogue: Epilogue) -> Source:
        made = source(problem, config, epilogue)
        changed = tuple((name, text.replace(right, wrong)) for name, text in made.headers)
        assert changed != made.headers
        return replace(made, headers=changed)

    return spoiled


def _how(late: bool) -> dict[str, str]:
    return {"EMULATE_LATE": "1"} if late else {}


def _run(
    program: Path, problem: Problem, sizes: list[int], operands: tuple[np.ndarray, ...], how: dict[str, str]
) -> np.ndarray:
    """C of two calls. ``sizes``: grid, block, cluster, bytes of the workspace; ``how``: the emulation's environment."""
    words = [problem.m, problem.n, problem.k, *sizes, 2]
    done = subprocess.run(
        [str(program), *map(str, words)],
        input=b"".join(operand.tobytes() for operand in operands),
        capture_output=True,
        timeout=120,
        env=how,
    )
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.uint16).reshape(problem.m, problem.n)


@functools.cache
def _machine() -> Path:
    """The machine's object file, compiled once per process."""
    folder = Path(tempfile.mkdtemp(prefix="outblas-emulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _compile("-c", str(HERE / "machine.cpp"), "-o", str(folder / "machine.o"))
    return folder / "machine.o"


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    subprocess.run([COMPILER, *_FLAGS, *arguments], check=True, capture_output=True, text=True)


def _for_cpu(text: str) -> str:
    """The kernel without PTX of its own, and with shared memory that is a CTA's."""
    text = re.sub(
        r"(void wgmma_m64n(\d+)k16\([^{]*\{).*?\n\}\n",
        lambda found: f"{found[1]}\n  emu::wgmma(d, {found[2]}, a, b, accumulate, false);\n}}\n",
        text,
        flags=re.S,
    )
    text = re.sub(
        r"(void wgmma_instance\([^{]*\{).*?m64n(\d+)k16.*?\n\}\n",
        lambda found: f"{found[1]}\n  emu::wgmma(d, {found[2]}, a, b, accumulate, OUTBLAS_NN);\n}}\n",
        text,
        flags=re.S,
    )
    text = re.sub(r'asm volatile\("barrier\.cluster\.arrive[^;]*;"[^;]*\);', "cluster_arrive();", text)
    text = re.sub(r"extern __shared__ [^;]*?(\w+)\[\];", r"unsigned char* const \1 = emu::shared_window();", text)
    taken = [0]

    def static(found: re.Match[str]) -> str:
        lines = []
        for one in re.split(r",\s*(?=\w+\s*(?:\[|$))", found[4]):
            name, dims = re.fullmatch(r"(\w+)\s*(.*)", one.strip()).groups()  # type: ignore[union-attr]
            kind = f"{found[3]} (&{name}){dims}" if dims else f"{found[3]}& {name}"
            cast = f"{found[3]} (*){dims}" if dims else f"{found[3]}*"
            lines.append(f"{found[1]}{kind} = *reinterpret_cast<{cast}>(emu::shared_window() + {taken[0]});")
            taken[0] += 64 * 1024  # a quarter of the window each; no kernel has dynamic shared memory beside it
        return "\n".join(lines)

    return _SHARED.sub(static, text)
