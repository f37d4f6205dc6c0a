"""The file of shipped cubins: packed cubins come out unchanged, and damaged ones are refused."""

from __future__ import annotations

import random
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import make_source, sha_without_headers
from outblas.runtime import cubin_pack
from outblas.runtime.cubin import Cubin, SassFacts
from outblas.runtime.cubin_pack import CubinPack, pack_bytes, pack_key

ABOUT = {"nvrtc": "13.0 (wheel 13.0.88)", "kernels": "k"}
FACTS = SassFacts(4, 0, 0, 2, 1, 0, 0, 0, ("fp32",))


def cubin(seed: int, entry: str = "kernel", arch: str = "sm_90a") -> Cubin:
    """Cubins of one entry are alike, as real ones are."""
    common = random.Random(entry).randbytes(6000)
    image = b"\x7fELF" + common + random.Random(seed).randbytes(500) + b"\n\0" * 100
    return Cubin(image, entry, arch, 168, 0, 0, 1024 + seed, FACTS, 0.25, False, "ptxas said so")


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    return tmp_path / "kernels.pack"


def test_what_is_packed_comes_out_again(path: Path) -> None:
    kernels = {key(i): cubin(i, f"kernel_{i % 3}", "sm_80" if i % 5 == 0 else "sm_90a") for i in range(40)}
    path.write_bytes(pack_bytes(kernels, ABOUT))
    pack = CubinPack(path)
    assert (len(pack), pack.images, pack.about, pack.bytes) == (40, 40, ABOUT, path.stat().st_size)
    for name, each in kernels.items():
        assert pack.get(name) == replace(each, compile_seconds=0.0, from_cache=True, log="")
    for absent in (key(40), b"\0" * 15 + b"\xff", b"\xff" * 16):
        assert pack.get(absent) is None


def test_the_bytes_depend_on_the_kernels_alone() -> None:
    kernels = {key(i): cubin(i) for i in range(9)}
    assert pack_bytes(kernels, ABOUT) == pack_bytes(dict(reversed(kernels.items())), dict(reversed(ABOUT.items())))


def test_an_empty_pack_is_a_pack(path: Path) -> None:
    path.write_bytes(pack_bytes({}, ABOUT))
    assert len(CubinPack(path)) == 0 and CubinPack(path).get(key(0)) is None


def test_kernels_of_one_machine_code_share_it(path: Path) -> None:
    one = pack_bytes({key(0): cubin(0)}, ABOUT)
    path.write_bytes(pack_bytes({key(i): replace(cubin(0), compile_seconds=i, log=str(i)) for i in range(50)}, ABOUT))
    pack = CubinPack(path)
    assert (len(pack), pack.images) == (50, 1)
    assert pack.bytes == len(one) + 49 * 20  # a key and a number each
    # The same code with other registers is another cubin.
    path.write_bytes(pack_bytes({key(0): cubin(0), key(1): replace(cubin(0), registers=40)}, ABOUT))
    assert CubinPack(path).images == 2 and CubinPack(path).get(key(1)) != CubinPack(path).get(key(0))


def test_cubins_of_one_kernel_function_are_packed_against_each_other() -> None:
    """Common bytes are stored once, not once per cubin."""
    assert len(pack_bytes({key(i): cubin(i) for i in range(50)}, ABOUT)) < 50 * 1000 + 40000


def test_cubins_of_one_length_share_a_block(path: Path) -> None:
    """Eight kinds of one kernel function, in turns: a block has alike ones, however they are mixed."""
    shared = [random.Random(kind).randbytes(6000 + 10 * kind) for kind in range(8)]
    kernels = {key(i): replace(cubin(i), image=shared[i % 8] + random.Random(i).randbytes(300)) for i in range(8 * 48)}
    blocks = 8 * 48 / cubin_pack.IMAGES_OF_A_BLOCK
    assert len(pack_bytes(kernels, ABOUT)) < 8 * 48 * 500 + (blocks + 8) * 7000


