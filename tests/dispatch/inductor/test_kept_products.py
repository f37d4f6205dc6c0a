"""Products that stay whole in Inductor's decompositions, so that the pass of the package can replace them.

torch takes products of one row apart on CUDA alone: they are traced with fake tensors of a GPU. On the CPU it does so
with a row times a column, which is compiled here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor import config, decomposition  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

from outblas.dispatch import inductor_pass  # noqa: E402
from outblas.dispatch.guarantees.guarantee import set_process_guarantee  # noqa: E402
from outblas.dispatch.inductor_settings import keep_products  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

MM, OURS = torch.ops.aten.mm.default, torch.ops.outblas.mm.default
ONE_ROW = (1, 8), (8, 5)


def tables() -> list[Any]:
    return [decomposition.decompositions, decomposition.fast_random_decomps()]


@pytest.fixture(name="optimised")
def optimised_fixture(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes of the matrices in which an optimised model has laid weights."""
    shapes = [(16, 8)]
    monkeypatch.setattr(inductor_pass.joined_operators, "joined_shapes", lambda: shapes)
    return shapes


@pytest.fixture(name="made")
def made_fixture(monkeypatch: pytest.MonkeyPatch, optimised: Any) -> Iterator[Any]:
    """An installed pass that would replace all products with K = 8, on any device, beside an optimised model."""
    monkeypatch.setattr(inductor_pass.device_registry, "devices", {})
    before, entries = config.post_grad_custom_post_pass, [table[MM] for table in tables()]
    made = inductor_pass.install()
    monkeypatch.setattr(made, "_predicate", lambda a, b: bool((a.t() + 1).shape[0] == b.shape[0] == 8))
    yield made
    inductor_pass.remove(made)
    assert config.post_grad_custom_post_pass is before and [table[MM] for table in tables()] == entries


def traced(*shapes: tuple[int, ...], function: Any = torch.mm, device: str = "cuda", tuned: bool = True) -> Any:
    """Return the graph of a product after the decompositions of ``max-autotune``."""
    with FakeTensorMode(), config.patch(coordinate_descent_tuning=tuned):
        operands = [torch.empty(shape, device=device, dtype=torch.float16) for shape in shapes]
        return make_fx(function, decomposition_table=decomposition.select_decomp_table())(*operands).graph


def targets(graph: Any) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_a_product_that_the_pass_replaces_stays_whole(made: Any) -> None:
    graph = traced(*ONE_ROW)
    assert targets(graph) == [MM], "and nothing of the question is in the graph"
    made(graph)
    assert targets(graph) == [OURS] and made.replaced == 1
    assert targets(traced((3, 8), (8, 1))) == [MM]


def layer(x: Any, w: Any, other: Any) -> Any:
    return torch.mm(x, w).relu(), torch.mm(x, other)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_graph_without_weights_of_one_matrix_becomes_what_torch_makes_of_it(rows: int, made: Any) -> None:
    shapes = (rows, 8), (8, 5), (8, 6)
    with config.patch(coordinate_descent_tuning=True):
        graph = traced(*shapes, function=layer)
        assert targets(graph).count(MM) == 2
        made(graph)
    graph.lint()
    assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")
    assert (targets(graph).count(OURS), made.replaced) == ((0, 0) if rows == 1 else (2, 2))
    inductor_pass.remove(made)
    if rows == 1:
        assert str(graph) == str(traced(*shapes, function=layer))


@pytest.mark.parametrize("merged", ["join_products", "fuse_stacked_gates"])
def test_a_graph_with_merged_weights_keeps_all_its_products(
    merged: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_pass, merged, lambda *_: 1)
    with config.patch(coordinate_descent_tuning=True):
        graph = traced((1, 8), (8, 5), (8, 6), function=layer)
        made(graph)
    assert targets(graph).count(OURS) == 2


@pytest.mark.parametrize("shapes", [((1, 7), (7, 5)), ((3, 7), (7, 1)), ((3, 7), (7, 5)), ((3, 1), (1, 5))])
def test_all_others_become_what_they_were(shapes: Any, made: Any) -> None:
    found = traced(*shapes)
    inductor_pass.remove(made)
    assert str(found) == str(traced(*shapes))
    assert (MM in targets(found)) == (1 not in shapes[0] + shapes[1]) or shapes[0][1] == 1


