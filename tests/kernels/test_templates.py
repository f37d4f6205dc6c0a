"""Templates of CUTLASS and CuTe: what may be filled in, what comes out, and that it compiles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rivals.carried_builds import CarriedBuilds

from outblas.core.errors import ConfigError, ToolchainMissing
from outblas.core.problem import Problem
from outblas_lab.custom.templates.fill import CuteSm80, CutlassSm80, CutlassSm90, template_text
from outblas_lab.jail import build
from outblas_lab.jail.confined_compiler import CompileLimits
from outblas_lab.jail.static_gate import check_built
from support.gpus.known import H200

pytestmark = pytest.mark.long
SMALL = Problem(72, 136, 200)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile": (96, 128, 64)},
        {"tile": (64, 128, 64), "schedule": "cooperative"},
        {"tile": (128, 100, 64)},
        {"tile": (128, 128, 48)},
        {"tile": (128, 256, 64), "schedule": "pingpong"},
        {"tile": (256, 256, 64), "schedule": "cooperative"},
        {"cluster": (3, 1)},
        {"cluster": (4, 4)},
        {"schedule": "ping"},
        {"scheduler": "streamk"},
        {"schedule": "pingpong", "scheduler": "stream_k"},
        {"schedule": "warp_specialized", "tile": (64, 64, 64), "swizzle": 2},
        {"stages": 1},
        {"stages": True},
        {"stages": 12},
        {"swizzle": 3},
    ],
)
def test_what_cutlass_cannot_do_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        CutlassSm90(**wrong)
    assert raised.value.wrong and raised.value.expected and raised.value.do


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile": (128, 128, 48)},
        {"warp": (48, 64)},
        {"warp": (8, 64)},
        {"tile": (256, 256, 32)},
        {"tile": (256, 128, 32), "warp": (128, 64)},
        {"tile": (16, 128, 32), "warp": (16, 16)},
        {"stages": 2},
        {"stages": True},
        {"tile": (256, 128, 64), "stages": 5},
        {"swizzle": "streamk"},
        {"width": 3},
        {"swizzle": "stream_k", "width": 2},
        {"splits": 4},
        {"swizzle": "stream_k", "splits": 17},
        {"acc": "bf16"},
    ],
)
def test_what_cutlass_for_ampere_cannot_do_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        CutlassSm80(**wrong)
    assert raised.value.wrong and raised.value.expected and raised.value.do


def test_the_template_for_ampere_says_its_accumulator_and_its_shared_memory() -> None:
    filled = [
        CutlassSm80(),
        CutlassSm80(acc="fp16"),
        CutlassSm80(width=4),
        CutlassSm80(stages=5),
        CutlassSm80(swizzle="stream_k"),
        CutlassSm80(swizzle="stream_k", splits=4),
        CutlassSm80((64, 64, 64), (32, 32), 5),
    ]
    assert len({each.name for each in filled}) == len({each.kernel().name for each in filled}) == len(filled)
    assert [each.kernel().launch.acc for each in filled[:2]] == ["fp32", "fp16"]
    assert filled[0].shared_bytes == 4 * 2 * 32 * (128 + 128) and filled[-1].name == "64x64x64_32x32_s5_i1_fp32"
    assert "GemmIdentityThreadblockSwizzle<4>" in filled[2].text() and "{M, N, K}, 4," in filled[5].text()


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile": (128, 128, 48)},
        {"tile": (48, 128, 32)},
        {"tile": (256, 256, 32), "warps": (2, 2)},
        {"tile": (256, 256, 64), "stages": 8, "warps": (4, 2)},
        {"stages": 1},
        {"warps": (3, 1)},
        {"warps": (1, 1)},
        {"tile": (32, 32, 64), "warps": (4, 2)},
    ],
)
def test_what_the_cute_text_cannot_do_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CuteSm80(**wrong)


def test_every_place_is_filled_and_different_values_are_different_kernels() -> None:
    filled = [
        CutlassSm90(),
        CutlassSm90(stages=4),
        CutlassSm90(swizzle=2),
        CutlassSm90(cluster=(1, 2)),
        CutlassSm90((64, 128, 64), schedule="warp_specialized"),
        CutlassSm90(schedule="cooperative"),
        CutlassSm90(schedule="cooperative", scheduler="stream_k"),
    ]
    assert len({each.name for each in filled}) == len({each.kernel().name for each in filled}) == len(filled)
    for each in filled:
        assert not re.search(r"\{\{[A-Z_]+\}\}", each.text()) and each.kernel().launch.form == "host"
    cute = CuteSm80((64, 128, 32), 3, (2, 2))
    launch = cute.kernel().launch
    assert launch.block == (128, 1, 1) and launch.shared == 3 * 2 * 32 * (64 + 128)
    assert launch.grid_of(Problem(65, 129, 64), H200) == (2, 2, 1)


def test_extents_that_tma_and_vectors_cannot_read_are_refused_by_the_launch_block() -> None:
    for kernel in (CutlassSm90().kernel(), CuteSm80().kernel()):
        assert kernel.launch.why_not(SMALL, H200) is None
        assert kernel.launch.why_not(Problem(72, 136, 204), H200) is not None
        assert kernel.launch.why_not(Problem(72, 132, 200), H200) is not None
        assert kernel.launch.why_not(Problem(1, 8, 8), H200) is None


def test_the_workspace_and_the_stream_are_the_callers() -> None:
    """A call of CUTLASS neither allocates nor waits, and reads no C."""
    text = template_text("cutlass_sm90.cu")
    code = re.sub(r"//.*", "", text)
    assert not re.search(r"cudaMalloc|Synchronize|device_memory|\bstatic\s+(?!typename|const)\w+\s+\w+\s*[;=]", code)
    assert "initialize(all, workspace, stream)" in code and "run(stream)" in code
    assert re.search(r"float, float, void, LayoutC", code), "no source operand"


def test_an_unknown_template_or_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="template"):
        template_text("cutlass_sm100.cu")
    with pytest.raises(ConfigError, match="template"):
        template_text("../examples/naive.cu")
    from outblas_lab.custom.templates import fill

    monkeypatch.setattr(fill, "template_text", lambda name: "{{TILE_M}} {{NEW}}")
    with pytest.raises(ConfigError, match="NEW"):
        CutlassSm90().text()


@pytest.mark.slow
def test_cutlass_compiles_to_wgmma_in_fp32_and_travels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "CUTLASS_LIMITS", CompileLimits(280.0, 48 << 30))  # a busy machine takes minutes
    kernel = CutlassSm90((64, 64, 64), schedule="warp_specialized").kernel()
    try:
        built = build.build(kernel, SMALL, H200)
    except ToolchainMissing as error:
        pytest.skip(str(error))
    assert check_built(built) is None, "it asks for nothing that a launch has no need of"
    facts = built.cubin.facts
    assert facts.hgmma > 0 and facts.accumulators == ("fp32",) and facts.utmaldg > 0
    assert built.counters()["spill_bytes"] == 0 and facts.ldl == facts.stl == 0
    carried = CarriedBuilds(tmp_path, H200)
    assert carried.get(kernel, SMALL) is None
    carried.put(built, SMALL)
    found = carried.get(kernel, SMALL)
    assert found is not None and found.cubin.image == built.cubin.image and found.counters() == built.counters()
    assert carried.get(kernel, Problem(72, 136, 200, dtype="bf16")) is None, "compiled for another dtype"
    path = carried.path(kernel, SMALL)
    path.write_bytes(path.read_bytes()[:-1])
    assert carried.get(kernel, SMALL) is None, "damaged"


def test_names_are_json_and_file_safe() -> None:
    name = CutlassSm90((128, 256, 64), (2, 1), "cooperative", 3, "stream_k", 4).name
    assert json.loads(json.dumps(name)) == name and re.fullmatch(r"[\w]+", name)
