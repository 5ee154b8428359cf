
// A picture as a PDF file: its paths, images and text, in the fonts of the page.

const PDF_JOINS = { miter: 0, round: 1, bevel: 2 };
const PDF_CAPS = { butt: 0, round: 1, square: 2 };
const MISSING_WIDTH = 600; // the width of the box that replaces a missing letter

const digits = (number) => String(Number(number.toFixed(4)));
const numbers = (list) => list.map(digits).join(" ");

/** The fonts of the page by weight: file, and [glyph, advance] of each letter. */
function pageFonts() {
  return Object.fromEntries([...document.getElementById("fonts").content.querySelectorAll("data")].map((data) => {
    const glyphs = data.dataset.glyphs.split(",").map((entry) => entry.split(":").map(Number));
    const file = Uint8Array.from(atob(data.value), (letter) => letter.charCodeAt(0));
    return [data.dataset.weight, { file, glyphs: new Map(glyphs.map(([code, ...glyph]) => [code, glyph])) }];
  }));
}

// The file: numbered objects, and a table of their places.

class PdfFile {
  parts = [];
  places = [];
  length = 0;

  write(part) {
    const bytes = typeof part === "string" ? Uint8Array.from(part, (letter) => letter.charCodeAt(0)) : part;
    this.parts.push(bytes);
    this.length += bytes.length;
  }

  object(text) {
    this.places.push(this.length);
    this.write(`${this.places.length} 0 obj\n${text}\nendobj\n`);
    return `${this.places.length} 0 R`;
  }

  async stream(entries, content) {
    const raw = new Blob([content]).stream().pipeThrough(new CompressionStream("deflate"));
    const bytes = new Uint8Array(await new Response(raw).arrayBuffer());
    this.places.push(this.length);
    this.write(`${this.places.length} 0 obj\n<< ${entries} /Filter /FlateDecode /Length ${bytes.length} >>\nstream\n`);
    this.write(bytes);
    this.write("\nendstream\nendobj\n");
    return `${this.places.length} 0 R`;
  }

  finish(catalog) {
    const start = this.length;
    const rows = this.places.map((place) => `${String(place).padStart(10, "0")} 00000 n \n`).join("");
    const size = this.places.length + 1;
    this.write(`xref\n0 ${size}\n0000000000 65535 f \n${rows}trailer\n<< /Size ${size} /Root ${catalog} >>\nstartxref\n${start}\n%%EOF\n`);
    return new Blob(this.parts);
  }
}

const hex = (number) => number.toString(16).padStart(4, "0");

/** Write a font, with a map from its glyphs to letters, so that text can be searched and copied. */
async function writeFont(file, { file: data, glyphs }) {
  const name = "/DejaVuSans";
  const stored = await file.stream(`/Length1 ${data.length}`, data);
  const descriptor = file.object(`<< /Type /FontDescriptor /FontName ${name} /Flags 4 /FontBBox [-1000 -300 1500 1100] `
    + `/ItalicAngle 0 /Ascent 928 /Descent -236 /CapHeight 729 /StemV 90 /FontFile2 ${stored} >>`);
  const widths = [...glyphs.values()].map(([glyph, advance]) => `${glyph} [${advance}]`).join(" ");
  const descendant = file.object(`<< /Type /Font /Subtype /CIDFontType2 /BaseFont ${name} /CIDToGIDMap /Identity `
    + `/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> /FontDescriptor ${descriptor} /DW ${MISSING_WIDTH} /W [${widths}] >>`);
  const utf16 = (code) => [...String.fromCodePoint(code)].flatMap((letter) => [...Array(letter.length).keys()].map((k) => hex(letter.charCodeAt(k)))).join("");
  const pairs = [...glyphs].map(([code, [glyph]]) => `1 beginbfchar <${hex(glyph)}> <${utf16(code)}> endbfchar`);
  const map = await file.stream("", ["/CIDInit /ProcSet findresource begin 12 dict begin begincmap /CMapName /Letters def /CMapType 2 def",
    "1 begincodespacerange <0000> <ffff> endcodespacerange", ...pairs, "endcmap end end"].join("\n"));
  return file.object(`<< /Type /Font /Subtype /Type0 /BaseFont ${name} /Encoding /Identity-H /DescendantFonts [${descendant}] /ToUnicode ${map} >>`);
}

// The content: each function returns operators of PDF. A matrix leads from the element to the page.

