"use strict";
// Tables sort by their headings, page, and filter; links into closed details open them;
// a choice hides what was not chosen; pictures grow. Without it all is shown.

const numeric = (key) => (key === "" || Number.isNaN(Number(key)) ? null : Number(key));

/** Empty cells last; numbers before words, by size; words by the alphabet, numbers in them by size. */
function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [x, y] = [numeric(a), numeric(b)];
  if (x !== null && y !== null) return sign * (x - y);
  if ((x === null) !== (y === null)) return x === null ? 1 : -1;
  return sign * a.localeCompare(b, "en", { numeric: true });
}

const key = (row, column) => row.cells[column].dataset.key;

/** A test of rows for one word of a filter: `column=value`, `column<number`, `column>number`, or text anywhere. */
function test(word, names) {
  const [, name, sign, value] = /^([^=<>]+)([=<>])(.*)$/.exec(word) || [];
  const column = names.indexOf(name);
  if (column < 0) return (row) => row.textContent.toLowerCase().includes(word.toLowerCase());
  if (sign === "=") return (row) => key(row, column) === value || (numeric(value) !== null && numeric(key(row, column)) === numeric(value));
  return (row) => {
    const [found, limit] = [numeric(key(row, column)), numeric(value)];
    return found !== null && limit !== null && (sign === "<" ? found < limit : found > limit);
  };
}

function enliven(table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const names = heads.map((head) => head.textContent);
  const size = Number(table.dataset.perPage);
  let rows = [...body.rows];
  let page = 0;

  const pager = document.createElement("div");
  pager.className = "pager";
  const back = pager.appendChild(document.createElement("button"));
  const where = pager.appendChild(document.createElement("span"));
  const on = pager.appendChild(document.createElement("button"));
  where.setAttribute("role", "status");
  back.type = on.type = "button";
  back.textContent = "Previous";
  on.textContent = "Next";

  function show() {
    const kept = rows.filter((row) => !row.classList.contains("filtered"));
    const last = Math.max(0, Math.ceil(kept.length / size) - 1);
    page = Math.min(Math.max(page, 0), last);
    kept.forEach((row, k) => row.classList.toggle("beyond", Math.floor(k / size) !== page));
    const first = kept.length ? page * size + 1 : 0;
    where.textContent = `${first}–${Math.min(kept.length, (page + 1) * size)} of ${kept.length}`;
    back.hidden = on.hidden = rows.length <= size;
    back.disabled = page === 0;
    on.disabled = page === last;
  }

  function sort(column) {
    const ascending = heads[column].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    rows = rows.sort((a, b) => compare(key(a, column), key(b, column), ascending ? 1 : -1));
    body.append(...rows);
    page = 0;
    show();
  }

  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(column));
    head.replaceChildren(button);
  });
  back.addEventListener("click", () => { page -= 1; show(); });
  on.addEventListener("click", () => { page += 1; show(); });

  const input = document.querySelector(`input[data-filters="${table.id}"]`);
  if (input) {
    input.addEventListener("input", () => {
      const tests = input.value.split(/\s+/).filter(Boolean).map((word) => test(word, names));
      rows.forEach((row) => row.classList.toggle("filtered", !tests.every((passes) => passes(row))));
      page = 0;
      show();
    });
  }
  if (rows.length > size || input) table.parentElement.after(pager);
  show();
}

function open() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
  }
}

/** A choice of parts shows the chosen one alone. */
function choose(choice) {
  const parts = [...document.querySelectorAll(`[data-part="${choice.id}"]`)];
  const show = () => parts.forEach((part) => { part.hidden = part.id !== choice.value; });
  choice.addEventListener("change", show);
  choice.parentElement.hidden = false;
  show();
}

/** A click, or Enter, makes a picture twice as large, and as it was; text in it can still be selected. */
function magnify(picture) {
  const turn = () => { if (!String(getSelection())) picture.classList.toggle("large"); };
  picture.addEventListener("click", turn);
  picture.addEventListener("keydown", (event) => { if (event.key === "Enter") turn(); });
}

document.querySelectorAll("figure .scroll").forEach(magnify);
document.querySelectorAll("table").forEach(enliven);
document.querySelectorAll("select").forEach(choose);
window.addEventListener("hashchange", open);
open();
