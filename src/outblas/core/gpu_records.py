"""Records of GPU models: one JSON file each, from the user's folder, the package, or derived from the driver's answers.

A packaged record is ``data/gpus/<name>.json``. ``outblas calibrate`` writes a user's record. A record says for each
figure where it comes from: the driver, a measurement, or an estimate.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError, UsageError
from outblas.core.files import user_data_folder, write_json
from outblas.core.lab_parts import find_part
from outblas.core.plain_files import read_json
from outblas.core.roofline import Gpu

FORMAT = 1
#: Files of ``data/gpus`` that are no record.
_OTHERS = ("architectures.json",)
#: A record fits a GPU whose memory differs by less than this share.
MEMORY_SHARE = 0.1
#: Figures of a record, the names of :class:`Gpu` without its own name.
FIGURES = tuple(field.name for field in fields(Gpu) if field.name != "name")
#: Figures that may be 0 or empty; all others are above 0.
_MAY_BE_ZERO = ("wgmma_tflops", "clusters")
#: Figures that are whole numbers.
_WHOLE = ("arch", "sms", "memory_bytes", "smem_optin", "sm_smem", "sm_threads", "l2_bytes")


@dataclass(frozen=True)
class GpuRecord:
    """The record of a GPU model.

    Attributes:
        title: name for people, e.g. ``NVIDIA H200 SXM, 141 GB``.
        products: product names of this model, as the driver spells them.
        source: figure -> where it comes from, e.g. ``driver``, ``measured: ...`` or ``estimate: ...``.
        reference: True for the GPU to which the start coefficients of the kernel families belong.
        origin: ``user``, ``packaged``, ``recorded`` or ``derived``.
        provenance: of a calibration; None for other records.
        heuristics: the GPU's name in nvMatmulHeuristics; empty if it has none.
    """

    gpu: Gpu
    title: str
    products: tuple[str, ...]
    source: Mapping[str, str]
    reference: bool = False
    origin: str = "packaged"
    provenance: Mapping[str, Any] | None = None
    heuristics: str = ""

    @property
    def estimated(self) -> tuple[str, ...]:
        """Return the names of the figures that are estimates, in the order of the file."""
        return tuple(name for name, source in self.source.items() if source.startswith("estimate"))

    def names_product(self, product: str) -> bool:
        """Return True if a product name, as the driver spells it, is of this model."""
        return product in self.products

    def fits(self, product: str, sms: int, memory_bytes: int) -> bool:
        """Return True if a device is of this model: product name, number of SMs, and memory within 10%.

        A MIG slice, a card with other memory and a name with an addition, e.g. ``NVL``, do not fit.
        """
        near = abs(memory_bytes - self.gpu.memory_bytes) < MEMORY_SHARE * self.gpu.memory_bytes
        return self.names_product(product) and sms == self.gpu.sms and near

    def to_json(self) -> dict[str, Any]:
        figures = {name: value for name, value in asdict(self.gpu).items() if name != "name"}
        head = {"format": FORMAT, "name": self.gpu.name, "title": self.title, "products": list(self.products)}
        found = {**head, "reference": self.reference, "figures": {**figures, "clusters": list(self.gpu.clusters)}}
        about: dict[str, Any] = {} if self.provenance is None else {"provenance": dict(self.provenance)}
        about |= {"heuristics": self.heuristics} if self.heuristics else {}
        return {**found, "source": dict(self.source), **about}


def record_from_json(data: Any, where: str, origin: str) -> GpuRecord:
    """Return the record of a file's content.

    Args:
        origin: origin of the record: ``user`` or ``packaged``.

    Raises:
        RecordError: a field is missing, of another type, or out of range.
    """
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format is {data['format']!r}")
        figures = {name: _figure(name, data["figures"][name]) for name in FIGURES}
        source = {name: _words(name, data["source"][name]) for name in FIGURES}
        title, heuristics = _words("title", data["title"]), _words("heuristics", data.get("heuristics", ""))
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,79}", str(data["name"])):
            raise ValueError(f"name is {data['name']!r}")
        gpu = Gpu(name=str(data["name"]), **figures)
        reference, provenance = data.get("reference") is True, data.get("provenance")
        if provenance is not None and not isinstance(provenance, dict):
            raise ValueError("provenance is not an object")
        value = data["products"]
        if not isinstance(value, list) or not all(isinstance(name, str) and "\\" not in name for name in value):
            raise ValueError(f"products {value!r} are not plain names")
        products = tuple(value)
        return GpuRecord(gpu, title, products, source, reference, origin, provenance, heuristics)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"GPU record {where} cannot be read ({error!r})"[:300]
        raise RecordError(wrong, f"a record of format {FORMAT}", "recreate it with: outblas calibrate") from error


def _words(name: str, value: Any) -> str:
    """Return a text unchanged; raise ValueError for any other type."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}")
    return value


