"""Captured products: their counts, their file, and the unchanged behaviour of the program."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import RecordError, UsageError
from outblas.core.problem import Problem
from outblas.dispatch.capture import threads as capture_threads
from outblas.records.captured_products import CapturedProducts

pytestmark = pytest.mark.long
# -- the recorder ----------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
import outblas  # noqa: E402


def half(*shape: int, dtype: Any = None) -> Any:
    return torch.ones(shape, dtype=dtype or torch.float16)


def counts_of(recorder: Any) -> dict[tuple[Any, ...], int]:
    return {(p.m, p.n, p.k, p.layout, p.dtype, p.op, p.batch): n for p, n in recorder.captured.counts.items()}


def test_every_way_to_a_product_is_counted() -> None:
    a, w, bias = half(16, 64), half(32, 64), half(32)
    with outblas.capture() as c:
        torch.mm(a, w.t())
        torch.matmul(a, w.t())
        outblas.matmul(a, w.t())
        torch.mm(a, half(64, 32), out=half(16, 32))
        torch.nn.functional.linear(a.view(2, 8, 64), w, bias)
        torch.bmm(half(3, 16, 64), half(3, 64, 32))
        torch.mm(half(64, 16).t(), w.t())
        a.float() @ w.t().float()  # not half precision
        half(0, 64) @ w.t()  # nothing to do
    assert counts_of(c) == {
        (16, 32, 64, "TN", "fp16", "mm", 1): 3,
        (16, 32, 64, "NN", "fp16", "mm", 1): 1,
        (16, 32, 64, "TN", "fp16", "addmm", 1): 1,
        (16, 32, 64, "NN", "fp16", "bmm", 3): 1,
        (16, 32, 64, "TT", "fp16", "mm", 1): 1,
    }


def test_what_is_one_product_is_recorded_as_what_outblas_serves() -> None:
    from outblas.dispatch.torch_op import mm

    a, w = half(16, 64), half(32, 64)
    with outblas.capture() as c:
        torch.mv(a, half(64))
        outblas.matmul(a, half(64))
        torch.addmv(half(16), a, half(64))
        mm(a, w.t())
        torch.bmm(a[None], w.t()[None])
        torch.bmm(a.view(2, 8, 64), w.t().expand(2, 64, 32))
        torch.bmm(half(16, 3, 64).transpose(0, 1), half(64, 32).expand(3, 64, 32))  # rows are not below each other
        torch.baddbmm(half(1, 16, 32), a[None], w.t()[None])
    assert counts_of(c) == {
        (16, 1, 64, "TN", "fp16", "mv", 1): 2,
        (16, 1, 64, "TN", "fp16", "addmv", 1): 1,
        (16, 32, 64, "TN", "fp16", "outblas::mm", 1): 1,
        (16, 32, 64, "TN", "fp16", "bmm", 1): 2,
        (16, 32, 64, "strided", "fp16", "bmm", 3): 1,
        (16, 32, 64, "TN", "fp16", "baddbmm", 1): 1,
    }
    assert c.captured.problems() == {Problem(16, 1, 64): 2, Problem(16, 32, 64): 3}
    assert {why.split(":")[0]: n for why, n in c.captured.not_served().items()} == {
        "a bias is added": 2,
        "a batch of products": 1,
    }


def test_inference_mode_and_backward_are_seen() -> None:
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    x = half(16, 64, dtype=torch.bfloat16)
    with outblas.capture() as c:
        with torch.inference_mode():
            layer(x)
        layer(x.requires_grad_()).backward(half(16, 32, dtype=torch.bfloat16))
    seen = counts_of(c)
    assert seen[16, 32, 64, "TN", "bf16", "mm", 1] == 2
    assert sum(seen.values()) == 4  # two forwards, dgrad, wgrad
    assert seen[16, 64, 32, "NN", "bf16", "mm", 1] == 1


def test_the_result_is_torchs_own_with_the_recorder_on() -> None:
    a, b = torch.randn(8, 16, dtype=torch.float16), torch.randn(16, 8, dtype=torch.float16)
    with outblas.capture(), torch.inference_mode():
        seen = torch.matmul(a, b)
    assert torch.equal(seen, torch.matmul(a, b))


def test_threads_started_in_the_block_are_seen_and_starting_is_given_back() -> None:
    start = threading.Thread.start
    go = threading.Event()

    def work() -> None:
        torch.mm(half(16, 64), half(64, 32))

    def late() -> None:
        go.wait(60)
        work()

    with outblas.capture() as c:
        threads = [threading.Thread(target=work) for _ in range(4)]
        outliving = threading.Thread(target=late)
        for thread in (*threads, outliving):
            thread.start()
        for thread in threads:
            thread.join()
    assert threading.Thread.start is start
    go.set()
    outliving.join()
    assert counts_of(c) == {(16, 32, 64, "NN", "fp16", "mm", 1): 4}


def test_a_compiled_function_is_seen() -> None:
    compiled = torch.compile(lambda a, b: torch.mm(a, b).relu(), backend="eager")
    a, b = half(16, 64), half(64, 32)
    compiled(a, b)
    with outblas.capture() as c:
        compiled(a, b)
    assert counts_of(c) == {(16, 32, 64, "NN", "fp16", "mm", 1): 1}


def test_a_subclass_of_tensor_is_seen_through() -> None:
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    with outblas.capture() as c:
        torch.mm(Wrapped(half(16, 64)), half(64, 32))
    assert counts_of(c) == {(16, 32, 64, "NN", "fp16", "mm", 1): 1}


def test_the_file_is_written_also_when_the_block_raises_and_append_adds(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    with pytest.raises(ZeroDivisionError), outblas.capture(file):
        torch.mm(half(16, 64), half(64, 32))
        raise ZeroDivisionError
    assert sum(CapturedProducts.load(file).counts.values()) == 1
    with outblas.capture(file, append=True):
        torch.mm(half(16, 64), half(64, 32))
    assert sum(CapturedProducts.load(file).counts.values()) == 2 and len(CapturedProducts.load(file).provenance) == 2
    with outblas.capture(file):
        pass
    assert CapturedProducts.load(file).counts == {}


def test_a_long_record_is_written_in_between(tmp_path: Path) -> None:
    now = [0.0]
    with outblas.capture(tmp_path / "p.json", clock=lambda: now[0]):
        torch.mm(half(16, 64), half(64, 32))
        assert not (tmp_path / "p.json").exists()
        now[0] = 11.0
        torch.mm(half(16, 64), half(64, 32))
        assert sum(CapturedProducts.load(tmp_path / "p.json").counts.values()) == 2


def test_a_damaged_file_is_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(RecordError):
        outblas.capture(tmp_path / "p.json", append=True)
    with pytest.raises(UsageError):
        outblas.capture(append=True)


def test_a_capture_asks_cuda_nothing_before_the_program_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    on = [False]

    def gpu(index: int = 0) -> tuple[str, str]:
        asked.append(index)
        return "a GPU", "1.2"

    monkeypatch.setattr("outblas.records.provenance.gpu_and_driver", gpu)
    monkeypatch.setattr("outblas.dispatch.capture.session.gpu_and_driver", gpu)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with outblas.capture(tmp_path / "p.json") as c:
        torch.mm(half(16, 64), half(64, 32))
        c.write()
        assert asked == [] and CapturedProducts.load(tmp_path / "p.json").provenance[0]["gpu"] is None
        on[0] = True
    assert asked == [3] and CapturedProducts.load(tmp_path / "p.json").provenance[0]["gpu"] == "a GPU"


def test_a_write_that_fails_in_between_warns_once_and_the_product_is_made(tmp_path: Path) -> None:
    now = [0.0]
    recorder = outblas.capture(tmp_path / "sub" / "p.json", clock=lambda: now[0])
    (tmp_path / "sub").write_text("a file where a folder should be")
    with pytest.raises(RecordError), recorder:
        with pytest.warns(RuntimeWarning, match="capture continues") as warned:
            for _ in range(3):
                now[0] += 11.0
                assert torch.mm(half(16, 64), half(64, 32)).shape == (16, 32)
        assert len(warned) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recorder._warned = False
            now[0] += 11.0
            torch.mm(half(16, 64), half(64, 32))
    assert sum(recorder.captured.counts.values()) == 4


def test_captures_that_add_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    first, second = outblas.capture(file, append=True), outblas.capture(file, append=True)
    with first:
        torch.mm(half(16, 64), half(64, 32))
        with second:
            torch.mm(half(8, 64), half(64, 32))  # seen by both
            first.write()
        torch.mm(half(16, 64), half(64, 32))
    found = CapturedProducts.load(file)
    assert {p.m: n for p, n in found.counts.items()} == {16: 2, 8: 2} and len(found.provenance) == 2
    assert sorted(p["products"] for p in found.provenance) == [1, 3]


@pytest.mark.parametrize("published", [False, True])
def test_a_write_broken_off_before_or_after_the_rename_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    file = tmp_path / "p.json"
    with outblas.capture(file, append=True) as c:
        torch.mm(half(16, 64), half(64, 32))
        c.write()
        torch.mm(half(16, 64), half(64, 32))
        save = CapturedProducts.save

        def broken(self: CapturedProducts, path: Any) -> None:
            if published:
                save(self, path)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(CapturedProducts, "save", broken)
            with pytest.raises(KeyboardInterrupt):
                c.write()
        torch.mm(half(16, 64), half(64, 32))
    assert list(CapturedProducts.load(file).counts.values()) == [3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_forked_while_the_record_is_held_multiplies_and_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    held, go = threading.Event(), threading.Event()
    with outblas.capture(file) as c:

        def hold() -> None:
            with c._lock, capture_threads._lock:
                held.set()
                go.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12: forking with threads, on purpose
            child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that hangs is killed
            torch.mm(half(2, 2), half(2, 2))
            c.write()
            other = threading.Thread(target=lambda: None)
            other.start()
            other.join()
            os._exit(0 if c.captured.counts == {} and not file.exists() else 1)
        assert os.waitpid(child, 0)[1] == 0
        go.set()
        thread.join()


def test_the_record_is_not_held_while_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[bool] = []

    def take() -> None:
        counted.append(c._lock.acquire(timeout=10))
        if counted[-1]:
            c._lock.release()

    def save(self: CapturedProducts, path: Any) -> None:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    with outblas.capture(tmp_path / "p.json") as c:
        monkeypatch.setattr(CapturedProducts, "save", save)
        c.write()
    assert counted[0]


def test_captures_that_overlap_without_nesting_give_starting_back() -> None:
    start = threading.Thread.start
    first, second = outblas.capture(), outblas.capture()

    def started() -> int:
        depth: list[int] = []
        thread = threading.Thread(target=lambda: depth.append(torch._C._len_torch_dispatch_stack()))
        thread.start()
        thread.join()
        return depth[0]

    capture_threads.wrap_new_threads(first._new_mode)
    capture_threads.wrap_new_threads(second._new_mode)
    assert started() == 2
    capture_threads.unwrap_new_threads(first._new_mode)
    assert started() == 1
    capture_threads.unwrap_new_threads(second._new_mode)
    assert threading.Thread.start is start and started() == 0


def test_starting_that_another_wrapped_meanwhile_is_left_and_not_watched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    try:
        with outblas.capture():
            ours = threading.Thread.start
            threading.Thread.start = lambda thread: ours(thread)  # type: ignore[method-assign,assignment]
        with outblas.capture() as c:
            thread = threading.Thread(target=lambda: torch.mm(half(16, 64), half(64, 32)))
            thread.start()
            thread.join()
        assert list(c.captured.counts.values()) == [1]
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        capture_threads._wrapped.clear()