/** A path of M, L, C, Q and z, as matplotlib writes it. */
function pathOperators(d, matrix) {
  const place = (x, y) => [matrix.a * x + matrix.c * y + matrix.e, matrix.b * x + matrix.d * y + matrix.f];
  const counts = { M: 2, L: 2, C: 6, Q: 4, Z: 0 };
  const operators = [];
  let last = [0, 0];
  for (const [, command, text] of d.matchAll(/([a-zA-Z])([^a-zA-Z]*)/g)) {
    const count = counts[command.toUpperCase()];
    if (count === undefined || (count && command !== command.toUpperCase())) throw new Error(`a path has the command ${command}`);
    const all = (text.match(/[-+.\d]+(?:[eE][-+]?\d+)?/g) ?? []).map(Number);
    if (!count) operators.push("h");
    for (let k = 0; count && k < all.length; k += count) {
      const points = [];
      for (let j = k; j < k + count; j += 2) points.push(place(all[j], all[j + 1]));
      const end = points.at(-1);
      if (command === "Q") { // a quadratic curve is a cubic one
        const third = (from) => from.map((value, axis_) => value + (2 / 3) * (points[0][axis_] - value));
        points.splice(0, 1, third(last), third(end));
      }
      operators.push(`${numbers(points.flat())} ${count === 2 ? (command === "M" && k === 0 ? "m" : "l") : "c"}`);
      last = end;
    }
  }
  return operators.join("\n");
}

const colourOf = (paint) => paint.match(/[\d.]+/g).slice(0, 3).map((part) => part / 255);
const rectangle = (box) => {
  const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(box.getAttribute(name)));
  return `M ${x} ${y} L ${x + width} ${y} L ${x + width} ${y + height} L ${x} ${y + height} Z`;
};
const outline = (shape) => (shape.tagName === "rect" ? rectangle(shape) : shape.getAttribute("d"));

/** Fill and stroke a path in its style. */
function paintOperators(path, style, scale, states) {
  const fills = style("fill") !== "none";
  const strokes = style("stroke") !== "none" && parseFloat(style("stroke-width")) > 0;
  if (!fills && !strokes) return "";
  const opacity = Number(style("opacity"));
  const dashes = style("stroke-dasharray").match(/[\d.]+/g) ?? [];
  const offset = parseFloat(style("stroke-dashoffset")) || 0;
  return [
    states.name(opacity * Number(style("fill-opacity")), opacity * Number(style("stroke-opacity"))),
    fills ? `${numbers(colourOf(style("fill")))} rg` : "",
    strokes ? `${numbers(colourOf(style("stroke")))} RG ${digits(parseFloat(style("stroke-width")) * scale)} w` : "",
    `[${numbers(dashes.map((length) => length * scale))}] ${digits(offset * scale)} d`,
    `${PDF_JOINS[style("stroke-linejoin")] ?? 0} j ${PDF_CAPS[style("stroke-linecap")] ?? 0} J`,
    path,
    fills && strokes ? "B" : fills ? "f" : "S",
  ].join("\n");
}

/** Opacities of a page, as named graphics states. */
class PdfStates {
  made = new Map();

  name(fill, stroke) {
    const text = `<< /ca ${digits(fill)} /CA ${digits(stroke)} >>`;
    if (!this.made.has(text)) this.made.set(text, `S${this.made.size}`);
    return `/${this.made.get(text)} gs`;
  }

  get entries() { return [...this.made].map(([text, name]) => `/${name} ${text}`).join(" "); }
}

/** The content of a page: the shapes of a picture that is part of the document. */
class PdfContent {
  states = new PdfStates();
  images = [];

  constructor(root, fonts) {
    const [, , width, height] = root.getAttribute("viewBox").split(" ").map(Number);
    this.root = root;
    this.fonts = fonts;
    this.size = [width, height];
    this.fromScreen = new DOMMatrix([1, 0, 0, -1, 0, height]).multiply(root.getScreenCTM().inverse());
  }

  matrixOf(shape) { return this.fromScreen.multiply(shape.getScreenCTM()); }

  named(name) { return this.root.querySelector(`#${CSS.escape(name)}`); }

  get operators() {
    const shapes = [...this.root.querySelectorAll("path, rect, use, text, image")];
    return shapes.filter((shape) => !shape.closest("defs, clipPath"))
      .flatMap((shape) => ["q", this.clip(shape), this.draw(shape), "Q"]).filter(Boolean).join("\n");
  }

  /** Clip an element as it and its groups say. */
  clip(shape) {
    const operators = [];
    for (let at = shape.closest("[clip-path]"); at; at = at.parentElement.closest("[clip-path]")) {
      const box = this.named(at.getAttribute("clip-path").slice("url(#".length, -1)).firstElementChild;
      operators.push(`${pathOperators(outline(box), this.matrixOf(at))} W n`);
    }
    return operators.join("\n");
  }

  draw(shape) {
    const computed = getComputedStyle(shape);
    const style = (name) => computed.getPropertyValue(name);
    if (shape.tagName === "text") return this.text(shape, style);
    if (shape.tagName === "image") return this.image(shape);
    if (shape.tagName === "use") return this.marker(shape, style);
    return this.path(shape, style, this.matrixOf(shape));
  }

