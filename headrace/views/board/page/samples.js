// The sample browser: the form's conditions stand in the address, the server answers with rows as the report has them.
import { view, go, ask, element } from "/static/view.js";

const FIELDS = [
  ["words", "search", "search in prompts and completions"], ["least", "number", "reward from"], ["most", "number", "to"],
  ["from", "number", "steps from"], ["to", "number", "to"], ["lag", "number", "lag from"], ["ticket", "number", "ticket"],
  ["rollout", "number", "rollout"],
];
const MARKS = [["cut", "cut off"], ["failed", "with failures"], ["gone", "never trained"]];
const ORDERS = { newest: "newest first", oldest: "oldest first", worst: "lowest reward first", best: "highest reward first", longest: "longest first" };

let asked = 0, colouring = "lag", chosen = null;   // chosen: the first of two rollouts that are to be compared

export function drawSamples(into) {
  const given = new URLSearchParams(view.q);
  const form = element("form", { class: "toolbar sieve", onsubmit: (event) => { event.preventDefault(); search(); } });
  for (const [name, type, text] of FIELDS) {
    const field = element("input", { name, type, step: "any", value: given.get(name) ?? "", placeholder: type === "search" ? text : false, "aria-label": text });
    form.append(element("label", { class: name }, type === "search" ? "" : text, field));
  }
  for (const [name, text] of MARKS) {
    form.append(element("label", {}, element("input", { name, type: "checkbox", value: "1", checked: given.get(name) === "1" }), text));
  }
  const order = element("select", { name: "order", "aria-label": "order" });
  for (const [value, text] of Object.entries(ORDERS)) order.append(new Option(text, value, false, given.get("order") === value));
  form.append(order, element("button", {}, "show"), element("button", { type: "button", onclick: () => { go({ q: "" }); drawSamples(into); } }, "reset"));
  form.onchange = search;
  const found = element("div", { id: "found" });
  chosen = null;
  into.replaceChildren(form, element("div", { id: "compared" }), found);
  show(found, 0);

  function search() {
    const pairs = [...new FormData(form)].filter(([name, value]) => value && !(name === "order" && value === "newest"));
    go({ q: String(new URLSearchParams(pairs)) });
    found.replaceChildren();
    show(found, 0);
  }
}

async function show(found, start) {
  const turn = ++asked;
  const waiting = element("p", { class: "empty" }, "Reading …");
  found.append(waiting);
  try {
    const answer = await (await ask("/api/rollouts", [["run", view.run], ["start", start], ...new URLSearchParams(view.q)])).json();
    if (turn !== asked) return;
    const part = element("div");
    part.innerHTML = answer.html;
    const line = element("div", { class: "more-line" }, `${answer.shown} shown · ${answer.candidates.toLocaleString("en")} groups fit the numbers`);
    if (answer.following != null) {
      const next = element("button", { type: "button", onclick: () => { line.remove(); show(found, answer.following); } }, answer.shown ? "more" : "search on");
      line.prepend(next);
    }
    found.append(part, line);
    setUp(part);
    for (const place of part.querySelectorAll(".place")) {
      place.after(element("button", { type: "button", class: "compare", "aria-pressed": String(place.dataset.place === chosen), onclick: (event) => choose(event.target, place.dataset.place) }, "compare"));
    }
    for (const choice of part.querySelectorAll(".colour-by")) {
      choice.value = colouring;
      if (colouring !== "lag") colourTokens(part, colouring);
      choice.addEventListener("change", () => { colouring = choice.value; });
    }
  } catch (error) {
    found.append(element("p", { class: "banner" }, error.message));
  } finally {
    waiting.remove();
  }
}

// The first click chooses a rollout, also for a later search; the second one shows both.
async function choose(button, place) {
  const into = document.getElementById("compared");
  if (chosen === null || chosen === place) {
    chosen = chosen === null ? place : null;
    button.setAttribute("aria-pressed", String(chosen !== null));
    into.replaceChildren(chosen === null ? "" : element("p", { class: "banner calm" }, `Rollout ${place}: choose another one to compare it with.`));
    return;
  }
  const first = chosen;
  chosen = null;
  for (const pressed of document.querySelectorAll(".compare")) pressed.setAttribute("aria-pressed", "false");
  try {
    into.innerHTML = await (await ask("/api/compared", [["run", view.run], ["one", first], ["other", place]])).text();
  } catch (error) {
    into.replaceChildren(element("p", { class: "banner" }, error.message));
  }
  into.scrollIntoView({ block: "nearest" });
}
