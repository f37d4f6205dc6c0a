from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from pages.gpu_folders import name_of_gpu
from pages.headline import headline_rows
from pages.headline_picture import headline_svg
from pages.publish_results import _listed_blocks, check_published, publish

from outblas.core.errors import RecordError
from outblas.records.results import read_result, write_result
from outblas_lab.publish.palette import ratio_ticks
from support.bench_fixture import META, make_rows, write_bench

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


@pytest.mark.parametrize(("low", "high"), [(0.97, 1.03), (0.9, 1.3), (0.95, 1.6), (0.5, 2.5), (0.02, 40)])
def test_ratio_axes_have_some_ticks_and_one_at_one(low, high):
    ticks = ratio_ticks(low, high)
    assert 1.0 in ticks and 1 <= len(ticks) <= 12 and all(low <= t <= high for t in ticks)
    assert ticks == sorted(set(ticks))


def page(path, *names):
    """A page with empty blocks of some names, and of those that a module of tables lists for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = [name for (where, name), _ in _listed_blocks() if path.as_posix().endswith(f"/{where}")]
    names = dict.fromkeys((*names, *listed))
    blocks = "\n\n".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->" for name in names)
    path.write_text(f"# Title\n\n{blocks}\n\nrest\n")
    return path


@pytest.fixture
def published(tmp_path):
    folder = tmp_path / "results" / "h200"
    write_bench(folder / "grid.parquet")
    page(tmp_path / "README.md", "results")
    page(tmp_path / "docs" / "results" / "tables.md", "tables")
    page(tmp_path / "docs" / "use" / "when-not.md", "weak")
    return folder, tmp_path


def test_publishing_writes_every_page_that_is_there_and_twice_the_same_bytes(published):
    folder, root = published
    pages = ["README.md", "docs/results/tables.md", "docs/use/when-not.md"]
    pictures = {root / "docs/img" / name for name in ("speedup.svg", "headline.svg")}
    files = {folder / "summary.json", *pictures, *(root / name for name in pages)}
    assert len(check_published(*published)) == len(files)
    assert set(publish(*published)) == files
    first = {path: path.read_bytes() for path in files}
    assert check_published(*published) == []
    publish(*published)
    assert {path: path.read_bytes() for path in files} == first
    for name in pages:
        text = (root / name).read_text()
        assert text.startswith("# Title\n") and text.endswith("rest\n") and "old" not in text


def test_a_block_that_a_module_of_tables_lists_is_written(published, monkeypatch):
    folder, root = published
    blocks = {("docs/new.md", "sizes"): lambda gpu: f"{gpu.folder.name}: {len(gpu.results)} files"}
    monkeypatch.setattr("pages.all_rows_table.BLOCKS", blocks)
    new = page(root / "docs" / "new.md", "sizes")
    assert new in publish(*published)
    assert "<!-- sizes:begin -->\nh200: 1 files\n<!-- sizes:end -->" in new.read_text()


def test_the_table_has_every_summary_row(published):
    folder, root = published
    publish(*published)
    text = (root / "docs/results/tables.md").read_text()
    for row in json.loads((folder / "summary.json").read_text()):
        assert f"| {row['n']} | {row['geomean']:.3f}× | {row['flop_weighted']:.3f}× | {row['min']:.3f}× |" in text


def test_the_readme_has_a_row_for_each_gpu_and_use_that_has_a_file(published):
    folder, root = published
    other = root / "results" / "h100"
    write_bench(other / "grid.parquet")
    publish(*published)
    rows = [line for line in (root / "README.md").read_text().splitlines() if "*grid1000*" in line]
    (summary,) = (r for r in json.loads((folder / "summary.json").read_text()) if not r["pdl"])
    assert len(rows) == 2
    assert all(f"| {summary['n']} | {summary['geomean']:.3f}× | {summary['flop_weighted']:.3f}× |" in r for r in rows)


def test_a_fall_back_that_runs_under_every_launch_option_is_one_of_the_ten_worst_lines(published):
    folder, root = published
    rows = read_result(folder / "grid.parquet").rows
    last = max(rows, key=lambda row: row["m"] * row["n"] * row["k"])
    kept = [row for row in rows if row["m"] * row["n"] * row["k"] != last["m"] * last["n"] * last["k"]]

    def row(ratio, pdl, early=False):
        same = dict.fromkeys(("published", "speedup", "low", "high"), ratio)
        return {**last, **same, "baseline": "torch", "pdl": pdl, "early": early}

    write_result([*kept, row(0.5, False), row(0.5, True), row(0.6, True, early=True)], META, folder / "grid.parquet")
    publish(*published)
    text = (root / "docs/use/when-not.md").read_text()
    label = f"| {last['m']} × {last['n']} × {last['k']} |"
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith(label)]
    assert [line[2:4] for line in lines] == [["off / on", "0.500×"], ["on, constant weights", "0.600×"]]


def of_gpu(name, commit="0000000"):
    """Metadata of a bench that a GPU made."""
    return {**META, "provenance": {**META["provenance"], "gpu": name, "driver": f"of {name}", "commit": commit}}


@pytest.fixture
def two_gpus(published):
    """Results of an H100 beside those of an H200, copied as if it had measured the same."""
    folder, root = published
    other = root / "results" / "h100"
    rows = read_result(folder / "grid.parquet").rows
    write_result(rows, of_gpu("NVIDIA H200"), folder / "grid.parquet")
    write_result(rows, of_gpu("NVIDIA H100 80GB HBM3"), other / "grid.parquet")
    page(root / "docs" / "results" / "method.md", "again")
    return folder, root, other


def test_each_page_has_the_tables_of_each_gpu_under_its_name(two_gpus):
    folder, root, other = two_gpus
    assert other / "summary.json" in publish(folder, root)
    assert check_published(folder, root) == []
    (h100,) = {row["gpu"] for row in json.loads((other / "summary.json").read_text())}
    assert h100 == "NVIDIA H100 80GB HBM3"
    readme, tables, weak, again = (
        (root / name).read_text()
        for name in ("README.md", "docs/results/tables.md", "docs/use/when-not.md", "docs/results/method.md")
    )
    assert [line.split(" | ")[0] for line in readme.splitlines() if "*grid1000*" in line] == [
        "| H200",
        "| H100",
    ]
    for text, heading in ((tables, "## {}"), (weak, "## The ten worst rows on {}"), (again, "**{}**")):
        first, second = (text.index(heading.format(gpu) + "\n") for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
        assert first < second
    of_h200, of_h100 = again.partition("<!-- again:end -->")[0].split("**NVIDIA H100 80GB HBM3**")
    assert "--work build/h200" in of_h200 and "build/h100" not in of_h200
    assert "--work build/h100" in of_h100 and "build/h200" not in of_h100
    assert "Measured on NVIDIA H100 80GB HBM3, driver of NVIDIA H100 80GB HBM3" in tables
    assert f"driver of NVIDIA H200, files in `{folder.as_posix()}`" in weak and f"files in `{other.as_posix()}`" in weak
    assert weak.count("## GPUs without a library") == 1


def test_a_gpu_with_other_files_alone_is_on_their_pages(two_gpus):
    """It has a model's steps and no bench, so it has no summary and no place in the tables of benches."""
    folder, root, other = two_gpus
    steps = page(root / "docs" / "results" / "whole-models.md", "transformer", "whole_models", "compiled_models")
    table = page(root / "docs" / "results" / "index.md", "results")
    (other / "grid.parquet").unlink()
    variants = {"torch": {"us": [1000.0], "tokens_per_s": 64}, "outblas": {"speedup": [1.25, 1.2, 1.3]}}
    made = {**of_gpu("NVIDIA H100 80GB HBM3")["provenance"], "toolchain": {"torch": "2"}}
    data = {"layers": 1, "context": 2, "rounds": 3, "provenance": made}
    data["steps"] = [{"step": "decode_8", "mode": "graph", "variants": variants}]
    (other / "model_steps.json").write_text(json.dumps(data))
    publish(folder, root)
    assert not (other / "summary.json").exists() and "H100" not in (root / "docs/results/tables.md").read_text()
    block = steps.read_text().partition("<!-- transformer:end -->")[0]
    assert "1.250× (1.200 to 1.300)" in block and "Not measured" not in block
    assert "| H100 | [decode steps of Llama 3 8B" in table.read_text()


