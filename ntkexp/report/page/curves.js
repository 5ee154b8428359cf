
// The curves of the selected runs in one picture. Their points are in the rows of the table.

const SPACE = "http://www.w3.org/2000/svg";
const COLOURS = ["0072b2", "d55e00", "009e73", "cc79a7", "e69f00", "56b4e9", "000000"];
const DASHES = ["none", "5 2", "1.5 1.5", "6 2 1.5 2"];
const FRAME = { left: 44, right: 340, top: 8, bottom: 196, width: 490, height: 226, label: 9 };

/** The curves of a row by name: "loss:0 1.5,10 0.2;…". */
function curvesOf(row) {
  const parts = row.dataset.curves.split(";").filter(Boolean).map((part) => part.split(":"));
  return new Map(parts.map(([name, text]) => [name, text.split(",").map((point) => point.split(" ").map(Number))]));
}

/** About five round numbers that cover an interval. */
function linearTicks(low, high) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, k) => (first + k) * step);
}

/** Powers of ten, also their multiples by 2 and 5 if there are less than three. */
function logTicks(low, high) {
  const powers = [];
  for (let k = Math.floor(Math.log10(low)); 10 ** k <= high; k += 1) powers.push(10 ** k);
  const inside = (ticks) => ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  const every = Math.ceil(powers.length / 6);
  if (inside(powers).length > 2) return inside(powers.filter((_, k) => k % every === 0));
  return inside(powers.flatMap((power) => [power, 2 * power, 5 * power]));
}

/** A map from numbers to positions, and its ticks. */
function axis(values, start, end, isLog) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const at = isLog ? Math.log10 : Number;
  const extent = at(high) - at(low) || 1;
  const place = (value) => start + ((at(value) - at(low)) / extent) * (end - start);
  return { place, ticks: (isLog ? logTicks : linearTicks)(low, high) };
}

const inColour = (use, colour) => `${use}: var(--c${colour}, #${colour})`;

function drawn(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  if (text !== undefined) made.textContent = text;
  return made;
}

function label(text, x, y, anchor, colour = "000000") {
  const style = `font-size: 7px; font-family: var(--plot-font); text-anchor: ${anchor}; ${inColour("fill", colour)}`;
  return drawn("text", { x, y, style }, text);
}

/** Lines and labels of both axes. */
function frame(x, y, title) {
  const { left, right, top, bottom } = FRAME;
  const line = (d) => drawn("path", { d, style: `fill: none; stroke-width: 0.6; ${inColour("stroke", "000000")}` });
  const short = (tick) => String(Number(tick.toPrecision(3))).replace("-", "−");
  return [
    line(`M ${left} ${top} L ${left} ${bottom} L ${right} ${bottom}`),
    ...x.ticks.flatMap((tick) => [line(`M ${x.place(tick)} ${bottom} L ${x.place(tick)} ${bottom + 3}`), label(short(tick), x.place(tick), bottom + 11, "middle")]),
    ...y.ticks.flatMap((tick) => [line(`M ${left} ${y.place(tick)} L ${left - 3} ${y.place(tick)}`), label(short(tick), left - 5, y.place(tick) + 2.5, "end")]),
    label("step", (left + right) / 2, bottom + 23, "middle"),
    label(title, left + 4, top + 2, "start"),
  ];
}

/** Heights of labels near the ends of lines, at least one line of text apart. */
function spread(heights) {
  const order = heights.map((_, k) => k).sort((a, b) => heights[a] - heights[b]);
  const placed = [...heights];
  order.forEach((k, place) => {
    if (place) placed[k] = Math.max(placed[k], placed[order[place - 1]] + FRAME.label);
  });
  const beyond = Math.max(0, Math.max(...placed) - FRAME.bottom);
  return placed.map((height) => height - beyond);
}

/** The picture of curves of several runs: [{ name, points }]. */
function overlay(curves, title, isLog) {
  const positive = curves.map(({ name, points }) => ({ name, points: points.filter(([, value]) => !isLog || value > 0) }));
  const all = positive.filter(({ points }) => points.length).flatMap(({ points }) => points);
  const box = { viewBox: `0 0 ${FRAME.width} ${FRAME.height}`, role: "img", class: "plot wide", "aria-label": title };
  const svg = drawn("svg", box);
  if (!all.length) {
    svg.append(label("These runs have no such curve.", FRAME.left, FRAME.top + 10, "start"));
    return svg;
  }
  const shown = positive.filter(({ points }) => points.length);
  const x = axis(all.map(([step]) => step), FRAME.left, FRAME.right, false);
  const y = axis(all.map(([, value]) => value), FRAME.bottom, FRAME.top + 8, isLog);
  const heights = spread(shown.map(({ points }) => y.place(points.at(-1)[1])));
  const lines = shown.flatMap(({ name, points }, k) => {
    const colour = COLOURS[k % COLOURS.length];
    const dash = DASHES[Math.floor(k / COLOURS.length) % DASHES.length];
    const d = `M ${points.map(([step, value]) => `${x.place(step).toFixed(2)} ${y.place(value).toFixed(2)}`).join(" L ")}`;
    const style = `fill: none; stroke-width: 1.2; stroke-dasharray: ${dash}; ${inColour("stroke", colour)}`;
    return [drawn("path", { d, style }), label(name, FRAME.right + 5, heights[k] + 2.5, "start", colour)];
  });
  svg.append(...frame(x, y, title), ...lines);
  return svg;
}

/** Boxes in the rows of the table of runs select the runs whose curves are drawn below it. */
function compareCurves(table) {
  const rows = [...table.querySelectorAll("tr[data-curves]")];
  const names = table.dataset.curves.split(";").filter(Boolean).map((part) => part.split(":"));
  if (!names.length) return;
  const choice = element("select", {}, ...names.map(([name, text]) => element("option", { value: name }, text)));
  const isLog = element("input", { type: "checkbox" });
  const clear = button("Clear", "Clear the selection", () => select([]));
  const panel = element("section", { id: "overlay", "aria-label": "Curves of the selected runs" }, element("div", { class: "tools" },
    element("label", {}, "Curves of ", choice), element("label", {}, isLog, " logarithmic"), clear));

  const boxes = rows.map((row) => {
    const box = element("input", { type: "checkbox", "aria-label": `Draw the curves of ${words(row.cells[0])}` });
    box.addEventListener("change", draw);
    row.cells[0].prepend(box, " ");
    return box;
  });

  function draw() {
    const selected = rows.filter((_, k) => boxes[k].checked);
    panel.hidden = !selected.length;
    const curves = selected.map((row) => ({ name: words(row.cells[0]), points: curvesOf(row).get(choice.value) ?? [] }));
    const svg = overlay(curves, choice.selectedOptions[0].textContent, isLog.checked);
    const figure = element("figure", { class: "wide", "data-name": "curves" },
      element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Picture of the curves" }, svg),
      element("figcaption", {}, element("span", { class: "tools" })));
    showTools(figure);
    panel.querySelector("figure")?.remove();
    panel.append(figure);
  }
  function select(chosen) {
    boxes.forEach((box, k) => { box.checked = chosen.includes(rows[k]); });
    draw();
  }
  const passing = () => rows.filter((row) => !row.classList.contains("filtered"));
  const tools = table.parentElement.previousElementSibling;
  tools.append(button("Draw curves", "Draw curves of all runs that pass the filter", () => select(passing())));
  choice.addEventListener("change", draw);
  isLog.addEventListener("change", draw);
  table.parentElement.after(panel);
  isLog.checked = names[0][0].startsWith("loss");
  panel.hidden = true;
}
