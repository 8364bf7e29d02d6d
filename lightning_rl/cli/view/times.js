// Step time: where each iteration's seconds went.

const PARTS = ["generate", "reward", "logprob", "train", "sync", "eval", "other"];
const BARS = 220, TIMES_HEIGHT = 210;

function drawTimes() {
  const timed = view.runs.map((run, place) => ({ run, place, rows: run.metrics.filter((row) => "time/iteration" in row) }))
    .filter(({ place, rows }) => rows.length && !curves.hiddenRuns.has(place));
  const section = $("#times");
  if (!timed.length) {
    section.replaceChildren(el("p", { class: "empty" }, "No step times: add the callbacks StepTimer and RunReport."));
    return;
  }
  const cards = timed.map(({ place }) => el("div", { class: "card chart", "data-run": place }));
  section.replaceChildren(el("div", { class: "times" }, ...cards));
  timed.forEach((entry, i) => fillTimes(cards[i], entry));
}

function partNames(rows) {
  const found = new Set(rows.flatMap((row) => Object.keys(row).filter((key) => key.startsWith("time/")).map((key) => key.slice(5))));
  found.delete("iteration");
  return [...PARTS.filter((part) => found.has(part)), ...[...found].filter((part) => !PARTS.includes(part))];
}

// Many iterations share a bar; it shows their mean.
function binned(rows, parts) {
  const size = Math.ceil(rows.length / BARS);
  const bars = [];
  for (let start = 0; start < rows.length; start += size) {
    const some = rows.slice(start, start + size);
    const mean = (name) => some.reduce((total, row) => total + (Number(row[`time/${name}`]) || 0), 0) / some.length;
    bars.push({ first: some[0].iteration, last: some.at(-1).iteration, total: mean("iteration"), seconds: parts.map((part) => Math.max(0, mean(part))) });
  }
  return bars;
}

function fillTimes(card, { run, rows }) {
  const parts = partNames(rows);
  const bars = binned(rows, parts);
  const width = Math.max(card.clientWidth - 28, 200);
  const tallest = most(bars.map((bar) => bar.seconds.reduce((a, b) => a + b, 0)));
  const y = scale(0, tallest, TIMES_HEIGHT - BOTTOM, TOP);
  const step = (width - LEFT - 6) / bars.length;
  const svg = el("svg", { height: TIMES_HEIGHT, viewBox: `0 0 ${width} ${TIMES_HEIGHT}` });
  for (const tick of ticks(0, y.high, 4)) {
    svg.append(el("line", { class: "rule", x1: LEFT, x2: width - 6, y1: y(tick), y2: y(tick) }),
      el("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, `${format(tick)} s`));
  }
  const every = Math.ceil(bars.length / 12);
  bars.forEach((bar, i) => {
    const group = el("g", { "data-bar": bar.first, onmousemove: (event) => showTip(event, timesTip(bar, parts)), onmouseleave: hideTip });
    let low = 0;
    bar.seconds.forEach((seconds, part) => {
      group.append(el("rect", { x: LEFT + i * step + step * 0.06, width: step * 0.88, y: y(low + seconds), height: Math.max(0, y(low) - y(low + seconds)), fill: partColour(part) }));
      low += seconds;
    });
    svg.append(group);
    if (i % every === 0) svg.append(el("text", { x: LEFT + (i + 0.5) * step, y: TIMES_HEIGHT - 4, "text-anchor": "middle" }, String(bar.first)));
  });
  const whole = rows.reduce((total, row) => total + row["time/iteration"], 0);
  const sums = parts.map((part) => rows.reduce((total, row) => total + (Number(row[`time/${part}`]) || 0), 0));
  card.replaceChildren(el("h2", {}, run.name, el("span", { class: "soft" }, `${rows.length} iterations, ${format(whole)} s`)), svg,
    el("table", {}, el("tbody", {},
      el("tr", {}, el("th", {}, "part"), ...parts.map((part, i) => el("th", { class: "number" }, el("i", { class: "dot", style: `background: ${partColour(i)}` }), part))),
      el("tr", {}, el("th", {}, "mean s"), ...sums.map((sum) => el("td", { class: "number" }, format(sum / rows.length)))),
      el("tr", {}, el("th", {}, "share"), ...sums.map((sum) => el("td", { class: "number" }, `${(100 * sum / whole).toFixed(1)} %`))))));
}

const partColour = (place) => COLOURS[place % COLOURS.length];

function timesTip(bar, parts) {
  const title = bar.first === bar.last ? `iteration ${bar.first}` : `iterations ${bar.first}–${bar.last}, mean`;
  const line = (name, seconds) => el("tr", {}, el("td", {}, name), el("td", {}, `${format(seconds)} s`));
  return el("div", {}, el("b", {}, title), el("table", {}, ...parts.map((part, i) => line(part, bar.seconds[i])), line("iteration", bar.total)));
}