def test_a_file_in_the_folder_of_another_gpu_is_refused(two_gpus):
    folder, root, other = two_gpus
    (other / "host_cost.json").write_text(json.dumps({"provenance": {"gpu": "NVIDIA H200"}}))
    with pytest.raises(RecordError, match=r"host_cost.json was measured on NVIDIA H200.* folder h200"):
        publish(folder, root)
    (other / "host_cost.json").unlink()
    write_result(read_result(folder / "grid.parquet").rows, of_gpu("NVIDIA H200"), other / "grid.parquet")
    with pytest.raises(RecordError, match="grid.parquet was measured on NVIDIA H200"):
        check_published(folder, root)
    assert not (root / "docs/img/speedup.svg").exists()


def test_the_worst_rows_are_those_of_the_files(published):
    folder, root = published
    publish(*published)
    text = (root / "docs/use/when-not.md").read_text()
    rows = sorted(read_result(folder / "grid.parquet").rows, key=lambda row: row["published"])
    assert sum(line.count(f"{rows[0]['m']} × {rows[0]['n']} × {rows[0]['k']} ") for line in text.splitlines()) >= 1
    assert f"| {rows[0]['published']:.3f}× |" in text and f"| {rows[9]['published']:.3f}× |" in text
    below = sum(row["published"] < 0.99 for row in rows)
    assert f"Of {len(rows):,} published rows, {below} are below 0.99" in text


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_readme_without_its_markers_is_left_alone_and_nothing_written(published, text):
    directory, root = published
    readme, picture = root / "README.md", root / "docs/img/speedup.svg"
    readme.write_text(text)
    with pytest.raises(RecordError, match="no markers"):
        publish(*published)
    assert readme.read_text() == text and not picture.exists() and not (directory / "summary.json").exists()


