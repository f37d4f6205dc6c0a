"""Compilation without a GPU: refused sources, and a cache that can be damaged, shared or full."""

from __future__ import annotations

import builtins
import errno
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from outblas.core.errors import CompileError, ToolchainMissing  # noqa: E402
from outblas.kernels.source import Source  # noqa: E402
from outblas.runtime import cubin as cubins  # noqa: E402
from outblas.runtime import nvrtc as compiling  # noqa: E402
from outblas.runtime.nvrtc import Cubin, CubinCache, cache_key, compile_many, compile_source, parse_ptxas  # noqa: E402
from outblas.runtime.sass import check_static  # noqa: E402

PLAIN = Source(
    '#include "part.cuh"\nextern "C" __global__ void plain(float* o) { __shared__ float s[64]; '
    "s[threadIdx.x] = o[threadIdx.x]; __syncthreads(); o[threadIdx.x] = s[63 - threadIdx.x] * FACTOR + part(); }",
    "plain",
    (("part.cuh", "float part() { return 1.0f; }"),),
    ("-DFACTOR=2.0f",),
    "fp32",
    "probe",
)
SPILL = replace(
    PLAIN,
    entry="spill",
    text="""extern "C" __global__ void __launch_bounds__(1024) spill(float* o) {
  float d[100];
  #pragma unroll
  for (int i = 0; i < 100; i++) d[i] = o[threadIdx.x + i * 1024];
  __syncthreads();
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    #pragma unroll
    for (int i = 0; i < 100; i++) d[i] = d[i] * d[(i * 7 + 3) % 100] + 1.0f; }
  #pragma unroll
  for (int i = 0; i < 100; i++) o[threadIdx.x + i * 1024] = d[i]; }""",
)
#: The accumulator is touched while a wgmma that writes it is in flight: ptxas serialises them.
SERIALISED = replace(
    PLAIN,
    entry="serial",
    text="""extern "C" __global__ void __launch_bounds__(128) serial(float* o, unsigned long long a, unsigned long long b, int n) {
  float d[4] = {0};
  for (int t = 0; t < n; t++) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1,1,1,0,0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;");
    d[0] += o[t];
    asm volatile("wgmma.wait_group.sync.aligned 0;"); }
  for (int i = 0; i < 4; i++) o[threadIdx.x * 4 + i] = d[i]; }""",  # noqa: E501
)
BROKEN = replace(PLAIN, text='extern "C" __global__ void plain(float* o) { *o = undefined_name; }')


def variant(index: int) -> Source:
    return replace(PLAIN, options=(f"-DFACTOR={index}.0f",))


@pytest.fixture
def cache(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "cache")


@dataclass(frozen=True)
class Bomb(Source):
    """A source that ends the process that receives it, as a crash of the compiler would."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def bomb() -> Bomb:
    return Bomb(PLAIN.text, PLAIN.entry, PLAIN.headers, ("-DFACTOR=99.0f",), PLAIN.acc, PLAIN.family)


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a compilation is a failure of the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiling, "_nvrtc_compile", refuse)


@pytest.mark.parametrize("arch", compiling.ARCHITECTURES)
def test_compiles_for_every_architecture(arch: str) -> None:
    cubin = compile_source(PLAIN, arch, cache=None)
    assert cubin.image.startswith(b"\x7fELF")
    assert (cubin.entry, cubin.arch, cubin.from_cache) == ("plain", arch, False)
    assert cubin.registers > 0 and cubin.static_smem == 256 and cubin.spill_bytes == 0
    assert f"for '{arch}'" in cubin.log and cubin.compile_seconds > 0


def test_spills_are_recorded_and_fail_gate_one() -> None:
    cubin = compile_source(SPILL, cache=None)
    assert cubin.spill_bytes > 0 and cubin.stack_bytes > 0 and cubin.facts.ldl > 0 and cubin.facts.stl > 0
    with_mma = replace(cubin.facts, hmma=1, accumulators=("fp32",))
    assert "spill" in str(check_static(with_mma, SPILL, cubin))


def test_syntax_error_carries_the_log() -> None:
    with pytest.raises(CompileError, match="undefined_name") as caught:
        compile_source(BROKEN, cache=None)
    assert 'identifier "undefined_name" is undefined' in caught.value.log
    assert "\n" not in str(caught.value)


def test_serialised_wgmma_is_a_failure() -> None:
    with pytest.raises(CompileError, match="C75") as caught:
        compile_source(SERIALISED, cache=None)
    assert "serialized" in caught.value.log


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7512", "C7600"])
def test_ptxas_warnings_are_failures(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = compile_source(PLAIN, cache=None)
    log = f"ptxas warning : ({code}) Potential Performance Loss: said so\n{honest.log}"
    monkeypatch.setattr(compiling, "_nvrtc_compile", lambda *_: (honest.image, log))
    with pytest.raises(CompileError, match=code) as caught:
        compile_source(PLAIN, cache=None)
    assert caught.value.log == log


@pytest.mark.parametrize("arch", ["sm_70", "sm_100", "90", "", "compute_90"])
def test_unknown_architecture_is_refused_before_the_compiler(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    with pytest.raises(CompileError, match="sm_80 or sm_86 or sm_89 or sm_90 or sm_90a"):
        compile_source(PLAIN, arch)
    with pytest.raises(CompileError, match="not supported"):
        list(compile_many([PLAIN], arch))


def test_entry_that_is_not_there() -> None:
    with pytest.raises(CompileError, match="no kernel 'absent'"):
        compile_source(replace(PLAIN, entry="absent"), cache=None)


def test_parse_counts_the_named_entry_and_its_calls() -> None:
    log = """ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for helper
    0 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers
"""
    assert parse_ptxas(log, "one") == (40, 15, 16, 512)
    assert parse_ptxas(log, "two") == (12, 0, 0, 0)


def test_second_time_from_the_cache(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_source(PLAIN, cache=cache)
    no_compiler(monkeypatch)
    again = compile_source(PLAIN, cache=cache)
    assert again == replace(first, from_cache=True)


def test_key_depends_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [
        cache_key(PLAIN, "sm_90a"),
        cache_key(PLAIN, "sm_80"),
        cache_key(replace(PLAIN, text=PLAIN.text + " "), "sm_90a"),
        cache_key(replace(PLAIN, entry="other"), "sm_90a"),
        cache_key(replace(PLAIN, options=("-DFACTOR=3.0f",)), "sm_90a"),
        cache_key(replace(PLAIN, headers=(("part.cuh", "float part() { return 2.0f; }"),)), "sm_90a"),
        cache_key(replace(PLAIN, headers=(("part.h", PLAIN.headers[0][1]),)), "sm_90a"),
    ]
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: "99.0")
    variants.append(cache_key(PLAIN, "sm_90a"))
    monkeypatch.setattr(compiling, "FORMAT", "another")
    variants.append(cache_key(PLAIN, "sm_90a"))
    assert len(set(variants)) == len(variants)


def _truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


def _empty(data: bytes) -> bytes:
    return b""


def _old_format(data: bytes) -> bytes:
    return b"outblas-cubin-0\n" + data[16:]


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty, _old_format])
def test_damaged_file_is_compiled_again_and_repaired(cache: CubinCache, damage: Any) -> None:
    first = compile_source(PLAIN, cache=cache)
    path = cache.path(cache_key(PLAIN, "sm_90a"))
    path.write_bytes(damage(path.read_bytes()))
    again = compile_source(PLAIN, cache=cache)
    assert not again.from_cache and again.image == first.image
    assert compile_source(PLAIN, cache=cache).from_cache


def test_file_under_another_key_is_not_taken(cache: CubinCache) -> None:
    compile_source(variant(1), cache=cache)
    wrong = cache.path(cache_key(variant(2), "sm_90a"))
    wrong.parent.mkdir(parents=True, exist_ok=True)
    wrong.write_bytes(cache.path(cache_key(variant(1), "sm_90a")).read_bytes())
    assert not compile_source(variant(2), cache=cache).from_cache


def test_full_disk_costs_one_warning(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cubins.os, "fsync", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [compile_source(variant(i), cache=cache) for i in range(3)]
    assert [str(w.message) for w in caught if "No space left" in str(w.message)] == [str(caught[0].message)]
    assert len(caught) == 1 and "OUTBLAS_CACHE_DIR" in str(caught[0].message)
    assert not any(r.from_cache for r in results)
    assert not [p for p in (cache.directory / "cubin").rglob("*") if p.is_file()], "a half file was left"


def test_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CubinCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="OUTBLAS_CACHE_DIR") as caught:
        assert not compile_source(variant(1), cache=cache).from_cache
        assert not compile_source(variant(1), cache=cache).from_cache
    assert len(caught) == 1


def test_directory_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path / "here"))
    compile_source(PLAIN)
    assert compile_source(PLAIN).from_cache
    assert CubinCache().path(cache_key(PLAIN, "sm_90a")).is_relative_to(tmp_path / "here")


def test_sources_that_read_files_are_not_cached(cache: CubinCache, tmp_path: Path) -> None:
    (tmp_path / "part.cuh").write_text("float part() { return 1.0f; }")
    outside = replace(PLAIN, headers=(), options=(*PLAIN.options, f"-I{tmp_path}"))
    absolute = replace(PLAIN, headers=(), text=PLAIN.text.replace("part.cuh", str(tmp_path / "part.cuh")))
    for source in (outside, absolute):
        compile_source(source, cache=cache)
        assert not compile_source(source, cache=cache).from_cache


def test_files_of_the_working_directory_are_not_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part.cuh").write_text("float part() { return 1.0f; }")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"part\.cuh"):
        compile_source(replace(PLAIN, headers=()), cache=None)


PUBLISH = """
import sys, time
from dataclasses import replace
from pathlib import Path
from outblas.runtime.cubin import Cubin, CubinCache, SassFacts
cache, go = CubinCache(sys.argv[1]), Path(sys.argv[2])
cubin = Cubin(bytes(1 << 16), "e", "sm_90a", 1, 0, 0, 0, SassFacts(0, 0, 0, 0, 0, 0, 0, 0, ()), 0.0, False, "")
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    cache.put("k" * 64, cubin)
    found = cache.get("k" * 64)
    assert found is not None and found.image == cubin.image
