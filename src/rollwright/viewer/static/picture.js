// A view as PNG, made in the page; and zooming of the timeline by dragging.
"use strict";

(() => {
  async function picture() {
    const source = document.getElementById("main");
    for (const menu of document.querySelectorAll("details.menu[open]")) menu.open = false;
    const width = source.offsetWidth, height = Math.min(source.offsetHeight, 12000), scale = height > 6000 ? 1 : 2;
    const clone = source.cloneNode(true);
    for (const each of clone.querySelectorAll(".actions, .skip")) each.remove();
    const canvases = source.querySelectorAll("canvas");
    clone.querySelectorAll("canvas").forEach((each, index) => { // curves are canvases, which a clone has empty
      const image = document.createElement("img");
      image.src = canvases[index].toDataURL();
      image.setAttribute("width", canvases[index].clientWidth);
      image.setAttribute("height", canvases[index].clientHeight);
      each.replaceWith(image);
    });
    const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules].map((rule) => rule.cssText)).join("\n");
    const theme = document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    const frame = document.createElement("div");
    frame.setAttribute("data-theme", theme);
    frame.className = "picture";
    frame.append(clone);
    const html = new XMLSerializer().serializeToString(frame);
    const style = rules.replaceAll("]]>", "").replaceAll(":root", ".picture") ;
    const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}"><foreignObject width="100%" height="100%">` +
      `<style xmlns="http://www.w3.org/1999/xhtml"><![CDATA[${style}\n.picture{font:14px/1.5 var(--sans);background:var(--page);color:var(--text);width:${width}px;min-height:${height}px;font-variant-numeric:tabular-nums}]]></style>${html}</foreignObject></svg>`;
    const image = new Image();
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svg);
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.drawImage(image, 0, 0);
    const link = document.createElement("a");
    link.href = canvas.toDataURL("image/png");
    link.download = (document.title.split(" · ")[0].replace(/[^\w.-]+/g, "-") || "view") + ".png";
    link.click();
  }
  document.addEventListener("click", (event) => {
    if (event.target.closest('[data-do="picture"]')) picture().catch((error) => window.rollwright.tell(`no picture: ${error.message}`));
  });

  // -- the timeline: drag over a span of time to see it larger ------------------------------------------------------
  let from = null;
  const place = (svg, event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return Math.max(Number(svg.dataset.left), Math.min(view.width, ((event.clientX - box.left) / box.width) * view.width));
  };
  document.addEventListener("pointerdown", (event) => {
    const svg = event.target.closest("[data-timeline]");
    if (svg && event.button === 0) { from = { svg, x: place(svg, event) }; }
  });
  document.addEventListener("pointermove", (event) => {
    if (!from) return;
    const to = place(from.svg, event), selection = from.svg.querySelector("[data-selection]");
    selection.setAttribute("x", Math.min(from.x, to));
    selection.setAttribute("width", Math.abs(to - from.x));
  });
  document.addEventListener("pointerup", (event) => {
    if (!from) return;
    const { svg, x } = from, to = place(svg, event);
    from = null;
    svg.querySelector("[data-selection]").setAttribute("width", 0);
    if (Math.abs(to - x) < 6) return;
    const left = Number(svg.dataset.left), start = Number(svg.dataset.start), end = Number(svg.dataset.end);
    const time = (at) => (start + ((at - left) / (svg.viewBox.baseVal.width - left)) * (end - start)).toFixed(4);
    const address = `${svg.dataset.timeline}?start=${time(Math.min(x, to))}&end=${time(Math.max(x, to))}`;
    window.rollwright.go(address);
    svg.addEventListener("click", (click) => click.preventDefault(), { once: true, capture: true });
  });
})();
