// The page: the list of runs, the tabs, what the server says as it happens. curves.js and samples.js draw two of the tabs; the others are
// the report's parts as the server makes them.
import { view, go, ask, readAddress, element, number, clock, dollars, seldom } from "/static/view.js";
import { drawCurves, refreshCurves, smoother, whole, colourOf } from "/static/curves.js";
import { drawSamples } from "/static/samples.js";
import { setUpPager } from "/static/pager.js";
import { setUpLanes } from "/static/lanes.js";

const TABS = { overview: "Overview", curves: "Curves", samples: "Samples", pools: "Pools", lanes: "Swimlanes", drawn: "Drawn against trained",
  accounting: "Accounting", warnings: "Warnings", setup: "Setup" };
const BY_ITSELF = ["overview", "accounting", "warnings"];  // drawn again when facts arrive; the others would lose what was zoomed or read
const MOODS = { alive: "good", finished: "good", starting: "plain", interrupted: "plain", paused: "bad", silent: "bad", stopped: "bad", died: "bad" };
const MOST_RUNS = 32;
const at = (id) => document.getElementById(id);

let runs = [], opened = {}, source = null, listening = "", drawnVersion = "", first = true;
const versionNow = () => (view.run in opened ? `${opened[view.run].version} ${opened[view.run].read}` : "");

// ---- the list --------------------------------------------------------------------------------------------------------

function drawList() {
  const wanted = at("find").value.toLowerCase();
  const fitting = runs.filter((one) => `${one.name} ${one.headline} ${one.life} ${one.verdict ?? ""}`.toLowerCase().includes(wanted));
  at("runs").replaceChildren(...fitting.map(row));
  at("no-runs").hidden = fitting.length > 0;
  at("no-runs").textContent = runs.length ? "No run fits." : "There is no run here yet. headrace train makes one, and it appears by itself.";
}

const UNWELL = ["not learning", "broken"];

function row(one) {
  const mood = MOODS[one.life], share = one.steps ? Math.min(100, (100 * one.step) / one.steps) : 0;
  const chosen = view.runs.includes(one.name);
  const numbers = element("div", { class: "numbers" }, element("span", {}, "step ", element("b", {}, one.step.toLocaleString("en")), ` of ${one.steps.toLocaleString("en")}`));
  if (one.verdict) numbers.prepend(element("span", { class: `whether ${UNWELL.includes(one.verdict) ? "bad" : ""}` }, one.verdict));
  if (one.reward != null) numbers.append(element("span", {}, "reward ", element("b", {}, number(one.reward))));
  if (one.held_out != null) numbers.append(element("span", {}, "held out ", element("b", {}, number(one.held_out))));
  numbers.append(element("span", {}, clock(one.seconds)));
  if (one.cost != null) numbers.append(element("span", {}, dollars(one.cost)));
  const swatch = element("button", { class: `swatch ${chosen ? colourOf(one.name) : ""}`, type: "button", "aria-pressed": String(chosen),
    title: chosen ? "leave its curves out" : "overlay its curves", onclick: (event) => { event.stopPropagation(); overlay(one.name); } });
  return element("li", { class: `run${view.run === one.name ? " here" : ""}`, "data-name": one.name, onclick: () => open(one.name) },
    swatch, element("div", {},
      element("div", { class: "name" }, element("a", { href: "#", title: `${one.name}\n${one.headline}`, onclick: (event) => event.preventDefault() }, one.name),
        element("span", { class: `life ${mood}`, title: one.words }, one.life)),
      numbers, element("div", { class: `done ${one.living ? "" : mood}` }, element("i", { style: `width:${share}%` }))));
}

function open(name) {
  const alone = view.runs.length <= 1;
  go({ run: name, runs: alone ? [name] : view.runs.includes(name) ? view.runs : [...view.runs, name].slice(-MOST_RUNS), from: "", to: "", steps: "", lane: "" });
  draw();
}

function overlay(name) {
  const without = view.runs.filter((one) => one !== name);
  if (view.tab === "overview") go({ tab: "curves" });  // it is of one run
  go({ runs: without.length < view.runs.length ? without : [...view.runs, name].slice(-MOST_RUNS) });
  if (!view.run) go({ run: name });
  draw();
}

// ---- the part that is shown -------------------------------------------------------------------------------------------

function drawTabs() {
  const warned = opened[view.run]?.warned + Object.keys(opened[view.run]?.advice ?? {}).length;
  at("tabs").replaceChildren(...Object.entries(TABS).map(([tab, name]) => element("button",
    { type: "button", role: "tab", "aria-selected": String(view.tab === tab), tabindex: view.tab === tab ? "0" : "-1", "data-tab": tab, onclick: () => { go({ tab }); draw(); } },
    name, tab === "warnings" && warned ? element("span", { class: "count" }, String(warned)) : null)));
}

