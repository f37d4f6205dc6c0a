"""RMS norms in ``outblas.optimize``: recognised modules, their results, and the way back."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import outblas  # noqa: E402
from outblas.adapt.optimize import epsilon_of_norm  # noqa: E402
from support.served_fixture import Served, served_fixture  # noqa: F401  # noqa: E402

SIZE = 24


class Norm(nn.Module):
    """The norm of Llama, in names of its own."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, SIZE, dtype=dtype))
        self.little = 1e-5

    def forward(self, rows: Any) -> Any:
        """Divide by the root of the mean square."""
        kind = rows.dtype
        rows = rows.to(torch.float32)
        mean_square = rows.pow(2).mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(mean_square + self.little)
        return self.weight * rows.to(kind)


class WithScale(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SIZE))


def rows(dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.randn(5, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes with which torch's fused norm was called."""
    calls: list[Any] = []
    own = F.rms_norm

    def counted(x: Any, shape: Any, *more: Any) -> Any:
        calls.append(tuple(shape))
        return own(x, shape, *more)

    monkeypatch.setattr(F, "rms_norm", counted)
    return calls


def test_a_norm_is_known_by_what_it_does() -> None:
    assert epsilon_of_norm(Norm()) == epsilon_of_norm(Norm(torch.half)) == "little"
    others = [Norm(torch.float32), WithScale(), nn.LayerNorm(8)]
    assert [epsilon_of_norm(other) for other in others] == [None] * len(others)
    without_number = Norm()
    without_number.little = torch.tensor(1e-5)  # type: ignore[assignment]
    assert epsilon_of_norm(without_number) is None


def changed(tmp_path: Path, old: str, new: str) -> Any:
    """The class :class:`Norm` of a file in which some words of its code are others."""
    source = inspect.getsource(Norm)
    assert old in source
    path = tmp_path / "changed_norm.py"
    path.write_text(
        f"from typing import Any\nimport torch\nfrom torch import nn\nSIZE = {SIZE}\n" + source.replace(old, new)
    )
    spec = importlib.util.spec_from_file_location("changed_norm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["changed_norm"] = module  # where inspect looks for the source
    spec.loader.exec_module(module)
    return module.Norm


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("SIZE, dtype", "SIZE,  dtype", "little"),
        ("rows.pow(2)", "rows.pow(3)", None),
        ("self.weight * rows", "self.little * rows", None),
        ("mean(-1", "mean(0", None),
        ("rows * torch.rsqrt(mean_square", "mean_square * torch.rsqrt(rows", None),
    ],
)
def test_one_other_word_is_no_norm(
    old: str, new: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "changed_norm", None)
    assert epsilon_of_norm(changed(tmp_path, old, new)()) == name


def test_transformers_norms_are_known() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    assert epsilon_of_norm(LlamaRMSNorm(8).bfloat16()) == epsilon_of_norm(Qwen3RMSNorm(8).half()) == "variance_epsilon"
    assert epsilon_of_norm(GemmaRMSNorm(8).bfloat16()) is None, "its weight counts from one"


@torch.no_grad()
def test_an_optimised_norm_is_torchs_and_nearer_to_fp32(served: Served, fused_calls: list[Any]) -> None:
    model, x = nn.Sequential(Norm(), nn.Identity()).eval(), rows()
    exact = F.rms_norm(x.float(), (SIZE,), model[0].weight.float(), 1e-5)  # type: ignore[arg-type]
    fused_calls.clear()
    before = model(x)
    assert not fused_calls
    report = outblas.optimize(model)
    assert report.norms == ["0: RMS norm"] and "in torch's kernel:" in str(report)
    after = model(x)
    assert fused_calls == [(SIZE,)] and after.dtype == torch.bfloat16
    assert (after - exact).abs().max() <= (before - exact).abs().max()
    assert outblas.restore(model) == 1 and torch.equal(model(x), before) and len(fused_calls) == 1
    assert outblas.restore(model) == 0


def test_its_own_code_runs_in_training_under_autocast_on_other_devices_and_for_other_dtypes(
    served: Served, fused_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Norm()).eval()
    outblas.optimize(model)
    model(rows()).sum().backward()
    with torch.no_grad():
        assert model(rows(torch.float32)).dtype == torch.float32
        copied = copy.deepcopy(model)
        assert torch.equal(copied(rows()), Norm()(rows())) and not fused_calls
        model[0].little = 10.0  # type: ignore[assignment]
        assert model(rows()).abs().max() < 1.5, "epsilon is read at each call"
        assert len(fused_calls) == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):  # on a GPU, it lets torch's function return fp32
            model(rows())
        assert len(fused_calls) == 1
        monkeypatch.setattr("outblas.dispatch.device_registry.DEVICE_TYPE", "cuda")
        model(rows())
    assert len(fused_calls) == 1
