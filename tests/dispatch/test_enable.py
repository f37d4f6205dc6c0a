"""outblas.enable() on CPU tensors, whose kernels are replaced here in place of a GPU's."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor import config, decomposition  # noqa: E402

import outblas  # noqa: E402
from outblas.dispatch import device_registry, enable, native_table, product  # noqa: E402
from outblas.dispatch.enable import Switch  # noqa: E402
from support.native_fixture import built_fixture, switch_of_cpu  # noqa: F401  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402


@pytest.fixture(params=["native", "python"])
def on(served: Served, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Switch]:
    """The process's switch, of the CPU; with kernels in C++, which ask those in Python, and with these alone."""
    made = switch_of_cpu(monkeypatch, request)
    before = config.post_grad_custom_post_pass
    yield made
    if made._override is not None:
        assert bool(made._override.why_python) == (request.param == "python"), made._override.why_python
    while made._users:
        made.leave()
    made.disable()
    assert config.post_grad_custom_post_pass is before


def counted(on: Switch) -> tuple[int, int]:
    return on.status()["ours"], on.status()["torchs"]


@pytest.mark.parametrize(
    "part",
    [
        "inductor_pass.install",
        "inductor_pass._entry",
        "biased_layers.BiasedLayers.install",
        "aten_override.open_products",
    ],
)
def test_where_a_part_of_it_fails_nothing_is_on(
    part: str, on: Switch, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("another torch")

    before, mm = config.post_grad_custom_post_pass, decomposition.decompositions[torch.ops.aten.mm.default]
    with monkeypatch.context() as patched:
        patched.setattr(f"outblas.dispatch.{part}", fail)
        with pytest.raises(AttributeError, match="another torch"):
            outblas.enable()
    assert config.post_grad_custom_post_pass is before
    assert decomposition.decompositions[torch.ops.aten.mm.default] is mm
    x, w = numbers(3, 8), numbers(8, 5)
    torch.mm(x, w)
    assert not outblas.enabled() and not served.ran and counted(on) == (0, 0)
    assert outblas.enable()
    torch.mm(x, w)
    assert len(served.ran) == 1 and counted(on) == (1, 0)


def test_every_way_to_multiply_is_ours(on: Switch, served: Served) -> None:
    x, w = numbers(3, 8), numbers(5, 8, seed=1)
    layer = torch.nn.Linear(8, 5, bias=False, dtype=torch.float16)
    with torch.no_grad():
        layer.weight.copy_(w)
    expected = x @ w.t()
    ways: list[Any] = [
        lambda: torch.matmul(x, w.t()),
        lambda: torch.mm(x, w.t()),
        lambda: x @ w.t(),
        lambda: x.mm(w.t()),
        lambda: torch.nn.functional.linear(x, w),
        lambda: layer(x),
        lambda: torch.matmul(x.view(1, 3, 8), w.t())[0],
        lambda: torch.bmm(x[None], w.t()[None])[0],
        lambda: torch.bmm(x[:, None], w.t().expand(3, 8, 5))[:, 0],
        lambda: torch.einsum("mk,nk->mn", x, w),
        lambda: outblas.matmul(x, w.t()),
    ]
    assert outblas.enable() and outblas.enabled()
    for index, way in enumerate(ways):
        before = len(served.ran)
        assert torch.equal(way(), expected), index
        assert len(served.ran) == before + 1, index
    outblas.disable()
    assert not outblas.enabled()
    ran = len(served.ran)
    assert torch.equal(ways[0](), expected) and len(served.ran) == ran
    told = outblas.status()["torch"]
    kernels = told.pop("kernels")
    assert told == {"enabled": False, "ours": len(ways) - 1, "torchs": 0, "compiled": 0, "guarantee": "none"}
    assert kernels == ("C++" if os.environ["OUTBLAS_NATIVE"] == "1" else "Python: switched off by OUTBLAS_NATIVE")


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: torch.mm(x.float(), w.t().float()),
        lambda x, w: torch.mm(x.t(), x),
        lambda x, w: torch.mm(x[:0], w.t()),
        lambda x, w: torch.mm(x.to(torch.complex64).conj(), w.t().to(torch.complex64)),
        lambda x, w: torch.mm(x.long(), w.t().long()),
        lambda x, w: torch.bmm(x.expand(2, 3, 8).clone(), w.t().expand(2, 8, 5).clone()),
        lambda x, w: torch.bmm(x.t().expand(2, 8, 3), x.expand(2, 3, 8)),
        lambda x, w: torch.addmm(w[:, 0], x, w.t()),
        lambda x, w: torch.nn.functional.linear(x, w, w[:, 0]),
        lambda x, w: torch.mm(x, w.t(), out=torch.empty(3, 5, dtype=x.dtype)),
        lambda x, w: torch.mm(x.to_sparse().float(), w.t().float()),
    ],
)
def test_all_else_is_torchs_as_before(product: Any, on: Switch, served: Served) -> None:
    x, w = numbers(3, 8), numbers(5, 8, seed=1)
    expected = product(x, w)
    with outblas.use():
        result = product(x, w)
    assert not served.ran and counted(on)[0] == 0
    assert torch.equal(result, expected) and result.stride() == expected.stride() and result.dtype == expected.dtype