function showChosenTab() {  // a phone shows four of the nine
  const strip = at("tabs"), chosen = strip.querySelector("[aria-selected=true]").getBoundingClientRect(), seen = strip.getBoundingClientRect();
  strip.scrollLeft += (chosen.left + chosen.right - seen.left - seen.right) / 2;
}

function drawTitle() {
  const one = runs.find((each) => each.name === view.run);
  at("title").textContent = view.tab === "curves" && view.runs.length > 1 ? `${view.runs.length} runs` : view.run;
  at("life").replaceChildren();
  if (one && !(view.tab === "curves" && view.runs.length > 1)) {
    at("life").append(element("span", { class: `badge ${MOODS[one.life]}` }, one.words.length < 60 ? one.words : one.life));
  }
  document.title = view.run ? `${view.run} · headrace board` : "headrace board";
}

async function draw() {
  drawList();
  drawTabs();
  showChosenTab();
  drawTitle();
  listen();
  at("newer").hidden = true;
  drawnVersion = versionNow();
  const place = element("div");
  at("view").replaceChildren(place);
  if (!view.run) return;
  try {
    if (view.tab === "curves") await drawCurves(place);
    else if (view.tab === "samples") drawSamples(place);
    else await drawPart(place);
  } catch (error) {
    place.replaceChildren(element("p", { class: "banner" }, error.message));
  }
}

async function drawPart(place) {
  if (!place.childNodes.length) place.append(element("p", { class: "empty" }, "Reading …"));
  const lanes = view.tab === "lanes";
  const pairs = lanes ? [["run", view.run], ["show", view.show || "all"], ["start", view.lane || 0]] : [["run", view.run], ["part", view.tab]];
  if (view.steps) pairs.push(...view.steps.split("-").map((step, i) => [["from", "to"][i], step]));
  const text = await (await ask(lanes ? "/api/lanes" : "/api/part", pairs)).text();
  if (!place.isConnected) return;
  place.innerHTML = text;
  setUp(place);
  const choose = (changes) => { go(changes); drawPart(place).catch((error) => place.prepend(element("p", { class: "banner" }, error.message))); };
  setUpPager(place, (steps) => choose({ steps, lane: "" }));
  setUpLanes(place, choose, (q) => { go({ tab: "samples", q }); draw(); });
}

const renew = seldom(() => {
  const version = versionNow();
  if (view.tab === "curves") refreshCurves().catch(() => {});
  else if (version === drawnVersion) return;
  else if (BY_ITSELF.includes(view.tab)) { drawnVersion = version; drawPart(at("view").firstChild).catch(() => {}); }
  else if (drawnVersion && view.tab !== "setup") at("newer").hidden = false;
  drawnVersion ||= version;
}, 1500);

// ---- what happens -----------------------------------------------------------------------------------------------------

function listen() {
  const names = [...new Set([view.run, ...view.runs])].filter(Boolean);
  const wanted = String(new URLSearchParams(names.map((one) => ["run", one])));
  if (source && wanted === listening) return;
  source?.close();
  listening = wanted;
  source = new EventSource("/api/events?" + wanted);
  source.addEventListener("runs", (event) => hear(JSON.parse(event.data)));
  source.onopen = () => state("live", "live");
  source.onerror = () => state("lost", "no answer; trying again");
}

// A browser opens six connections to one server, so a tab that nobody sees gives its own back, unless it is to give alerts.
function rest() {
  source?.close();
  source = null;
  state("", "resting");
}
addEventListener("pagehide", rest);
document.addEventListener("visibilitychange", () => { if (!document.hidden) listen(); else if (!alerting) rest(); });

function state(name, words) {
  at("link-state").className = `faint ${name}`;
  at("link-state").textContent = words;
}

function hear(said) {
  state("live", "live");
  tellChanges(said);
  const grew = JSON.stringify(said.opened) !== JSON.stringify(opened);
  runs = said.runs;
  opened = said.opened;
  at("place").textContent = said.directory;
  if (first) {
    first = false;
    const there = runs.map((one) => one.name);
    view.runs = view.runs.filter((one) => there.includes(one));
    if (!there.includes(view.run)) view.run = view.runs[0] ?? there[0] ?? "";
    if (!view.runs.length && view.run) view.runs = [view.run];
    draw();
    document.querySelector(".run.here")?.scrollIntoView({ block: "nearest", inline: "center" });
    return;
  }
  if (!view.run && runs.length) return open(runs[0].name);
  drawList();
  drawTabs();
  drawTitle();
  if (grew) renew();
}