def _figure(name: str, value: Any) -> Any:
    """Return a figure in its type; raise ValueError if it is no number or out of range."""
    if name == "clusters":
        if not isinstance(value, list) or len(value) > 16 or not all(type(x) is int and x >= 0 for x in value):
            raise ValueError(f"clusters is {value!r}")
        return tuple(value)
    number = type(value) is int if name in _WHOLE else type(value) in (int, float) and math.isfinite(value)
    least = 0.0 if name in _MAY_BE_ZERO else 1e-9
    if not number or not least <= value < 1e15:
        raise ValueError(f"{name} is {value!r}")
    return value if name in _WHOLE else float(value)


@functools.cache
def packaged_records() -> dict[str, GpuRecord]:
    """Return short name -> packaged record, sorted by name. Every call returns the same dict: do not change it.

    Raises:
        RecordError: a file of the package is damaged.
    """
    folder = resources.files("outblas") / "data" / "gpus"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json") and file.name not in _OTHERS)
    read = (record_from_json(json.loads(folder.joinpath(n).read_text("utf-8")), n, "packaged") for n in names)
    return {record.gpu.name: record for record in read}


def packaged_gpu(name: str) -> Gpu:
    """Return the GPU of a packaged record by its short name, e.g. ``h200``.

    Raises:
        UsageError: the package has no such record.
    """
    if name not in packaged_records():
        known = " or ".join(packaged_records())
        raise UsageError(f"no packaged record for GPU {name!r}", known, "pass one of them, or run outblas calibrate")
    return packaged_records()[name].gpu


@functools.cache
def reference_gpu() -> Gpu:
    """Return the GPU whose rates the start coefficients of the kernel families describe."""
    (found,) = (record.gpu for record in packaged_records().values() if record.reference)
    return found


def user_record_path(name: str) -> Path:
    """Return the file of a user's record: ``$XDG_DATA_HOME/outblas/gpus/<name>.json``.

    Without that variable the folder is ``~/.local/share/outblas/gpus``. The file need not exist.
    """
    return user_data_folder("gpus") / f"{name}.json"


def user_records() -> list[GpuRecord]:
    """Return the records in the user's folder, sorted by file name; empty without such a folder.

    Raises:
        RecordError: a file is damaged, or the folder cannot be read.
    """
    folder = user_record_path("any").parent
    try:
        files = sorted(folder.glob("[!.]*.json")) if folder.is_dir() else []
        return [read_record(file) for file in files]
    except (OSError, ValueError) as error:
        raise RecordError(
            f"GPU records in {folder} cannot be read ({error})", "readable JSON files", "rerun outblas calibrate"
        ) from error


def read_record(path: Path) -> GpuRecord:
    """Return the record of one file, e.g. of ``outblas calibrate --out``.

    Raises:
        RecordError: its content is no record.
        OSError: the file cannot be read.
        ValueError: it is no JSON.
    """
    return record_from_json(read_json(path), str(path), "user")


def save_user_record(record: GpuRecord) -> Path:
    """Write a record into the user's folder; return its path. An older record of the same name is replaced.

    Raises:
        RecordError: the disk refuses.
    """
    return write_json(user_record_path(record.gpu.name), record.to_json())


def gpu_of_product(product: str) -> Gpu | None:
    """Return the GPU with a record for a product name, e.g. ``NVIDIA H200``; None if no record names it.

    A remark in parentheses at the end of the name does not count. A short name, e.g. ``h200``, is accepted, too.
    """
    plain = product.strip()
    head, opened, remark = plain.rpartition("(")
    if opened and remark.find(")") == len(remark) - 1:
        plain = head.strip()
    for record in (*user_records(), *packaged_records().values()):
        if plain == record.gpu.name or record.names_product(plain):
            return record.gpu
    return None


