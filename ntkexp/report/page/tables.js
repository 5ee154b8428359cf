"use strict";
// The script of all pages: tables.js, pictures.js, pdf.js, curves.js and start.js, in this order.
// It adds all controls, so without it a page shows everything and has no dead buttons.

/** An element with attributes and content. */
function element(name, attributes = {}, ...content) {
  const made = document.createElement(name);
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.append(...content);
  return made;
}

/** A button. `full` is its name for screen readers, which begins with the visible text. */
function button(text, full, act) {
  const made = element("button", { type: "button", "aria-label": full }, text);
  made.addEventListener("click", act);
  return made;
}

/** Save text or bytes as a file. */
function download(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

// Keys of cells, and their order.

const SMALLEST_FILTERED = 6; // tables with fewer rows have no filter

const numeric = (key) => (key === "" || Number.isNaN(Number(key)) ? null : Number(key));
const words = (node) => node.textContent.replace(/\s+/g, " ").trim();
const keyOf = (cell) => cell.dataset.key ?? words(cell);

/** Empty cells last; numbers before words, by size; words by the alphabet, numbers in them by size. */
function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [x, y] = [numeric(a), numeric(b)];
  if (x !== null && y !== null) return sign * (x - y);
  if ((x === null) !== (y === null)) return x === null ? 1 : -1;
  return sign * a.localeCompare(b, "en", { numeric: true });
}

// Filters.

const columnName = (text) => text.replace(/ /g, "_");

/** The heading row of the group of a row, if there is one. */
const groupOf = (row) => row.parentElement.querySelector("tr.group");

/** The values of a row by name: its cells, its settings, and the settings of its group. */
function valuesOf(row, names) {
  const values = new Map(names.map((name, k) => [columnName(name), keyOf(row.cells[k])]));
  [groupOf(row), row].forEach((part) => part?.querySelectorAll(".chip[data-key]").forEach((chip) => {
    values.set(chip.dataset.key, chip.dataset.value);
    values.set(chip.dataset.key.split(".").at(-1), chip.dataset.value);
  }));
  return values;
}

/** A test of rows for one word of a filter: `column=value`, `column<number`, `column>number`, or text anywhere. */
function test(word, known) {
  const [, name, sign, value] = /^([^=<>]+)([=<>])(.*)$/.exec(word) || [];
  if (!known.has(name)) return (_, text) => text.includes(word.toLowerCase());
  const limit = numeric(value);
  return (values) => {
    const found = values.get(name) ?? "";
    const number = numeric(found);
    if (sign === "=") return found === value || (limit !== null && number === limit);
    return number !== null && limit !== null && (sign === "<" ? number < limit : number > limit);
  };
}

/** Mark the rows that do not pass every word of a filter. */
function filterRows(rows, names, text) {
  const values = new Map(rows.map((row) => [row, valuesOf(row, names)]));
  const known = new Set([...values.values()].flatMap((each) => [...each.keys()]));
  const tests = text.split(/\s+/).filter(Boolean).map((word) => test(word, known));
  rows.forEach((row) => {
    const content = `${words(row)} ${groupOf(row) ? words(groupOf(row)) : ""}`.toLowerCase();
    row.classList.toggle("filtered", !tests.every((passes) => passes(values.get(row), content)));
  });
}

// Tables as files: all rows that pass the filter, in the shown order.

/** A cell for a spreadsheet, which must not run it as a formula. */
function csvCell(text) {
  const safe = numeric(text) === null && /^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
}

/** The texts of rows. The name of a group becomes the first column. `read` returns the text of a cell. */
function linesOf(names, rows, read) {
  const hasGroups = rows.some(groupOf);
  const lines = rows.map((row) => [...(hasGroups ? [words(groupOf(row))] : []), ...[...row.cells].map(read)]);
  return [hasGroups ? ["group", ...names] : names, ...lines];
}

/** Numbers have every digit. */
const csvOf = (names, rows) => linesOf(names, rows, keyOf).map((line) => `${line.map(csvCell).join(",")}\n`).join("");

