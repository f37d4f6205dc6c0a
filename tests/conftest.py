"""Tests marked ``gpu`` are skipped, with the reason, where there is no usable CUDA GPU."""

from __future__ import annotations

import gc
import importlib.util
import os
import platform
import random
import runpy
import signal
from collections.abc import Generator, Iterable
from functools import lru_cache
from pathlib import Path

import pytest
from typer import testing

from outblas.runtime.cubin import CubinCache

try:
    from hypothesis import settings
except ImportError:  # the tests that use it skip themselves
    pass
else:
    settings.register_profile("outblas", deadline=None, derandomize=True, database=None)
    settings.load_profile("outblas")


#: Every test in it is marked ``gpu``.
GPU_TESTS = Path(__file__).resolve().parent / "gpu"
#: Name of this process of pytest-xdist, empty in any other.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare for Ctrl-C, for processes side by side, and for short compilations.

    What a shell starts in the background ignores Ctrl-C, and so would programs that tests start and interrupt.
    Processes of pytest-xdist share the cores: threads of several would mostly wait for each other. On a CPU, Inductor
    would try the compiler's vector instructions for 15 s in each process; scalar code does for small tensors.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_user_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the libraries that the developer has tuned on this machine."""
    monkeypatch.setenv("OUTBLAS_LIBRARY", "")


@pytest.fixture(autouse=True, scope="session")
def libraries_are_read_once() -> None:
    """A library is frozen, and reading the packaged one takes half a second, in hundreds of tests."""
    from outblas.records import library

    library.parse_library = lru_cache(maxsize=32)(library.parse_library)  # by the file's text


@pytest.fixture(autouse=True, scope="session")
def commands_are_made_once() -> None:
    """The tree of all commands is the same at every call; making it takes a tenth of a second, in hundreds of tests."""
    testing._get_command = lru_cache(maxsize=8)(testing._get_command)  # by the app


@pytest.fixture(scope="session")
def fresh_cubins(tmp_path_factory: pytest.TempPathFactory) -> CubinCache:
    """Kernels that this session compiled, in whichever of its processes; empty in the beginning."""
    base = tmp_path_factory.getbasetemp()
    return CubinCache((base.parent if WORKER else base) / "cubins")


@lru_cache(maxsize=1)
def why_no_gpu() -> str:
    """Return one line on the missing part, empty if GPU tests can run. A CPU build is recognised without its import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if version["cuda"] is None:
        return f"torch {version['__version__']} is a CPU build"
    import torch

    return "" if torch.cuda.is_available() else "no CUDA GPU on this machine"


def pytest_report_header() -> str:
    gpu = why_no_gpu()
    if not gpu:
        import torch

        gpu = f"{torch.cuda.get_device_name(0)} (torch {torch.__version__})"
    return f"outblas: Python {platform.python_version()}; gpu: {gpu}"


class NotHere(pytest.File):
    """Collect a file of GPU tests on a machine without a GPU: one skip with its reason, and no import."""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip(f"needs a GPU: {why_no_gpu()}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector: modules and tests live to the end, and it would go through them often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each process of pytest-xdist collect the files in an order of its own.

    Pytest rewrites the assertions of a file and keeps the bytecode for the others. In one order for all, every
    process would rewrite every file, at the same time.
    """
    report = yield
    if WORKER and isinstance(collector, pytest.Directory):
        random.Random(WORKER).shuffle(report.result)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Import the files of tests/gpu without a GPU only to list their tests."""
    if parent.config.option.collectonly or GPU_TESTS not in module_path.parents or not why_no_gpu():
        return None
    return NotHere.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU; put files that take long before the others, whose ends fill the cores evenly."""
    if WORKER:
        items.sort(key=lambda item: item.path)
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)
    reason = why_no_gpu()
    if reason:
        skip = pytest.mark.skip(reason=f"needs a GPU: {reason}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
