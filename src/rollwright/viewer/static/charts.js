// Curves over steps, drawn by uPlot: zoom by dragging, values under the pointer, smoothing, a click opens a step.
"use strict";

(() => {
  const drawn = new Map(); // figure -> uPlot
  let smoothing = 0;
  let zoom = null; // steps that are shown: kept when the page follows the run
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
    if (size >= 1e6) return minus((value / 1e6).toPrecision(3) + "M");
    return size >= 1e4 ? minus((value / 1e3).toPrecision(3) + "k") : number(value);
  }

  // Steps are whole numbers, so are the ticks below them.
  const STEPS = Array.from({ length: 27 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));

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

  function draw(figure) {
    drawn.get(figure)?.destroy();
    const chart = JSON.parse(figure.dataset.chart);
    const plot = figure.querySelector(".plot"), output = figure.querySelector("output");
    const data = uPlot.join(chart.series.map((each) => [each.points.map((point) => point[0]), each.points.map((point) => point[1])]));
    const weight = chart.series.some((each) => each.points.length > 2) ? smoothing : 0;
    const series = [{}];
    const columns = [data[0]];
    chart.series.forEach((each, index) => {
      const stroke = colour(`--curve-${(index % 6) + 1}`);
      const few = each.points.length < 40;
      const dash = [[], [6, 3], [2, 3], [8, 3, 2, 3]][index % 4];
      if (weight) {
        series.push({ label: each.label, stroke: stroke + "44", width: 1, spanGaps: true, points: { show: false } });
        columns.push(data[index + 1]);
      }
      series.push({ label: each.label, stroke, width: 1.7, spanGaps: true, dash, points: { show: few && !weight, size: 4, fill: stroke } });
      columns.push(weight ? smooth(data[index + 1], weight) : data[index + 1]);
    });
    const axis = { stroke: colour("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const says = (at) => {
      const lines = weight ? 2 : 1;
      const values = chart.series.map((each, index) => (chart.series.length > 1 ? `${index + 1}: ` : "") + number(columns[lines * index + lines][at]));
      return `step ${columns[0][at]} · ${values.join("  ")}`;
    };
    const options = {
      width: Math.max(200, plot.clientWidth), height: 170, series, padding: [8, 8, 0, 0], legend: { show: false },
      scales: { x: { time: false }, y: { range } },
      axes: [{ ...axis, size: 26, incrs: STEPS }, { ...axis, size: 46, values: (_, ticks) => ticks.map(short) }],
      cursor: { sync: { key: "steps" }, points: { size: 7 }, drag: { x: true, y: false, setScale: true } },
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
            window.rollwright.go(figure.dataset.click + columns[0][u.cursor.idx]);
          });
        }],
      },
    };
    const made = new uPlot(options, columns, plot);
    if (zoom && zoomOf === location.pathname) made.setScale("x", { min: zoom[0], max: zoom[1] });
    drawn.set(figure, made);
  }

  function drawAll() {
    for (const [figure, made] of drawn) if (!figure.isConnected) { made.destroy(); drawn.delete(figure); }
    if (zoomOf !== location.pathname) { zoom = null; zoomOf = location.pathname; }
    const control = document.querySelector("[data-smoothing]");
    if (control) control.value = smoothing;
    for (const figure of document.querySelectorAll("figure[data-chart]")) draw(figure);
  }

  document.addEventListener("input", (event) => {
    if (event.target.dataset.smoothing === undefined) return;
    smoothing = Number(event.target.value);
    drawAll();
  });
  document.addEventListener("theme", drawAll);
  document.addEventListener("DOMContentLoaded", drawAll);
  document.addEventListener("htmx:afterSettle", drawAll);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 120); });
})();
