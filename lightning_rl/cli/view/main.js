// Start: unpack the index, then draw the chosen tab.

const DRAW = { curves: drawCurves, times: drawTimes, rollouts: drawRollouts };
let tab = "curves";

function showTab(name) {
  tab = name;
  history.replaceState(null, "", `#${name}`);
  for (const button of document.querySelectorAll("#tabs button")) button.setAttribute("aria-current", String(button.dataset.tab === name));
  for (const section of Object.keys(DRAW)) $(`#${section}`).hidden = section !== name;
  hideTip();
  DRAW[name]();
  if (name === "rollouts" && rollouts.open !== null) openRollout(rollouts.open);
}

const SETTINGS = 3; // of those in which runs differ, what a run shows without being pointed at
const SETTING = 24; // characters of a value, of which the last tell paths apart

function drawRuns() {
  const names = shortNames(view.runs.map((run) => run.name));
  const keys = [...new Set(view.runs.flatMap((run) => Object.keys(run.settings)))];
  const short = shortNames(keys, ".");
  $("#runs").replaceChildren(...view.runs.map((run, place) => {
    const { status, accuracy_after: accuracy, reward_after: reward, error } = run.summary;
    const figures = [["accuracy", accuracy], ["held-out reward", reward === accuracy ? null : reward]];
    const after = figures.filter(([, value]) => value != null).map(([name, value]) => `${name} ${format(value)}`);
    const differs = keys.map((key) => `${key}: ${run.settings[key] ?? "–"}`);
    const said = [[run.name, status, error, ...after].filter(Boolean).join(" · "), ...(Object.keys(run.settings).length ? differs : [])].join("\n");
    const shown = keys.map((key, at) => [short[at], run.settings[key]]).filter(([, value]) => value !== undefined).slice(0, SETTINGS);
    const settings = shown.map(([key, value]) => `${key} ${value.length > SETTING ? `…${value.slice(-SETTING)}` : value}`).join(" · ");
    return el("button", { class: "chip", "aria-pressed": String(!curves.hiddenRuns.has(place)), title: said, onclick: () => {
      if (!curves.hiddenRuns.delete(place)) curves.hiddenRuns.add(place);
      drawRuns();
      showTab(tab);
    } }, el("i", { class: "dot", style: `background: ${runColour(place)}` }), names[place], settings ? el("small", {}, settings) : null, status === "failed" ? el("b", { class: "bad" }, "failed") : null);
  }));
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
  view = JSON.parse(new TextDecoder().decode(await unpack("index")));
  $("#loading").remove();
  drawRuns();
  for (const button of document.querySelectorAll("#tabs button")) button.addEventListener("click", () => showTab(button.dataset.tab));
  addEventListener("keydown", onKey);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => { if (tab !== "rollouts") showTab(tab); }, 150); });
  const named = location.hash.slice(1);
  const first = view.runs.some((run) => run.metrics.length) ? "curves" : "rollouts";
  showTab(named in DRAW ? named : first);
}

start().catch((error) => { document.body.prepend(el("p", { class: "bad" }, `This page cannot be shown: ${error}. It needs a browser of 2023 or later.`)); });
