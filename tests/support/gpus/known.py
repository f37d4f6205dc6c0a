"""GPUs of the packaged records, for tests."""

from __future__ import annotations

from outblas.core.gpu_records import packaged_gpu

H200 = packaged_gpu("h200")
H100 = packaged_gpu("h100")
