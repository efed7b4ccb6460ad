"use strict";
// Groups of the rank that is pointed at, by the rank law (topology.py): numbers only, no markup.
function liveMap() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const map = document.getElementById("map");
  const said = document.getElementById("said");
  const kinds = document.getElementById("kinds");
  const cells = [...map.querySelectorAll("li")];
  const first = cells.map((cell) => +cell.dataset.r);
  const count = cells.map((cell) => +cell.dataset.n);
  let kind = kinds.querySelector("input:checked").value;
  let held = null;
  let current = 0;

  // the numbering of the ranks that has these axes: the dense one, or that of the experts
  const viewOf = (axes) => data.views.find((view) => axes.every((axis) => axis in view.sizes));
  const coordinate = (rank, axis, view = viewOf([axis])) =>
    Math.floor(rank / view.strides[axis]) % view.sizes[axis];

  const groupNumber = (rank, axes) => {
    const view = viewOf(axes);
    let found = 0, width = 1;
    for (const axis of view.order) {
      if (axes.includes(axis)) continue;
      found += coordinate(rank, axis, view) * width;
      width *= view.sizes[axis];
    }
    return found;
  };

  const members = (rank, axes) => {
    const view = viewOf(axes);
    let found = [rank];
    for (const axis of view.order) {
      if (!axes.includes(axis)) continue;
      const stride = view.strides[axis], size = view.sizes[axis];
      const base = found.map((r) => r - coordinate(r, axis, view) * stride);
      found = Array.from({ length: size }, (_, i) => base.map((r) => r + i * stride)).flat();
    }
    return found;
  };

  const letters = (number) => {
    let word = "";
    for (number += 1; number; number = Math.floor((number - 1) / 26)) {
      word = String.fromCharCode(97 + (number - 1) % 26) + word;
    }
    return word;
  };

  const colour = () => {
    const met = new Map();  // groups are numbered as they are met
    cells.forEach((cell, at) => {
      const number = groupNumber(first[at], data.kinds[kind]);
      if (!met.has(number)) met.set(number, met.size);
      const group = met.get(number);
      cell.className = "g" + (group % data.colours);
      cell.querySelector("em").textContent = letters(group);
    });
    document.getElementById("kind").textContent = kind;
  };

  const listed = (ranks) => {
    const sorted = [...ranks].sort((a, b) => a - b);
    return "[" + (sorted.length > 12
      ? sorted.slice(0, 8).join(", ") + ", … " + sorted.at(-1) + "] of " + sorted.length
      : sorted.join(", ") + "]");
  };

  const describe = (at) => {
    const rank = first[at];
    const node = Math.floor(rank / data.perNode);
    const place = [...new Set(data.views.flatMap((view) => view.order))]
      .filter((axis) => viewOf([axis]).sizes[axis] > 1)
      .map((axis) => axis + " " + coordinate(rank, axis)).join(", ");
    const experts = data.experts.length ? "; experts " + data.experts[coordinate(rank, "ep")] : "";
    const layers = data.layers.length ? "; layers " + data.layers[coordinate(rank, "pp")] : "";
    const groups = Object.entries(data.kinds)
      .map(([name, axes]) => [name, members(rank, axes)])
      .filter(([, found]) => found.length > 1)
      .map(([name, found]) => name + " " + listed(found)).join(" · ");
    const tile = count[at] > 1 ? "ranks " + rank + " to " + (rank + count[at] - 1) + ", the first: " : "";
    said.textContent = tile + "rank " + rank + ": node " + node + ", local rank " +
      (rank % data.perNode) + (place ? "; " + place : "") + layers + experts + ". " + groups;
  };

  const cellOf = (rank) => {
    let low = 0, high = first.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (first[middle] <= rank) low = middle; else high = middle - 1;
    }
    return low;
  };

  const show = (at) => {
    const together = new Set();
    for (let rank = first[at]; rank < first[at] + Math.min(count[at], 64); rank += 1) {
      members(rank, data.kinds[kind]).forEach((member) => together.add(cellOf(member)));
    }
    cells.forEach((cell, other) => {
      cell.classList.toggle("in", together.has(other));
      cell.classList.toggle("out", !together.has(other));
      cell.classList.toggle("me", other === at);
    });
    describe(at);
  };

  const clear = () => {
    if (held !== null) return show(held);
    cells.forEach((cell) => cell.classList.remove("in", "out", "me"));
  };

  const hold = (at) => {
    held = held === at ? null : at;
    cells.forEach((cell, other) => cell.setAttribute("aria-pressed", String(other === held)));
    show(at);
  };

  const move = (to) => {
    if (to < 0 || to >= cells.length) return;
    cells[current].tabIndex = -1;
    current = to;
    cells[current].tabIndex = 0;
    cells[current].focus();
  };

  const columns = () => {
    const top = cells[0].offsetTop;
    const next = cells.findIndex((cell) => cell.offsetTop > top);
    return next < 0 ? cells.length : next;
  };

  const at = (event) => cells.indexOf(event.target.closest("#map li"));
  const keys = {
    ArrowRight: () => move(current + 1), ArrowLeft: () => move(current - 1),
    ArrowDown: () => move(current + columns()), ArrowUp: () => move(current - columns()),
    Home: () => move(0), End: () => move(cells.length - 1),
    Enter: () => hold(current), " ": () => hold(current),
    Escape: () => { held = null; clear(); },
  };

  cells.forEach((cell, index) => {
    cell.tabIndex = index ? -1 : 0;
    cell.setAttribute("role", "button");
    cell.setAttribute("aria-pressed", "false");
    const places = [...cell.querySelectorAll("small")].map((line) => line.textContent);
    cell.setAttribute("aria-label", [cell.title, ...places].join(", "));
    cell.removeAttribute("title");
  });
  map.querySelectorAll("ol").forEach((list) => list.setAttribute("role", "group"));
  map.addEventListener("mouseover", (event) => { if (at(event) >= 0) show(at(event)); });
  map.addEventListener("mouseleave", clear);
  map.addEventListener("focusin", (event) => { if (at(event) >= 0) { current = at(event); show(current); } });
  map.addEventListener("focusout", clear);
  map.addEventListener("click", (event) => { if (at(event) >= 0) { move(at(event)); hold(current); } });
  map.addEventListener("keydown", (event) => {
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  kinds.addEventListener("change", (event) => { kind = event.target.value; colour(); clear(); });
  kinds.hidden = said.hidden = false;
  map.classList.add("live");
  colour();
}
if (document.getElementById("data").textContent) liveMap();
