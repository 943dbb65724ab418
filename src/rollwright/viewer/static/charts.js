// Charts, drawn by uPlot: zoom by dragging, values under the pointer, any axis, a band around the mean of seeds, a click opens a step.
"use strict";

(() => {
  const drawn = new Map(); // figure -> uPlot
  const view = { x: "step", log: false, smoothing: 0 }; // what chart_bar.js changes
  let zoom = null; // part of the axis that is shown: kept when the page follows the run
  let zoomOf = "";
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // As ``number`` in tracking/readable.py; an axis has room for large numbers in thousands and millions only.
  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return minus(Math.round(value).toLocaleString("en-US"));
    if (size && size < 1e-3) return minus(value.toExponential(1).replace(/e([+-])(\d)$/, "e$10$2"));
    return minus(String(size < 1 ? +value.toPrecision(4) : +value.toFixed(2)));
  }
  const minus = (text) => text.replace(/^-/, "−");
  function short(value) {
    const size = Math.abs(value ?? 0);
    if (size >= 1e9) return minus(+(value / 1e9).toPrecision(3) + "G");
    if (size >= 1e6) return minus(+(value / 1e6).toPrecision(3) + "M");
    return size >= 1e4 ? minus(+(value / 1e3).toPrecision(3) + "k") : number(value);
  }
  function duration(seconds) {
    const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
    const at = parts.findIndex(([, size]) => seconds >= size);
    if (at < 0) return `${number(seconds)} s`;
    const [unit, size] = parts[at], whole = Math.floor(seconds / size + 1e-9), rest = parts[at + 1] && Math.round((seconds - whole * size) / parts[at + 1][1]);
    return `${at === 3 ? number(seconds) : whole} ${unit}${rest ? ` ${rest} ${parts[at + 1][0]}` : ""}`;
  }
  const place = (value) => (view.x === "time" ? duration(value) : view.x === "step" ? String(value) : short(value));

  // Steps and samples are whole numbers, so are the ticks below them; ticks of time are round times.
  const WHOLE = Array.from({ length: 36 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));
  const TIMES = [0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 8640000];

  // An exponential mean without the bias of its first values.
  function smooth(values, weight) {
    let mean = 0, total = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      mean = mean * weight + value * (1 - weight);
      total = total * weight + (1 - weight);
      return mean / total;
    });
  }

  // Values that differ by their last bits only are one value: between them there is no room for ticks.
  function range(_, low, high) {
    if (low === null || high === null) return [0, 1];
    const room = Math.max(Math.abs(low), Math.abs(high));
    return high - low > 1e-6 * room ? uPlot.rangeNum(low, high, 0.1, true) : [low - (room || 1) / 2, high + (room || 1) / 2];
  }
  const logRange = (_, low, high) => (low === null || high === null || !(low > 0) ? [0.1, 1] : uPlot.rangeLog(low, high, 10, false));

  // The position of a step on the axis that is shown: between two known ones, on the line from one to the other.
  function positions(chart, series) {
    if (view.x === "step") return (step) => step;
    const axes = JSON.parse(chart.closest("[data-axes]")?.dataset.axes ?? "[]");
    const known = axes[series.line ?? 0]?.[view.x];
    if (!known) return null;
    return (step) => {
      let low = 0, high = known.length - 1;
      if (step <= known[0][0]) return known[0][1];
      if (step >= known[high][0]) return known[high][1];
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (known[middle][0] <= step) low = middle; else high = middle;
      }
      const [from, to] = [known[low], known[high]];
      return from[1] + ((step - from[0]) / (to[0] - from[0])) * (to[1] - from[1]);
    };
  }

  // What a chart shows now: its columns, the lines that they make, and the step of each position.
  function prepared(figure) {
    const chart = JSON.parse(figure.dataset.chart), steps = new Map(), tables = [], lines = [];
    let lacking = 0;
    const isLog = view.log && chart.series.some((each) => each.points.some((point) => point[1] > 0));
    const value = (number) => (isLog && !(number > 0) ? null : number);
    chart.series.forEach((each) => {
      const at = positions(figure, each);
      if (!at) { lacking += 1; return; }
      const xs = each.points.map((point) => at(point[0])), edges = each.low ? [each.low, each.high] : [];
      each.points.forEach((point, index) => steps.has(xs[index]) || steps.set(xs[index], point[0]));
      lines.push({ ...each, few: each.points.length < 40, colour: ((each.line ?? lines.length) % 6) + 1, dash: [[], [6, 3], [2, 3], [8, 3, 2, 3]][(each.line ?? lines.length) % 4] });
      tables.push([xs, ...[each.points, ...edges].map((points) => points.map((point) => value(point[1])))]);
    });
    return { chart, lines, steps, lacking, isLog, columns: tables.length ? uPlot.join(tables) : [[]] };
  }

  function draw(figure) {
    drawn.get(figure)?.destroy();
    drawn.delete(figure);
    const plot = figure.querySelector(".plot"), output = figure.querySelector("output");
    if (figure.hidden || figure.closest("details:not([open]), [hidden]")) return; // folded or filtered out: drawn as soon as it is seen
    const { chart, lines, steps, lacking, isLog, columns: joined } = prepared(figure);
    output.textContent = chart.last;
    plot.replaceChildren();
    if (!lines.length) {
      plot.textContent = `The run did not record ${view.x} for these steps.`;
      return;
    }
    const weight = chart.series.some((each) => each.points.length > 2) ? view.smoothing : 0;
    const series = [{}], columns = [joined[0]], bands = [], mains = [];
    let at = 1;
    for (const line of lines) {
      const stroke = colour(`--curve-${line.colour}`), values = joined[at];
      if (weight && !line.low) {
        series.push({ label: line.label, stroke: stroke + "44", width: 1, spanGaps: true, points: { show: false } });
        columns.push(values);
      }
      mains.push(series.length);
      series.push({ label: line.label, stroke, width: 1.7, spanGaps: true, dash: line.dash, points: { show: line.few && !weight, size: 4, fill: stroke } });
      columns.push(weight ? smooth(values, weight) : values);
      if (line.low) {
        for (const edge of [joined[at + 1], joined[at + 2]]) {
          series.push({ label: line.label, stroke: stroke + "00", width: 0, spanGaps: true, points: { show: false } });
          columns.push(weight ? smooth(edge, weight) : edge);
        }
        bands.push({ series: [series.length - 1, series.length - 2], fill: stroke + "2e" });
      }
      at += line.low ? 3 : 1;
    }
    // Lines of other runs have other positions: the value of each is that of its nearest point.
    const near = (column, index) => {
      for (let off = 0; off < column.length; off += 1) {
        for (const value of [column[index - off], column[index + off]]) if (value !== null && value !== undefined) return value;
      }
      return null;
    };
    const says = (index) => {
      const values = lines.map((line, order) => (lines.length > 1 ? `${(line.line ?? order) + 1}: ` : "") + number(near(columns[mains[order]], index)));
      return `${view.x === "step" ? "step " : ""}${place(columns[0][index])} · ${values.join("  ")}`;
    };
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const options = {
      width: Math.max(200, plot.clientWidth), height: 170, series, bands, padding: [8, 12, 0, 0], legend: { show: false },
      scales: { x: { time: false }, y: isLog ? { distr: 3, range: logRange } : { range } },
      axes: [
        { ...axis, size: 26, incrs: view.x === "time" ? TIMES : WHOLE, space: view.x === "time" ? 70 : 50, values: (_, ticks) => ticks.map(place) },
        { ...axis, size: 46, values: (_, ticks) => ticks.map((tick) => (tick === null ? null : short(tick))) },
      ],
      cursor: { sync: { key: "charts" }, points: { size: 7 }, drag: { x: true, y: false, setScale: true } },
      hooks: {
        setCursor: [(u) => { output.textContent = u.cursor.idx === null || u.cursor.idx === undefined ? chart.last : says(u.cursor.idx); }],
        setScale: [(u, key) => {
          if (key !== "x" || u.status !== 1) return;
          const whole = [columns[0][0], columns[0][columns[0].length - 1]];
          zoom = u.scales.x.min <= whole[0] && u.scales.x.max >= whole[1] ? null : [u.scales.x.min, u.scales.x.max];
        }],
        ready: [(u) => {
          u.over.addEventListener("click", (event) => {
            if (u.select.width > 3 || u.cursor.idx === null || u.cursor.idx === undefined || !figure.dataset.click) return;
            event.preventDefault();
            window.rollwright.go(figure.dataset.click + steps.get(columns[0][u.cursor.idx]));
          });
        }],
      },
    };
    const made = new uPlot(options, columns, plot);
    made.shown = { chart, lines, mains, isLog, lacking };
    if (zoom && zoomOf === location.pathname) made.setScale("x", { min: zoom[0], max: zoom[1] });
    drawn.set(figure, made);
  }

  function drawAll() {
    for (const [figure, made] of drawn) if (!figure.isConnected) { made.destroy(); drawn.delete(figure); }
    if (zoomOf !== location.pathname) { zoom = null; zoomOf = location.pathname; }
    for (const figure of document.querySelectorAll("figure[data-chart]")) draw(figure);
  }

  // Change what all charts show; a zoom is of one axis only.
  function change(changes) {
    if (changes.x !== undefined && changes.x !== view.x) zoom = null;
    Object.assign(view, changes);
    drawAll();
  }
  window.rollwrightCharts = { change, draw, drawAll, view, drawn, colour, number };

  document.addEventListener("theme", drawAll);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });
})();
