"""The page of an evolution, from a run folder that is written as a run would write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from outblas.core.config import Candidate, config_name, config_to_json
from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records.store import Store
from outblas_lab.llm.archive import Archive, ArchiveShape, Entry
from outblas_lab.llm.budget import Cost
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal
from outblas_lab.llm.feedback import score_of
from outblas_lab.llm.reply import Reply
from outblas_lab.publish.html.evolve_charts import difference
from outblas_lab.publish.html.evolve_data import MAX_ANCESTORS, EvolveRun, load_evolution
from outblas_lab.publish.html.evolve_page import charts_of, render_evolution
from outblas_lab.publish.html.tune_page import write_report
from support.llm_kernels import PROBLEM, failed, kernel, passed

OTHER = Problem(64, 64, 64)
EVIL = "</script><img src=x onerror=alert(1)>"


class Writer:
    """Writes chains into a run folder."""

    def __init__(self, folder: Path, **about: object) -> None:
        folder.mkdir()
        shape = vars(ArchiveShape())
        wanted = {
            "format": 1, "kind": "evolve", "problems": [PROBLEM.key, OTHER.key], "device": "r.jsonl", "gpu": "h200",
            "models": [{"name": "m", "weight": 1.0, "price": {"prompt": 1.0, "answer": 2.0}}],
            "settings": {"shape": shape, "seed": 0, "turns": 3}, "ended": "the end", "started": "now",
            "recording": {"gpu": "NVIDIA H200", "date": "2000-01-01T00:00:00+00:00"},
            "provenance": {"gpu": None, "command": "outblas evolve"}, **about,
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(wanted))
        self.store = Store(folder / "store.sqlite")
        self.journal = EvolveJournal(folder / "store.sqlite")
        self.archive = Archive(ArchiveShape(migrate_every=99))

    def turn(
        self, chain: int, turn: int, kind: str, evaluation: Evaluation | None, parents: tuple[Candidate, ...] = (),
        gain: float = 0.0, model: str = "m",
    ) -> None:  # fmt: skip
        names = [config_name(p) for p in parents]
        q = self.journal.ask(chain, turn, PROBLEM.key, 0, model, "new", names, [{"role": "user", "content": "?"}])
        self.journal.replied(
            self.journal.sent(q.id, Cost(1, 9, 9)), Reply("answered", "x", "stop", Cost(1, 1000, 100), 1)
        )
        if evaluation is None:
            self.journal.settle(AnswerOutcome(q.id, kind))
            return
        self.store.append("run", evaluation)
        name, score = config_name(evaluation.config), score_of(evaluation)
        us = evaluation.timing.median_us if evaluation.timing else None
        ratio = evaluation.speedup.ratio if evaluation.speedup else None
        entries = []
        if kind == "proven" and score is not None and us is not None:
            entries = self.archive.insert(
                Entry(PROBLEM.key, 0, name, config_to_json(evaluation.config), score, us, q.id)
            )
        answer = "config" if isinstance(evaluation.config, Sm80MmaConfig) else "code"
        self.journal.settle(AnswerOutcome(q.id, kind, answer, name, us, ratio, gain, "words"), entries)

    def close(self) -> None:
        self.store.close()
        self.journal.close()


CONFIG = Sm80MmaConfig(64, 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """1 and a config are proven; shown both, the model answers a wrong 3, repairs it to 4, which is the best."""
    writer = Writer(tmp_path / "run")
    writer.turn(1, 0, "proven", passed(kernel(1), 3.9), gain=0.01)
    writer.turn(2, 0, "proven", passed(CONFIG, 3.8), gain=0.02)  # type: ignore[arg-type]
    writer.turn(3, 0, "wrong", failed(kernel(3), Status.WRONG, "why"), (kernel(1), CONFIG))
    writer.turn(3, 1, "refusal", None, (kernel(1), CONFIG))
    writer.turn(3, 2, "proven", passed(kernel(4), 3.0), (kernel(1), CONFIG), gain=0.2)
    writer.turn(4, 0, "malformed", None)
    writer.close()
    return tmp_path / "run"


@pytest.fixture
def run(folder: Path) -> EvolveRun:
    return load_evolution(folder)


def test_the_lineage_of_the_best_goes_back_through_repairs(run: EvolveRun) -> None:
    best = run.archive.best(PROBLEM.key)
    assert best is not None and best.name == kernel(4).name
    nodes = {n.name: n for n in run.lineage(PROBLEM.key, best.name)}
    assert nodes[kernel(4).name].parents == (kernel(3).name,)  # the refusal between them is no candidate
    assert nodes[kernel(3).name].parents == (kernel(1).name, config_name(CONFIG))
    assert [nodes[n].generation for n in (kernel(1).name, config_name(CONFIG), kernel(3).name, kernel(4).name)] == [
        0, 0, 1, 2,
    ]  # fmt: skip


def test_a_long_lineage_is_cut_to_its_nearest_ancestors(tmp_path: Path) -> None:
    """A thousand generations are more than Python allows nested calls."""
    writer = Writer(tmp_path / "run")
    kernels = [kernel(i) for i in range(1000)]
    writer.journal._db.execute("PRAGMA synchronous = OFF")
    for i, one in enumerate(kernels):
        writer.turn(i + 1, 0, "proven", passed(one, 3.9 - 1e-3 * i), tuple(kernels[max(0, i - 2) : i]))
    writer.close()
    run = load_evolution(tmp_path / "run")
    best = run.archive.best(PROBLEM.key)
    assert best is not None and best.name == kernels[-1].name
    nodes = run.lineage(PROBLEM.key, best.name)
    assert len(nodes) == MAX_ANCESTORS + 1 and nodes[-1].name == best.name and nodes[-1].generation == MAX_ANCESTORS
    assert nodes[-1].parents == (kernels[-3].name, kernels[-2].name)
    page = render_evolution(run)
    assert len(page) < 1.5e6


def test_code_and_knobs_are_accounted_for_apart(run: EvolveRun) -> None:
    code, config, neither = run.by_answer()
    assert (code.name, sum(code.kinds.values()), code.kinds["proven"], code.new_bests) == ("code", 3, 2, 2)
    assert code.gain == pytest.approx(0.21) and code.spent == Cost(3, 3000, 300)
    assert (config.name, config.kinds["proven"], config.gain) == ("config", 1, 0.02)
    assert (neither.name, sum(neither.kinds.values()), neither.gain) == ("neither", 2, 0.0)
    assert code.spent + config.spent + neither.spent == run.spent
    assert dict(run.kinds()) == {"proven": 3, "wrong": 1, "malformed": 1, "refusal": 1}


def embedded(html: str) -> dict:
    found = re.search(r'id="outblas-data">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found.group(1))


def test_the_page_is_one_file_with_everything(folder: Path) -> None:
    page = write_report(folder, folder / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and "http://" not in page and "https://" not in page
    assert page.index("Geometric mean of the best kernels") < page.index("Words on this page")
    for said in ("recorded measurements of NVIDIA H200, 1 January 2000", "Lineage of the best", kernel(4).name,
                 "config", "the end", "No kernel was proven on this problem", "<del>-    int variant = 3;</del>",
                 "<ins>+    int variant = 4;</ins>"):  # fmt: skip
        assert said in page, said
    groups = embedded(page)["groups"]
    assert [g["title"] for g in groups] == [PROBLEM.key, OTHER.key]
    assert [s["name"] for s in groups[0]["figures"]["curve"]["series"]] == ["best so far", "code", "config"]


def test_the_progress_climbs_with_the_proven_kernels(run: EvolveRun) -> None:
    chart = charts_of(run, PROBLEM.key)["curve"]
    dots, knobs = chart.series[1], chart.series[2]
    (steps, code, config), (baseline, floor) = ([s.artists[0] for s in chart.series], chart.axes.lines[-2:])
    assert list(steps.get_xdata()) == [1, 2, 5] and list(steps.get_ydata()) == sorted(steps.get_ydata())
    assert list(code.get_xdata()) == [1, 5] and list(config.get_xdata()) == [2]
    assert dots.tips[1] == f"answer 5 (code): {code.get_ydata()[1]:.3f}×"
    assert (dots.name, knobs.name) == ("code", "config")
    low, high = chart.axes.get_ylim()
    assert baseline.get_ydata()[0] == 1.0 and low < 1.0 < floor.get_ydata()[0] < high


def test_the_lineage_has_an_edge_from_every_parent(run: EvolveRun) -> None:
    edges, proven, others = charts_of(run, PROBLEM.key)["tree"].series
    assert sum(math.isnan(y) for y in edges.artists[0].get_ydata()) == 3
    filled, hollow = proven.artists[0], others.artists[0]
    assert len(filled.get_xdata()) == 3 and filled.get_markerfacecolor() == filled.get_color()
    assert len(hollow.get_xdata()) == 1 and hollow.get_markerfacecolor() == "white"
    assert any("wrong" in tip for tip in others.tips)


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.levels, self.stack, self.bare = list[int](), list[str](), 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if re.fullmatch(r"h[1-6]", tag):
            self.levels.append(int(tag[1]))
        self.bare += tag == "th" and "scope" not in dict(attrs)
        if tag not in ("meta", "link", "input"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def test_the_page_is_outlined(folder: Path) -> None:
    outline = Outline()
    outline.feed(render_evolution(load_evolution(folder)))
    assert outline.stack == [] and outline.bare == 0 and outline.levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(outline.levels))


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    about = {"models": [{"name": EVIL}], "ended": EVIL, "device": EVIL, "recording": {"gpu": EVIL, EVIL: [EVIL]}}
    writer = Writer(tmp_path / "run", **about)
    evil = kernel(1).text + f"// {EVIL}\n"
    writer.turn(1, 0, "proven", passed(type(kernel(1)).parse(evil), 3.9), model=EVIL)
    writer.close()
    body = render_evolution(load_evolution(tmp_path / "run"))
    assert "<img" not in body and "&lt;img" in body


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "store.sqlite").unlink(),
        lambda folder: (folder / "run.json").write_text('{"kind": "evolve"}'),
        lambda folder: (folder / "store.sqlite").write_bytes(b"x" * 5000),
    ],
)
def test_a_run_that_cannot_be_read_is_one_error(folder: Path, spoil: Callable[[Path], object]) -> None:
    spoil(folder)
    with pytest.raises(RecordError):
        write_report(folder, folder / "report.html")


def test_a_run_without_a_proven_kernel_has_a_page(tmp_path: Path) -> None:
    Writer(tmp_path / "run", device="compile", recording=None).close()
    body = render_evolution(load_evolution(tmp_path / "run"))
    assert "Nothing was run" in body and body.count("No kernel was proven") == 2


def test_a_difference_says_where_there_is_none() -> None:
    assert difference("a\nb", "a\nb", ("x", "y")) == []
    assert difference("a\nb", "a\nc", ("x", "y"))[-2:] == ["-b", "+c"]
    long = difference("", "x\n" * 1000, ("x", "y"))
    assert len(long) == 401 and long[-1] == "603 more lines"