def recorded_gpu(provenance: Mapping[str, Any]) -> Gpu:
    """Return the GPU of recorded times: that of the field ``gpu_record``, else the known one of product ``gpu``.

    Raises:
        RecordError: the record is damaged; or the field is missing and no known GPU has that product name.
    """
    if "gpu_record" in provenance:
        return record_from_json(provenance["gpu_record"], "of the recorded times", "recorded").gpu
    name = str(provenance.get("gpu", ""))
    found = gpu_of_product(name)
    if found is None:
        wrong = f"the recording is from GPU {name!r}, which has no record"
        raise RecordError(wrong, "a GPU with a record", "run outblas calibrate on that GPU")
    return found


def short_name(product: str) -> str:
    """Return the short name of a product without a record: ``NVIDIA GeForce RTX 4090`` gives ``rtx-4090``.

    It has lower-case letters, digits and hyphens. A name without any of them gives ``gpu``.
    """
    words = re.sub(r"[^a-z0-9]+", "-", product.lower()).strip("-")
    return re.sub(r"^(nvidia-|geforce-)+", "", words)[:80].strip("-") or "gpu"


def nearest(gpu: Gpu, among: Iterable[Gpu]) -> Gpu:
    """Return the GPU of ``among`` that is most similar: the same instructions first, then the nearest rates.

    The distance is the sum of the absolute logarithms of the ratios of SMs, clock, peak, both bandwidths and shared
    memory. The first of equally near GPUs is returned.

    Raises:
        UsageError: ``among`` is empty.
    """

    def distance(other: Gpu) -> tuple[bool, float]:
        names = ("sms", "clock_mhz", "tflops", "hbm_tbs", "l2_tbs", "sm_smem")
        ratios = (getattr(gpu, name) / getattr(other, name) for name in names)
        return (gpu.wgmma_tflops > 0) != (other.wgmma_tflops > 0), sum(abs(math.log(ratio)) for ratio in ratios)

    listed = list(among)
    if not listed:
        raise UsageError(f"no packaged data fits {gpu.name}", "packaged data for at least one GPU", "reinstall outblas")
    return next((other for other in listed if other.name == gpu.name), None) or min(listed, key=distance)


@functools.cache
def nearest_with_data(gpu: Gpu, kind: str, ending: str) -> str:
    """Return the short name of the GPU whose packaged data serve a GPU: its own if they exist, else the nearest one's.

    Args:
        kind: folder of the data in the package, e.g. ``models``, ``policies`` or ``recordings``.
        ending: end of the file's name after the short name, e.g. ``.npz``; empty for a folder.

    Raises:
        UsageError: the package has such data of no GPU.
    """
    if has_data(gpu.name, kind, ending):
        return gpu.name
    return nearest(gpu, (r.gpu for name, r in packaged_records().items() if has_data(name, kind, ending))).name


@functools.cache
def data_of_architecture(name: str, kind: str) -> Any | None:
    """Return the packaged ``.npz`` file, of which machine code and data serve a GPU.

    It is the GPU's own file, else that of the nearest GPU of the same architecture. Return None without such a file, or
    if the package does not know the GPU.
    """
    record = packaged_records().get(name)
    if record is None:
        return None
    known = [r.gpu for other, r in packaged_records().items() if has_data(other, kind, ".npz")]
    known = [gpu for gpu in known if gpu.arch == record.gpu.arch]
    return packaged_data(kind) / f"{nearest(record.gpu, known).name}.npz" if known else None


def has_data(name: str, kind: str, ending: str) -> bool:
    """Return True if the package has data of a GPU.

    Args:
        kind: folder of the data in the package, as for :func:`nearest_with_data`.
        ending: end of the file's name, as for :func:`nearest_with_data`.
    """
    place = packaged_data(kind) / f"{name}{ending}"
    return place.is_file() if ending else place.is_dir()


def packaged_data(kind: str) -> Traversable:
    """Return the folder of packaged data: this package's if it has the kind, else that of outblas-lab.

    Args:
        kind: name of the folder, e.g. ``models``; ``recordings`` and ``policies`` come with outblas-lab. It may be
            missing.
    """
    own = resources.files("outblas") / "data" / kind
    labs = None if own.is_dir() else find_part("data")
    return own if labs is None else labs / kind
