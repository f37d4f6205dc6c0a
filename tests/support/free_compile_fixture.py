"""What tests that compile free kernels share: the reason to skip them, and a compile cache of their own."""

from __future__ import annotations

import pytest

from support.free_fixture import missing

compiles = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(name="cache", autouse=True, scope="module")
def cache_fixture(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
