"""The pass over Inductor's graphs: replaced and untouched nodes, and installation without a trace."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor import config  # noqa: E402
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext  # noqa: E402

import outblas  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry, inductor_pass  # noqa: E402
from outblas.dispatch.fusion import joined_operators  # noqa: E402
from outblas.dispatch.inductor_pass import ProductPass, has_kernel_for_graph, replace_products  # noqa: E402
from outblas.dispatch.inductor_settings import switch_padding_off  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow  # noqa: E402
from support.served_fixture import ANY, Served, numbers, served_fixture  # noqa: F401  # noqa: E402

MM, OURS = torch.ops.aten.mm.default, torch.ops.outblas.mm.default


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before, entry = config.post_grad_custom_post_pass, inductor_pass._entry()
    own = None if entry is None else entry.user_override
    yield
    if entry is not None:
        entry.user_override = own
    config.post_grad_custom_post_pass = before


def traced(function: Any, *operands: Any, mode: str = "fake") -> Any:
    return make_fx(function, tracing_mode=mode)(*operands)


def targets(graph: Any) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function" and node.target in (MM, OURS)]


def test_products_are_replaced_where_the_predicate_says_so() -> None:
    def function(x: Any, w: Any, v: Any) -> Any:
        return torch.relu(x @ w) @ v + 1

    operands = numbers(3, 8), numbers(8, 5, seed=1), numbers(5, 6, seed=2)
    module = traced(function, *operands)
    assert replace_products(module.graph, lambda a, b: a.shape[1] == 8) == 1
    module.graph.lint()
    module.recompile()
    assert targets(module.graph) == [OURS, MM] and torch.equal(module(*operands), function(*operands))
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
    assert (
        replace_products(module.graph, lambda a, b: False) == 0
        and replace_products(module.graph, lambda a, b: True) == 1
    )
    module.recompile()
    assert torch.equal(module(*operands), function(*operands))


@pytest.mark.parametrize(
    ("operands", "chosen"),
    [
        ((numbers(3, 8), numbers(8, 5)), True),
        ((numbers(3, 8), numbers(5, 8).t()), True),
        ((numbers(8, 3).t(), numbers(8, 5)), False),
        ((numbers(3, 8, dtype=torch.bfloat16), numbers(8, 5, dtype=torch.bfloat16)), True),
        ((numbers(3, 8, dtype=torch.float32), numbers(8, 5, dtype=torch.float32)), False),
        ((numbers(0, 8), numbers(8, 5)), False),
    ],
)
def test_what_the_library_has_is_chosen(operands: Any, chosen: bool, served: Served) -> None:
    module = traced(torch.mm, *operands)
    assert replace_products(module.graph, has_kernel_for_graph) == chosen
    assert targets(module.graph) == [OURS if chosen else MM]


def test_nothing_is_chosen_off_the_gpu_nor_of_symbolic_shapes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    module = traced(torch.mm, numbers(3, 8), numbers(8, 5), mode="symbolic")
    assert replace_products(module.graph, has_kernel_for_graph) == 0
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        a = torch.empty(3, 8, dtype=torch.float16)
        assert has_kernel_for_graph(a, a.t()) and not has_kernel_for_graph(a, 3) and not has_kernel_for_graph(None, a)
        monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cuda")
        assert not has_kernel_for_graph(a, a.t())
    module = traced(lambda x, w, v: torch.addmm(v, x, w), numbers(3, 8), numbers(8, 5), numbers(5))
    assert replace_products(module.graph, lambda a, b: True) == 0 and "addmm" in str(module.graph)


def traced_for_any(dimension: int, a: Any, b: Any) -> tuple[Any, Any]:
    """Return a traced product whose first operand has one symbolic extent, and the environment of its symbols."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    sizes = [DimDynamic.STATIC] * 2
    sizes[dimension] = DimDynamic.DYNAMIC
    symbolic = StatelessSymbolicContext(dynamic_sizes=sizes)
    fakes = mode.from_tensor(a, symbolic_context=symbolic), mode.from_tensor(b, static_shapes=True)
    return traced(lambda x, w: torch.relu(torch.mm(x, w)), *fakes), shapes


def listed(*entries: tuple[int, bool], n: int = 5, k: int = 8) -> Library:
    """Return a library of a weight with a row for each (M, whether it has a kernel)."""
    choice = LibraryChoice(ANY, 1.2, 1.1, 1.3)
    rows = [LibraryRow(Problem(m, n, k, "NN"), "lt_auto", plain=choice if kernel else None) for m, kernel in entries]
    return Library("h200", tuple(rows))


