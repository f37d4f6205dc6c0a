"""Style and script of the report page, inlined into it."""

from __future__ import annotations

CSS = """
:root { color-scheme: light; --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa; --blue: #0b5fcc; }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
  background: #fff; }
header, main, noscript { display: block; max-width: 1200px; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 1.5rem; }
h1 { font-size: clamp(1.35rem, 1rem + 1.6vw, 2rem); line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.08rem; margin: 1.75rem 0 .5rem; }
.origin { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
.origin.replay { color: var(--ink); background: #fff5d6;
  border: 1px solid #d4a72c; border-radius: 8px; padding: .6rem .8rem; }
.cards { list-style: none; margin: 0; padding: 0; display: grid; gap: .6rem;
  grid-template-columns: repeat(7, minmax(0, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .65rem .8rem; }
.card strong { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; line-height: 1.25; }
.card span { color: var(--soft); font-size: .82rem; line-height: 1.3; display: block; }
.card.geomean { border-color: var(--blue); box-shadow: inset 0 3px 0 var(--blue); }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1.25rem; }
figure { margin: 0; min-width: 0; }
figcaption { margin-top: .4rem; }
figcaption, .note { color: var(--soft); font-size: .88rem; }
.plot { width: 100%; height: 380px; }
.plot.roofline { height: 480px; }
.plot.heat { height: 600px; max-width: 860px; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; align-items: center; }
.controls label { display: inline-flex; align-items: center; gap: .5rem; }
.controls output { display: inline-block; min-width: 3.2em; font-weight: 600; font-variant-numeric: tabular-nums; }
.controls input[type=range] { width: 14rem; accent-color: var(--blue); }
.scroll { overflow: auto; border: 1px solid var(--line); border-radius: 8px; margin: .5rem 0 1rem; }
.scroll.limited { max-height: 30rem; }
.scroll:focus-visible, input:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .5rem 0; color: var(--soft); }
caption span { display: inline-block; position: sticky; left: .7rem; padding-right: .7rem; margin-left: .7rem;
  max-width: min(1150px, calc(100vw - 3.5rem)); }
th, td { padding: .3rem .7rem; text-align: right; border-top: 1px solid var(--line); white-space: nowrap; }
tbody th, .text { text-align: left; font-weight: 500; }
.long { white-space: normal; overflow-wrap: anywhere; min-width: 9rem; }
thead th, thead th.text { background: var(--card); position: sticky; top: 0; font-weight: 600; }
.code { overflow: auto; max-height: 30rem; margin: .5rem 0 1rem; padding: .6rem .8rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; font-size: .82rem; line-height: 1.4; }
.code ins { background: #d8f5df; text-decoration: none; } .code del { background: #fde2de; text-decoration: none; }
.code:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
main { padding-bottom: 3rem; }
@media (max-width: 1000px) { .cards { grid-template-columns: repeat(3, minmax(0, 1fr)); } }
@media (max-width: 760px) {
  header, main { padding-left: .8rem; padding-right: .8rem; }
  .pair { grid-template-columns: minmax(0, 1fr); }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  th, td { padding: .3rem .5rem; }
  .plot { height: 330px; } .plot.heat { height: 440px; } .plot.roofline { height: 430px; }
}
"""

JS = """
(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("outblas-data").textContent);
  var config = { responsive: true, displaylogo: false, displayModeBar: false };
  var touch = window.matchMedia("(pointer: coarse)").matches;
  var narrow = window.matchMedia("(max-width: 760px)").matches;

  function chooseHeat(group) {
    var plot = document.getElementById("heat-" + group);
    var figure = data.groups[group].figures.heat;
    var slider = document.querySelector("[data-k='" + group + "']");
    var toggle = document.querySelector("[data-pdl-toggle='" + group + "']");
    var k = figure.ks[slider ? Number(slider.value) : 0];
    var pdl = toggle ? toggle.checked : figure.pdls[0];
    if (slider) { document.getElementById("heat-k-" + group).textContent = k; }
    var shown = figure.data.map(function (t) { return t.meta.k === k && t.meta.pdl === pdl; });
    return Plotly.restyle(plot, { visible: shown });
  }

  var drawn = Array.prototype.map.call(document.querySelectorAll(".plot"), function (plot) {
    var figure = data.groups[plot.dataset.group].figures[plot.dataset.figureName];
    var layout = Object.assign({}, figure.layout, { dragmode: touch ? false : "zoom" });
    if (narrow) { layout.font = Object.assign({}, layout.font, { size: 10 }); }
    return Plotly.newPlot(plot, figure.data, layout, config);
  });
  document.querySelectorAll("[data-k]").forEach(function (input) {
    input.addEventListener("input", function () { chooseHeat(input.dataset.k); });
  });
  document.querySelectorAll("[data-pdl-toggle]").forEach(function (input) {
    input.addEventListener("change", function () { chooseHeat(input.dataset.pdlToggle); });
  });
  Promise.all(drawn).then(function () { document.documentElement.dataset.ready = "true"; });
})();
"""