function tellChanges(said) {
  if (first) return;
  const before = Object.fromEntries(runs.map((one) => [one.name, one]));
  for (const one of said.runs) {
    if (!before[one.name]) tell(one.name, "a new run", "plain");
    else if (before[one.name].life !== one.life) tell(one.name, one.words, MOODS[one.life]);
  }
  for (const [name, one] of Object.entries(said.opened)) {
    const old = opened[name];
    if (!old || old.read < 1) continue;
    const said = { ...one.warnings, ...one.advice }, before = { ...old.warnings, ...old.advice };
    for (const [key, words] of Object.entries(said)) {
      if (!(key in before)) tell(name, words, "bad", key);
      else if (before[key] !== words) retell(name, key, words);  // the same with newer numbers is no news
    }
    for (const key of Object.keys(before)) if (!(key in said)) retell(name, key, "");
    if (one.deaths > old.deaths) tell(name, "a worker process died", "bad");
  }
}

// Changes the words of a toast that is still shown, or takes it away if they are empty.
function retell(name, key, words) {
  const toast = [...at("toasts").children].find((one) => one.dataset.run === name && one.dataset.key === key);
  if (!toast) return;
  if (words) toast.querySelector(".words").textContent = words;
  else toast.remove();
}

let alerting = false;
function tell(name, words, mood, key = "") {
  const toast = element("div", { class: `toast ${mood}`, "data-run": name, "data-key": key },
    element("span", {}, element("b", {}, name), " ", element("span", { class: "words" }, words)),
    element("button", { type: "button", title: "close", onclick: () => toast.remove() }, "×"));
  at("toasts").append(toast);
  setTimeout(() => toast.remove(), 20000);
  if (alerting) new Notification(`headrace: ${name}`, { body: words, tag: name });
}

at("alerts").onclick = async () => {
  if (!("Notification" in window)) return tell("alerts", "this browser has no notifications", "bad");
  alerting = !alerting && (await Notification.requestPermission()) === "granted";
  if (Notification.permission === "denied") tell("alerts", "this browser refuses notifications of this page; allow them beside its address", "bad");
  at("alerts").textContent = `alerts: ${alerting ? "on" : "off"}`;
  at("alerts").setAttribute("aria-pressed", String(alerting));
};

at("copy").onclick = async () => {
  try {
    await navigator.clipboard.writeText(location.href);
    tell("link", "copied: it opens at this view", "good");
  } catch {
    tell("link", `this browser lets no page copy; the address is the link: ${location.href}`, "plain");
  }
};

// The report's links to episodes: the address here holds the view, so they scroll instead.
document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("#view a[href^='#']")?.getAttribute("href").slice(1);
  if (!anchor) return;
  event.preventDefault();
  if (anchor.startsWith("tab-")) { go({ tab: anchor.slice(4) }); draw(); return; }
  const episode = at(anchor);
  if (episode) { episode.open = true; episode.scrollIntoView({ behavior: "smooth" }); }
});

// ---- keyboard ---------------------------------------------------------------------------------------------------------

const move = (by) => {
  const names = [...at("runs").children].map((one) => one.dataset.name);
  const next = names[Math.min(names.length - 1, Math.max(0, names.indexOf(view.run) + by))];
  if (next && next !== view.run) open(next);
  document.querySelector(".run.here")?.scrollIntoView({ block: "nearest" });
};
const does = { j: () => move(1), k: () => move(-1), x: () => view.run && overlay(view.run), s: () => view.tab === "curves" && smoother(), z: whole, t: () => at("theme").click(),
  "/": () => at("find").focus(), "?": () => at("help").showModal() };
document.addEventListener("keydown", (event) => {
  const writing = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && writing) event.target.blur();
  if (writing || event.ctrlKey || event.metaKey || event.altKey || at("help").open) return;
  const tab = Object.keys(TABS)[Number(event.key) - 1];
  if (tab) { go({ tab }); draw(); }
  else if (does[event.key]) { event.preventDefault(); does[event.key](); }
});

at("tabs").addEventListener("keydown", (event) => {
  const tabs = Object.keys(TABS), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  go({ tab: tabs[(tabs.indexOf(view.tab) + by + tabs.length) % tabs.length] });
  draw();
  at("tabs").querySelector("[aria-selected=true]").focus();
});
at("keys").onclick = () => at("help").showModal();
at("find").oninput = drawList;
at("newer").querySelector("button").onclick = () => draw();
addEventListener("popstate", () => { readAddress(); draw(); });
readAddress();
listen();