assert not cache.trouble, cache.trouble
"""


def test_two_processes_publish_the_same_key(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUBLISH, str(tmp_path), str(tmp_path / "go")]
    root = str(Path(compiling.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, env=env, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["k" * 64]


COMPILE = """
import sys
from outblas.runtime.cubin import CubinCache
from outblas.runtime.nvrtc import compile_source
from outblas.kernels.source import Source
print("ready", flush=True)
source = Source(sys.stdin.readline().encode().decode("unicode_escape"), "k", (), (), "fp32", "probe")
print(compile_source(source, cache=CubinCache(sys.argv[1])).from_cache)
"""


def test_of_processes_that_want_the_same_kernel_one_compiles(tmp_path: Path) -> None:
    lines = "".join(f"o[{i}] += o[{i + 1}] * {i}.5f;" for i in range(800))  # slow enough for all to want it at once
    text = f'extern "C" __global__ void k(float* o) {{ {lines} }}\n'
    env = {**os.environ, "PYTHONPATH": str(Path(compiling.__file__).parents[2])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    several = [subprocess.Popen(command, text=True, env=env, **pipes) for _ in range(3)]
    for process in several:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in several:
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.flush()
    found = []
    for process in several:
        said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        found.append(said.strip())
    assert sorted(found) == ["False", "True", "True"]


def test_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError("No module named 'cuda'")
        return real(name, *args, **kwargs)

    compiling.nvrtc_version.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ToolchainMissing, match=r"pip install 'outblas\[compile\]'"):
        compile_source(PLAIN, cache=None)
    with pytest.raises(ToolchainMissing):
        list(compile_many([PLAIN]))


def test_many_reports_every_source_once(cache: CubinCache) -> None:
    sources = [variant(0), BROKEN, variant(2), bomb(), variant(4), variant(5)]
    seen: list[tuple[int, int]] = []
    results = dict(compile_many(sources, jobs=2, progress=lambda done, total: seen.append((done, total)), cache=cache))
    assert sorted(results) == list(range(6))
    assert seen == [(i, 6) for i in range(1, 7)]
    assert isinstance(results[1], CompileError) and "undefined_name" in results[1].log
    assert isinstance(results[3], CompileError) and "process died" in str(results[3])
    for index in (0, 2, 4, 5):
        assert isinstance(results[index], Cubin)
        assert results[index].image == compile_source(sources[index], cache=None).image


def test_many_takes_cached_ones_without_a_process(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [variant(i) for i in range(3)]
    assert len(list(compile_many(sources, jobs=1, cache=cache))) == 3
    no_compiler(monkeypatch)
    monkeypatch.setattr(compiling, "compile_processes", None)
    assert all(r.from_cache for _, r in compile_many(sources, jobs=2, cache=cache) if isinstance(r, Cubin))


def test_many_warns_once_of_a_cache_that_workers_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CubinCache(tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="compile cache") as caught:
        results = list(compile_many([variant(i) for i in range(4)], jobs=2, cache=cache))
    assert len(caught) == 1
    assert all(isinstance(r, Cubin) for _, r in results)
