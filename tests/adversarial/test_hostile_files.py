"""Files and folders that somebody crafted: each ends in an error of the house, or counts as absent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.files import lock_folder, lock_for_update, write_atomic
from outblas.core.journal import Journal
from outblas.records.captured_products import CapturedProducts
from outblas.records.library import Library
from outblas.records.store import Store
from outblas.runtime.cubin import FORMAT, Cubin, CubinCache, SassFacts, decode, encode
from support.gpus.known import H200
from support.helpers import SOURCE_PATH

KEY = "ab" * 32
DEEP = "[" * 100_000
STRANGER = 65534
CUBIN = Cubin(b"image", "k", "sm_90a", 32, 0, 0, 0, SassFacts(1, 0, 0, 0, 0, 0, 0, 0, ("fp32",)), 0.1, False, "")


@pytest.fixture
def kept(tmp_path: Path) -> CubinCache:
    cache = CubinCache(tmp_path / "cache")
    cache.put(KEY, CUBIN)
    assert cache.get(KEY) is not None and not cache.trouble
    return cache


def owned_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the path somebody else's; who is not root becomes somebody else."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def a_link(path: Path, _: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def writable_by_all(path: Path, _: pytest.MonkeyPatch) -> None:
    path.chmod(0o666)


def a_pipe(path: Path, _: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [owned_by_another, a_link, writable_by_all, a_pipe])
def test_a_cached_file_that_others_may_have_written_is_refused_once(
    kept: CubinCache, spoil: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(kept.path(KEY), monkeypatch)
    with pytest.warns(RuntimeWarning, match="is not used") as said:
        assert kept.get(KEY) is None
        assert kept.get(KEY) is None
    assert len(said) == 1 and str(kept.path(KEY)) in str(said[0].message)


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_cache_folder_of_others_is_not_written(tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    if mode == 0o755:
        owned_by_another(folder, monkeypatch)
    cache = CubinCache(folder)
    with pytest.warns(RuntimeWarning, match="your own writable") as said, cache.locked(KEY):
        cache.put(KEY, CUBIN)
    assert len(said) == 1 and not list(folder.iterdir())


def test_locks_leave_what_lies_in_their_place(kept: CubinCache, tmp_path: Path) -> None:
    def precious(place: Path) -> Path:
        mine = tmp_path / f"mine{len(list(tmp_path.iterdir()))}"
        mine.write_text("precious")
        place.parent.mkdir(exist_ok=True, parents=True)
        place.unlink(missing_ok=True)
        place.symlink_to(mine)
        return mine

    mine = precious(kept.directory / "lock" / KEY[:2])
    with pytest.warns(RuntimeWarning, match="symbolic link"), kept.locked(KEY):
        assert mine.read_text() == "precious"
    mine = precious(tmp_path / "run" / ".driver.lock")
    with pytest.raises(RecordError, match="symbolic link"), lock_folder(tmp_path / "run"):
        pass
    assert mine.read_text() == "precious"
    mine = precious(tmp_path / ".library.json.lock")
    with pytest.raises(RecordError, match="symbolic link"), lock_for_update(tmp_path / "library.json", "do"):
        pass
    assert mine.read_text() == "precious"
    mine = precious(tmp_path / f".out.json.{os.getpid()}.tmp")
    write_atomic(tmp_path / "out.json", b"{}")
    assert mine.read_text() == "precious" and (tmp_path / "out.json").read_bytes() == b"{}"
    plain = tmp_path / "run2" / ".driver.lock"
    plain.parent.mkdir()
    plain.write_text("precious")
    with lock_folder(plain.parent):
        assert plain.read_text() == "precious"


def signed(body: bytes) -> bytes:
    return FORMAT.encode() + b"\n" + hashlib.sha256(body).digest() + body


def changed(**fields: Any) -> bytes:
    start = len(FORMAT) + 1 + 32
    text, _, image = encode(CUBIN, KEY)[start:].partition(b"\n")
    record = json.loads(text)
    for name, value in fields.items():
        of = record["facts"] if name in SassFacts.__annotations__ else record
        if value is ...:
            del of[name]
        else:
            of[name] = value
    return signed(json.dumps(record).encode() + b"\n" + image)


CRAFTED = {
    "no JSON": signed(b"nothing\n"),
    "nothing": signed(b""),
    "a list": signed(b"[1, 2]\nimage"),
    "nested": signed(DEEP.encode() + b"\n"),
    "no UTF-8": signed(b'{"key": "\xff"}\n'),
    "no facts": changed(facts=...),
    "facts are text": changed(facts="x"),
    "a field less": changed(registers=...),
    "a field more": changed(more=1),
    "registers are text": changed(registers="32"),
    "registers are true": changed(registers=True),
    "accumulators are a number": changed(accumulators=1),
    "accumulators hold a number": changed(accumulators=[1]),
    "a count is null": changed(hmma=None),
    "the log is a list": changed(log=["x"]),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_cubin_counts_as_damaged(name: str) -> None:
    assert decode(CRAFTED[name], KEY) is None
    whole = changed()
    assert decode(whole, KEY) is not None and decode(whole, "cd" * 32) is None


def _journal(path: Path) -> None:
    Journal(path, {"seed": 0}).close()


READERS: dict[str, Callable[[Path], object]] = {
    "library": Library.load,
    "captured": CapturedProducts.load,
    "journal": _journal,
    "store": Store,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "nested", "no UTF-8", "NUL"])
def test_what_is_no_file_of_ours_is_refused_and_not_waited_for(tmp_path: Path, reader: str, what: str) -> None:
    path = tmp_path / "given"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    else:
        path.write_bytes({"nested": DEEP.encode(), "no UTF-8": b'{"a": "\xff"}', "NUL": b"\0" * 512}[what] + b"\n")
    with pytest.raises(OutblasError):
        READERS[reader](path)


def _command(*arguments: str | bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "outblas", *arguments],
        env={**os.environ, "PYTHONPATH": SOURCE_PATH, **environment},
        capture_output=True,
    )


def test_a_name_that_is_no_utf_8_is_one_line(tmp_path: Path) -> None:
    run = os.fsencode(tmp_path) + b"/r\xff\xfe"
    done = _command("tune", "--device", "replay:h200", "--mnk", "64_4096_64", "--run", run)
    assert done.returncode == 2 and b"Traceback" not in done.stderr and b"not valid UTF-8" in done.stderr
    assert not os.path.exists(run)


def test_a_name_that_the_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    run = tmp_path / "r_ä"
    done = _command(
        "tune", "--device", "replay:h200", "--mnk", "64_4096_64", "--budget", "2", "--agent", "random",
        "--run", str(run), PYTHONIOENCODING="ascii",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"r_\\xe4" in done.stdout + done.stderr and (run / "store.sqlite").exists()


def test_no_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from outblas.cli import listing
    from outblas.cli.main import app

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(listing, "out", type("Full", (), {"print": full}))
    done = CliRunner().invoke(app, ["list", "agents"])
    assert done.exit_code == 2 and "out of memory" in done.output


def test_no_tensors_are_torchs_to_refuse() -> None:
    torch = pytest.importorskip("torch")
    import outblas

    some = torch.ones(2, 2)
    for a, b in ((None, None), (some, None), (None, some), (some, 3)):
        with pytest.raises(TypeError, match="must be Tensor"):
            outblas.matmul(a, b)


def test_a_folder_whose_name_is_no_utf_8_is_refused_before_it_is_made(tmp_path: Path) -> None:
    from outblas.core.files import lock_run_folder

    with pytest.raises(UsageError, match="UTF-8"), lock_run_folder(tmp_path / "r\udcff"):
        pass
    assert not list(tmp_path.iterdir())


def test_an_own_cache_gives_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = CubinCache(tmp_path / "new" / "cache")
        with cache.locked(KEY):
            cache.put(KEY, CUBIN)
        assert cache.get(KEY) is not None


def test_a_small_cached_file_is_read_with_little_memory(kept: CubinCache) -> None:
    code = (
        "import resource, sys; from outblas.runtime.cubin import CubinCache; "
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
        "assert CubinCache(sys.argv[1]).get(sys.argv[2]) is not None"
    )
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH}
    done = subprocess.run([sys.executable, "-c", code, str(kept.directory), KEY], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_carried_kernel_whose_image_is_none_counts_as_absent(tmp_path: Path) -> None:
    from rivals.carried_builds import CarriedBuilds

    from outblas.core.problem import Problem
    from outblas_lab.custom.examples.example_kernels import example

    carried, kernel, problem = CarriedBuilds(tmp_path, H200), example("naive"), Problem(64, 64, 64)
    path = carried.path(kernel, problem)
    half_a_header = b"x\x7fELF\x02\x01" + b"\0" * 12 + (190).to_bytes(2, "little") + b"\0" * 20
    path.write_bytes(encode(replace(CUBIN, image=half_a_header), carried._key(kernel, problem)))
    assert carried.get(kernel, problem) is None


def test_a_nul_in_a_name_is_an_error_of_the_house() -> None:
    for reader in (Library.load, CapturedProducts.load, _journal):
        with pytest.raises((OutblasError, ValueError), match="NUL|null"):
            reader(Path("a\0b"))


def test_a_folder_that_a_killed_process_left_goes_away_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that is new, in use, of another kind, or a link."""
    from outblas_lab.jail.scratch_folder import scratch_folder

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "outblas-x-link").symlink_to(tmp_path / "elsewhere")
    for name in ("outblas-x-left", "outblas-x-new", "outblas-y-left"):
        (tmp_path / name / "in").mkdir(parents=True)
    with scratch_folder("outblas-x-") as used:
        for name in ("outblas-x-left", "outblas-y-left", "elsewhere", used):
            os.utime(tmp_path / name, (0, 0))
        with scratch_folder("outblas-x-") as second:
            assert not (tmp_path / "outblas-x-left").exists()
        assert os.path.exists(used) and not os.path.exists(second)
    kept = {"elsewhere", "outblas-x-link", "outblas-x-new", "outblas-y-left"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_folders_in_folders_go_away_with_the_folder_of_a_worker() -> None:
    from outblas_lab.jail.scratch_folder import scratch_folder

    with scratch_folder("outblas-test-") as folder, contextlib.chdir(folder):
        for _ in range(1500):
            os.mkdir("in")
            os.chdir("in")
    assert not os.path.exists(folder)
