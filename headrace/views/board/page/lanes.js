// Rollouts over time: which are shown, what colours them, and a click on a lane opens its sample. The chart itself is the report's.
import { view, go } from "/static/view.js";

export function setUpLanes(part, choose, openSample) {
  const lanes = part.querySelector(".swimlanes");
  if (!lanes) return;
  lanes.querySelector("select[name=show]").onchange = (event) => choose({ show: event.target.value === "all" ? "" : event.target.value, lane: "" });
  for (const button of lanes.querySelectorAll("button[data-lane]")) {
    button.onclick = () => choose({ lane: button.dataset.lane === "0" ? "" : button.dataset.lane });
  }
  const colour = lanes.querySelector("select[name=colour]");
  const paint = () => { lanes.classList.toggle("by-version", view.colour !== "lag"); };
  colour.value = view.colour || "version";
  colour.onchange = () => { go({ colour: colour.value === "version" ? "" : colour.value }); paint(); };
  paint();
  for (const button of lanes.querySelectorAll(".lanes button")) button.onclick = () => show(button);
  const svg = lanes.querySelector(".gantt-svg");
  if (!svg) return;
  let pressed = 0;
  svg.addEventListener("pointerdown", (event) => { pressed = event.clientX; });
  svg.addEventListener("click", (event) => {  // its target is the chart, which has captured the pointer to be dragged
    const lane = Math.abs(event.clientX - pressed) < 5 && document.elementFromPoint(event.clientX, event.clientY)?.closest(".lane");
    if (lane) show(lane);
  });

  // The journal has no text of groups that were not trained: their outcome is listed.
  function show(marked) {
    const { ticket, rollout, gone } = marked.dataset;
    const pairs = gone ? [["ticket", ticket], ["gone", "1"]] : rollout == null ? [["ticket", ticket]] : [["ticket", ticket], ["rollout", rollout]];
    openSample(String(new URLSearchParams(pairs)));
  }
}