@pytest.mark.parametrize("how", ["removed", "another pass", "ahead of time", "no kernel", "no optimised model"])
def test_nothing_is_kept_that_the_pass_will_not_see(
    how: str, made: Any, optimised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "no optimised model":
        optimised.clear()
    elif how == "removed":
        inductor_pass.remove(made)
    elif how == "another pass":
        monkeypatch.setattr(made, "_is_set", lambda: False)
    elif how == "no kernel":
        monkeypatch.setattr(made, "_predicate", lambda a, b: False)
    with V.set_aot_compilation(how == "ahead of time"):
        found = traced(*ONE_ROW)
    assert MM not in targets(found) and torch.ops.aten.sum.dim_IntList in targets(found)
    inductor_pass.remove(made)
    assert str(found) == str(traced(*ONE_ROW))


@pytest.mark.usefixtures("optimised")
def test_a_pass_that_takes_the_place_of_ours_takes_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where the setting is the whole process's, as before torch 2.13."""
    monkeypatch.setattr(inductor_pass, "_entry", lambda: None)
    made = inductor_pass.install()
    made._predicate = lambda a, b: True
    with config.patch(post_grad_custom_post_pass=None):
        assert MM not in targets(traced(*ONE_ROW))
    assert targets(traced(*ONE_ROW)) == [MM]
    inductor_pass.remove(made)
    assert MM not in targets(traced(*ONE_ROW)) and config.post_grad_custom_post_pass is None


def test_a_pass_in_a_list_is_seen(made: Any) -> None:
    with config.patch(post_grad_custom_post_pass=[made]):
        assert targets(traced(*ONE_ROW)) == [MM]


def test_batches_stay_whole_while_results_are_batch_invariant(
    made: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_pass.device_registry, "DEVICE_TYPE", "cuda")
    batch = ((2, 1, 8), (2, 8, 5))
    apart = targets(traced(*batch, function=torch.bmm))
    set_process_guarantee("batch_invariant")
    try:
        assert targets(traced(*batch, function=torch.bmm)) == [torch.ops.aten.bmm.default] != apart
        assert targets(traced((1, 7), (7, 5))) == [MM], "every half-precision product"
    finally:
        set_process_guarantee("none")


def test_what_may_be_a_merged_gate_stays_whole(
    made: Any, optimised: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimised.clear()
    monkeypatch.setattr(inductor_pass.device_registry, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(inductor_pass.fused, "serves", lambda a, b, epilogue: b.shape[1] == 6)

    def merged(x: Any, w: Any) -> Any:
        return x @ w.t()

    assert targets(traced((1, 7), (6, 7), function=merged)).count(MM) == 1
    assert MM not in targets(traced((1, 7), (5, 7), function=merged))
    monkeypatch.setenv("OUTBLAS_FUSED", "0")
    assert MM not in targets(traced((1, 7), (6, 7), function=merged))


@pytest.mark.parametrize("by_turns", [False, True])
def test_parts_of_one_matrix_stay_whole_for_the_kernel_of_the_matrix(
    by_turns: bool, made: Any, optimised: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(x: Any, w: Any) -> Any:
        return [x @ part.t() for part in (w.view(4, 2, 7).unbind(1) if by_turns else w.split((3, 5)))]

    monkeypatch.setattr(inductor_pass.device_registry, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(made, "_predicate", lambda a, b: not by_turns and b.shape[1] == 8)
    monkeypatch.setattr(made, "_serves_gate", lambda a, w, activation: by_turns and activation == "gelu")
    operands = (1, 7), (8, 7)
    optimised[:] = [(8, 7)]
    found = traced(*operands, function=parts)
    assert targets(found).count(MM) == 2
    assert [tuple(each.meta["val"].shape) for each in found.nodes if each.target is MM] == (
        [(1, 4)] * 2 if by_turns else [(1, 3), (1, 5)]
    )
    for others in ([], [(8, 6)], [(9, 7)], [(2, 7)]):
        optimised[:] = others
        assert MM not in targets(traced(*operands, function=parts)), "no model has laid them so"
    optimised[:] = [(8, 7)]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        symbol = mode.shape_env.create_unbacked_symint()
        rows = torch.empty((symbol, 7), device="cuda", dtype=torch.float16)
        weight = torch.empty((8, 7), device="cuda", dtype=torch.float16).split(4)[0]
        assert not made._serves_joined(rows, weight.t()), "a symbolic M"
    monkeypatch.setattr(made, "_predicate", lambda a, b: False)
    monkeypatch.setattr(made, "_serves_gate", lambda a, w, activation: False)
    assert MM not in targets(traced(*operands, function=parts)), "no kernel is faster"


def test_other_tables_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decomposition, "decompositions", {MM: None})
    monkeypatch.delattr(decomposition, "fast_random_decomps")
    keep_products([MM], lambda *_: True)()
    assert decomposition.decompositions == {MM: None}
    monkeypatch.delattr(decomposition, "decompositions")
    keep_products([MM], lambda *_: True)()


def test_an_entry_that_was_changed_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    table, theirs = {MM: torch.mm}, lambda a, b: NotImplemented
    monkeypatch.setattr(decomposition, "decompositions", table)
    restore = keep_products([MM], lambda *_: True)
    assert table[MM](1, 2) is NotImplemented
    table[MM] = theirs
    restore()
    assert table[MM] is theirs


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_caches_tell_code_with_and_without_the_pass_apart(
    served: Served, optimised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by turns with filled caches of Inductor and AOTAutograd; a row times a column is taken apart on CPUs."""
    monkeypatch.setattr(inductor_pass, "take_apart", lambda *_: None)
    row, column = numbers(1, 8), numbers(8, 1, seed=1)
    expected, ran = row @ column, []
    hits = torch._dynamo.utils.counters["aot_autograd"]
    before = hits["autograd_cache_hit"]
    settings = torch._functorch.config.patch(enable_autograd_cache=True), config.patch(fx_graph_cache=True)
    with fresh_cache(), settings[0], settings[1], torch.no_grad():
        for on in (False, True, False, True):
            torch._dynamo.reset()
            made = inductor_pass.install() if on else None
            run = torch.compile(lambda x, w: torch.mm(x, w), fullgraph=True, mode="max-autotune-no-cudagraphs")
            served.ran.clear()
            assert torch.equal(run(row, column), expected)
            ran.append(len(served.ran))
            if made is not None:
                inductor_pass.remove(made)
    torch._dynamo.reset()
    assert ran == [0, 1, 0, 1] and hits["autograd_cache_hit"] - before == 2
