// The bar above charts: search, axis, logarithm, smoothing, pins and folds. What it shows is part of the address; pins and folds are
// kept in the browser, too, so that the next run is shown in the same way.
"use strict";

(() => {
  const charts = window.rollwrightCharts;
  const PINNED = "Pinned", KEY = "rollwright-charts";
  const bar = () => document.querySelector("[data-chart-bar]");
  const figures = () => [...document.querySelectorAll("figure[data-chart]")];
  const groups = () => [...document.querySelectorAll("details.chart-group")];
  const kept = () => { try { return JSON.parse(localStorage.getItem(KEY)) ?? {}; } catch { return {}; } };
  const keep = (changes) => { try { localStorage.setItem(KEY, JSON.stringify({ ...kept(), ...changes })); } catch { /* private window */ } };

  let state = { x: "step", log: false, smoothing: 0, find: "", pins: [], folded: [] };

  function read() {
    const asked = new URLSearchParams(location.search), stored = kept();
    const axes = [...(bar()?.querySelector("[data-axis]")?.options ?? [])].map((option) => option.value);
    const smoothing = Number(asked.get("smoothing"));
    state = {
      x: axes.includes(asked.get("x")) ? asked.get("x") : "step",
      log: asked.get("log") === "1",
      smoothing: smoothing > 0 && smoothing <= 0.95 ? smoothing : 0,
      find: asked.get("find") ?? "",
      pins: asked.has("pin") ? asked.getAll("pin") : stored.pins ?? [],
      folded: asked.has("fold") ? asked.getAll("fold") : stored.folded ?? [],
    };
  }

  // A view that differs from the usual one is in the address, so that a link shows the same.
  function write() {
    const asked = new URLSearchParams(location.search);
    for (const name of ["x", "log", "smoothing", "find", "pin", "fold"]) asked.delete(name);
    if (state.x !== "step") asked.set("x", state.x);
    if (state.log) asked.set("log", "1");
    if (state.smoothing) asked.set("smoothing", state.smoothing);
    if (state.find) asked.set("find", state.find);
    for (const name of state.pins) asked.append("pin", name);
    for (const name of state.folded) asked.append("fold", name);
    try {
      history.replaceState(history.state, "", location.pathname + (asked.size ? `?${asked}` : "") + location.hash);
    } catch { /* a report that is opened as a file has no such address */ }
    keep({ pins: state.pins, folded: state.folded });
  }

  const nameOf = (figure) => figure.dataset.name;

  // Put pinned charts first, hide what the search leaves out, fold what is folded.
  function arrange() {
    const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
    const pinned = groups().find((group) => group.dataset.group === PINNED);
    let found = 0;
    for (const figure of figures()) {
      const isPinned = state.pins.includes(nameOf(figure)), home = document.getElementById(figure.dataset.home);
      const target = isPinned && pinned ? pinned.querySelector(".curves") : home;
      if (target && figure.parentElement !== target) {
        const next = [...target.children].find((other) => Number(other.dataset.order) > Number(figure.dataset.order));
        target.insertBefore(figure, next ?? null);
      }
      const button = figure.querySelector("[data-do=pin]");
      if (button) button.setAttribute("aria-pressed", String(isPinned));
      const text = `${nameOf(figure)} ${figure.dataset.title}`.toLowerCase();
      figure.hidden = !words.every((word) => text.includes(word));
      found += figure.hidden ? 0 : 1;
    }
    for (const group of groups()) {
      const shown = group.querySelectorAll("figure[data-chart]:not([hidden])").length;
      group.hidden = !shown;
      group.querySelector("[data-count]").textContent = shown;
      group.open = !state.folded.includes(group.dataset.group) || words.length > 0;
    }
    const none = document.querySelector("[data-no-charts]");
    if (none) none.hidden = found > 0;
    const count = bar()?.querySelector("[data-found]");
    if (count) count.textContent = words.length ? `${found} of ${figures().length}` : "";
  }

  function control() {
    const shown = bar();
    if (!shown) return;
    shown.querySelector("[data-axis]").value = state.x;
    shown.querySelector("[data-log]").checked = state.log;
    shown.querySelector("[data-smoothing]").value = state.smoothing;
    const field = shown.querySelector("[data-find]");
    if (document.activeElement !== field) field.value = state.find;
    const top = document.querySelector(".top");
    document.documentElement.style.setProperty("--top", `${top ? top.offsetHeight : 0}px`);
  }

  function show() {
    if (!document.querySelector("figure[data-chart]")) return;
    read();
    control();
    arrange();
    charts.change({ x: state.x, log: state.log, smoothing: state.smoothing });
  }

  function change(changes) {
    state = { ...state, ...changes };
    write();
    arrange();
    control();
    charts.change({ x: state.x, log: state.log, smoothing: state.smoothing });
  }

  document.addEventListener("input", (event) => {
    const { dataset, value } = event.target;
    if (dataset.smoothing !== undefined) change({ smoothing: Number(value) });
    if (dataset.find !== undefined) change({ find: value.trim() });
  });
  document.addEventListener("change", (event) => {
    const { dataset, value, checked } = event.target;
    if (dataset.axis !== undefined) change({ x: value });
    if (dataset.log !== undefined) change({ log: checked });
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-do=pin], [data-do=fold-all]");
    if (!button) return;
    if (button.dataset.do === "fold-all") {
      const names = groups().map((group) => group.dataset.group).filter((name) => name !== PINNED);
      return change({ folded: names.every((name) => state.folded.includes(name)) ? [] : names });
    }
    const figure = button.closest("figure"), name = nameOf(figure);
    change({ pins: state.pins.includes(name) ? state.pins.filter((pin) => pin !== name) : [...state.pins, name] });
    figure.querySelector("[data-do=pin]").focus();
  });
  // A click on a title folds its group; what the search opens is not kept.
  document.addEventListener("click", (event) => {
    const group = event.target.closest("details.chart-group > summary")?.parentElement;
    if (!group || state.find) return;
    event.preventDefault();
    const name = group.dataset.group;
    change({ folded: group.open ? [...state.folded, name] : state.folded.filter((folded) => folded !== name) });
  });
  document.addEventListener("DOMContentLoaded", show);
  document.addEventListener("htmx:afterSettle", show);
})();
