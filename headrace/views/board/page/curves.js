// Live curves: one chart for each number, all runs that are chosen in it. The server merges steps, so a chart has few points however long
// a run is; zooming asks for the part that is seen.
import { view, go, ask, element, number, DEFAULT_METRICS } from "/static/view.js";

const WINDOWS = ["1", "5", "20", "100", "500", "2000"];
const AXES = { step: "optimizer steps", minutes: "minutes", tokens: "tokens trained" };
export const colourOf = (run) => `c${(Math.max(0, view.runs.indexOf(run)) % 6) + 1}`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isAxis = (over) => over in AXES;

let charts = new Map();   // metric -> { figure, plot, data }
let known = {};           // metric -> { run: last value }
let place = null, grid = null, asked = 0;

const shown = () => (view.metrics.length ? view.metrics : DEFAULT_METRICS.filter((one) => one in known));

export async function drawCurves(into) {
  place = into;
  charts.forEach((one) => one.plot && one.plot.destroy());
  charts = new Map();
  grid = element("div", { class: "figures" });
  place.replaceChildren(element("p", { class: "empty" }, "Reading …"));
  if (!view.runs.length) {
    place.replaceChildren(element("p", { class: "empty" }, "No run is chosen: mark one in the list."));
    return;
  }
  known = await (await ask("/api/metrics", view.runs.map((run) => ["run", run]))).json();
  const comparison = await compared();
  if (place !== into) return;
  place.replaceChildren(...[toolbar(), comparison, grid].filter(Boolean));
  await refreshCurves();
}

async function compared() {
  if (view.runs.length < 2) return null;
  const made = element("details", { class: "compare", open: true }, element("summary", {}, "Settings that differ"));
  const table = element("div");
  table.innerHTML = await (await ask("/api/differences", view.runs.map((run) => ["run", run]))).text();
  made.append(table);
  return made;
}

function toolbar() {
  const over = element("select", { id: "over", onchange: (event) => change({ over: event.target.value, from: "", to: "" }) });
  for (const [value, name] of Object.entries(AXES)) over.append(new Option(name, value, false, view.over === value));
  const others = element("optgroup", { label: "another number" });
  for (const name of Object.keys(known)) others.append(new Option(name, name, false, view.over === name));
  over.append(others);
  const smoothing = element("select", { id: "window", onchange: (event) => change({ window: event.target.value }) });
  for (const value of WINDOWS) {
    smoothing.append(new Option(value === "1" ? "none" : `mean of ${value}`, value, false, view.window === value));
  }
  const more = element("select", { id: "more", onchange: (event) => change({ metrics: [...shown(), event.target.value] }, true) });
  more.append(new Option("add a chart …", "", true, true));
  for (const name of Object.keys(known).filter((one) => !shown().includes(one))) more.append(new Option(name, name));
  return element("div", { class: "toolbar" },
    element("label", {}, "over", over), element("label", {}, "smoothing", smoothing), more,
    element("span", { class: "right" },
      element("button", { type: "button", id: "whole", hidden: !view.from && !view.to, onclick: whole, title: "z" }, "whole range"),
      element("a", { id: "csv", href: csvAddress(), download: "" }, "CSV")));
}

const csvAddress = () => "/api/csv?" + new URLSearchParams([
  ...view.runs.map((run) => ["run", run]), ...shown().map((one) => ["metric", one])]);

function change(changes, all = false) {
  go(changes);
  if (all || "over" in changes) return drawCurves(place);
  const button = document.getElementById("whole");
  if (button) button.hidden = !view.from && !view.to;
  return refreshCurves();
}

export const whole = () => change({ from: "", to: "" });
export const smoother = () => {
  const next = WINDOWS[(WINDOWS.indexOf(view.window) + 1) % WINDOWS.length];
  const choice = document.getElementById("window");
  if (choice) choice.value = next;  // the tab may still be reading: its toolbar takes the value from the view
  change({ window: next });
};