@pytest.mark.parametrize(
    ("library", "chosen"),
    [
        (listed((24, True)), True),
        (listed((24, False), (999, True)), True),
        (listed((24, False)), False),
        (listed((24, True), n=6), False),
        (Library("h200", (), {}, (LibraryInterval(listed((100, True)).rows[0], 110),)), True),
    ],
)
def test_a_product_of_any_m_is_chosen_if_some_m_has_a_kernel(library: Library, chosen: bool, served: Served) -> None:
    served.library = library
    module, shapes = traced_for_any(0, numbers(3, 8), numbers(8, 5))
    assert replace_products(module.graph, has_kernel_for_graph) == chosen
    assert targets(module.graph) == [OURS if chosen else MM]
    assert shapes.guards == [], "no M is excluded from the graph"
    (product,) = (node for node in module.graph.nodes if node.target in (MM, OURS))
    assert not isinstance(product.meta["val"].shape[0], int) and product.meta["val"].shape[1] == 5


def test_no_other_extent_may_be_symbolic(served: Served) -> None:
    module, _ = traced_for_any(1, numbers(3, 8), numbers(8, 5))
    assert replace_products(module.graph, has_kernel_for_graph) == 0
    columns, _ = traced_for_any(0, numbers(8, 3).t(), numbers(8, 5))
    assert replace_products(columns.graph, has_kernel_for_graph) == 0, "the strides of its columns are symbolic, too"


def test_a_kernel_that_could_not_be_loaded_is_not_chosen(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "is_left_to_torch", lambda decision: True)
    assert not has_kernel_for_graph(numbers(3, 8), numbers(8, 5))


class Theirs(CustomGraphPass):  # type: ignore[misc]
    def __init__(self, uuid: Any = "theirs") -> None:
        self.graphs, self._uuid = list[Any](), uuid

    def __call__(self, graph: Any) -> None:
        self.graphs.append(graph)

    def uuid(self) -> Any:
        return self._uuid


def test_passes_of_the_user_run_before_and_are_given_back(served: Served) -> None:
    theirs = Theirs()
    for before in (None, theirs, [theirs, theirs]):
        config.post_grad_custom_post_pass = before
        made = inductor_pass.install()
        assert config.post_grad_custom_post_pass is made
        graph = traced(torch.mm, numbers(3, 8), numbers(8, 5)).graph
        made(graph)
        assert targets(graph) == [OURS] and made.replaced == 1
        inductor_pass.remove(made)
        assert config.post_grad_custom_post_pass is before
    assert len(theirs.graphs) == 3


def test_a_pass_below_another_is_left_without_effect(served: Served) -> None:
    made = inductor_pass.install()
    config.post_grad_custom_post_pass = top = Theirs()
    inductor_pass.remove(made)
    assert config.post_grad_custom_post_pass is top
    graph = traced(torch.mm, numbers(3, 8), numbers(8, 5)).graph
    made(graph)
    assert targets(graph) == [MM]


