// Which steps of a long run are shown: fields, buttons, and the strip of the whole run.
export function setUpPager(part, choose) {
  const form = part.querySelector(".pager");
  if (!form) return;
  const [first, last] = form.querySelectorAll("input");
  form.onsubmit = (event) => { event.preventDefault(); choose(`${first.value}-${last.value}`); };
  for (const button of form.querySelectorAll("[data-steps]")) button.onclick = () => choose(button.dataset.steps);
  const svg = part.querySelector(".strip svg");
  if (!svg) return;
  const steps = svg.viewBox.baseVal.width, width = last.value - first.value + 1;
  const at = (event) => Math.min(steps, Math.max(1, Math.ceil((event.offsetX / svg.clientWidth) * steps)));
  let pressed = null;
  svg.onpointerdown = (event) => { pressed = { x: event.offsetX, step: at(event) }; };
  svg.onpointerup = (event) => {
    if (!pressed) return;
    const here = at(event), from = pressed.step, dragged = Math.abs(event.offsetX - pressed.x) > 4;
    pressed = null;
    const left = dragged ? Math.min(from, here) : Math.min(Math.max(1, here - Math.floor(width / 2)), Math.max(1, steps - width + 1));
    choose(`${left}-${dragged ? Math.max(from, here) : Math.min(steps, left + width - 1)}`);
  };
}
