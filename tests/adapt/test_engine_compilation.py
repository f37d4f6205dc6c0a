"""Compiled code of vLLM, whose compiler is called as its adapter of Inductor calls it: the products become operators.

vLLM hands its own pass to ``standalone_compile`` as a patch of Inductor's settings. The pass takes only the graph, and
its key exists only while the model is compiled.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch._inductor import config, standalone_compile  # noqa: E402
from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402

from outblas.dispatch import inductor_pass  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

pytestmark = [
    pytest.mark.skipif(inductor_pass._entry() is None, reason="this torch has one setting for all threads"),
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler"),
]


class PassManager(CustomGraphPass):
    """The engine's pass. It counts its graphs."""

    def __init__(self) -> None:
        self.compiling, self.graphs = False, 0

    def __call__(self, graph: Any) -> None:
        self.graphs += 1

    def uuid(self) -> Any:
        assert self.compiling, "the engine's range of sizes is known only while it compiles"
        return "passes of an engine"


def backend(passes: PassManager) -> Callable[..., Any]:
    """Return the engine's backend of torch.compile. The setting is a patch for one compilation, in place of ours."""

    def compiled(graph: Any, inputs: Any) -> Any:
        passes.compiling = True
        patches = {"config_patches": {"post_grad_custom_post_pass": passes, "force_disable_caches": False}}
        try:
            return standalone_compile(graph, inputs, dynamic_shapes="from_graph", options=patches, aot=True)
        finally:
            passes.compiling = False

    return compiled


@pytest.fixture(name="made")
def made_fixture() -> Iterator[Any]:
    """The pass as ``outblas.enable`` installs it; nothing stays compiled."""
    made = inductor_pass.install()
    torch._dynamo.reset()
    with fresh_cache():
        yield made
    inductor_pass.remove(made)
    torch._dynamo.reset()


def test_the_engines_own_pass_runs_before_ours_and_its_code_holds_the_operator(served: Served, made: Any) -> None:
    """Compiled for any number of tokens, and to be saved. It does not count as compilation ahead of time."""
    passes, w = PassManager(), numbers(5, 8, seed=1)
    run = torch.compile(lambda x: torch.relu(torch.nn.functional.linear(x, w)), backend=backend(passes), fullgraph=True)
    with torch.no_grad():
        for m in (3, 24):
            x = numbers(m, 8, seed=m)
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(run(x), torch.relu(torch.nn.functional.linear(x, w)))
    assert (passes.graphs, made.replaced) == (1, 1)
    assert [problem.m for problem in served.ran] == [3, 24]
    assert config.post_grad_custom_post_pass is made, "the engine's pass stays in its own compilation"
