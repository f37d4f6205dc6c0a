"""vLLM's unquantized experts: by a stand-in of its interface, and by vLLM's own class where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import outblas  # noqa: E402
from outblas.adapt import engine_log, vllm_experts  # noqa: E402
from outblas.adapt.vllm_experts import LAYER, LEAST_TOKENS, METHOD, serve_experts  # noqa: E402
from outblas.dispatch import enable  # noqa: E402
from outblas.dispatch.grouped import grouped_state, moe_layer  # noqa: E402
from support.grouped_stand_in import StandIn, grouped_stand_in  # noqa: E402

EXPERTS, HIDDEN, WIDTH, TOP = 4, 64, 32, 2
LAYER_NAME = "4 experts of 64 x 64 bf16"
THEIRS = -1.0  # vLLM's layer returns this everywhere


class CustomOp:
    """vLLM 0.26.0's table of operators: an out-of-tree class takes the place of the one whose name it has."""

    def __new__(cls, *arguments: Any) -> Any:
        return super().__new__(registry().get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None) -> Any:
        assert name not in registry(), f"Duplicate op name: {name}"
        _decorated_op_cls.name = name
        registry()[name] = _decorated_op_cls
        return _decorated_op_cls


class UnquantizedFusedMoEMethod(CustomOp):
    name = "unquantized_fused_moe"

    def __init__(self, moe: Any) -> None:
        self.moe, self.unquantized_backend = moe, SimpleNamespace(name="TRITON")
        self.moe_quant_config = SimpleNamespace(gemm1_clamp_limit=None)
        self.mk_can_overlap_shared_experts = False
        self.workspace, self.is_locked = 0, False

    def apply(
        self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts: Any, shared_experts_input: Any
    ) -> Any:
        assert len(x) <= self.workspace or not self.is_locked, "Workspace growth is not allowed after locking."
        self.workspace = max(self.workspace, len(x))
        return torch.full_like(x, THEIRS)


def registry() -> dict[str, Any]:
    found: dict[str, Any] = sys.modules[vllm_experts._OPERATORS].op_registry_oot
    return found


