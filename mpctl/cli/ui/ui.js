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
const TYPED = ["job", "model", "gpus", "runtime", "seq-length", "global-batch-size", "lora", "qlora", "tokens", "price"];
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

const LOST = held.loading ? "The planner in this page has ended: reload the page." : "Is mpctl ui still running?";

// asks the server; a search answers in lines, its progress first
async function askServer(path, body, {signal, onProgress} = {}) {
  const answer = await fetch(path, {method: "POST", signal, body: JSON.stringify(body),
    headers: {"X-Mpctl-Token": held.token, "Content-Type": "application/json"}});
  if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
  if (!onProgress) return answer.json();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return JSON.parse(text);
    const lines = (text + value).split("\n").filter(line => line);
    text = lines.pop();
    for (const line of lines) onProgress(...JSON.parse(line).progress);
    if (text.startsWith('{"progress"') && text.endsWith("}")) { onProgress(...JSON.parse(text).progress); text = ""; }
  }
}

// asks the planner in this page, a worker, one question at a time; it cannot be interrupted: a search that is
// cancelled ends it, and another one is loaded
let worker = null, queue = Promise.resolve();

function loadPlanner() {
  worker = new Worker("worker.js", {type: "module"});
  $(last ? "told" : "verdict").textContent = held.loading;
  return worker;
}

function askPlanner(path, body, {signal, onProgress} = {}) {
  const asking = queue.then(() => new Promise((resolve, reject) => {
    if (signal?.aborted) { reject(signal.reason); return; }
    const planner = worker ?? loadPlanner();
    const end = () => planner.removeEventListener("message", heard);
    const heard = ({data}) => {
      if (data.progress) onProgress?.(...data.progress);
      if (data.error) { end(); reject(new Error(data.error)); }
      if (data.answer) { end(); resolve(JSON.parse(data.answer)); }
    };
    planner.addEventListener("message", heard);
    if (onProgress) signal?.addEventListener("abort", () => { end(); planner.terminate(); worker = null; reject(signal.reason); });
    planner.postMessage({path, body: JSON.stringify(body)});
  }));
  queue = asking.catch(() => {});
  return asking;
}

const ask = held.loading ? askPlanner : askServer;

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
  const others = Object.keys(controls).filter(name => name !== "job" && !NAMES.includes(name) && !TYPED.includes(name))
    .map(name => {
      const drop = make("button", {type: "button", "aria-label": `leave out ${name}`}, "×");
      drop.onclick = () => { change({[name]: ""}, true); drawLayout(); };
      return make("div", {class: "control"}, make("span", {}, name), make("span", {}, controls[name], " ", drop));
    });
  $("layout").replaceChildren(make("legend", {}, "Layout"), ...rows, ...others);
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
  $("run").textContent = answer.run && `${controls.tokens} tokens: ${answer.run}`;
  mark(answer);
  if (answer.status === "illegal") { $("plan").classList.add("stale"); return; }
  $("plan").innerHTML = answer.html;
  $("data").textContent = JSON.stringify(answer.data);
  liveMap();  // page.js: the groups of the rank that is pointed at
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
    const {signal} = open;
    const answer = await ask("plan", {controls}, {signal});
    if (mine !== asked) return;
    show(answer);
    const found = {};  // of the planner in this page one by one, so that a new plan waits for one alone
    for (const target of held.loading ? NAMES : [""]) {
      Object.assign(found, await ask("choices", {controls, target}, {signal}));
      if (mine !== asked) return;
    }
    legal = found;
    drawLayout();
    mark(answer);
  } catch (error) {
    if (error.name === "AbortError" || mine !== asked) return;
    $("told").textContent = `No answer: ${error.message}. ${LOST}`;
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
    const answer = await ask("emit", {controls, target});
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
  pins = [...pins, {...controls}].slice(-PINS);
  drawPins();
});

