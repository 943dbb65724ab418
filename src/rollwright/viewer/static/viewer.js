// What every page of `rollwright view` does in the browser: theme, keys, copying, tokens, and following a run that writes.
"use strict";

(() => {
  const root = document.documentElement;
  const page = () => document.getElementById("page");
  const main = () => document.getElementById("main");
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  // -- theme: what the system says, until the reader chooses --------------------------------------------------------
  const stored = (() => { try { return localStorage.getItem("rollwright-theme"); } catch { return null; } })();
  if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  function toggleTheme() {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("rollwright-theme", root.dataset.theme); } catch { /* private window: for this page only */ }
    document.dispatchEvent(new Event("theme"));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));

  // -- telling ------------------------------------------------------------------------------------------------------
  function tell(text) {
    const told = document.getElementById("told");
    const toast = document.createElement("div");
    toast.className = "toast";
    toast.textContent = text;
    told.replaceChildren(toast);
    setTimeout(() => toast.remove(), 1800);
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // no secure context, or not allowed
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    tell("copied");
  }

  // -- tokens -------------------------------------------------------------------------------------------------------
  const facts = new WeakMap();
  function showToken(token) {
    const card = token.closest("[data-tokens]");
    if (!facts.has(card)) facts.set(card, JSON.parse(card.dataset.tokens));
    const all = card.querySelectorAll(".t");
    const index = Array.prototype.indexOf.call(all, token);
    card.querySelector(".t.chosen")?.classList.remove("chosen");
    token.classList.add("chosen");
    const parts = [["token", index], ...facts.get(card).map(([name, values]) => [name, values[index]])];
    card.querySelector(".token-facts").replaceChildren(...parts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => {
      const part = document.createElement("span"), label = document.createElement("b");
      label.textContent = name;
      part.append(label, typeof value === "string" ? JSON.stringify(value).slice(1, -1) : String(value));
      return part;
    }));
  }
  const STRIDES = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  function moveToken(area, by) {
    const all = [...area.querySelectorAll(".t")];
    const next = all[Math.max(0, Math.min(all.length - 1, all.findIndex((each) => each.classList.contains("chosen")) + by))];
    if (next) { showToken(next); next.scrollIntoView({ block: "nearest" }); }
  }
  // Where a sample went another way than better ones: shown at once.
  function showParting() {
    for (const token of document.querySelectorAll("[data-tokens] .t.parts")) {
      const card = token.closest("[data-tokens]");
      if (card.querySelector(".t.chosen")) continue;
      showToken(token);
      if (card.dataset.part === undefined) token.scrollIntoView({ block: "nearest" });
    }
  }
  document.addEventListener("DOMContentLoaded", showParting);
  document.addEventListener("htmx:afterSettle", showParting);
  document.addEventListener("pointerover", (event) => {
    if (event.target.matches?.("[data-tokens] .t")) showToken(event.target);
  });

  // -- clicks -------------------------------------------------------------------------------------------------------
  // htmx takes links of HTML only; those in drawings go the same way, but for a click that asks for another tab.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("svg a[href]");
    if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || !window.htmx) return;
    event.preventDefault();
    go(link.getAttribute("href"));
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-do], [data-copy]");
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target) || (button && !/^(picture|chart-)/.test(button.dataset.do ?? ""))) menu.open = false;
    }
    if (!button) return;
    if (button.dataset.copy !== undefined) copy(button.dataset.copy);
    else if (button.dataset.do === "link") copy(location.href);
    else if (button.dataset.do === "theme") toggleTheme();
    else if (button.dataset.do === "help") document.getElementById("help").showModal();
  });
  // A cell of a table of tasks leads where its row leads.
  document.addEventListener("click", (event) => {
    const link = event.target.closest(".matrix td.cell")?.closest("[data-row]")?.querySelector("[data-open]");
    if (link && !String(getSelection())) go(link.getAttribute("href"));
  });
  document.addEventListener("change", (event) => {
    if (event.target.dataset.do === "values") event.target.closest("[data-tokens]").querySelector(".tokens").classList.toggle("values", event.target.checked);
    if (event.target.matches("[data-filters] select, [data-filters] input:not([type=search])")) event.target.form.requestSubmit();
  });
  // A filter that is empty is no part of the address.
  document.addEventListener("htmx:configRequest", (event) => {
    const asked = event.detail.formData;
    for (const [name, value] of [...asked.entries()]) if (value === "") asked.delete(name);
  });

  // -- keys ---------------------------------------------------------------------------------------------------------
  const go = (address) => {
    if (!address) return;
    const link = document.createElement("a");
    link.href = address;
    link.hidden = true;
    page().append(link);
    window.htmx?.process(link);
    link.click();
  };
  window.rollwright = { tell, go };
  function step(by) {
    const neighbour = by > 0 ? main().dataset.next : main().dataset.previous;
    const rows = [...document.querySelectorAll("[data-row] [data-open]")];
    if (neighbour) return go(neighbour);
    if (rows.length) {
      const at = rows.indexOf(document.activeElement);
      const next = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by))];
      next.focus({ focusVisible: true });
      next.closest("[data-row]").scrollIntoView({ block: "nearest" });
    } else if (main().dataset.group) tell("there is no further sample");
  }
  const keys = {
    j: () => step(1),
    k: () => step(-1),
    g: () => go(main().dataset.group),
    t: toggleTheme,
    u: () => go([...document.querySelectorAll(".crumbs a")].pop()?.getAttribute("href")),
    "?": () => document.getElementById("help").showModal(),
    "/": () => {
      const field = document.getElementById("search");
      if (field) { field.focus(); field.select(); } else go(main().dataset.search);
    },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") for (const menu of document.querySelectorAll("details.menu[open]")) menu.open = false;
    if (event.target.matches("input, select, textarea")) return;
    const tokens = event.target.closest(".tokens");
    if (tokens && event.key in STRIDES) {
      moveToken(tokens, STRIDES[event.key]);
      event.preventDefault();
    } else if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });
  document.addEventListener("htmx:afterSettle", () => {
    if (location.pathname.endsWith("/search") && document.activeElement === document.body) document.getElementById("search")?.focus({ preventScroll: true });
  });

  // -- following a run that writes ----------------------------------------------------------------------------------
  // Why the page is not replaced now, in words; empty if it may be.
  function pause() {
    if (document.hidden || document.querySelector(".htmx-request")) return "waits";
    if (document.querySelector("details[open]:not([data-group], .turn), dialog[open]")) return "paused while something is open";
    if (document.activeElement?.matches(".tokens")) return "paused while the tokens have the focus";
    if (document.activeElement?.matches("input, select, textarea")) return "paused while a field has the focus";
    return String(getSelection()) ? "paused while text is selected" : "";
  }
  function say(text) {
    for (const live of document.querySelectorAll("[data-live]")) if (live.textContent !== text) live.textContent = text;
  }
  async function follow() {
    const { stamp, stampUrl } = page().dataset, paused = pause();
    say(paused && paused !== "waits" ? paused : "follows the run");
    if (!stampUrl || paused) return;
    const answer = await fetch(stampUrl).catch(() => null);
    if (!answer) return say("stopped: the viewer does not answer");
    if (!answer.ok) return say(`stopped: the viewer answered ${answer.status}`);
    if ((await answer.text()) === stamp || page().dataset.stamp !== stamp || pause()) return;
    // Meanwhile the reader may have gone on: nothing is asked in the reader's place, and a page that is old is not put in.
    const here = location.href, shown = page();
    const html = await fetch(here).then((page) => (page.ok ? page.text() : "")).catch(() => "");
    if (!html || location.href !== here || page() !== shown || pause()) return;
    const chosen = [...document.querySelectorAll("[data-open]")].indexOf(document.activeElement);
    window.htmx.swap("#page", html, { swapStyle: "outerHTML", swapDelay: 0, settleDelay: 0 }, { select: "#page" });
    if (chosen >= 0) document.querySelectorAll("[data-open]")[chosen]?.focus({ preventScroll: true });
  }
  setInterval(follow, 2000);
})();