  path(shape, style, matrix) {
    const scale = Math.sqrt(Math.abs(matrix.a * matrix.d - matrix.b * matrix.c));
    return paintOperators(pathOperators(outline(shape), matrix), style, scale, this.states);
  }

  /** A copy of a path. The style of the path itself comes before the style of the copy. */
  marker(use, style) {
    const shape = this.named((use.getAttribute("href") ?? use.getAttribute("xlink:href")).slice(1));
    const own = getComputedStyle(shape);
    const matrix = this.matrixOf(use).translate(Number(use.getAttribute("x")) || 0, Number(use.getAttribute("y")) || 0);
    return this.path(shape, (name) => (shape.style.getPropertyValue(name) ? own.getPropertyValue(name) : style(name)), matrix);
  }

  /** Letters, anchored as the style says. */
  text(text, style) {
    const weight = Number(style("font-weight")) >= 600 ? "bold" : "normal";
    const known = this.fonts[weight].glyphs;
    const glyphs = [...text.textContent].map((letter) => known.get(letter.codePointAt(0)) ?? [0, MISSING_WIDTH]);
    const size = parseFloat(style("font-size"));
    const width = (size * glyphs.reduce((sum, [, advance]) => sum + advance, 0)) / 1000;
    const shift = { middle: width / 2, end: width }[style("text-anchor")] ?? 0;
    const at = this.matrixOf(text).translate((Number(text.getAttribute("x")) || 0) - shift, Number(text.getAttribute("y")) || 0);
    const opacity = Number(style("opacity")) * Number(style("fill-opacity"));
    return [
      this.states.name(opacity, opacity), `${numbers(colourOf(style("fill")))} rg BT /${weight} ${digits(size)} Tf`,
      `${numbers([at.a, at.b, -at.c, -at.d, at.e, at.f])} Tm <${glyphs.map(([glyph]) => hex(glyph)).join("")}> Tj ET`,
    ].join("\n");
  }

  image(image) {
    const [x, y, width, height] = ["x", "y", "width", "height"].map((name) => Number(image.getAttribute(name)));
    const at = this.matrixOf(image).multiply(new DOMMatrix([width, 0, 0, -height, x, y + height]));
    this.images.push(image);
    return `${numbers([at.a, at.b, at.c, at.d, at.e, at.f])} cm /I${this.images.length} Do`;
  }
}

/** Write the pixels of an image, and return its object. */
async function writeImage(file, image) {
  const loaded = new Image();
  loaded.src = image.getAttribute("href") ?? image.getAttribute("xlink:href");
  await loaded.decode();
  const context = new OffscreenCanvas(loaded.naturalWidth, loaded.naturalHeight).getContext("2d");
  context.drawImage(loaded, 0, 0);
  const { data, width, height } = context.getImageData(0, 0, loaded.naturalWidth, loaded.naturalHeight);
  const shape = `/Type /XObject /Subtype /Image /Width ${width} /Height ${height} /BitsPerComponent 8`;
  const alpha = await file.stream(`${shape} /ColorSpace /DeviceGray`, data.filter((_, k) => k % 4 === 3));
  return file.stream(`${shape} /ColorSpace /DeviceRGB /SMask ${alpha}`, data.filter((_, k) => k % 4 !== 3));
}

async function writePicture(content) {
  const file = new PdfFile();
  file.write("%PDF-1.5\n");
  const operators = await file.stream("", content.operators);
  const fonts = [];
  for (const [weight, font] of Object.entries(content.fonts)) fonts.push(`/${weight} ${await writeFont(file, font)}`);
  const images = [];
  for (const image of content.images) images.push(`/I${images.length + 1} ${await writeImage(file, image)}`);
  const resources = `<< /ExtGState << ${content.states.entries} >> /Font << ${fonts.join(" ")} >> /XObject << ${images.join(" ")} >> >>`;
  const parent = `${file.places.length + 2} 0 R`; // the object after the page
  const page = file.object(`<< /Type /Page /Parent ${parent} /MediaBox [0 0 ${numbers(content.size)}] /Contents ${operators} /Resources ${resources} >>`);
  const pages = file.object(`<< /Type /Pages /Kids [${page}] /Count 1 >>`);
  return file.finish(file.object(`<< /Type /Catalog /Pages ${pages} >>`));
}

/** The picture as a PDF file. It is drawn from a copy in the colours of print. */
async function pdfOf(svg) {
  const stage = element("div", { style: "position: absolute; left: -9999px; top: 0" });
  stage.innerHTML = printed(svg);
  document.body.append(stage);
  try {
    return await writePicture(new PdfContent(stage.firstElementChild, pageFonts()));
  } finally {
    stage.remove();
  }
}