async function drawPins() {
  if (!pins.length) { $("pins").replaceChildren(); return; }
  const shown = pins;
  const buttons = pins.map((pin, at) => {
    const loads = make("button", {type: "button"}, `load ${at + 1}`);
    const drops = make("button", {type: "button", "aria-label": `remove pin ${at + 1}`}, "×");
    loads.onclick = () => load(pin);
    drops.onclick = () => { pins = pins.filter(other => other !== pin); drawPins(); };
    return make("span", {}, loads, " ", drops);
  });
  try {
    const answer = await ask("compare", {pins});
    if (shown !== pins) return;
    const drawn = make("div");
    drawn.innerHTML = answer.html ?? "";
    if (answer.issues) drawn.textContent = answer.issues.map(i => `${i.where}: ${i.message}`).join("; ");
    $("pins").replaceChildren(make("h2", {}, "Pinned layouts"), make("p", {class: "buttons"}, ...buttons), drawn);
  } catch (error) { $("told").textContent = error.message; }
}

function load(words) { controls = {...words}; remember(true); fill(); refresh(); $("verdict").scrollIntoView({block: "nearest"}); }

let search = null;
$("search").addEventListener("click", async event => {
  const button = event.target;
  if (search) { search.abort(); return; }
  const mine = search = new AbortController(), bar = $("progress");
  button.textContent = "Cancel the search";
  bar.removeAttribute("value");
  $("searching").hidden = false;
  $("told").textContent = "";
  try {
    const answer = await ask("search", {controls}, {signal: mine.signal, onProgress: (stage, done, total) => {
      bar.max = total || 1;
      if (total) bar.value = done; else bar.removeAttribute("value");
      bar.setAttribute("aria-valuetext", stage);
    }});
    if (answer.issues) { $("found").replaceChildren(); throw new Error(answer.issues.map(i => `${i.message}: ${i.hint}`).join("; ")); }
    drawFound(answer);
    $("told").textContent = "found: choose a row or a point to load it";
  } catch (error) { $("told").textContent = mine.signal.aborted ? "search cancelled" : error.message; }
  search = null;
  $("searching").hidden = true;
  button.textContent = "Search from here";
});

// the search's own tables and picture, whose rows and points load what they show
function drawFound({html, loads}) {
  const place = make("div");
  place.innerHTML = html;
  for (const cell of place.querySelectorAll("td, th[scope=row]")) {
    const words = loads[cell.textContent];
    if (!words) continue;
    const button = make("button", {type: "button"}, cell.textContent);
    button.onclick = () => load(words);
    cell.replaceChildren(button);
  }
  const picture = place.querySelector("svg.chart");
  if (picture) livePoints(picture, loads);
  else place.querySelectorAll("details").forEach(part => { part.open = part.querySelector("button") !== null; });
  const head = make("summary", {}, "Search: the fastest layouts that fit");
  $("found").replaceChildren(make("details", {open: ""}, head, place));
}

// points of the picture: one stop for the keyboard, arrows to the next by time, Enter loads
function livePoints(picture, loads) {
  const points = [...picture.querySelectorAll("use")].map(point => [point, point.querySelector("title")?.textContent])
    .filter(([, words]) => loads[words]).map(([point, words]) => ({point, words, x: +point.getAttribute("x")}));
  points.sort((a, b) => a.x - b.x);
  picture.setAttribute("role", "group");
  points.forEach(({point, words}, at) => {
    const move = to => {
      if (!points[to]) return;
      point.setAttribute("tabindex", "-1");
      points[to].point.setAttribute("tabindex", "0");
      points[to].point.focus();
    };
    const keys = {ArrowRight: () => move(at + 1), ArrowUp: () => move(at + 1), ArrowLeft: () => move(at - 1),
      ArrowDown: () => move(at - 1), Home: () => move(0), End: () => move(points.length - 1),
      Enter: () => load(loads[words]), " ": () => load(loads[words])};
    point.setAttribute("role", "button");
    point.setAttribute("aria-label", words);
    point.setAttribute("tabindex", at ? "-1" : "0");
    point.addEventListener("click", () => load(loads[words]));
    point.addEventListener("focus", () => { $("told").textContent = words; });
    point.addEventListener("keydown", event => {
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
  });
}

if (!held.loading) setInterval(() => { ask("alive", {}).catch(() => {}); }, 60000);
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.search + location.hash);
controls = fromHash() ?? held.first;
fill();
refresh();
