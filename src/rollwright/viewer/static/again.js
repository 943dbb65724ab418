// Samples a recorded call again: POST starts an engine on the viewer's machine, which ends with the page.
"use strict";

(() => {
  let asked = ""; // address of the run whose engine was started
  const post = (url, body, more = {}) => fetch(url, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...more });
  function end() {
    if (asked) post(asked, {}, { keepalive: true }).catch(() => {});
    asked = "";
  }
  document.addEventListener("submit", async (event) => {
    const form = event.target.closest("[data-again]");
    if (!form) return;
    event.preventDefault();
    event.stopPropagation();
    const button = form.querySelector("button"), answers = document.getElementById("again-answers"), text = button.textContent;
    button.disabled = true;
    button.textContent = asked ? "Sampling…" : "Starting an engine…";
    const body = { ...JSON.parse(form.dataset.again), model: form.elements.model.value, same_seed: form.elements.same_seed.checked };
    asked = form.dataset.url;
    const answer = await post(asked, body).catch(() => null);
    const html = answer ? await answer.text() : "";
    button.disabled = false;
    button.textContent = text;
    const page = new DOMParser().parseFromString(html, "text/html");
    const made = page.querySelector("section.card") ?? document.createElement("p");
    if (!answer?.ok) {
      made.className = "state bad";
      made.textContent = page.querySelector("#main p")?.textContent || html.slice(0, 300) || "the viewer does not answer";
    }
    answers.prepend(document.importNode(made, true));
  }, true);
  addEventListener("pagehide", end);
  document.addEventListener("htmx:beforeSwap", () => { if (document.querySelector("[data-again]")) setTimeout(() => { if (!document.querySelector("[data-again]")) end(); }, 500); });
})();