@pytest.fixture(name="vllm")
def vllm_fixture(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """A vLLM whose table of out-of-tree classes is empty."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    contents: dict[str, dict[str, Any]] = {
        vllm_experts._OPERATORS: {"CustomOp": CustomOp, "op_registry_oot": {}},
        vllm_experts._HOME: {vllm_experts._NAME: UnquantizedFusedMoEMethod},
    }
    for home in [*contents]:
        parts = home.split(".")
        contents = {".".join(parts[:length]): {} for length in range(1, len(parts))} | contents
    made = {name: ModuleType(name) for name in contents}
    for name, module in made.items():
        module.__dict__.update(contents[name], __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture(name="kernels")
def kernels_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """OutBLAS is on, and the CPU has grouped kernels."""
    state = grouped_stand_in(monkeypatch, vllm_experts)
    monkeypatch.setattr(grouped_state, "states", {0: state})
    monkeypatch.setattr(enable, "_switch", enable.Switch("CPU", lambda guarantee: ""))
    assert enable.enable()
    yield state
    enable.disable()


def method() -> Any:
    parallel = SimpleNamespace(use_ep=False, dp_size=1, pcp_size=1, sp_size=1)
    moe = SimpleNamespace(has_bias=False, is_lora_enabled=False, moe_parallel_config=parallel)
    return UnquantizedFusedMoEMethod(moe)


def layer() -> Any:
    made = torch.Generator().manual_seed(0)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    w13, w2 = (
        torch.nn.Parameter(torch.randn(shape, generator=made).mul(0.1).bfloat16(), requires_grad=False)
        for shape in shapes
    )
    activation = SimpleNamespace(name="SILU")
    return SimpleNamespace(
        w13_weight=w13, w2_weight=w2, activation=activation, expert_map=None, apply_router_weight_on_input=False
    )


def routed(tokens: int = 7) -> tuple[Any, Any, Any]:
    """Return x, scores and choices with vLLM's dtypes."""
    made = torch.Generator().manual_seed(1)
    scores, chosen = torch.rand(tokens, EXPERTS, generator=made).topk(TOP)
    return torch.randn(tokens, HIDDEN, generator=made).bfloat16(), scores, chosen.int()


def applied(of: Any, given: Any, operands: Any, shared: Any = None) -> Any:
    x, scores, chosen = operands
    with torch.inference_mode():
        return of.apply(given, x, scores, chosen, shared, None)


def is_theirs(result: Any) -> bool:
    return bool((result == THEIRS).all())


def set_at(owner: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)


def test_a_layer_is_served_and_counted(vllm: Any, kernels: StandIn) -> None:
    assert serve_experts() == ""
    of, given, (x, scores, chosen) = method(), layer(), routed()
    assert isinstance(of, UnquantizedFusedMoEMethod) and type(of) is not UnquantizedFusedMoEMethod
    found = applied(of, given, (x, scores, chosen))
    operands = (x.float(), given.w13_weight.float(), given.w2_weight.float(), chosen.long(), scores)
    want = moe_layer.by_torch(*operands)
    torch.testing.assert_close(found.float(), want, atol=0.01, rtol=0.02)
    assert [(problem.gated, must, wait) for problem, must, wait in kernels.asked] == [
        (True, True, True),
        (False, True, True),
    ], "both products are kernels, and both are waited for"
    assert outblas.status()["torch"]["ours"] == 2
    assert kernels.status()["layers"] == {LAYER_NAME: {"outblas": [7], "engine": []}}


def test_shared_experts_beside_the_layer_do_not_hinder_it(vllm: Any, kernels: StandIn) -> None:
    serve_experts()
    assert not is_theirs(applied(method(), layer(), routed(), shared=object()))


OTHERS: dict[str, Any] = {
    "unquantized_backend.name": "FLASHINFER_CUTLASS", "moe.has_bias": True, "moe.is_lora_enabled": True,
    "moe.moe_parallel_config.use_ep": True, "moe.moe_parallel_config.dp_size": 2,
    "moe.moe_parallel_config.pcp_size": 2, "moe.moe_parallel_config.sp_size": 2,
    "moe_quant_config.gemm1_clamp_limit": 7.0, "mk_can_overlap_shared_experts": True,
    "activation.name": "GELU", "expert_map": torch.arange(4), "apply_router_weight_on_input": True,
}  # fmt: skip


@pytest.mark.parametrize("path", [*METHOD, *LAYER])
@pytest.mark.parametrize("lacking", [False, True])
def test_what_a_layer_has_beside_swiglu_experts_leaves_it_to_vllm(
    path: str, lacking: bool, vllm: Any, kernels: StandIn
) -> None:
    """``lacking``: the attribute is not there, as in a vLLM of another version."""
    serve_experts()
    of, given = method(), layer()
    owner = of if path in METHOD else given
    if lacking:
        parent, _, name = path.rpartition(".")
        delattr(owner if not parent else eval(f"owner.{parent}"), name)
    else:
        set_at(owner, path, OTHERS[path])
    assert is_theirs(applied(of, given, routed())) and not kernels.asked
    assert kernels.status()["layers"] == {LAYER_NAME: {"outblas": [], "engine": [7]}}
    assert outblas.status()["torch"]["ours"] == 0


@pytest.mark.parametrize("tokens", [1, LEAST_TOKENS - 1, LEAST_TOKENS])
def test_a_few_tokens_are_vllms(tokens: int, vllm: Any, kernels: StandIn) -> None:
    serve_experts()
    assert is_theirs(applied(method(), layer(), routed(tokens))) == (tokens < LEAST_TOKENS)


def test_vllms_layer_needs_no_more_workspace_after_start_up(vllm: Any, kernels: StandIn) -> None:
    """vLLM locks it after its captures. Its first step has the most tokens."""
    serve_experts()
    of, given = method(), layer()
    assert [is_theirs(applied(of, given, routed(tokens))) for tokens in (64, 8, 2, 1)] == [False, False, True, True]
    of.is_locked = True
    assert is_theirs(applied(of, given, routed(3))) and not is_theirs(applied(of, given, routed(16)))
    enable.disable()
    assert is_theirs(applied(of, given, routed(64)))


@pytest.mark.parametrize("lacking", ["gate", "product", "rows"])
def test_a_layer_without_all_its_kernels_is_vllms_as_a_whole(lacking: str, vllm: Any, kernels: StandIn) -> None:
    """A capture has such layers, because nothing is loaded there."""
    kernels.lacking = {"gate": {True}, "product": {False}, "rows": set()}[lacking]
    kernels.with_rows = lacking != "rows"
    serve_experts()
    assert is_theirs(applied(method(), layer(), routed()))
    assert kernels.layers()[LAYER_NAME] == {"outblas": [], "engine": [7]}


def test_gradients_other_dtypes_and_batch_invariance_are_vllms(
    vllm: Any, kernels: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_experts()
    of, given, (x, scores, chosen) = method(), layer(), routed()
    assert is_theirs(of.apply(given, x.clone().requires_grad_(), scores, chosen, None, None))
    single = layer()
    single.w13_weight, single.w2_weight = given.w13_weight.float(), given.w2_weight.float()
    assert is_theirs(applied(of, single, (x.float(), scores, chosen)))
    monkeypatch.setattr(vllm_experts, "process_guarantee", lambda: "batch_invariant")
    assert is_theirs(applied(of, given, (x, scores, chosen)))


def test_weights_of_another_layout_or_name_are_vllms(vllm: Any, kernels: StandIn) -> None:
    serve_experts()
    of, given = method(), layer()
    of.unquantized_backend.name = "FLASHINFER_TRTLLM"
    given.w13_weight = given.w13_weight.view(EXPERTS, 2, 64, 32)
    assert is_theirs(applied(of, given, routed()))
    assert kernels.layers() == {"4 experts of 2 x 64 x 32 bf16": {"outblas": [], "engine": [7]}}
    del given.w13_weight
    assert is_theirs(applied(of, given, routed()))


def test_a_compiler_that_looks_into_the_layer_finds_vllms(vllm: Any, kernels: StandIn) -> None:
    serve_experts()
    of, given, (x, scores, chosen) = method(), layer(), routed()
    compiled = torch.compile(lambda x: of.apply(given, x, scores, chosen, None, None), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert is_theirs(compiled(x)) and not kernels.asked


def test_vllm_computes_while_outblas_is_off(vllm: Any, kernels: StandIn) -> None:
    serve_experts()
    of, given = method(), layer()
    enable.disable()
    assert is_theirs(applied(of, given, routed())) and kernels.layers() == {}
    enable.enable()
    assert not is_theirs(applied(of, given, routed()))


# -- the replacement --------------------------------------------------------------------------------------------------


def test_a_second_registration_changes_nothing(vllm: Any) -> None:
    assert serve_experts() == "" == serve_experts()
    (made,) = registry().values()
    assert issubclass(made, UnquantizedFusedMoEMethod) and made.name == UnquantizedFusedMoEMethod.name


def test_the_class_of_another_package_stays(vllm: Any) -> None:
    registry()[vllm_experts._NAME] = another = type("Another", (UnquantizedFusedMoEMethod,), {})
    assert "another package" in serve_experts() and registry() == {vllm_experts._NAME: another}


def test_another_vllm_is_told(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed(UnquantizedFusedMoEMethod):
        def apply(self, layer: Any, hidden_states: Any) -> Any:
            return hidden_states

    home = vllm[vllm_experts._HOME]
    monkeypatch.setattr(home, vllm_experts._NAME, Renamed)
    assert serve_experts().endswith("apply of this vLLM takes (self, layer, hidden_states)") and not registry()
    monkeypatch.delattr(home, vllm_experts._NAME)
    assert "has no UnquantizedFusedMoEMethod that can be replaced" in serve_experts()
    monkeypatch.setitem(sys.modules, vllm_experts._OPERATORS, None)
    assert "has no UnquantizedFusedMoEMethod" in serve_experts()


def test_the_log_line_has_the_experts(vllm: Any, kernels: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log.device_registry, "devices", {})
    serve_experts()
    of, given = method(), layer()
    for tokens in (1, 4, 8):
        applied(of, given, routed(tokens))
    of.moe.has_bias = True
    wide = layer()
    wide.w13_weight = torch.cat([given.w13_weight, given.w13_weight], dim=1)
    applied(of, wide, routed(8))
    assert engine_log.summary(engine_log.weights_of_process()) == (
        "outblas computes the matmuls of 1 of 2 weights (N x K): 4 experts of 64 x 64 bf16 at M 4 to 8; "
        "the engine computes 4 experts of 128 x 64 bf16 (M 8 so far)"
    )


def test_vllms_own_class_is_replaced(kernels: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs vLLM, and no GPU: ``docs/develop/torch-integration.md`` says how to have both."""
    pytest.importorskip("vllm")
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as home
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        FusedMoEQuantConfig,
        RoutingMethodType,
    )

    experts = SimpleNamespace(is_monolithic=lambda: False)
    chosen = (home.UnquantizedMoeBackend.TRITON, experts)
    monkeypatch.setattr(home, "select_unquantized_moe_backend", lambda moe_config: chosen)
    monkeypatch.setattr(home.UnquantizedFusedMoEMethod, "forward_native", lambda self, **given: given["x"] * 0 + THEIRS)
    moe = FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=TOP, hidden_dim=HIDDEN, intermediate_size=WIDTH,
        num_local_experts=EXPERTS, num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Default, in_dtype=torch.bfloat16,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
    )  # fmt: skip
    try:
        assert serve_experts() == ""
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            of = home.UnquantizedFusedMoEMethod(moe)
        of.moe_quant_config = FusedMoEQuantConfig.make()
        given = layer()
        given.activation = MoEActivation.SILU
        with torch.inference_mode():
            results = [
                of.apply(
                    layer=given, x=x, topk_weights=scores, topk_ids=chosen, shared_experts=None,
                    shared_experts_input=None,
                )
                for x, scores, chosen in (routed(7), routed(1))
            ]  # fmt: skip
        assert [is_theirs(result) for result in results] == [False, True]
    finally:
        op_registry_oot.pop(vllm_experts._NAME, None)