def test_cubins_longer_than_a_block(path: Path) -> None:
    big = {
        key(i): replace(
            cubin(i), image=random.Random(i).randbytes(cubin_pack.MOST_BLOCK_BYTES // 2 + 1 + i % 2 * 600_000)
        )
        for i in range(4)
    }
    path.write_bytes(pack_bytes(big, ABOUT))
    assert all(CubinPack(path).get(k).image == c.image for k, c in big.items())  # type: ignore[union-attr]


def test_few_blocks_are_kept(path: Path) -> None:
    kernels = {key(i): cubin(i, f"kernel_{i}") for i in range(20)}
    path.write_bytes(pack_bytes(kernels, ABOUT))
    pack = CubinPack(path)
    for name in (*kernels, *kernels):
        assert pack.get(name).image == kernels[name].image  # type: ignore[union-attr]
    assert 1 <= len(pack._unpacked) <= 8


def test_a_python_without_lzma_cannot_use_a_pack(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(pack_bytes({key(0): cubin(0)}, ABOUT))
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(RecordError, match="cannot be used .*lzma"):
        CubinPack(path).get(key(0))


@pytest.mark.parametrize("cut", [0, 1, 40, 100, 1500, -1])
def test_a_truncated_file_is_refused(cut: int, path: Path) -> None:
    path.write_bytes(pack_bytes({key(i): cubin(i) for i in range(9)}, ABOUT)[:cut])
    with pytest.raises(RecordError, match="cannot be used .*outblas_lab.build.cubin_build"):
        CubinPack(path)


@pytest.mark.parametrize("data", [b"outblas-cubins-9" + b"\0" * 200, b"PK\x03\x04" * 50, b"\0" * 500])
def test_a_foreign_file_is_refused(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    with pytest.raises(RecordError, match="starts with"):
        CubinPack(path)


def test_a_pack_that_says_nothing_of_itself_is_refused(path: Path) -> None:
    path.write_bytes(pack_bytes({}, ["no", "mapping"]))  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="no provenance"):
        CubinPack(path)


def test_absurd_counts_are_refused_before_they_are_read(path: Path) -> None:
    data = bytearray(pack_bytes({key(0): cubin(0)}, ABOUT))
    struct.pack_into("<I", data, 16 + 8 + 4, 2**32 - 1)
    path.write_bytes(data)
    with pytest.raises(RecordError, match="damaged"):
        CubinPack(path)


def test_any_flipped_bit_is_noticed(path: Path) -> None:
    """In the table it is noticed at once; in a block at the read. No wrong cubin is returned."""
    kernels = {key(i): cubin(i) for i in range(5)}
    good = pack_bytes(kernels, ABOUT)
    expected = {k: replace(c, compile_seconds=0.0, from_cache=True, log="") for k, c in kernels.items()}
    noticed = 0
    for position in range(0, len(good), 97):
        data = bytearray(good)
        data[position] ^= 0x10
        path.write_bytes(data)
        try:
            pack = CubinPack(path)
            for name, each in expected.items():
                assert pack.get(name) == each
        except RecordError:
            noticed += 1
    assert noticed == len(range(0, len(good), 97))


def test_a_file_that_changes_under_its_reader(path: Path) -> None:
    first, second = ({key(i): cubin(i + base) for i in range(5)} for base in (0, 100))
    path.write_bytes(pack_bytes(first, ABOUT))
    pack = CubinPack(path)
    path.write_bytes(pack_bytes(second, ABOUT))
    with pytest.raises(RecordError, match="cannot be used"):
        pack.get(key(3))
    path.unlink()
    with pytest.raises(RecordError, match="No such file"):
        pack.get(key(2))


def test_a_key_names_the_source_and_the_architecture() -> None:
    problem, config = Problem(64, 64, 64), Sm90WgmmaConfig(64, 64)
    source = make_source(problem, config)
    same = [make_source(Problem(128, 256, 512), config), make_source(problem, Sm90WgmmaConfig(64, 64))]
    assert {pack_key(each, "sm_90a") for each in same} == {pack_key(source, "sm_90a")}
    changed = [
        make_source(Problem(64, 64, 64, "NN"), config),
        make_source(Problem(64, 64, 64, dtype="bf16"), config),
        make_source(problem, replace(config, pdl=True)),
        make_source(problem, Sm80MmaConfig(64, 64)),
        *(replace(source, **{name: "x"}) for name in ("text", "entry", "acc", "family")),
        replace(source, options=("-DX",)),
        replace(source, headers=source.headers[:-1]),
        replace(source, headers=(*source.headers, ("more.cuh", ""))),
        replace(source, headers=(("ptx/types.cuh", "changed"), *source.headers[1:])),
    ]
    keys = [pack_key(source, "sm_90a"), pack_key(source, "sm_80"), *(pack_key(each, "sm_90a") for each in changed)]
    assert len(set(keys)) == len(keys)
    assert sha_without_headers(source) not in (source.sha(), kernels_sha())


def test_launch_options_of_one_source_share_a_key() -> None:
    config = Sm80MmaConfig(64, 64, pdl=True)
    keys = {pack_key(make_source(Problem(64, 64, 64), replace(config, even=even)), "sm_90a") for even in (False, True)}
    assert len(keys) == 1
