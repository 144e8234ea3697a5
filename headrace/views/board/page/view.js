// What is shown, as it stands in the address: a link opens at the same view.
export const DEFAULT_METRICS = [
  "reward/drawn", "held_out/reward", "reward/trained", "lag/mean", "train/kl", "train/entropy", "length/mean", "share/truncated",
  "share/no_contrast", "train/grad_norm", "train/loss", "time/step_seconds", "time/engine_tokens_per_second", "time/engine_idle",
  "cost/dollars_per_step",
];
const LISTS = ["runs", "metrics"];
export const view = { run: "", runs: [], tab: "overview", over: "step", window: "1", metrics: [], from: "", to: "", steps: "", q: "", show: "", lane: "", colour: "" };
const EMPTY = structuredClone(view);

export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(view)) {
    view[name] = LISTS.includes(name) ? given.getAll(name) : given.get(name) ?? EMPTY[name];
  }
  if (!given.has("tab") && (view.metrics.length || view.runs.length > 1)) view.tab = "curves";  // a link of when they were the first tab
}

export function address() {
  const made = new URLSearchParams();
  for (const [name, value] of Object.entries(view)) {
    if (Array.isArray(value)) value.forEach((one) => made.append(name, one));
    else if (value !== EMPTY[name] || name === "tab") made.set(name, value);
  }
  return "#" + made;
}

// Changes the view; the caller draws what follows from it. A new run or tab is a step that the back button undoes.
export function go(changes) {
  const step = ("run" in changes && changes.run !== view.run) || ("tab" in changes && changes.tab !== view.tab);
  Object.assign(view, changes);
  history[step ? "pushState" : "replaceState"](null, "", address());
}

export async function ask(path, pairs) {
  const answer = await fetch(path + "?" + new URLSearchParams(pairs));
  if (answer.ok) return answer;
  let words = answer.statusText;
  try { words = (await answer.json()).error.message; } catch { /* not from us: a proxy, or a server that has ended */ }
  throw new Error(words);
}

export function element(kind, attributes = {}, ...inside) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made[name] = value;
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...inside.filter((one) => one != null));
  return made;
}

export const number = (value, digits = 3) => {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size !== 0 && size < 1e-3) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits + (size >= 1000 ? 1 : 0))));
};

export const clock = (seconds) => {
  const s = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${pad(Math.floor(s / 60) % 60)}:${pad(s % 60)}` : `${Math.floor(s / 60)}:${pad(s % 60)}`;
};

export const dollars = (value) => (value >= 1000 ? `$${Math.round(value).toLocaleString("en")}` : value >= 0.1 ? `$${value.toFixed(2)}` : `$${Number(value.toPrecision(2))}`);

// At most once in `wait` milliseconds, and always once more after the last call.
export function seldom(work, wait) {
  let timer = 0, last = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(() => { last = Date.now(); work(); }, Math.max(0, wait - (Date.now() - last)));
  };
}