def in_a_thread(function: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def setting() -> Any:
    return config.post_grad_custom_post_pass


def test_a_pass_that_is_told_of_inference_runs_before(served: Served) -> None:
    module = pytest.importorskip("torch._inductor.custom_graph_pass")
    if not hasattr(module, "CustomInferenceAwareGraphPass"):
        pytest.skip("this torch has no such passes")

    class Told(module.CustomInferenceAwareGraphPass):  # type: ignore[misc, name-defined]
        told: list[bool] = []

        def __call__(self, graph: Any, is_inference: bool) -> None:
            self.told.append(is_inference)

        def uuid(self) -> Any:
            return "told"

    torch._dynamo.reset()
    with torch.no_grad(), config.patch(post_grad_custom_post_pass=Told()), outblas.use(), fresh_cache():
        torch.compile(lambda x: x @ x.t() + 1, backend="inductor")(numbers(4, 4))
    torch._dynamo.reset()
    assert Told.told == [True]


def test_the_pass_is_every_threads_whoever_installs_or_removes_it(served: Served) -> None:
    here = setting()
    made = in_a_thread(inductor_pass.install)
    assert setting() is made and in_a_thread(setting) is made
    made.replaced = 0
    graphs = [traced(torch.mm, numbers(3, 8), numbers(8, 5)).graph for _ in range(2)]
    in_a_thread(lambda: setting()(graphs[0]))
    setting()(graphs[1])
    assert made.replaced == 2 and all(targets(graph) == [OURS] for graph in graphs)
    in_a_thread(lambda: inductor_pass.remove(made))
    assert setting() is here and in_a_thread(setting) is None
    again = inductor_pass.install()
    assert in_a_thread(setting) is again
    inductor_pass.remove(again)


@pytest.mark.skipif(inductor_pass._entry() is None, reason="this torch has one setting for all threads")
def test_an_engine_with_a_hash_of_its_own_is_not_entered_behind_its_back(served: Served) -> None:
    """Its compiled code would be found again by a process without this package."""
    manager = type("PostGradPassManager", (), {"__module__": "vllm.compilation.passes.pass_manager"})()
    made = inductor_pass.install()
    try:
        with config.patch(post_grad_custom_post_pass=manager):
            assert setting() is manager and not made.keeps(torch.ops.aten.mm.default, numbers(3, 8), numbers(8, 5))
        assert setting() is made
    finally:
        inductor_pass.remove(made)


@pytest.mark.skipif(inductor_pass._entry() is None, reason="this torch has one setting for all threads")
def test_what_a_thread_has_set_itself_runs_before_and_stays_its_own(served: Served) -> None:
    theirs, patched = Theirs(), Theirs("b")

    def work() -> tuple[list[Any], int]:
        config.post_grad_custom_post_pass = theirs
        made = in_a_thread(inductor_pass.install)
        setting()(traced(torch.mm, numbers(3, 8), numbers(8, 5)).graph)
        with config.patch(post_grad_custom_post_pass=patched):
            setting()(traced(torch.mm, numbers(3, 8), numbers(8, 5)).graph)
        seen = [setting().before, copy.deepcopy(setting()).is_same_pass(made)]
        in_a_thread(lambda: inductor_pass.remove(made))
        return [*seen, setting()], made.replaced

    assert in_a_thread(work) == ([theirs, True, theirs], 2)
    assert len(theirs.graphs) == len(patched.graphs) == 1 and setting() is None


def test_a_package_compiled_ahead_holds_torchs_product(served: Served) -> None:
    made = ProductPass()
    usual = made.uuid()
    graph = traced(torch.mm, numbers(3, 8), numbers(8, 5)).graph
    with V.set_aot_compilation(True):
        made(graph)
        assert targets(graph) == [MM] and made.replaced == 0 and made.uuid() != usual
    made(graph)
    assert targets(graph) == [OURS]


class Keeper:
    weight: Any = numbers(8, 4)


def test_the_cache_tells_passes_apart(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = [ProductPass(before).uuid() for before in (None, Theirs("a"), Theirs("b"), [Theirs("a"), Theirs("b")])]
    monkeypatch.setenv("OUTBLAS_PDL", "1")
    identities.append(ProductPass().uuid())
    off = ProductPass()
    off.active = False
    identities.append(off.uuid())
    served.library = type(served.library)("h200", ())
    identities.append(ProductPass().uuid())
    assert len(set(identities)) == len(identities) and None not in identities
    keeper = Keeper()
    joined_operators.matrix_keepers.add(keeper)
    identities.append(ProductPass().uuid())
    keeper.weight = None
    assert ProductPass().uuid() == identities[-2], "weights that have left their matrix"
    assert len(set(identities)) == len(identities)
    assert ProductPass(lambda graph: None).uuid() is None, "an unknown pass is not cached"
    monkeypatch.setattr(device_registry, "devices", {})
    assert ProductPass().uuid() == ProductPass().uuid()


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_inductor_compiles_what_the_pass_leaves(served: Served) -> None:
    """The real thing, through AOTAutograd and the C++ backend: forward and gradients, equal to eager."""
    seen = Theirs(None)
    config.post_grad_custom_post_pass = seen
    made = inductor_pass.install()
    torch._dynamo.reset()

    def function(x: Any, w: Any) -> Any:
        return torch.relu(torch.nn.functional.linear(x, w)) * 2

    x, w = numbers(3, 8, grad=True), numbers(5, 8, seed=1, grad=True)
    expected = torch.autograd.grad(function(x, w), (x, w), numbers(3, 5, seed=2))
    run = torch.compile(function, fullgraph=True)
    with torch._inductor.config.patch(fx_graph_cache=False):
        result = run(x, w)
        found = torch.autograd.grad(result, (x, w), numbers(3, 5, seed=2))
    assert torch.equal(result, function(x, w)) and made.replaced >= 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert len(served.ran) >= 2 and len(seen.graphs) == 2


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_code_for_any_m_looks_each_m_up_when_it_runs(served: Served) -> None:
    served.library = listed((3, True), (24, True), (7, False))
    made = inductor_pass.install()
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    w = numbers(8, 5, seed=1)
    run = torch.compile(lambda x: torch.relu(torch.mm(x, w)) * 2, fullgraph=True)
    graphs = counts["unique_graphs"]
    with torch._inductor.config.patch(fx_graph_cache=False):
        for m in (3, 7, 24, 5):
            x = numbers(m, 8, seed=m)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(run(x), torch.relu(torch.mm(x, w)) * 2)
    assert counts["unique_graphs"] - graphs == 1 and made.replaced == 1
    assert [problem.m for problem in served.ran] == [3, 24], "torch computes the others"


def paddings() -> tuple[bool, bool]:
    """Inductor's setting in this thread and in a new one."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(config.shape_padding))
    thread.start()
    thread.join()
    return config.shape_padding, found[0]


def test_padding_is_off_in_all_threads_until_it_is_restored() -> None:
    assert paddings() == (True, True)
    restore = switch_padding_off()
    assert paddings() == (False, False)
    with config.patch(shape_padding=True):
        assert not config.shape_padding, "a value that is set meanwhile is lost"
    restore()
    assert paddings() == (True, True)
    with config.patch(shape_padding=False):
        assert not config.shape_padding
    assert paddings() == (True, True)
