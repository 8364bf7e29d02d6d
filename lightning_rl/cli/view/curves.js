// Curves: every metric of every run by iteration.

const FIRST_SHOWN = [
  "reward/mean", "eval/accuracy", "policy/entropy", "policy/kl_ref", "rollout/logprob_gap_max", "rollout/tokens_mean",
  "rollout/staleness_max", "policy/grad_norm", "value/loss", "time/iteration",
];
const HEIGHT = 168, LEFT = 46, BOTTOM = 20, TOP = 8;
const curves = { names: "", chosen: null, hiddenRuns: new Set(), log: new Set(), smooth: 0, search: "", charts: [], at: null };

const metricNames = () => [...view.metrics].filter((name) => name !== "iteration").sort();

// Those that were chosen; until then, those of most interest.
function shownMetrics(names) {
  const first = FIRST_SHOWN.filter((name) => names.includes(name));
  return curves.chosen ?? new Set(first.length ? first : names.slice(0, 6));
}

function drawCurves() {
  drawDifferences();
  const names = metricNames();
  const charts = $("#charts");
  if (!names.length) charts.replaceChildren(el("p", { class: "empty" }, "No metrics: they need the callback RunReport, which writes metrics.jsonl."));
  // With the same metrics the picker stays, and what was typed there.
  else if (curves.names !== String(names)) charts.replaceChildren(el("div", { class: "split" }, metricPicker(names), el("div", { class: "grid" })));
  curves.names = String(names);
  if (names.length) drawCharts();
}

function metricPicker(names) {
  const list = el("div");
  const shown = shownMetrics(names);
  const fill = () => {
    const groups = new Map();
    for (const name of names.filter((n) => n.includes(curves.search))) {
      const group = name.includes("/") ? name.split("/")[0] : "other";
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    list.replaceChildren(...[...groups].flatMap(([group, members]) => [
      el("h3", {}, group), ...members.map(metricBox),
    ]));
  };
  const metricBox = (name) => el("label", {},
    el("input", { type: "checkbox", "data-metric": name, checked: shown.has(name), onchange: (event) => {
      if (event.target.checked) shown.add(name); else shown.delete(name);
      curves.chosen = shown;
      drawCharts();
    } }),
    name.includes("/") ? name.slice(name.indexOf("/") + 1) : name);
  fill();
  return el("aside", { class: "card picker" },
    el("input", { type: "search", placeholder: "find a metric", "aria-label": "find a metric", value: curves.search,
      oninput: (event) => { curves.search = event.target.value.trim(); fill(); } }),
    el("label", { class: "wide" }, "Smoothing",
      el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: curves.smooth, "aria-label": "smoothing",
        oninput: (event) => { curves.smooth = Number(event.target.value); drawCharts(); } })),
    list);
}

function drawCharts() {
  const all = metricNames();
  const shown = shownMetrics(all);
  const names = all.filter((name) => shown.has(name));
  const usual = FIRST_SHOWN.filter((name) => names.includes(name));
  const ordered = [...usual, ...names.filter((name) => !usual.includes(name))];
  const cards = ordered.map((name) => el("div", { class: "card chart", "data-chart": name }));
  $("#charts .grid").replaceChildren(...cards);
  curves.charts = cards.map(fillChart);
  setCursor(curves.at);
}

// Points of one run: numbers, and where the metric was not finite.
function seriesOf(run, name) {
  const rows = run.metrics.filter((row) => name in row);
  const points = rows.filter((row) => typeof row[name] === "number").map((row) => [row.iteration, row[name]]);
  const broken = rows.filter((row) => typeof row[name] !== "number").map((row) => row.iteration);
  return { points, broken };
}

function smoothed(points, weight) {
  let mean = null;
  return points.map(([x, y]) => [x, (mean = mean === null ? y : weight * mean + (1 - weight) * y)]);
}

