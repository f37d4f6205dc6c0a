"""The one legality predicate: each rule has a case that only it refuses, and what it allows compiles."""

from __future__ import annotations

import functools
import random
import runpy
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from outblas.core.config import KernelConfig, config_name, knob_schema
from outblas.core.errors import DeviceError, UsageError
from outblas.core.problem import Problem
from outblas.core.suites import suite
from outblas.kernels.catalogue import catalogue, with_launch, without_launch
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry import geometry, workspace_bytes
from outblas.kernels.geometry_terms import MAX_CLUSTER
from outblas.kernels.legality import never_legal, surely_illegal, why_illegal
from outblas.kernels.pool import mma_pool, pool, pool_families, unaligned_pool
from outblas.kernels.source import make_source
from outblas.runtime.device import gpu_of_device
from support.gpus.known import H200
from support.helpers import ROOT


def test_every_pool_config_is_legal_somewhere() -> None:
    large = Problem(8192, 8192, 16384)
    for config in dict.fromkeys((*pool(), *unaligned_pool(), *mma_pool())):
        problem = large
        if FAMILIES[config.family].few_rows_only:
            problem = replace(large, m=config.bm, k=getattr(config, "kept_k", 0) or large.k)
        rows = getattr(config, "a_rows", 0) or 512
        problem = replace(large, m=rows, n=512) if workspace_bytes(problem, config) or rows < 512 else problem
        kinds = [replace(problem, acc=acc) for acc in ("fp32", "fp16")] + [replace(problem, layout="NN")]
        reasons = {why_illegal(kind, config, H200) for kind in kinds}
        assert None in reasons, (config_name(config), reasons)


def test_each_pool_has_its_families_no_duplicates_and_no_launch_options() -> None:
    families = FAMILIES.values()
    hopper = {family.name for family in pool_families()}
    odd = {family.name for family in families if family.for_unaligned_rows}
    others = {family.name for family in families if family.instructions == "mma"}
    assert hopper | odd | others == set(FAMILIES) and hopper & others
    for kernels, of in ((pool(), hopper), (unaligned_pool(), odd), (mma_pool(), others)):
        assert len(set(kernels)) == len(kernels) >= 128
        assert {c.family for c in kernels} == of
        assert not any(c.pdl for c in kernels)


def random_config(rng: random.Random) -> KernelConfig:
    """A pool config with a few knobs drawn anew, mostly nonsense."""
    config = rng.choice(pool())
    numbers = [-1, 0, 1, 2, 3, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 1000]
    for knob in rng.sample(knob_schema(type(config)), rng.randint(0, 3)):
        values: dict[str, Sequence[Any]] = {"int": numbers, "bool": [False, True], "word": knob.words}
        config = config.with_knobs(**{knob.name: rng.choice(values[knob.kind])})
    return config


