"use strict";
// The page's hash has its controls: #model=llama-3-70b&gpus=64xh100&tp=8. A question that is asked while an older one
// is open makes the older one's answer void.
const held = JSON.parse(document.getElementById("first").textContent);
const NAMES = ["tp", "pp", "cp", "ep", "vpp", "micro-batch-size", "zero", "recompute", "sequence-parallel"];
const TITLES = {"tp": "tp (tensor)", "pp": "pp (pipeline)", "cp": "cp (context)", "ep": "ep (experts)",
  "vpp": "vpp (chunks)", "micro-batch-size": "micro batch", "zero": "ZeRO", "recompute": "recompute",
  "sequence-parallel": "sequence par."};
const DEFAULTS = {"tp": "1", "pp": "1", "cp": "1", "ep": "1", "vpp": "1", "micro-batch-size": "1", "zero": "0",
  "recompute": "none", "sequence-parallel": "false"};
const TYPED = ["job", "model", "gpus", "runtime", "seq-length", "global-batch-size", "lora", "qlora"];
const KNOWN = new Set(held.names);
const LONGEST = 200, PINS = 4, WAIT = 60, PUSH = 700;
const $ = id => document.getElementById(id);
const form = $("controls");
let controls = {}, asked = 0, open = null, legal = {}, pins = [], timer = 0, pushed = 0, last = null;

function make(tag, attributes = {}, ...content) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}

async function ask(path, body, signal) {
  const answer = await fetch(path, {method: "POST", signal, body: JSON.stringify(body),
    headers: {"X-Mpctl-Token": held.token, "Content-Type": "application/json"}});
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  return answer.json();
}

function fromHash() {
  const text = location.hash.slice(1);
  if (!text || text.length > 4000) return null;
  const found = {};
  for (const [name, value] of new URLSearchParams(text))
    if (KNOWN.has(name) && value.length <= LONGEST) found[name] = value;
  return found;
}

function hashOf(words) {
  return "#" + new URLSearchParams(Object.entries(words).filter(([, value]) => value !== "")).toString();
}

function remember(isCommitted) {
  const hash = hashOf(controls);
  if (hash === location.hash) return;
  clearTimeout(pushed);
  if (isCommitted) { history.pushState(null, "", hash); return; }
  pushed = setTimeout(() => history.pushState(null, "", hash), PUSH);
}

function drawLayout() {
  const rows = NAMES.map(name => {
    const now = controls[name] ?? DEFAULTS[name];
    const known = legal[name] ?? {[now]: ""};
    const values = Object.keys(known).includes(now) ? Object.keys(known) : [...Object.keys(known), now];
    const buttons = values.map(value => {
      const input = make("input", {type: "radio", name, value});
      input.checked = value === now;
      const why = known[value] ?? "";
      if (why) { input.setAttribute("aria-disabled", "true"); input.setAttribute("aria-description", why); }
      const label = make("label", why ? {title: why} : {}, input, make("span", {}, value));
      return label;
    });
    const group = make("div", {class: "choices", role: "radiogroup", "aria-label": TITLES[name]}, ...buttons);
    const why = make("p", {class: "why", id: `why-${name}`});
    return make("div", {class: "control"}, make("span", {}, TITLES[name]), group, why);
  });
  const focused = document.activeElement;
  const at = focused && form.contains(focused) && focused.type === "radio" ? [focused.name, focused.value] : null;
  $("layout").replaceChildren(make("legend", {}, "Layout"), ...rows);
  if (at) form.querySelector(`input[name="${at[0]}"][value="${CSS.escape(at[1])}"]`)?.focus();
}

function fill() {
  for (const name of TYPED) {
    const field = form.elements.namedItem(name);
    if (field && field !== document.activeElement) field.value = controls[name] ?? "";
  }
  drawLayout();
}

function show(answer) {
  last = answer;
  $("plan").classList.remove("stale");
  const verdict = $("verdict");
  verdict.textContent = answer.verdict;
  verdict.className = `verdict ${answer.status === "fits" ? "fits" : answer.status === "unknown" ? "unknown" : "over"}`;
  const f = answer.figures;
  $("step").textContent = answer.step && `${answer.step}, ${f["tokens/s"]} tokens/s, MFU ${f.MFU}`;
  mark(answer);
  if (answer.status !== "illegal") $("plan").innerHTML = answer.html;
  else $("plan").classList.add("stale");
}

function mark(answer) {
  for (const why of form.querySelectorAll(".why")) why.textContent = "";
  const others = [];
  for (const {control, issue} of answer.issues) {
    const words = `${issue.message}${issue.hint ? ": " + issue.hint : ""}`;
    const place = control && $(`why-${control}`);
    if (place) place.textContent = words; else others.push(`${issue.where}: ${words}`);
  }
  for (const field of form.querySelectorAll("input")) field.removeAttribute("aria-invalid");
  for (const {control} of answer.issues)
    for (const field of form.querySelectorAll(`input[name="${control}"]`)) field.setAttribute("aria-invalid", "true");
  $("told").textContent = others.join("; ");
}