export async function refreshCurves() {
  if (!place || !place.isConnected || !view.runs.length) return;
  const turn = ++asked, names = shown();
  if (!grid.isConnected) return;
  if (!names.length) {
    grid.replaceChildren(element("p", { class: "empty" }, "There are no numbers yet: no optimizer step was recorded."));
    return;
  }
  const pairs = [["over", view.over], ["window", view.window], ["points", Math.min(1000, Math.max(200, innerWidth))]];
  if (view.from) pairs.push(["from", view.from], ["to", view.to]);
  pairs.push(...view.runs.map((run) => ["run", run]), ...names.map((one) => ["metric", one]));
  const answer = await (await ask("/api/curves", pairs)).json();
  if (turn !== asked || !grid.isConnected) return;
  grid.replaceChildren(...names.map((name) => chart(name, answer.titles[name])));
  for (const name of names) fill(name, answer.curves[name]);
}

function chart(name, title) {
  if (charts.has(name)) return charts.get(name).figure;
  const here = element("div", { class: "plot-here" }), legend = element("span", { class: "legend" });
  const buttons = element("span", { class: "buttons" },
    element("button", { type: "button", title: "save this chart as a picture", onclick: () => savePicture(name) }, "PNG"),
    element("button", { type: "button", title: "larger or smaller", onclick: () => widen(name) }, "⤢"),
    element("button", { type: "button", title: "leave this chart out", onclick: () => change({ metrics: shown().filter((one) => one !== name) }, true) }, "×"));
  const figure = element("figure", { class: "live-chart", "data-metric": name },
    element("figcaption", {}, element("b", {}, title), buttons, title === name ? null : element("code", {}, name), legend), here);
  charts.set(name, { figure, here, legend, title, plot: null });
  return figure;
}

function widen(name) {
  const { figure } = charts.get(name);
  figure.classList.toggle("wide");
  redrawCurves();
}

// One table for uPlot: the x of all runs, and for each run its mean, and its range where steps were merged.
function tableOf(curves) {
  const runs = view.runs.filter((run) => curves[run]);
  const tables = runs.map((run) => {
    const { x, y, low, high } = curves[run];
    return low ? [x, y, high, low] : [x, y];
  });
  return { runs, data: tables.length ? uPlot.join(tables, tables.map((one) => one.map(() => 2))) : [[]], tables };
}

