"""The pass among those of vLLM: by a stand-in of its interface, and by vLLM's own manager where it is installed."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch._inductor.custom_graph_pass import CustomGraphPass  # noqa: E402
from torch._inductor.utils import fresh_cache  # noqa: E402

from outblas.adapt import vllm_graphs  # noqa: E402
from outblas.adapt.vllm_graphs import KEY, enter_graphs  # noqa: E402
from outblas.dispatch import enable  # noqa: E402
from outblas.dispatch.inductor_pass import ProductPass  # noqa: E402
from support.ended_compilation import Seen, ends_after_passes  # noqa: E402


class InductorPass(CustomGraphPass):  # type: ignore[misc]
    """The base of all passes that the manager of vLLM 0.26.0 takes."""

    def uuid(self) -> Any:
        return type(self).__name__

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return True


class Manager(CustomGraphPass):  # type: ignore[misc]
    """A stand-in of the manager that vLLM hands Inductor. It takes such passes alone, and its key is JSON of theirs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.passes: list[Any] = []
        if KEY in settings:
            assert isinstance(settings[KEY], InductorPass)
            self.passes.append(settings[KEY])

    def __call__(self, graph: Any) -> None:
        for each in self.passes:
            if each.is_applicable_for_range((1, 8192)):
                each(graph)

    def uuid(self) -> str:
        return json.dumps([each.uuid() for each in self.passes], sort_keys=True)


class Own(InductorPass):
    """A pass of the user."""

    def __init__(self, applies: bool = True) -> None:
        self.calls, self._applies = 0, applies

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return self._applies

    def __call__(self, graph: Any) -> None:
        self.calls += 1


@pytest.fixture(name="settings", params=vllm_graphs._MODULES)
def settings_fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Inductor's settings of a configuration that is current, in a vLLM whose class has either place."""
    settings: dict[str, Any] = {"combo_kernels": True}
    config = SimpleNamespace(compilation_config=SimpleNamespace(inductor_compile_config=settings))
    parts = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: config},
        "vllm.compilation": {},
        "vllm.compilation.passes": {},
        request.param: {"InductorPass": InductorPass},
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, content in parts.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    yield settings


class Ending(Manager):
    def __call__(self, graph: Any) -> None:
        super().__call__(graph)
        raise Seen


def compiled(settings: dict[str, Any], run: bool = False) -> None:
    """Compile two layers, whose number of rows is symbolic, as vLLM does; with ``run`` the result is right."""

    def layers(x: Any, w: Any, v: Any) -> Any:
        return torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, w)), v)

    x, w, v = torch.ones(5, 8), torch.ones(16, 8), torch.ones(4, 16)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    options = {**copy.deepcopy(settings), KEY: (Manager if run else Ending)(copy.deepcopy(settings))}
    with fresh_cache(), ends_after_passes(not run):
        assert torch.equal(torch.compile(layers, options=options, fullgraph=True)(x, w, v), layers(x, w, v))


def test_products_of_any_m_are_replaced_as_long_as_the_pass_is_installed(settings: dict[str, Any]) -> None:
    made = ProductPass(None, lambda a, b: True)
    installed: list[Any] = [made]
    assert enter_graphs(lambda: installed[0]) == ""
    compiled(settings, run=True)
    assert made.replaced == 2
    installed[0] = None
    compiled(settings)
    assert made.replaced == 2


def test_vllms_key_tells_whether_it_took_part(settings: dict[str, Any]) -> None:
    without = Manager(settings).uuid()
    made = ProductPass(None, lambda a, b: True)
    installed: list[Any] = [made]
    enter_graphs(lambda: installed[0])
    on = Manager(settings).uuid()
    made.active = False
    off = Manager(settings).uuid()
    installed[0] = None
    gone = Manager(settings).uuid()
    assert len({without, on, off, gone}) == 4
    assert copy.deepcopy(settings)[KEY] is settings[KEY], "it counts for the process"


@pytest.mark.parametrize("applies", [True, False])
def test_the_users_own_pass_runs_where_it_applies(settings: dict[str, Any], applies: bool) -> None:
    own = settings[KEY] = Own(applies)
    before = Manager(settings).uuid()
    made = ProductPass(None, lambda a, b: True)
    enter_graphs(lambda: made)
    enter_graphs(lambda: made)
    assert settings[KEY].earlier is own, "and not a pass of ours"
    compiled(settings)
    assert (own.calls, made.replaced) == (applies, 2)
    assert before != Manager(settings).uuid() and "Own" in Manager(settings).uuid()


def test_a_configuration_is_sent_to_another_process(settings: dict[str, Any]) -> None:
    assert enter_graphs(enable.graph_pass) == ""
    received = pickle.loads(pickle.dumps(settings))
    assert received[KEY].uuid() == settings[KEY].uuid() and received[KEY].earlier is None
    assert isinstance(received[KEY], InductorPass)


def test_without_a_current_configuration_graphs_stay(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.config"], "get_current_vllm_config_or_none", lambda: None)
    assert "CUDA was in use before" in enter_graphs(lambda: None) and KEY not in settings


def test_another_vllm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_graphs, "_MODULES", ("vllm.no_such_module",))
    assert enter_graphs(lambda: None) == "this vLLM has no vllm.no_such_module"


def test_vllms_own_manager_runs_it() -> None:
    """Needs vLLM, and no GPU: ``docs/develop/torch-integration.md`` says how to have both."""
    pytest.importorskip("vllm")
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.config import CompilationConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.utils import Range

    class Nothing(InductorPass):
        def __call__(self, graph: Any) -> None:
            """vLLM's looks up operators of its GPU extension."""

    config = VllmConfig(device_config=DeviceConfig(device="cpu"), compilation_config=CompilationConfig(mode=3))
    before, made = config.compute_hash(), ProductPass(None, lambda a, b: True)
    with set_current_vllm_config(config):
        assert enter_graphs(lambda: made) == ""
        assert config.compute_hash() != before, "the folder of compiled code is another one"
        manager = PostGradPassManager()
        manager.configure(config)
        manager.add(config.compilation_config.inductor_compile_config[KEY])
        manager.fix_functionalization = Nothing()
        x, w = torch.ones(5, 8), torch.ones(16, 8)
        torch._dynamo.mark_dynamic(x, 0)
        linear = torch.nn.functional.linear
        with pass_context(Range(1, 8192)), fresh_cache():
            assert torch.equal(torch.compile(linear, options={KEY: manager})(x, w), linear(x, w))
    assert made.replaced == 1
