// Filters and sorting of the gallery. Without this script the page has every row, in the order of the data.
"use strict";
const table = document.querySelector("#runs table"), body = table.tBodies[0], rows = [...body.rows];
const heads = [...table.tHead.rows[0].cells], titles = heads.map((head) => head.textContent);
const text = (row, at) => row.cells[at].textContent;
const words = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
const bar = document.createElement("form"), count = document.createElement("p");
const chosen = {};
bar.id = "filters";
count.setAttribute("role", "status");
table.closest(".scroll").before(bar, count);

function control(name, element) {
  const label = document.createElement("label");
  label.append(name, element);
  element.addEventListener("input", show);
  bar.append(label);
  return element;
}
const sought = control("words", Object.assign(document.createElement("input"), {type: "search"}));
for (const name of ["device", "software", "dtype", "source", "fit", "in band"]) {
  const at = titles.indexOf(name), select = document.createElement("select");
  const values = [...new Set(rows.map((row) => text(row, at)))].sort();
  for (const value of ["all", ...values]) select.append(new Option(value, value === "all" ? "" : value));
  chosen[at] = control(name, select);
}
const again = Object.assign(document.createElement("button"), {type: "reset", textContent: "all runs"});
bar.append(again);
bar.addEventListener("reset", () => setTimeout(show));
bar.addEventListener("submit", (event) => event.preventDefault());

function show() {
  const parts = sought.value.toLowerCase().split(/\s+/), errors = [], error = titles.indexOf("error %");
  for (const row of rows) {
    const fits = Object.entries(chosen).every(([at, select]) => !select.value || text(row, at) === select.value);
    row.hidden = !(fits && parts.every((part) => words.get(row).includes(part)));
    if (!row.hidden) errors.push(Math.abs(parseFloat(text(row, error))));
  }
  const mean = errors.reduce((a, b) => a + b, 0) / errors.length;
  count.textContent = errors.length ? `${errors.length} of ${rows.length} runs, mean error ${mean.toFixed(1)} %` : "no run";
}

heads.forEach((head, at) => {
  const button = Object.assign(document.createElement("button"), {type: "button", textContent: titles[at]});
  if (titles[at] === "line") return;
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const is_down = head.getAttribute("aria-sort") === "ascending", isNumber = head.className === "r";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", is_down ? "descending" : "ascending");
    const value = (row) => (isNumber ? parseFloat(text(row, at).replaceAll(",", "")) : text(row, at));
    const known = (a) => (isNumber && Number.isNaN(a) ? Infinity : a);
    rows.sort((a, b) => {
      const [x, y] = [known(value(a)), known(value(b))];
      const order = x < y ? -1 : x > y ? 1 : 0;
      return is_down ? -order : order;
    });
    body.append(...rows);
  });
});
show();
