"""The entries that only a bench times: fall-back, torch without reduced-precision reductions, programmatic edges."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from outblas.core import rivals  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import baselines, programmatic_edges, torch_baselines  # noqa: E402
from outblas.judge.fallback_entry import FALLBACK, FallbackEntry  # noqa: E402
from outblas.runtime import cublaslt, workspace  # noqa: E402
from outblas.runtime.full_precision import (  # noqa: E402
    REDUCTIONS,
    full_precision_reductions,
    reduction_switches,
)

PROBLEM = Problem(8, 16, 24)
OPERANDS = tuple(torch.zeros(shape, dtype=torch.float16) for shape in ((8, 24), (16, 24), (8, 16)))


def test_the_bench_times_every_baseline_under_its_name() -> None:
    made = baselines.make_baselines(0, rivals.BENCH_BASELINES)
    assert tuple(made) == rivals.BENCH_BASELINES and [b.name for b in made.values()] == list(made)
    assert not {rivals.TORCH_FULL, rivals.LT_EDGES, FALLBACK} & set(rivals.RIVALS)
    assert made[rivals.LT_EDGES]._auto is made[rivals.LT_AUTO]


def test_edges_alone_have_an_autotuned_baseline_of_their_own() -> None:
    (alone,) = baselines.make_baselines(0, (rivals.LT_EDGES,)).values()
    assert isinstance(alone._auto, baselines.LtAuto)


def test_torchs_switches_are_off_during_a_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    before = reduction_switches()
    monkeypatch.setattr(torch_baselines.TorchMm, "bind", lambda *_: lambda stream: seen.append(reduction_switches()))
    call = torch_baselines.TorchFull().bind(PROBLEM, *OPERANDS)
    call(0)
    assert seen == [dict.fromkeys(REDUCTIONS, False)]
    assert reduction_switches() == before


def test_torchs_switches_return_after_an_error() -> None:
    before = reduction_switches()
    with pytest.raises(KeyError), full_precision_reductions():
        raise KeyError
    assert reduction_switches() == before


def test_every_figure_of_torch_names_its_switches() -> None:
    on, off = torch_baselines.TorchMm().detail(PROBLEM), torch_baselines.TorchFull().detail(PROBLEM)
    for name in REDUCTIONS:
        assert f"{name}={reduction_switches()[name]}" in on and f"{name}=False" in off
    assert on.startswith(f"torch {torch.__version__} ")


class Algorithm:
    workspace_bytes = 0

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *arguments: object) -> None:
        self.calls.append(arguments)


@pytest.mark.parametrize("named", [None, ""])
def test_a_fall_back_without_an_algorithm_is_torch(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = FallbackEntry()
    monkeypatch.setattr(torch_baselines.TorchMm, "bind", lambda *arguments: arguments[1:])
    if named is not None:
        entry.name_algorithm(PROBLEM, named)
    assert entry.bind(PROBLEM, *OPERANDS) == (PROBLEM, *OPERANDS) and entry.name == FALLBACK
    assert entry.detail(PROBLEM) == torch_baselines.TorchMm().detail(PROBLEM)


def test_a_fall_back_runs_the_named_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, algorithm = FallbackEntry(), Algorithm()
    monkeypatch.setattr(
        cublaslt.LtAlgorithms, "find", lambda self, problem, name: algorithm if name == "id=7" else None
    )
    entry.name_algorithm(PROBLEM, "id=7")
    entry.bind(PROBLEM, *OPERANDS)(5)
    assert algorithm.calls == [(*OPERANDS, 5, None)] and entry.detail(PROBLEM) == "id=7"
    entry.name_algorithm(PROBLEM, "id=8")  # not in this version of cuBLASLt
    assert entry.detail(PROBLEM).startswith("torch ")


def test_the_calls_of_all_operand_sets_and_problems_share_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a program a stream has one, too. Workspaces of their own leave the L2 cache, which a rival's does not."""
    entry, algorithm, made = FallbackEntry(), Algorithm(), list[Any]()
    algorithm.workspace_bytes = 64
    monkeypatch.setattr(cublaslt.LtAlgorithms, "find", lambda self, problem, name: algorithm)

    def allocate(nbytes: int, device: Any) -> Any:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(workspace, "allocate", allocate)
    for problem in (PROBLEM, PROBLEM, Problem(3, 64, 64)):
        entry.name_algorithm(problem, "id=7")
        entry.bind(problem, *OPERANDS)(5)
    assert len(made) == 1 and all(call[-1] is made[0] for call in algorithm.calls) and len(algorithm.calls) == 3


class Graphs:
    """A driver with one graph: nodes are numbers, kernels are even."""

    def __init__(self, edges: list[tuple[int, int, int]]) -> None:
        self.CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_KERNEL="kernel")
        self.CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
        self.CUgraphEdgeData = lambda: SimpleNamespace(type=0, from_port=0)
        self.edges: dict[tuple[int, int], Any] = {}
        for begin, end, kind in edges:
            self.edges[begin, end] = SimpleNamespace(type=kind, from_port=0)

    def cuGraphGetEdges(self, graph: str, count: int = 0) -> tuple[object, ...]:  # noqa: N802
        nodes = list(self.edges)
        return 0, [a for a, _ in nodes], [b for _, b in nodes], list(self.edges.values()), len(nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[int, str]:  # noqa: N802
        return 0, "kernel" if node % 2 == 0 else "memset"

    def cuGraphRemoveDependencies(
        self, graph: str, a: list[int], b: list[int], data: list[object], count: int
    ) -> tuple[int]:  # noqa: E501, N802
        assert self.edges.pop((a[0], b[0])) is data[0]
        return (0,)

    def cuGraphAddDependencies(
        self, graph: str, a: list[int], b: list[int], data: list[object], count: int
    ) -> tuple[int]:  # noqa: E501, N802
        self.edges[a[0], b[0]] = data[0]
        return (0,)


def test_edges_between_kernels_become_programmatic_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs([(0, 2, 0), (2, 3, 0), (3, 4, 0), (4, 6, 1)])
    monkeypatch.setattr(programmatic_edges, "driver", lambda: graphs)
    assert programmatic_edges.count_programmatic_edges("graph") == 1
    assert programmatic_edges.make_edges_programmatic("graph") == 1
    assert programmatic_edges.count_programmatic_edges("graph") == 2
    assert {ends: (edge.type, edge.from_port) for ends, edge in graphs.edges.items()} == {
        (0, 2): (1, 1),
        (2, 3): (0, 0),
        (3, 4): (0, 0),
        (4, 6): (1, 0),
    }
    assert programmatic_edges.make_edges_programmatic("graph") == 0


def test_a_graph_of_one_node_has_no_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programmatic_edges, "driver", lambda: Graphs([]))
    assert programmatic_edges.count_programmatic_edges("graph") == 0
    assert programmatic_edges.make_edges_programmatic("graph") == 0
