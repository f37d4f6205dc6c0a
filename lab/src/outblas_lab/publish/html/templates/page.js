(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("outblas-data").textContent);
  var root = document.documentElement;
  var NEAR = 40; // pixels within which a mark is under the pointer
  function all(selector, from) { return Array.prototype.slice.call((from || document).querySelectorAll(selector)); }
  function make(tag, cls, text) {
    var made = document.createElement(tag);
    if (cls) { made.className = cls; }
    if (text !== undefined) { made.textContent = text; }
    return made;
  }

  // Texts of a result row.
  function rowOf(group, number) {
    var row = {};
    data.groups[group].columns.forEach(function (name, i) { row[name] = data.groups[group].rows[number][i]; });
    return row;
  }
  function shapeOf(row) { return row.m + "×" + row.n + "×" + row.k; }
  function interval(row) {
    return row.low === null || row.high === null ? "none" : row.low.toFixed(3) + " to " + row.high.toFixed(3);
  }
  function kernelOf(group, row) { return row.fallback ? "falls back" : data.groups[group].kernels[row.kernel]; }
  function rowText(group, number) {
    var row = rowOf(group, number);
    var certain = row.low === null ? "" : " (" + interval(row) + ")";
    var mine = row.fallback ? "OutBLAS runs the baseline" : "OutBLAS " + row.us.toFixed(2) + " µs";
    return shapeOf(row) + ", " + data.groups[group].launches[Number(row.pdl)] + ": " + row.published.toFixed(3) + "×" + certain +
      "\n" + row.baseline + " " + row.baseline_us.toFixed(2) + " µs, " + mine + ", floor " + row.floor_us.toFixed(2) +
      " µs" + (row.fallback ? "" : "\n" + kernelOf(group, row));
  }

  // The text under the pointer.
  var tip = make("div", "tip");
  tip.hidden = true;
  document.body.appendChild(tip);
  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    var box = tip.getBoundingClientRect();
    var left = Math.min(Math.max(4, x + 14), window.innerWidth - box.width - 4);
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = (y + 18 + box.height > window.innerHeight ? Math.max(4, y - 12 - box.height) : y + 18) + "px";
  }

  // Charts: Matplotlib draws dots as <use>, a line as a path through all its points, and each bar alone.
  function marksOf(plot) {
    var figure = data.groups[plot.dataset.group].figures[plot.dataset.figureName];
    var marks = [];
    all("[data-series]", plot).forEach(function (drawn) {
      var series = figure.series[Number(drawn.dataset.series)], dots = all("use", drawn);
      if (drawn.dataset.tip || !(series.tips.length || series.rows.length)) { return; }
      var points = dots.length ? dots.map(function (dot) { return [dot.getAttribute("x"), dot.getAttribute("y")]; })
        : drawn.querySelector("path").getAttribute("d").match(/-?[\d.]+ -?[\d.]+/g).map(function (at) { return at.split(" "); });
      points.forEach(function (at, i) { marks.push({ drawn: drawn, series: series, i: i, x: Number(at[0]), y: Number(at[1]) }); });
    });
    return marks;
  }
  all(".canvas").forEach(function (plot) {
    var marks = null, view = plot.querySelector("svg").viewBox.baseVal;
    var ring = make("div", "dot");
    ring.hidden = true;
    plot.appendChild(ring);
    function leave() { tip.hidden = true; ring.hidden = true; }
    function look(event) {
      var bar = event.target.closest("[data-tip]");
      if (bar) {
        ring.hidden = true;
        showTip(bar.dataset.tip, event.clientX, event.clientY);
        return;
      }
      marks = marks || marksOf(plot);
      var box = plot.getBoundingClientRect(), scale = box.width / view.width;
      var best = null, least = NEAR * NEAR;
      marks.forEach(function (mark) {
        if (mark.drawn.style.display === "none") { return; }
        var dx = mark.x * scale + box.left - event.clientX, dy = mark.y * scale + box.top - event.clientY;
        if (dx * dx + dy * dy < least) { least = dx * dx + dy * dy; best = mark; }
      });
      if (!best) { leave(); return; }
      ring.hidden = false;
      ring.style.left = best.x * scale + "px";
      ring.style.top = best.y * scale + "px";
      var text = best.series.rows.length ? rowText(plot.dataset.group, best.series.rows[best.i]) : best.series.tips[best.i];
      showTip(text, event.clientX, event.clientY);
    }
    plot.addEventListener("pointermove", look);
    plot.addEventListener("pointerdown", look);
    plot.addEventListener("pointerleave", leave);
  });
  all("[data-toggles]").forEach(function (input) {
    function apply() {
      input.dataset.toggles.split(" ").forEach(function (number) {
        all("[data-series='" + number + "']", input.closest("figure")).forEach(function (drawn) {
          drawn.style.display = input.checked ? "" : "none";
        });
      });
    }
    input.addEventListener("change", apply);
    apply(); // a browser may remember the boxes of an earlier visit
  });

  // Heat maps.
  all(".heats").forEach(function (heats) {
    var index = heats.dataset.heats, ks = heats.dataset.ks.split(" ");
    var slider = document.querySelector("[data-k='" + index + "']");
    var toggle = document.querySelector("[data-pdl-toggle='" + index + "']");
    var maps = all("[data-at]", heats);
    function choose() {
      var k = ks[slider ? Number(slider.value) : 0];
      var pdl = toggle ? (toggle.checked ? "on" : "off") : maps[0].dataset.at.split(" ")[1];
      if (slider) { document.getElementById("heat-k-" + index).textContent = k; }
      maps.forEach(function (map) { map.hidden = map.dataset.at !== k + " " + pdl; });
      cue();
    }
    var cue = cued(heats);
    if (slider) { slider.addEventListener("input", choose); }
    if (toggle) { toggle.addEventListener("change", choose); }
    choose();
    function look(event) {
      var cell = event.target.closest("[data-row]");
      if (cell) { showTip(rowText(index, Number(cell.dataset.row)), event.clientX, event.clientY); }
      else { tip.hidden = true; }
    }
    heats.addEventListener("pointermove", look);
    heats.addEventListener("pointerdown", look);
    heats.addEventListener("pointerleave", function () { tip.hidden = true; });
  });

  // Tables: cells of every problem, sorting, searching, and a word on what a box hides.
  function fillEvery(box) {
    var group = box.dataset.every, body = box.querySelector("tbody");
    var classes = all("thead th", box).map(function (th) { return th.className.replace("short", ""); });
    data.groups[group].rows.forEach(function (_, number) {
      var row = rowOf(group, number), line = make("tr");
      var cells = [shapeOf(row), row.pdl ? "on" : "off", row.published.toFixed(3) + "×", interval(row),
        row.us.toFixed(2), row.baseline_us.toFixed(2), (100 * row.floor_us / row.us).toFixed(1),
        row.baseline, row.regime, kernelOf(group, row)];
      cells.forEach(function (text, i) {
        var cell = make(i ? "td" : "th", classes[i], text);
        if (!i) { cell.scope = "row"; }
        line.appendChild(cell);
      });
      body.appendChild(line);
    });
  }
  function compare(a, b) {
    var x = /^[-\d]/.test(a) ? a.match(/-?\d+(\.\d+)?/g) : null, y = /^[-\d]/.test(b) ? b.match(/-?\d+(\.\d+)?/g) : null;
    if (!x || !y) { return x ? -1 : y ? 1 : a.localeCompare(b); }
    for (var i = 0; i < Math.min(x.length, y.length); i++) {
      if (Number(x[i]) !== Number(y[i])) { return Number(x[i]) - Number(y[i]); }
    }
    return x.length - y.length;
  }
  function sortable(box) {
    all("thead th", box).forEach(function (th, column) {
      var button = make("button", "", th.textContent);
      th.textContent = "";
      th.appendChild(button);
      button.addEventListener("click", function () {
        var down = th.getAttribute("aria-sort") === "ascending";
        all("thead th", box).forEach(function (other) { other.removeAttribute("aria-sort"); });
        th.setAttribute("aria-sort", down ? "descending" : "ascending");
        var body = box.querySelector("tbody");
        var keyed = all("tr", body).map(function (line) { return [line.children[column].textContent, line]; });
        keyed.sort(function (a, b) { return (down ? -1 : 1) * compare(a[0], b[0]); });
        keyed.forEach(function (pair) { body.appendChild(pair[1]); });
      });
    });
  }
  function searchable(box, changed) {
    var tools = make("div", "tools"), input = make("input"), count = make("output");
    input.type = "search";
    input.placeholder = "Search, e.g. 64×64 or launch";
    input.setAttribute("aria-label", "Search the table: " + box.querySelector("caption").textContent);
    tools.appendChild(input);
    tools.appendChild(count);
    box.insertBefore(tools, box.firstChild);
    function find() {
      var words = input.value.toLowerCase().replace(/(\d)x(?=\d|\s|$)/g, "$1×").split(/\s+/).filter(Boolean), shown = 0;
      var lines = all("tbody tr", box);
      lines.forEach(function (line) {
        var text = line.dataset.text || (line.dataset.text = Array.prototype.map.call(line.children, function (cell) {
          return cell.textContent;
        }).join(" ").toLowerCase());
        line.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
        shown += !line.hidden;
      });
      count.textContent = shown + " of " + lines.length + " rows";
      changed();
    }
    input.addEventListener("input", find);
    find();
  }
  function cued(box) {
    var cue = make("p", "cue");
    box.appendChild(cue);
    function look() {
      var scroll = box.querySelector(".scroll:not([hidden]), .plot");
      var wide = scroll.matches(".plot") ? "the whole chart →" : "more columns →";
      var right = scroll.scrollWidth - scroll.clientWidth - scroll.scrollLeft > 2;
      var below = scroll.scrollHeight - scroll.clientHeight - scroll.scrollTop > 2;
      box.classList.toggle("more-right", right);
      box.classList.toggle("more-below", below);
      var hidden = [right ? wide : "", below ? "more rows ↓" : ""].filter(Boolean).join(", ");
      cue.textContent = hidden ? "Scroll for " + hidden : "";
    }
    box.addEventListener("scroll", look, { passive: true, capture: true });
    window.addEventListener("resize", look);
    look();
    return look;
  }
  function ready(box) {
    if (box.dataset.every !== undefined) { fillEvery(box); }
    sortable(box);
    var look = cued(box);
    if (box.classList.contains("searched")) { searchable(box, look); }
  }
  all(".chart").forEach(cued);
  all(".box").forEach(function (box) {
    var folded = box.closest("details:not([open])");
    if (!folded) { ready(box); return; }
    folded.addEventListener("toggle", function () { ready(box); }, { once: true });
  });

  all("[data-copy]").forEach(function (button) {
    button.addEventListener("click", function () {
      var code = button.parentNode.querySelector("code");
      var range = document.createRange();
      range.selectNodeContents(code);
      window.getSelection().removeAllRanges();
      window.getSelection().addRange(range);
      if (document.execCommand("copy")) { button.textContent = "Copied"; }
    });
  });
  root.dataset.ready = "true";
})();
