// One chart as a file: SVG with its axes and legend, and PNG drawn from that.
"use strict";

(() => {
  const charts = window.rollwrightCharts;
  const WIDTH = 760, HEIGHT = 380, FONT = "system-ui, sans-serif";
  const escaped = (text) => String(text).replace(/[&<>"]/g, (each) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[each]);

  function text(x, y, content, { anchor = "start", size = 12, fill = "--muted", weight = 400 } = {}) {
    return `<text x="${x}" y="${y}" text-anchor="${anchor}" font-family="${FONT}" font-size="${size}" font-weight="${weight}" fill="${charts.colour(fill)}">${escaped(content)}</text>`;
  }

  // Legends are as long as the labels: rows of as many as fit.
  function legend(lines, several) {
    const rows = [[]];
    let left = 0;
    for (const line of several ? lines : []) {
      const width = 34 + 6.6 * line.label.length;
      if (left && left + width > WIDTH - 32) { rows.push([]); left = 0; }
      rows[rows.length - 1].push([line, left]);
      left += width;
    }
    return rows[0].length ? rows : [];
  }

  function svg(figure) {
    const u = charts.drawn.get(figure);
    const { chart, lines, mains, isLog } = u.shown, several = chart.series.length > 1 || lines[0].low;
    const rows = legend(lines, several), top = 44 + 18 * rows.length, box = { left: 62, top, right: WIDTH - 18, bottom: HEIGHT - 42 };
    const { x, y } = u.scales, axis = (value) => (isLog ? Math.log10(value) : value);
    const across = (value) => box.left + ((value - x.min) / (x.max - x.min || 1)) * (box.right - box.left);
    const up = (value) => box.bottom - ((axis(value) - axis(y.min)) / (axis(y.max) - axis(y.min) || 1)) * (box.bottom - box.top);
    const inside = (index) => u.data[0][index] >= x.min && u.data[0][index] <= x.max;
    const points = (column) => u.data[column].map((value, index) => [u.data[0][index], value, index])
      .filter(([, value, index]) => value !== null && value !== undefined && inside(index))
      .map(([at, value]) => `${across(at).toFixed(2)},${up(value).toFixed(2)}`);
    const parts = [`<rect width="${WIDTH}" height="${HEIGHT}" fill="${charts.colour("--surface")}"/>`];
    parts.push(text(16, 26, chart.title + (chart.unit ? ` (${chart.unit})` : ""), { size: 15, fill: "--text", weight: 600 }));
    rows.forEach((row, number) => row.forEach(([line, left]) => {
      const at = 42 + 18 * number;
      parts.push(`<line x1="${16 + left}" x2="${38 + left}" y1="${at - 4}" y2="${at - 4}" stroke="${charts.colour(`--curve-${line.colour}`)}" stroke-width="2" stroke-dasharray="${line.dash}"/>`, text(44 + left, at, line.label));
    }));
    const [below, beside] = u.axes;
    (below._splits ?? []).forEach((value, index) => {
      if (below._values[index] === null || value < x.min || value > x.max) return;
      parts.push(`<line x1="${across(value)}" x2="${across(value)}" y1="${box.top}" y2="${box.bottom}" stroke="${charts.colour("--line")}"/>`, text(across(value), box.bottom + 17, below._values[index], { anchor: "middle", size: 11 }));
    });
    (beside._splits ?? []).forEach((value, index) => {
      if (value < y.min || value > y.max) return;
      parts.push(`<line x1="${box.left}" x2="${box.right}" y1="${up(value)}" y2="${up(value)}" stroke="${charts.colour("--line")}"/>`);
      if (beside._values[index]) parts.push(text(box.left - 7, up(value) + 4, beside._values[index], { anchor: "end", size: 11 }));
    });
    parts.push(text((box.left + box.right) / 2, HEIGHT - 9, { step: "step", time: "time of training", tokens: "tokens", samples: "samples" }[charts.view.x], { anchor: "middle" }));
    lines.forEach((line, order) => {
      const stroke = charts.colour(`--curve-${line.colour}`), main = mains[order];
      if (line.low) parts.push(`<polygon points="${[...points(main + 2), ...points(main + 1).reverse()].join(" ")}" fill="${stroke}" fill-opacity="0.18"/>`);
      parts.push(`<polyline points="${points(main).join(" ")}" fill="none" stroke="${stroke}" stroke-width="1.8" stroke-dasharray="${line.dash}"/>`);
      if (line.few) for (const point of points(main)) parts.push(`<circle cx="${point.split(",")[0]}" cy="${point.split(",")[1]}" r="2" fill="${stroke}"/>`);
    });
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${HEIGHT}" viewBox="0 0 ${WIDTH} ${HEIGHT}">${parts.join("")}</svg>`;
  }

  async function png(source) {
    const image = new Image();
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(source);
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 2 * WIDTH;
    canvas.height = 2 * HEIGHT;
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.drawImage(image, 0, 0, WIDTH, HEIGHT);
    return canvas.toDataURL("image/png");
  }

  async function save(figure, kind) {
    const source = svg(figure), link = document.createElement("a");
    link.href = kind === "png" ? await png(source) : "data:image/svg+xml;charset=utf-8," + encodeURIComponent(source);
    link.download = `${figure.dataset.name.replace(/[^\w.-]+/g, "-")}.${kind}`;
    link.click();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-do=chart-svg], [data-do=chart-png]");
    if (!button) return;
    const figure = button.closest("figure");
    button.closest("details.menu").open = false;
    if (!charts.drawn.has(figure)) return window.rollwright.tell("nothing is drawn here");
    save(figure, button.dataset.do.slice(-3)).catch((error) => window.rollwright.tell(`no file: ${error.message}`));
  });
})();
