"use strict";
// The theme: what the system says until the button is pressed.
const root = document.documentElement;
const asked = new URLSearchParams(location.search).get("theme");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const setTheme = (theme) => { root.dataset.theme = theme; };
setTheme(asked || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
document.getElementById("theme").onclick = () => setTheme(root.dataset.theme === "dark" ? "light" : "dark");

// One tooltip for every mark with data-tip.
const tip = document.getElementById("tip");
document.addEventListener("mousemove", (event) => {
  const text = event.target.dataset && event.target.dataset.tip;
  tip.style.opacity = text ? 1 : 0;
  if (!text) return;
  tip.textContent = text;
  const left = Math.max(8, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8));
  const above = event.clientY + 16 + tip.offsetHeight > window.innerHeight;
  tip.style.left = left + "px";
  tip.style.top = (above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 16) + "px";
});

// The time chart: its bars lie in seconds, so zooming is a new view box.
function setUpGantt(gantt) {
  const svg = gantt.querySelector("svg"), axis = gantt.querySelector(".gantt-axis");
  const first = Number(gantt.dataset.start), last = Number(gantt.dataset.end), height = svg.viewBox.baseVal.height;
  const origin = Number(gantt.dataset.origin || 0);  // the second of the run at which the chart's own begin
  let left = svg.viewBox.baseVal.x, width = svg.viewBox.baseVal.width;

  const clock = (seconds) => {
    const s = Math.floor(seconds + 1e-6), pad = (n) => String(n).padStart(2, "0");
    return s >= 3600 ? `${Math.floor(s / 3600)}:${pad(Math.floor(s / 60) % 60)}:${pad(s % 60)}` : `${Math.floor(s / 60)}:${pad(s % 60)}`;
  };
  const show = (newLeft, newWidth) => {
    width = Math.min(Math.max(newWidth, Math.min(2, (last - first) / 20)), last - first);
    left = Math.min(Math.max(newLeft, first), last - width);
    svg.setAttribute("viewBox", `${left} 0 ${width} ${height}`);
    const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
    const most = Math.min(10, Math.max(2, axis.clientWidth / 64));
    const step = steps.find((s) => width / s <= most) || 604800;
    axis.replaceChildren();
    for (let n = Math.ceil((left + origin) / step); n * step <= left + origin + width; n++) {
      const t = n * step - origin;
      const mark = document.createElement("span");
      mark.textContent = clock(n * step) + (step < 1 ? `.${Math.round(10 * n * step) % 10}` : "");
      mark.style.left = (100 * (t - left)) / width + "%";
      axis.append(mark);
    }
  };
  const zoom = (factor, at = 0.5) => show(left + width * at * (1 - factor), width * factor);
  const does = {
    all: () => show(first, last - first), in: () => zoom(0.5), out: () => zoom(2),
    left: () => show(left - width / 2, width), right: () => show(left + width / 2, width),
  };
  for (const button of gantt.querySelectorAll("button")) button.onclick = does[button.dataset.do];
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / svg.clientWidth);
  }, { passive: false });
  svg.tabIndex = 0;
  svg.setAttribute("aria-label", "chart over time: arrows move it, + and - zoom it, 0 shows all");
  svg.addEventListener("keydown", (event) => {
    const what = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", 0: "all" }[event.key];
    if (!what || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    does[what]();
  });
  let held = null;
  svg.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, left };
    svg.setPointerCapture(event.pointerId);
    svg.classList.add("held");
  });
  svg.addEventListener("pointermove", (event) => {
    if (held) show(held.left - ((event.clientX - held.x) / svg.clientWidth) * width, width);
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { held = null; svg.classList.remove("held"); });
  window.addEventListener("resize", () => show(left, width));
  show(left, width);
}

// Tokens coloured by something else than their lag. A scale runs from the panel's colour to a colour of the style sheet.
const COLOURINGS = {
  surprise: { of: (d) => -Number(d.p), most: 4, colour: () => "var(--c2)" },
  advantage: { of: (d) => Number(d.a), most: 1, colour: (value) => (value < 0 ? "var(--bad)" : "var(--good)") },
  ratio: { of: (d) => d.t - d.p, most: 0.5, colour: (value) => (value < 0 ? "var(--c1)" : "var(--c2)") },
  gap: { of: (d) => Math.abs(d.t - d.p), most: 0.5, colour: () => "var(--bad)" },
  entropy: { of: (d) => Number(d.e), most: 3, colour: () => "var(--c4)" },
};
function colourTokens(root, how) {
  for (const keys of root.querySelectorAll(".lag-keys")) keys.hidden = how !== "lag";
  for (const token of root.querySelectorAll(".text.tokens i")) {
    const value = how === "lag" ? NaN : COLOURINGS[how].of(token.dataset);
    const share = Math.round(100 * Math.min(1, Math.abs(value) / (how === "lag" ? 1 : COLOURINGS[how].most)));
    token.style.background = Number.isFinite(value) ? `color-mix(in srgb, ${COLOURINGS[how].colour(value)} ${share}%, transparent)` : "";
    token.style.borderBottomColor = how === "lag" ? "" : "transparent";
    token.classList.toggle("unknown", how !== "lag" && !Number.isFinite(value));
  }
  for (const words of root.querySelectorAll("small.unrecorded")) words.hidden = !["ratio", "gap", "entropy"].includes(how);
}

// The axis of the reward: the same in every part that is set up after it was chosen.
let axis = "step";
function showAxis(part) {
  for (const button of part.querySelectorAll("[data-over]")) {
    button.setAttribute("aria-pressed", String(button.dataset.over === axis));
    button.onclick = () => { axis = button.dataset.over; showAxis(part); };
  }
  for (const chart of part.querySelectorAll("[data-of]")) chart.hidden = chart.dataset.of !== axis;
}

function setUp(part) {
  showAxis(part);
  part.querySelectorAll(".gantt").forEach(setUpGantt);
  for (const choice of part.querySelectorAll(".colour-by")) choice.onchange = () => colourTokens(part, choice.value);
}
setUp(document);
