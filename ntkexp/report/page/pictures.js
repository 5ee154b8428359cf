
// Pictures: a large view with zoom, and files.

const ZOOM_FACTOR = 1.4;
const VARIABLE = /var\(--(?:c[0-9a-f]{6}|area), (#[0-9a-f]{6})\)/g;
const MIXED = /color-mix\(in srgb, (#[0-9a-f]{6}), (?:var\(--c000000\) (?:35|60)%|#fff var\(--lift\))\)/g;

/** A copy of a picture with the colours and font of print, and the size in points. */
function printed(svg) {
  const copy = svg.cloneNode(true);
  const [, , width, height] = svg.getAttribute("viewBox").split(" ");
  ["class", "style"].forEach((name) => copy.removeAttribute(name));
  Object.entries({ width: `${width}pt`, height: `${height}pt`, "stroke-linejoin": "round", "stroke-linecap": "butt" })
    .forEach(([name, value]) => copy.setAttribute(name, value));
  const text = new XMLSerializer().serializeToString(copy);
  return text.replace(VARIABLE, "$1").replace(MIXED, "$1").replaceAll("var(--plot-font)", "DejaVu Sans, sans-serif");
}

/** The large view of a picture. The picture itself moves there and back, so its ids stay unique. */
function enlarge(svg) {
  let zoom = 1;
  const home = element("span");
  const stage = element("div", { class: "stage", tabindex: "0", role: "group", "aria-label": svg.getAttribute("aria-label") });
  const resize = (to) => {
    zoom = Math.min(Math.max(to, 1), 12);
    svg.style.setProperty("--zoom", zoom);
  };
  const dialog = element("dialog", { class: "viewer", "aria-label": "Enlarged picture" }, element("div", { class: "tools" },
    button("+", "+ Zoom in", () => resize(zoom * ZOOM_FACTOR)),
    button("−", "− Zoom out", () => resize(zoom / ZOOM_FACTOR)),
    button("Fit", "Fit the window", () => resize(1)),
    button("Close", "Close", () => dialog.close())), stage);
  dialog.addEventListener("keydown", (event) => {
    const to = { "+": zoom * ZOOM_FACTOR, "=": zoom * ZOOM_FACTOR, "-": zoom / ZOOM_FACTOR, 0: 1 }[event.key];
    if (to) resize(to);
  });
  stage.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    resize(zoom * (event.deltaY < 0 ? ZOOM_FACTOR : 1 / ZOOM_FACTOR));
  });
  dialog.addEventListener("close", () => { resize(1); home.replaceWith(svg); dialog.remove(); });
  home.style.cssText = `display: block; height: ${svg.getBoundingClientRect().height}px`;
  svg.replaceWith(home);
  stage.append(svg);
  document.body.append(dialog);
  dialog.showModal();
}

/** A click on a picture, or its button, opens the large view. Text in it can still be selected. */
function showTools(figure) {
  const svg = figure.querySelector("svg");
  const title = svg.getAttribute("aria-label");
  const name = figure.dataset.name;
  figure.querySelector(".scroll").addEventListener("click", () => {
    if (!String(getSelection()) && figure.contains(svg)) enlarge(svg);
  });
  figure.querySelector(".tools").prepend(
    button("Enlarge", `Enlarge ${title}`, () => enlarge(svg)),
    button("SVG", `SVG of ${title}`, () => download(`${name}.svg`, "image/svg+xml", printed(svg))),
    button("PDF", `PDF of ${title}`, () => pdfOf(svg).then((bytes) => download(`${name}.pdf`, "application/pdf", bytes))),
  );
}