def test_the_picture_draws_every_row_and_tells_its_means(published):
    directory, picture = published[0], published[1] / "docs/img/speedup.svg"
    publish(*published)
    root = ElementTree.fromstring(picture.read_text())
    space = "{http://www.w3.org/2000/svg}"
    lines = [one for one in root.iter(f"{space}g") if one.get("class") in ("on", "off")]
    assert sum(len(re.findall("[ML]", line.find(f"{space}path").get("d"))) for line in lines) == 128
    assert {line.get("class") for line in lines} == {"on", "off"}
    texts = [t.text for t in root.iter(f"{space}text")]
    assert {"speed-up, log scale", "share of the problems, sorted by speed-up"} <= set(texts)
    assert "NVIDIA H200 (test fixture), 2 January 2000" in texts, "a date, no time stamp"
    rows = read_result(directory / "grid.parquet").rows
    for r in json.loads((directory / "summary.json").read_text()):
        name = "with PDL" if r["pdl"] else "without PDL"
        most = max(row["published"] for row in rows if row["pdl"] is r["pdl"])
        assert f"{name}: geometric mean {r['geomean']:.3f}×, from {r['min']:.3f}× to {most:.3f}×" in texts
        assert f"{r['by_regime']['launch']['geomean']:.3f}× {name}" in texts, "a curve's own label"
    assert "prefers-color-scheme: dark" in root.find(f"{space}style").text


def test_the_picture_prefers_the_headline_suite(published):
    directory, picture = published[0], published[1] / "docs/img/speedup.svg"
    rows = [{**r, "layout": "NN"} for r in make_rows((64,))]
    write_result(rows, META, directory / "a_first_by_name.parquet")
    publish(*published)
    assert "64 problems of grid1000, TN, fp16, fp32 sums, offline" in picture.read_text()


@pytest.mark.parametrize("name", ["speedup", "headline"])
def test_the_text_of_a_picture_is_legible_at_400_pixels(published, name):
    publish(*published)
    root = ElementTree.fromstring((published[1] / f"docs/img/{name}.svg").read_text())
    styles = [t.get("style") for t in root.iter("{http://www.w3.org/2000/svg}text")]
    sizes = [float(re.search(r"font(?:-size)?:[^;]*?([\d.]+)px", style)[1]) for style in styles]
    assert sizes and min(sizes) * 400 / float(root.get("width")) >= 9


def test_every_gpu_has_its_picture_above_its_table(two_gpus):
    folder, root, other = two_gpus
    publish(folder, root)
    own = root / f"docs/img/speedup-{other.name}.svg"
    assert name_of_gpu(other) in own.read_text() != (root / "docs/img/speedup.svg").read_text()
    first, second = (root / "docs/results/tables.md").read_text().split("\n## ")[1:]
    assert "(../img/speedup.svg)" in first and f"(../img/{own.name})" in second


def test_the_bars_have_every_row_of_the_small_table(published):
    folder, root = published
    rows = headline_rows(folder, [read_result(folder / "grid.parquet")])
    below = [replace(row, use="worse", geomean=0.9, rival="torch") for row in rows]
    elsewhere = [replace(row, gpu="NVIDIA H100 80GB HBM3", geomean=1.25) for row in rows]
    shown = [*rows, *below, *elsewhere]
    texts = [t.text for t in ElementTree.fromstring(headline_svg(shown)).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("over the fastest of torch, cuBLAS and autotuned cuBLASLt") == texts.count("over torch") == 1
    assert texts.count("H200") == texts.count("H100") == 1 and {"worse", "64 problems of grid1000"} <= set(texts)
    for row in shown:
        assert f"{row.geomean:.3f}×" in texts


def test_a_result_file_that_lacks_a_field_is_one_error_and_nothing_is_written(published):
    folder, root = published
    place = page(root / "docs/search/ppo.md", "recipe")
    before = place.read_bytes()
    fields = ("provenance", "recording", "settings", "problems", "hit_rates", "faults", "rows", "curves")
    data = {"format": 1, "kind": "recipe", **dict.fromkeys(fields, {})}
    (folder / "recipe.json").write_text(json.dumps(data))
    with pytest.raises(RecordError, match="block recipe cannot be generated.*KeyError"):
        publish(*published)
    assert place.read_bytes() == before and not (root / "docs/img").exists()