async function refresh() {
  const mine = ++asked;
  open?.abort();
  open = new AbortController();
  try {
    const answer = await ask("/plan", {controls}, open.signal);
    if (mine !== asked) return;
    show(answer);
    const found = await ask("/choices", {controls}, open.signal);
    if (mine !== asked) return;
    legal = found;
    drawLayout();
    mark(answer);
  } catch (error) {
    if (error.name === "AbortError" || mine !== asked) return;
    $("told").textContent = `No answer: ${error.message}. Is mpctl ui still running?`;
    $("plan").classList.add("stale");
  }
}

function change(words, isCommitted) {
  controls = Object.fromEntries(Object.entries({...controls, ...words}).filter(([, value]) => value !== ""));
  remember(isCommitted);
  clearTimeout(timer);
  timer = setTimeout(refresh, WAIT);
}

form.addEventListener("input", event => {
  const {name, value} = event.target;
  if (KNOWN.has(name)) change({[name]: value}, false);
});
form.addEventListener("submit", event => event.preventDefault());
window.addEventListener("popstate", () => { controls = fromHash() ?? {}; fill(); refresh(); });
window.addEventListener("hashchange", () => { controls = fromHash() ?? {}; fill(); refresh(); });

$("copy").addEventListener("click", () => copy(last?.command ?? ""));
$("target").addEventListener("change", async event => {
  const target = event.target.value;
  event.target.value = "";
  if (!target) return;
  try {
    const answer = await ask("/emit", {controls, target});
    if (answer.text) copy(answer.text); else $("told").textContent = answer.issues.map(i => i.message).join("; ");
  } catch (error) { $("told").textContent = error.message; }
});

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    $("told").textContent = `copied: ${text.slice(0, 120)}${text.length > 120 ? "…" : ""}`;
  } catch { $("told").textContent = text; }
}

$("pin").addEventListener("click", () => {
  if (!last || last.status === "illegal") return;
  pins = [...pins, {controls: {...controls}, figures: last.figures, seconds: last.seconds, verdict: last.verdict}].slice(-PINS);
  drawPins();
});

function drawPins() {
  if (!pins.length) { $("pins").replaceChildren(); return; }
  const keys = [...new Set(pins.flatMap(pin => Object.keys(pin.controls)))];
  const differs = keys.filter(key => new Set(pins.map(pin => pin.controls[key] ?? DEFAULTS[key] ?? "")).size > 1);
  const row = (title, cell) => make("tr", {}, make("th", {scope: "row"}, title), ...pins.map(pin => make("td", {}, cell(pin))));
  const base = pins[0].seconds;
  const table = make("table", {}, make("caption", {}, "Pinned layouts: what differs"),
    make("tbody", {},
      row("", pin => { const b = make("button", {type: "button"}, "load"); b.onclick = () => load(pin.controls); return b; }),
      ...differs.map(key => row(TITLES[key] ?? key, pin => pin.controls[key] ?? DEFAULTS[key] ?? "")),
      row("step time", pin => (pin.figures["step time"] ?? "") +
        (base && pin.seconds && pin !== pins[0] ? ` (${(100 * (pin.seconds / base - 1)).toFixed(0)} %)` : "")),
      ...["tokens/s", "MFU", "on device"].map(name => row(name, pin => pin.figures[name] ?? "")),
      row("fits", pin => pin.verdict)));
  $("pins").replaceChildren(make("div", {class: "scroll"}, table));
}

function load(words) { controls = {...words}; remember(true); fill(); refresh(); }

$("search").addEventListener("click", async event => {
  const button = event.target;
  button.disabled = true;
  const began = Date.now();
  const tick = setInterval(() => { $("told").textContent = `searching, ${((Date.now() - began) / 1e3).toFixed(0)} s`; }, 500);
  try {
    const answer = await ask("/search", {controls});
    if (answer.issues) { $("found").replaceChildren(); throw new Error(answer.issues.map(i => `${i.message}: ${i.hint}`).join("; ")); }
    drawFound(answer.rows);
    clearInterval(tick);
    $("told").textContent = `${answer.rows.length} layouts`;
  } catch (error) { clearInterval(tick); $("told").textContent = error.message; }
  button.disabled = false;
});

function drawFound(rows) {
  const cells = rows.map(row => {
    const words = NAMES.filter(name => row.controls[name] && row.controls[name] !== DEFAULTS[name])
      .map(name => `${name} ${row.controls[name]}`).join(", ") || "one rank holds all";
    const button = make("button", {type: "button"}, words);
    button.onclick = () => load(row.controls);
    const figures = ["step time", "on device"].map(name => make("td", {}, row.figures[name]));
    return make("tr", {}, make("td", {}, button), ...figures);
  });
  const head = make("tr", {}, ...["layout", "step time", "on device"].map(title => make("th", {scope: "col"}, title)));
  $("found").replaceChildren(make("div", {class: "scroll"}, make("table", {},
    make("caption", {}, "Found: the fastest layouts that fit"), make("thead", {}, head), make("tbody", {}, ...cells))));
}

setInterval(() => { if (!document.hidden) ask("/alive", {}).catch(() => {}); }, 60000);
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.search + location.hash);
controls = fromHash() ?? held.first;
fill();
refresh();
