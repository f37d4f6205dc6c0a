"""The choice among cuBLASLt's answers: its inputs, its rule, its file, its fit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="nets are fitted by torch")

from outblas.core.errors import OutblasError, RecordError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.predict.answer_choice import AnswerModel, network_inputs, other_answers  # noqa: E402
from outblas.predict.posterior import Regressor  # noqa: E402
from outblas.records.parquet import parquet_bytes  # noqa: E402
from outblas_lab.train import fit_answers as module  # noqa: E402
from outblas_lab.train.fit_answers import fit_answers, read_answers  # noqa: E402
from outblas_lab.train.fit_any_shape import NetSettings, fit_nets  # noqa: E402
from support.gpus.known import H100, H200  # noqa: E402

P = Problem(64, 4096, 4096)
FIRST, FASTER, ROUNDING = (
    "id=66 tile=10 splitk=1 reduction=0 swizzle=0 custom=1 stages=35 inner=0 cluster=2",
    "id=66 tile=15 splitk=4 reduction=2 swizzle=0 custom=3 stages=35 inner=0 cluster=3",
    "id=66 tile=15 splitk=8 reduction=4 swizzle=0 custom=3 stages=35 inner=0 cluster=3",
)


def model(gain: float, deviation: float = 0.0, margin: float = 1.01) -> AnswerModel:
    """Return a model whose two nets predict ``gain`` plus and minus ``deviation`` for every answer."""
    wide = AnswerModel.input_count()
    weights = (np.zeros((2, wide, 1), np.float32),)
    biases = (np.array([gain + deviation, gain - deviation], np.float32).reshape(2, 1, 1),)
    nets = Regressor(np.zeros(wide, np.float32), np.ones(wide, np.float32), weights, biases)
    return AnswerModel(nets, margin, 2.0, 2.0, "about")


def test_the_best_bound_is_taken_if_it_reaches_the_margin() -> None:
    choice = model(0.1).choose(P, H200, [FIRST, FASTER])
    assert choice is not None and choice.algorithm == FASTER
    assert math.isclose(choice.speedup, math.exp(0.1), rel_tol=1e-5) and choice.low <= choice.speedup
    assert model(0.1, deviation=0.05).choose(P, H200, [FIRST, FASTER]) is None
    assert model(math.nan).choose(P, H200, [FIRST, FASTER]) is None


@pytest.mark.parametrize("answers", [[], [FIRST], [FIRST, ROUNDING]])
def test_without_another_exact_answer_there_is_no_choice(answers: list[str]) -> None:
    assert model(0.5).choose(P, H200, answers) is None and other_answers(answers) == []


def test_inputs_tell_answers_apart() -> None:
    x = network_inputs(P, [FIRST, FASTER, ROUNDING], [1, 2], H200)
    assert x.shape == (2, AnswerModel.input_count()) and x.dtype == np.float32 and np.isfinite(x).all()
    assert (x[0] != x[1]).any()
    assert np.isfinite(network_inputs(P, ["", "what is this"], [1], H200)).all()


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.npz"
    model(0.1).save(file)
    read = AnswerModel.parse(file.read_bytes())
    assert (read.margin, read.sure, read.about) == (1.01, 2.0, "about")
    assert read.choose(P, H200, [FIRST, FASTER]) == model(0.1).choose(P, H200, [FIRST, FASTER])
    with pytest.raises(RecordError, match="cannot be read"):
        AnswerModel.parse(file.read_bytes()[:100])


def test_packaged_models_serve_their_gpus_and_no_other_architecture() -> None:
    assert "H100" in AnswerModel.load("h100").about and "H200" in AnswerModel.load("h200").about
    with pytest.raises(OutblasError, match="no choice of answers for a100"):
        AnswerModel.load("a100")


def recorded(file: Path, count: int, gpu: str = "NVIDIA H200", below: float = 8.0) -> Path:
    """Answers of which the second takes ``below`` us where M is below 64, else 12. The first takes 10."""
    import pyarrow as pa

    rng, rows = np.random.default_rng(0), []
    for _ in range(count):
        m, n, k = (int(2 ** rng.uniform(4, 8)), *(64 * int(rng.integers(8, 64)) for _ in range(2)))
        other = below if m < 64 else 12.0
        for answer, us in ((FIRST, 10.0), (FASTER, other)):
            rows.append({"problem": Problem(m, n, k).key, "answer": answer, "median_us": us})
    about = {"gpu": gpu, "driver": "1", "date": "2026-11-26T00:00:00"}
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"provenance": json.dumps(about)})
    file.write_bytes(parquet_bytes(table))
    return file


def test_a_fit_learns_which_answer_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTINGS", module.SETTINGS._replace(width=16, epochs=30, batch=64))
    monkeypatch.setattr(module, "MAX_SLOWER", (0.01, 0.01))  # of 400 problems the package's shares allow none
    file, lines = recorded(tmp_path / "a.parquet", 400), list[str]()
    (told,) = fit_answers([file], tmp_path / "sub", lines.append)
    assert len(lines) == module.FOLDS and "h200: bound" in told
    fitted = AnswerModel.parse((tmp_path / "sub" / "h200.npz").read_bytes())
    chosen = [fitted.choose(Problem(m, 2048, 2048), H200, [FIRST, FASTER]) for m in (20, 30, 150, 250)]
    assert [choice is not None for choice in chosen] == [True, True, False, False]
    assert "NVIDIA H200" in fitted.about


def test_one_fit_serves_both_gpus_as_each_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTINGS", module.SETTINGS._replace(width=16, epochs=30, batch=64))
    monkeypatch.setattr(module, "MAX_SLOWER", (0.01, 0.01))
    files = [recorded(tmp_path / "a.parquet", 400), recorded(tmp_path / "b.parquet", 300, "NVIDIA H100 80GB HBM3", 12)]
    told = fit_answers(files, tmp_path, lambda line: None)
    assert ["h200" in told[0], "h100" in told[1], len(told)] == [True, True, 2]
    problems = [Problem(m, 2048, 2048) for m in (20, 30)]
    for gpu, faster in ((H200, True), (H100, False)):
        fitted = AnswerModel.parse((tmp_path / f"{gpu.name}.npz").read_bytes())
        assert [fitted.choose(p, gpu, [FIRST, FASTER]) is not None for p in problems] == [faster] * 2


def test_half_of_the_nets_predict_a_quantile() -> None:
    """Of outputs that are 0 and 1 equally often, the mean is 0.5 and a low quantile 0."""
    x = np.random.default_rng(0).standard_normal((512, 3)).astype(np.float32)
    y = torch.tensor([0.0, 1.0]).repeat(256)
    settings = NetSettings(nets=5, width=8, epochs=40, batch=64, huber=1.0, quantile=0.15)
    each = fit_nets(x, y, torch.ones(512), settings).predict_each(x).mean(axis=1)
    assert each[:2] == pytest.approx(0.0, abs=0.1) and each[2:] == pytest.approx(0.5, abs=0.1)
    middle = fit_nets(x, y, torch.ones(512), settings._replace(quantile=None)).predict_each(x).mean(axis=1)
    assert middle == pytest.approx(0.5, abs=0.1)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="outblas fit any-shape answers"):
        read_answers(tmp_path / "missing.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"bad")
    with pytest.raises(RecordError, match="cannot be read"):
        read_answers(tmp_path / "bad.parquet")
