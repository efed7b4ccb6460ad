// The planner of a static copy: Python in this worker, the same answers as the server's (questions.py).
import {loadPyodide} from "./pyodide/pyodide.mjs";

const OFTEN = 100;  // milliseconds between two reports of a search's progress
const here = name => new URL(name, self.location.href).href;

async function load() {
  const [python, packed] = await Promise.all([
    loadPyodide({indexURL: here("pyodide/")}),
    fetch(here("planner.zip")).then(answer => answer.arrayBuffer()),
  ]);
  python.unpackArchive(packed, "zip", {extractDir: python.runPython("import site; site.getsitepackages()[0]")});
  await python.loadPackage(here("{{wheel}}"), {checkIntegrity: false, messageCallback: () => {}});
  return python.pyimport("mpctl.cli.ui.questions").answer_text;
}

const planner = load();
planner.catch(() => {});  // said with the first answer
self.addEventListener("message", async ({data: {path, body}}) => {
  let said = 0;
  const progress = (...words) => {
    if (Date.now() - said < OFTEN) return;
    said = Date.now();
    self.postMessage({progress: words});
  };
  try {
    self.postMessage({answer: (await planner)(path, body, progress)});
  } catch (error) { self.postMessage({error: error.message.trim().split("\n").at(-1)}); }
});
