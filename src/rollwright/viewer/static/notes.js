// Tags and notes of runs: a dialog that sends them to the viewer, which keeps them beside the run.
"use strict";

(() => {
  const dialog = () => document.getElementById("notes");
  let button = null;

  function problem(text) {
    const shown = dialog().querySelector(".problem");
    shown.textContent = text;
    shown.hidden = !text;
  }

  function open(chosen) {
    button = chosen;
    const { tags, note } = JSON.parse(button.dataset.notes), form = dialog().querySelector("form");
    form.elements.tags.value = tags.join(", ");
    form.elements.note.value = note;
    problem("");
    dialog().showModal();
  }

  async function save(form) {
    const { seen } = JSON.parse(button.dataset.notes);
    const tags = form.elements.tags.value.split(/[\s,]+/).filter(Boolean), note = form.elements.note.value.trim();
    const answer = await fetch(button.dataset.url, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ tags, note, seen }) });
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({}));
      const faults = Array.isArray(said.detail) ? said.detail.map((each) => `${each.loc.slice(1).join(" ")}: ${each.msg}`).join("; ") : "";
      throw new Error(said.error?.message ?? said.error ?? (faults || `the viewer answered ${answer.status}`));
    }
    dialog().close();
    const here = location.href, html = await fetch(here).then((page) => page.text());
    if (location.href === here) window.htmx.swap("#page", html, { swapStyle: "outerHTML", swapDelay: 0, settleDelay: 0 }, { select: "#page" });
    window.rollwright.tell("saved");
  }

  document.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-do=notes], [data-do=close-notes]");
    if (chosen?.dataset.do === "notes") open(chosen);
    else if (chosen) dialog().close();
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-notes-form]")) return;
    event.preventDefault();
    save(event.target).catch((error) => problem(error.message));
  });
})();