def test_errors_are_torchs(on: Switch) -> None:
    calls: list[Any] = [
        lambda: torch.mm(numbers(3), numbers(3, 2)),
        lambda: torch.mm(numbers(3, 4), numbers(3, 4)),
        lambda: torch.mm(numbers(3, 4), numbers(4, 4, dtype=torch.float32)),
        lambda: torch.bmm(numbers(1, 3, 4), numbers(2, 4, 4)),
        lambda: torch.bmm(numbers(3, 4), numbers(4, 4)),
        lambda: torch.bmm(numbers(1, 3, 4), numbers(1, 3, 4)),
    ]
    for enabled in (False, True):
        on.enable() if enabled else None
        for call in calls:
            with pytest.raises(RuntimeError):
                call()


def test_operands_of_two_devices_never_reach_a_kernel(on: Switch, served: Served) -> None:
    """The dispatcher looks at all of them and calls the kernel of one."""
    x, w = numbers(3, 8), numbers(8, 5)
    pairs = [(x, w.to("meta")), (x.to("meta"), w)]
    expected = [torch.mm(a, b).device for a, b in pairs]
    with outblas.use():
        assert [torch.mm(a, b).device for a, b in pairs] == expected
        assert [torch.ops.outblas.mm(a, b).device for a, b in pairs] == expected
    assert all(product.run_below_autograd(a, b) is None for a, b in pairs) and not served.ran


def test_a_models_gradients_are_ours_too(on: Switch, served: Served) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 5, bias=False), torch.nn.Linear(5, 4)).half()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-1, 2, p.shape))
    x = numbers(2, 3, 8, grad=True)
    wanted = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).sum(), wanted)
    with outblas.use():
        found = torch.autograd.grad(model(x).sum(), wanted)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert {p.key for p in served.ran} >= {"6_5_8_TN_fp16_fp32", "6_8_5_NN_fp16_fp32"}


def test_autocast_and_transforms_have_done_their_part(on: Switch, served: Served) -> None:
    x, w = numbers(3, 8, dtype=torch.float32, grad=True), numbers(5, 8, dtype=torch.float32)
    with outblas.use():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = x @ w.t()
        assert result.dtype == torch.bfloat16 and served.ran[-1].dtype == "bf16"
        result.sum().backward()
        a, b = numbers(2, 3, 8), w.half()
        assert torch.equal(torch.func.vmap(lambda t: t @ b.t())(a), a @ b.t())
        with torch.inference_mode():
            assert (a[0] @ b.t()).is_inference() and (a[0].float() @ w.t()).is_inference()
        assert torch.func.jvp(lambda t: t @ b.t(), (a[0],), (a[1],))[1].equal(a[1] @ b.t())


def test_modes_see_the_product_once(on: Switch) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    x, w = numbers(3, 8, dtype=torch.float32), numbers(8, 5, dtype=torch.float32)
    with outblas.use():
        with Functions():
            torch.mm(x, w)
        with Operators():
            torch.mm(x, w)
        with torch.device("cpu"):
            torch.mm(x, w)
    assert seen == [torch.mm, torch.ops.aten.mm.default]


def test_a_subclass_has_its_say_once_and_is_ours(on: Switch, served: Served) -> None:
    class Weight(torch.nn.Parameter):
        pass

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    seen: list[Any] = []
    x, w = numbers(3, 8), numbers(8, 5)
    expected = x.double() @ w.double()
    with outblas.use():
        for _ in range(2):
            assert torch.equal(torch.mm(x, Weight(w, requires_grad=False)).double(), expected)
        seen.clear()
        found = torch.mm(x.as_subclass(Watching), w)
        assert type(found) is Watching and seen == [torch.mm]
        torch.mm(x.float(), w.float().as_subclass(Watching))
        assert seen.count(torch.mm) == 2
    assert len(served.ran) == 3


