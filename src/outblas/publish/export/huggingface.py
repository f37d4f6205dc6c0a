"""A folder in the layout that Hugging Face's kernel-builder builds for the ``kernels`` package.

The exported kernel and its launcher as a torch operator ``gemm``. The driver's functions are looked up in libcuda at
the first call, so that nothing links to it. Source of the layout: kernel-builder's guide, "Writing Hub kernels".
"""

from __future__ import annotations

from pathlib import Path

from outblas.core.files import write_atomic
from outblas.publish.export.cpp import filled, launch_header
from outblas.publish.export.cuda_source import standalone
from outblas.publish.export.target import Target


def write_folder(target: Target, folder: Path) -> list[Path]:
    """Write a folder for the kernels of Hugging Face's hub and return the paths of its files.

    Raises:
        RecordError: a file cannot be written.
    """
    p, package = target.problem, target.name
    b_shape = ", ".join(map(str, p.b_shape))
    accessor = (
        "\n// The kernel as the launcher's translation unit knows it.\n"
        f"const void* {target.name}_kernel() {{ return reinterpret_cast<const void*>({target.config.family}); }}\n"
    )
    common = {"NAME": target.name}
    texts = {
        "build.toml": filled("hf_build.toml", **common),
        "flake.nix": filled("hf_flake.nix"),
        "README.md": filled("hf_readme.md", **common, ABOUT=target.comment().replace("// ", "").replace("//", "")),
        f"gemm/{target.name}.cu": standalone(target) + accessor,
        f"gemm/{target.name}.h": launch_header(target),
        "gemm/gemm.cu": filled(
            "hf_gemm.cu",
            **common,
            DTYPE={"fp16": "at::kHalf", "bf16": "at::kBFloat16"}[p.dtype],
            B_ROWS=p.b_shape[0],
            B_COLS=p.b_shape[1],
        ),
        "torch-ext/torch_binding.h": filled("hf_binding.h"),
        "torch-ext/torch_binding.cpp": filled("hf_binding.cpp"),
        f"torch-ext/{package}/__init__.py": filled("hf_init.py.txt", M=p.m, N=p.n, K=p.k, B_SHAPE=b_shape),
        "tests/test_gemm.py": filled(
            "hf_test.py.txt",
            **common,
            M=p.m,
            K=p.k,
            B_SHAPE=b_shape,
            DTYPE={"fp16": "torch.float16", "bf16": "torch.bfloat16"}[p.dtype],
            RIGHT="b.t()" if p.layout == "TN" else "b",
        ),
    }
    return [write_atomic(folder / name, text.encode()) for name, text in texts.items()]
