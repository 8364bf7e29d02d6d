// The settings in which runs differ: a row for each, a column for each run.

const LONG = 32; // characters of a value, of which the last tell paths apart

function drawDifferences() {
  const keys = [...new Set(view.runs.flatMap((run) => Object.keys(run.settings)))];
  const names = shortNames(view.runs.map((run) => run.name));
  const shown = view.runs.map((run, place) => ({ ...run, place })).filter(({ place }) => !curves.hiddenRuns.has(place));
  const short = (text) => (text.length > LONG ? `…${text.slice(-LONG)}` : text);
  const cell = ({ settings }, key) => el("td", { class: "mono", title: settings[key] }, short(settings[key] ?? "–"));
  $("#differences").hidden = !keys.length;
  $("#differences > div").replaceChildren(el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}), ...shown.map((run) => el("th", { title: run.name }, dot(run.place), names[run.place])))),
    el("tbody", {}, ...keys.map((key) => el("tr", {}, el("th", {}, key), ...shown.map((run) => cell(run, key)))))));
}