def test_users_are_counted_and_the_last_switches_off(on: Switch, served: Served) -> None:
    x, w = numbers(3, 8), numbers(8, 5)
    block = outblas.use()
    with block as entered:
        with block, outblas.use():
            outblas.disable()
            assert entered and outblas.enabled()
        torch.mm(x, w)
    assert not outblas.enabled() and len(served.ran) == 1
    outblas.enable()
    with pytest.raises(KeyError), outblas.use():
        raise KeyError
    assert outblas.enable() and outblas.enabled(), "a block that ends leaves what enable() asked for"
    torch.mm(x, w)
    assert len(served.ran) == 2
    outblas.disable()
    outblas.disable()
    torch.mm(x, w)
    assert len(served.ran) == 2 and counted(on) == (2, 0)


def test_threads_may_all_be_users(on: Switch, served: Served) -> None:
    failures: list[BaseException] = []
    x, w = numbers(3, 8), numbers(8, 5)
    expected = x @ w

    def work() -> None:
        try:
            for _ in range(50):
                with outblas.use():
                    assert outblas.enabled() and torch.equal(x @ w, expected)
        except BaseException as error:
            failures.append(error)

    with outblas.use():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and not outblas.enabled()
    assert len(served.ran) == 200 and counted(on) == (200, 0)


def test_no_promise_is_taken_from_the_environment(on: Switch, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = served.decide
    monkeypatch.setattr(served, "decide", lambda *call: seen.append(call[3]) or real(*call))
    for name, expected in ((None, "plain"), ("OUTBLAS_PDL", "pdl"), ("OUTBLAS_WEIGHTS", "pdl")):
        if name:
            monkeypatch.setenv(name, "1")
        with outblas.use():
            torch.mm(numbers(3, 8), numbers(8, 5))
        assert seen[-1] == expected


def test_what_cannot_be_had_is_torchs(on: Switch, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "run", lambda *call: None)
    x, w = numbers(3, 8), numbers(8, 5)
    expected = x @ w
    with outblas.use():
        assert torch.equal(x @ w, expected) and torch.equal(outblas.matmul(x, w), expected)
    assert counted(on) == (0, 2)


def test_what_the_table_knows_to_be_torchs_does_not_come_back(
    on: Switch, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of outblas.matmul calls torch.matmul for such products, and that calls our kernel of aten::mm."""

    class Table:
        def ours(self, *call: Any) -> Any:
            return NotImplemented

    if os.environ["OUTBLAS_NATIVE"] == "1":
        pytest.skip("kernels in C++ have a table of their own")
    monkeypatch.setattr(native_table, "table", Table())
    monkeypatch.setattr(native_table, "table_matmul", lambda a, b, out, option: torch.matmul(a, b))
    x, w = numbers(3, 8), numbers(8, 5)
    expected = x.double() @ w.double()
    with outblas.use():
        assert torch.equal(outblas.matmul(x, w).double(), expected)
        assert torch.equal(outblas.matmul(x[None], w)[0].double(), expected)
    assert not served.ran and counted(on) == (0, 2)


# -- where it gains nothing ------------------------------------------------------------------------------------


def test_where_it_gains_nothing_one_line_says_so(on: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on, "_why_not", lambda guarantee: "tested")
    for turn in (outblas.enable, lambda: outblas.use().__enter__()):
        with pytest.warns(RuntimeWarning, match="^outblas has no effect: tested$") as told:
            assert turn() is False
        assert len(told) == 1 and not outblas.enabled() and told[0].filename == __file__
    with pytest.warns(RuntimeWarning), outblas.use() as entered:
        assert not entered
    outblas.disable()
    assert not outblas.enabled() and not on._users


def test_the_environment_keeps_it_out(on: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on, "_why_not", enable.why_not)
    monkeypatch.setenv("OUTBLAS_DISABLE", "1")
    with pytest.warns(RuntimeWarning, match="OUTBLAS_DISABLE is set"):
        assert not outblas.enable()


def test_the_reason_is_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    served.library = type(served.library)("h200", ())
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(enable, "gpu_count", lambda: 1)
    assert enable.why_not().endswith("is not built for CUDA; install a CUDA build")
    monkeypatch.setattr(enable, "gpu_count", lambda: 0)
    assert enable.why_not().endswith("is not built for CUDA, and no CUDA GPU was found; run outblas doctor")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA GPU" in enable.why_not()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "L4")
    monkeypatch.setattr(device_registry, "device_state", lambda index: served)
    assert enable.why_not().startswith("no library covers L4; ")
    other = Served()
    monkeypatch.setattr(device_registry, "device_state", lambda index: other if index else served)
    assert enable.why_not() == "" and "\n" not in enable.why_not()


def test_nothing_is_said_where_it_works(on: Switch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with outblas.use():
            torch.mm(numbers(3, 8), numbers(8, 5))