const ESCAPES = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "−": "$-$", "≤": "$\\le$", "≥": "$\\ge$" };
const latexText = (text) => text.replace(/[\\~^−≤≥]|[{}$&#%_]/g, (letter) => ESCAPES[letter] ?? `\\${letter}`);

/** Numbers have the shown digits. The table needs the package booktabs. */
function latexOf(caption, names, rows) {
  const [head, ...lines] = linesOf(names, rows, words);
  const keys = linesOf(names, rows, keyOf).slice(1);
  const sides = head.map((_, k) => (keys.every((line) => line[k] === "" || numeric(line[k]) !== null) ? "r" : "l")).join("");
  const formatted = (cells) => `${cells.map(latexText).join(" & ")} \\\\`;
  return [
    "\\begin{table}", `\\caption{${latexText(caption)}}`, `\\begin{tabular}{${sides}}`, "\\toprule", formatted(head),
    "\\midrule", ...lines.map(formatted), "\\bottomrule", "\\end{tabular}", "\\end{table}", "",
  ].join("\n");
}

// Controls.

/** Sort the rows of each group by a column, or reverse their order. */
function sortRows(table, heads, column) {
  const ascending = heads[column].getAttribute("aria-sort") !== "ascending";
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const sign = ascending ? 1 : -1;
  [...table.tBodies].forEach((body) => {
    const rows = [...body.rows].filter((row) => !row.classList.contains("group"));
    body.append(...rows.sort((a, b) => compare(keyOf(a.cells[column]), keyOf(b.cells[column]), sign)));
  });
}

/** Buttons that turn pages of `size` rows. */
function makePager(table, size, rowsOf) {
  let page = 0;
  const where = element("span", { role: "status" });
  const back = button("Previous", `Previous rows of ${table.caption.textContent}`, () => turn(page - 1));
  const on = button("Next", `Next rows of ${table.caption.textContent}`, () => turn(page + 1));

  function turn(to) {
    const kept = rowsOf().filter((row) => !row.classList.contains("filtered"));
    const last = Math.max(0, Math.ceil(kept.length / size) - 1);
    page = Math.min(Math.max(to, 0), last);
    kept.forEach((row, k) => row.classList.toggle("beyond", Math.floor(k / size) !== page));
    const shown = kept.filter((row) => !row.classList.contains("beyond"));
    table.querySelectorAll("tr.group").forEach((head) => {
      head.classList.toggle("filtered", !kept.some((row) => groupOf(row) === head));
      head.classList.toggle("beyond", !shown.some((row) => groupOf(row) === head));
    });
    const first = kept.length ? page * size + 1 : 0;
    where.textContent = `${first}–${Math.min(kept.length, (page + 1) * size)} of ${kept.length}`;
    back.hidden = on.hidden = rowsOf().length <= size;
    back.disabled = page === 0;
    on.disabled = page === last;
  }
  return { turn, bar: element("div", { class: "pager" }, back, where, on) };
}

/** A table gets sorting, pages, a filter, and buttons for files. */
function enliven(table) {
  const heads = [...table.tHead.rows[0].cells];
  const names = heads.map(words);
  const caption = table.caption.textContent;
  const rowsOf = () => [...table.tBodies].flatMap((body) => [...body.rows].filter((row) => !row.classList.contains("group")));
  const kept = () => rowsOf().filter((row) => !row.classList.contains("filtered"));
  const pager = makePager(table, Number(table.dataset.perPage), rowsOf);

  heads.forEach((head, column) => {
    const sorter = element("button", { type: "button" }, ...head.childNodes);
    sorter.addEventListener("click", () => { sortRows(table, heads, column); pager.turn(0); });
    head.replaceChildren(sorter);
  });

  const tools = element("div", { class: "tools" });
  if (rowsOf().length >= SMALLEST_FILTERED) {
    const input = element("input", { type: "search", autocomplete: "off", spellcheck: "false", "aria-describedby": "filter-help" });
    input.addEventListener("input", () => { filterRows(rowsOf(), names, input.value); pager.turn(0); });
    tools.append(element("label", {}, "Filter ", element("span", { class: "unseen" }, caption), input), pager.bar);
  }
  tools.append(
    button("CSV", `CSV of ${caption}`, () => download(`${table.id}.csv`, "text/csv", csvOf(names, kept()))),
    button("LaTeX", `LaTeX of ${caption}`, () => download(`${table.id}.tex`, "text/x-tex", latexOf(caption, names, kept()))),
  );
  table.parentElement.before(tools);
  pager.turn(0);
}