def test_the_predicate_answers_for_any_knobs() -> None:
    """It never raises, and what it allows keeps the hardware's limits."""
    rng = random.Random(5)
    legal = 0
    for _ in range(8000):
        layout, dtype, acc = rng.choice([("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("NN", "fp16", "fp16")])
        problem = Problem(*(rng.choice((1, 7, 64, 1000, 4096)) for _ in range(3)), layout, dtype, acc)  # type: ignore[arg-type]
        config = random_config(rng)
        reason = why_illegal(problem, config, H200)
        assert reason is None or (isinstance(reason, str) and reason)
        if reason is None:
            legal += 1
            shape = geometry(problem, config)
            assert shape.smem_bytes <= H200.smem_optin and shape.threads <= 1024 and 1 <= shape.cluster <= MAX_CLUSTER
            assert shape.threads % 32 == 0 and shape.accumulators < 255
    assert 600 < legal < 7200  # both answers were really seen


def test_many_kernels_at_once_break_the_same_rules_as_one() -> None:
    kinds = [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")]
    configs = tuple(dict.fromkeys(config for family in FAMILIES.values() for config in tuple(family.pool())[::9]))
    broken = 0
    for extents in ((1, 8, 8), (7, 129, 1000), (64, 64, 4095), (4096, 57344, 32768)):
        for kind in kinds:
            problem = Problem(*extents, *kind)  # type: ignore[arg-type]
            surely = surely_illegal(problem, configs, H200)
            assert all(why_illegal(problem, configs[i], H200) for i in surely.nonzero()[0])
            legal = (c for c, each in zip(configs, surely, strict=True) if not each)
            assert all(never_legal(problem, c, H200) for c in legal if why_illegal(problem, c, H200))
            broken += surely.sum()
    assert broken > len(configs)


#: The first family has twice the kernels of any other.
SAMPLED = [next(iter(FAMILIES.values())), *FAMILIES.values()]
PAIRS = 3 * len(SAMPLED) * 2


@functools.cache
def compiled_sample() -> list[tuple[Problem, KernelConfig]]:
    rng = random.Random(11)
    kinds = [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")]
    found = []
    for i in range(PAIRS):
        problem = Problem(4096, 4096, 8192, *kinds[i % 3])  # type: ignore[arg-type]
        family = SAMPLED[i // 3 % len(SAMPLED)]
        if family.few_rows_only:
            problem = replace(problem, m=8 + 8 * (i % 2), acc="fp32")
        if all(why_illegal(problem, c, H200) for c in family.pool()):
            problem = replace(problem, acc="fp32")
        legal = [c for c in dict.fromkeys(family.pool()) if why_illegal(problem, c, H200) is None]
        found.append((problem, rng.choice(legal)))
    return found


@pytest.mark.parametrize("index", [pytest.param(i, marks=pytest.mark.slow if i % 2 else ()) for i in range(PAIRS)])
def test_what_is_legal_compiles_and_passes_the_static_gate(index: int) -> None:
    """Registers that the predicate allows do not spill."""
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static

    source = make_source(*compiled_sample()[index])
    cubin = compile_source(source, cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.static_smem) == (0, 0, 0)


def test_what_the_sanitizer_runs_is_legal_and_of_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # what the script sets is taken back
    cases = runpy.run_path(str(ROOT / "tools" / "sanitize.py"))["CASES"]
    assert {config.family for *_, config in cases} == set(FAMILIES)
    for name, extents, layout, dtype, acc, config in cases:
        for mnk in extents:
            assert why_illegal(Problem(*mnk, layout, dtype, acc), config, H200) is None, name


def test_the_sanitizer_refuses_a_name_of_no_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    script = runpy.run_path(str(ROOT / "tools" / "sanitize.py"))
    ran: list[Problem] = []
    script["main"].__globals__["run"] = lambda problem, config: ran.append(problem) or 0.0
    assert script["main"]("wgmma-splitt") == 2 and script["main"]("gemv", "nothing") == 2 and not ran
    error = capsys.readouterr().err
    assert "no case is named wgmma-splitt; expected one of wgmma-TN, " in error and "gemv-walk-kept-TN" in error
    assert script["main"]("--help") == 0 and not ran
    assert "Names given as arguments" in capsys.readouterr().out
    assert script["main"]("gemv-split", "wgmma-acc16") == 0 and len(ran) == 4


needs_catalogue = pytest.mark.skipif(
    not resources.files("outblas").joinpath("data", "catalogues", "h200.json").is_file(), reason="no catalogue yet"
)


@needs_catalogue
def test_every_catalogue_config_is_legal_on_the_grid() -> None:
    problems = suite("grid1000")
    assert len(catalogue("h200")) >= 128 and len(set(catalogue("h200"))) == len(catalogue("h200"))
    for config in catalogue("h200"):
        assert any(why_illegal(p, config, H200) is None for p in reversed(problems)), config_name(config)


def test_an_unknown_catalogue_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown catalogue 'a100'"):
        catalogue("a100")


def test_no_gpu_is_said_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceError, match="CUDA device 0 does not exist"):
        gpu_of_device(0)


def test_launch_options_are_set_and_taken_off() -> None:
    plain = Sm90WgmmaConfig(64, 64)
    assert with_launch(plain, "plain") == plain
    assert with_launch(plain, "pdl") == plain.with_knobs(pdl=True)
    assert with_launch(plain, "weights") == plain.with_knobs(pdl=True, early=True)
    assert without_launch(with_launch(plain, "weights")) == plain and without_launch(plain) is plain
    direct = Sm80MmaConfig(64, 64, pdl=True, even=True)
    assert without_launch(direct) == Sm80MmaConfig(64, 64)
