// Start: unpack the index, then draw the chosen tab.

const DRAW = { curves: drawCurves, times: drawTimes, rollouts: drawRollouts };
const asked = location.hash.slice(1);
let tab = "curves";

function showTab(name) {
  tab = name;
  history.replaceState(null, "", `#${name}`);
  for (const button of document.querySelectorAll("#tabs button")) button.setAttribute("aria-current", String(button.dataset.tab === name));
  for (const section of Object.keys(DRAW)) $(`#${section}`).hidden = section !== name;
  hideTip();
  DRAW[name]();
}

function drawRuns() {
  const names = shortNames(view.runs.map((run) => run.name));
  $("#runs").replaceChildren(...view.runs.map((run, place) => {
    const { status, accuracy_after: accuracy, reward_after: reward, error } = run.summary;
    const figures = [["accuracy", accuracy], ["held-out reward", reward === accuracy ? null : reward]];
    const after = figures.filter(([, value]) => value != null).map(([name, value]) => `${name} ${format(value)}`);
    const said = [run.name, status, error, ...after].filter(Boolean).join(" · ");
    return el("button", { class: "chip", "aria-pressed": String(!curves.hiddenRuns.has(place)), title: said, onclick: () => {
      if (!curves.hiddenRuns.delete(place)) curves.hiddenRuns.add(place);
      drawRuns();
      showTab(tab);
    } }, dot(place), names[place], run.state ? el("small", { class: run.state.startsWith("failed") ? "bad" : "" }, run.state) : null);
  }));
}

// Draws what is new in its place: nothing that is in sight moves.
function show(entries) {
  const main = $("main");
  const empty = !view.runs.length;
  receive(entries);
  drawRuns();
  if (empty) {
    const first = view.rollouts.length && !view.runs.some((run) => run.metrics.length) ? "rollouts" : "curves";
    showTab(asked in DRAW ? asked : first);
    return;
  }
  main.style.minHeight = `${main.offsetHeight}px`;
  DRAW[tab]();
  main.style.minHeight = "";
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (tab !== "rollouts" || typing || !["ArrowDown", "ArrowUp"].includes(event.key)) return;
  event.preventDefault();
  step(event.key === "ArrowDown" ? 1 : -1);
}

async function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  $("#theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
  const { runs, ...constants } = parse(await unpack(elementText("index")));
  Object.assign(view, constants);
  $("#loading").remove();
  for (const button of document.querySelectorAll("#tabs button")) button.addEventListener("click", () => showTab(button.dataset.tab));
  addEventListener("keydown", onKey);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (tab !== "rollouts") showTab(tab); }, 150); });
  show(runs);
}

const fail = (error) => document.body.prepend(el("p", { class: "bad" }, `This page cannot be shown: ${error}. It needs a browser of 2023 or later.`));
const started = start().catch(fail);
