"""Tests marked ``gpu`` are skipped, with the reason, where there is no usable CUDA GPU."""

from __future__ import annotations

import platform
import signal
from functools import lru_cache

import pytest

try:
    from hypothesis import settings
except ImportError:  # the tests that use it skip themselves
    pass
else:
    settings.register_profile("outblas", deadline=None, derandomize=True, database=None)
    settings.load_profile("outblas")


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would programs that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_user_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer has tuned on this machine is no part of a test."""
    monkeypatch.setenv("OUTBLAS_LIBRARY", "")


@lru_cache(maxsize=1)
def why_no_gpu() -> str:
    """Empty when GPU tests can run, else one line that says what is missing."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return "no CUDA GPU on this machine"
    return ""


def pytest_report_header() -> str:
    gpu = why_no_gpu()
    if not gpu:
        import torch

        gpu = f"{torch.cuda.get_device_name(0)} (torch {torch.__version__})"
    return f"outblas: Python {platform.python_version()}; gpu: {gpu}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_no_gpu()
    if reason:
        skip = pytest.mark.skip(reason=f"needs a GPU: {reason}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