function fillChart(card) {
  const name = card.dataset.chart;
  const width = Math.max(card.clientWidth - 28, 200);
  const series = view.runs.map((run, place) => ({ place, ...seriesOf(run, name) }))
    .filter(({ place, points, broken }) => !curves.hiddenRuns.has(place) && points.length + broken.length);
  const log = curves.log.has(name);
  const usable = (y) => !log || y > 0;
  const values = series.flatMap((s) => s.points.map((p) => p[1])).filter(usable);
  const iterations = series.flatMap((s) => [...s.points.map((p) => p[0]), ...s.broken]);
  const x = scale(least(iterations), most(iterations), LEFT, width - 6);
  const y = log
    ? scale(Math.log10(least(values)), Math.log10(most(values)), HEIGHT - BOTTOM, TOP, Math.log10)
    : scale(least(values), most(values), HEIGHT - BOTTOM, TOP);
  const svg = el("svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` });
  for (const tick of log ? logTicks(values) : ticks(y.low, y.high, 4)) {
    svg.append(el("line", { class: "rule", x1: LEFT, x2: width - 6, y1: y(tick), y2: y(tick) }),
      el("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
  }
  for (const tick of ticks(x.low, x.high, 5).filter(Number.isInteger)) {
    svg.append(el("text", { x: x(tick), y: HEIGHT - 4, "text-anchor": "middle" }, String(tick)));
  }
  for (const { place, points, broken } of series) {
    const path = (some) => some.filter((p) => usable(p[1])).map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    const stroke = runColour(place);
    if (curves.smooth) svg.append(el("path", { class: "raw", d: path(points), stroke }));
    svg.append(el("path", { class: "line", d: path(smoothed(points, curves.smooth)), stroke }));
    if (points.length < 40) svg.append(...points.filter((p) => usable(p[1])).map(([a, b]) => el("circle", { cx: x(a), cy: y(b), r: 2, fill: stroke, opacity: curves.smooth ? 0.3 : 1 })));
    svg.append(...broken.map((a) => el("text", { class: "bad", x: x(a), y: TOP + 4, "text-anchor": "middle", style: "fill: var(--bad)" }, "✕")));
  }
  const cursor = el("g", {});
  svg.append(cursor);
  const known = [...new Set(iterations)].sort((a, b) => a - b);
  svg.addEventListener("mousemove", (event) => {
    const at = (event.clientX - svg.getBoundingClientRect().left) * width / svg.getBoundingClientRect().width;
    setCursor(known.reduce((best, i) => (Math.abs(x(i) - at) < Math.abs(x(best) - at) ? i : best), known[0]));
  });
  svg.addEventListener("mouseleave", () => setCursor(null));
  const readout = el("div", { class: "readout" });
  const logButton = el("button", { "aria-pressed": String(log), title: "logarithmic", onclick: () => {
    if (log) curves.log.delete(name); else curves.log.add(name);
    drawCharts();
  } }, "log");
  card.replaceChildren(el("h2", {}, name, logButton), svg, readout);
  return { series, x, y, cursor, readout, usable };
}

// One iteration for all charts at once; null: the last values.
function setCursor(iteration) {
  curves.at = iteration;
  const names = shortNames(view.runs.map((run) => run.name));
  for (const { series, x, y, cursor, readout, usable } of curves.charts) {
    cursor.replaceChildren();
    if (iteration !== null && iteration >= x.low && iteration <= x.high) {
      cursor.append(el("line", { class: "cursor", x1: x(iteration), x2: x(iteration), y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    const entries = series.map(({ place, points, broken }) => {
      // A metric that is not logged in every iteration keeps its last value.
      const point = iteration === null ? points.at(-1) : points.findLast((p) => p[0] <= iteration);
      if (point && iteration !== null && usable(point[1])) cursor.append(el("circle", { cx: x(point[0]), cy: y(point[1]), r: 4, fill: runColour(place) }));
      const value = broken.includes(iteration) ? "not finite" : format(point?.[1]);
      const earlier = point && iteration !== null && point[0] < iteration && !broken.includes(iteration);
      return el("span", {}, dot(place), view.runs.length > 1 ? names[place] : null, el("b", {}, value),
        earlier ? el("span", { class: "soft" }, `at ${point[0]}`) : null);
    });
    readout.replaceChildren(...entries, el("span", { class: "soft" }, iteration === null ? "last" : `iteration ${iteration}`));
  }
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function scale(low, high, from, to, transform = (v) => v) {
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const place = (value) => from + ((transform(value) - low) / (high - low)) * (to - from);
  return Object.assign(place, { low, high });
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(10)));
}

function logTicks(values) {
  if (!values.length) return [];
  const [low, high] = [Math.floor(Math.log10(least(values))), Math.ceil(Math.log10(most(values)))];
  const step = Math.max(1, Math.ceil((high - low) / 4));
  const powers = [];
  for (let power = low; power <= high; power += step) powers.push(10 ** power);
  return powers.filter((p) => p >= least(values) && p <= most(values));
}