function fill(name, curves) {
  const one = charts.get(name);
  if (one.plot) one.plot.destroy();
  one.plot = null;
  const { runs, data, tables } = tableOf(curves);
  one.here.replaceChildren();
  one.curves = curves;
  if (!runs.length) {
    one.here.append(element("div", { class: "none" }, "not recorded"));
    one.legend.replaceChildren();
    return;
  }
  const series = [{}], bands = [], means = [];
  const line = isAxis(view.over);
  runs.forEach((run, i) => {
    const colour = css(`--${colourOf(run)}`);
    means.push(series.length);
    const paths = line ? undefined : () => null;
    series.push({ label: run, stroke: colour, width: 1.6, spanGaps: true, paths, points: line ? {} : { show: true, size: 5, fill: colour } });
    if (tables[i].length > 2) {
      bands.push({ series: [series.length, series.length + 1], fill: colour + "2e" });
      for (const label of ["high", "low"]) series.push({ label, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
    }
  });
  const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const write = (plot) => writeLegend(one, runs, means, plot);
  one.plot = new uPlot({
    width: one.here.clientWidth || 400, height: one.here.clientHeight || 190, series, bands, legend: { show: false }, padding: [8, 14, 0, 0],
    scales: { x: { time: false, range: rangeOfX }, y: { range: rangeOfY } },
    axes: [{ ...axis, values: (u, ticks) => tickLabels(ticks), size: 26 }, { ...axis, values: (u, ticks) => tickLabels(ticks), size: roomForLabels }],
    cursor: { sync: { key: "curves", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    hooks: { setCursor: [write], setSelect: [zoomed], ready: [write, (plot) => plot.over.addEventListener("dblclick", whole)] },
  }, data, one.here);
}

// Labels of an axis: the fewest digits that show each tick exactly, so that no two are alike (as in the report's charts).
const DIGITS = [0, 1, 2, 3, 4, 5, 6];
const FORMS = [
  ...DIGITS.map((digits) => (value) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })),
  ...DIGITS.map((digits) => (value) => value.toExponential(digits)),
];
export function tickLabels(ticks) {
  const known = ticks.filter((one) => one != null);
  const step = known.length > 1 ? Math.abs(known[1] - known[0]) : Math.abs(known[0] ?? 0) || 1;
  const exact = (form) => known.every((one) => Math.abs(Number(form(one).replaceAll(",", "")) - one) <= 1e-3 * step);
  const form = FORMS.find(exact) ?? String;
  return ticks.map((one) => (one == null ? "" : one === 0 ? "0" : form(one)));
}

// As wide as the longest label.
export function roomForLabels(plot, labels) {
  if (!labels) return 54;
  plot.ctx.save();
  plot.ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  const widest = Math.max(0, ...labels.map((one) => plot.ctx.measureText(one).width / devicePixelRatio));
  plot.ctx.restore();
  return Math.max(40, Math.ceil(widest) + 14);
}

const rangeOfX = (plot, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]);
const rangeOfY = (plot, low, high) => {
  if (low == null) return [0, 1];
  const room = high > low ? 0.06 * (high - low) : Math.abs(high) / 2 || 0.5;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
};

function zoomed(plot) {
  const { left, width } = plot.select;
  if (width < 4) return;
  const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  change({ from: String(from), to: String(to) });
}

function writeLegend(one, runs, means, plot) {
  const place = plot.cursor.idx;
  const keys = runs.map((run, i) => {
    const values = plot.data[means[i]];
    let at = place ?? values.length - 1;
    while (at > 0 && values[at] == null) at -= 1;
    const key = element("i", { class: colourOf(run) });
    return element("span", {}, key, runs.length > 1 ? `${run} ` : "", element("b", {}, number(values[at])));
  });
  const x = place == null ? "" : `${isAxis(view.over) ? view.over : view.over + " ="} ${number(plot.data[0][place], 5)}`;
  one.legend.replaceChildren(...keys, element("span", { class: "at" }, x));
}

export function redrawCurves() {
  for (const [name, one] of charts) if (one.curves && one.figure.isConnected) fill(name, one.curves);
}

function savePicture(name) {
  const { plot, title } = charts.get(name);
  if (!plot) return;
  const from = plot.ctx.canvas, scale = devicePixelRatio, top = 54 * scale;
  const canvas = element("canvas", { width: from.width, height: from.height + top });
  const pen = canvas.getContext("2d");
  pen.fillStyle = css("--panel");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = css("--ink");
  pen.font = `600 ${14 * scale}px system-ui, sans-serif`;
  pen.fillText(`${title} over ${AXES[view.over] ?? view.over}`, 12 * scale, 22 * scale);
  pen.font = `${12 * scale}px system-ui, sans-serif`;
  let left = 12 * scale;
  for (const run of view.runs) {
    pen.fillStyle = css(`--${colourOf(run)}`);
    pen.fillRect(left, 36 * scale, 12 * scale, 3 * scale);
    pen.fillText(run, left + 18 * scale, 42 * scale);
    left += pen.measureText(run).width + 40 * scale;
  }
  pen.drawImage(from, 0, top);
  const link = element("a", { href: canvas.toDataURL("image/png"), download: name.replaceAll("/", "-") + ".png" });
  link.click();
}

addEventListener("resize", () => redrawCurves());
new MutationObserver(redrawCurves).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
