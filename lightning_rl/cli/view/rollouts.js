// All rollouts: filters, a sorted list in pages, and the one that is open.

const PAGE = 25;
// `open` and `found` are rows of `view.rollouts`.
const rollouts = { open: null, page: 0, sort: "place", descending: false, found: [], filters: {}, offered: "" };

const COLUMNS = [
  { name: "iteration", key: (r) => r.iteration, number: true },
  { name: "prompt", key: (r) => r.asked, cell: (r) => el("bdi", { class: "mono" }, r.asked), text: "begin", title: "the last message of the user" },
  { name: "completion", key: (r) => r.answered, cell: (r) => el("bdi", { class: "mono" }, r.answered), text: "end", title: "the end of the answer" },
  { name: "reward", key: (r) => r.reward, number: true },
  { name: "tokens", key: (r) => r.tokens, number: true },
  { name: "gap", key: (r) => r.gap, number: true, told: true },
  { name: "version", key: (r) => r.oldest, cell: (r) => (r.oldest === r.newest ? format(r.oldest) : `${r.oldest}–${r.newest}`), number: true, told: true },
  { name: "end", key: (r) => r.status + r.finish_reason, cell: (r) => (r.status === "completed" ? r.finish_reason ?? "–" : r.status) },
  { name: "flags", key: (r) => Object.keys(r.flags).length, cell: (r) => Object.keys(r.flags).map((flag) => el("span", { class: "flag" }, flag)) },
];

// Those above, with one for each part of the reward behind the reward, if there are several.
function columns() {
  const names = view.parts ??= [...new Set(view.rollouts.flatMap((r) => Object.keys(r.reward_parts ?? {})))];
  if (names.length < 2) return COLUMNS;
  const parts = names.map((name) => ({ name: `reward/${name}`, label: name, key: (r) => r.reward_parts?.[name], number: true, title: `reward/${name}, unweighted` }));
  const at = COLUMNS.findIndex((column) => column.name === "reward") + 1;
  return [...COLUMNS.slice(0, at), ...parts, ...COLUMNS.slice(at)];
}

function drawRollouts() {
  const section = $("#rollouts");
  if (!view.rollouts.length) {
    section.replaceChildren(el("p", { class: "empty" }, "No rollouts: they need the callback RolloutRecorder or PreviewTable."));
    rollouts.offered = "";
    return;
  }
  const distinct = (key) => [...new Set(view.rollouts.map(key))].filter((value) => value != null).sort();
  const choices = { set: distinct((r) => r.set), status: distinct((r) => r.status), end: distinct((r) => r.finish_reason) };
  const offered = JSON.stringify(choices);
  const fresh = rollouts.offered !== offered; // else the filters stay, and the rollout that is open
  if (fresh) {
    const browser = el("div", { class: "browser" }, el("div", { class: "card list" }), el("aside", { class: "card detail" }));
    section.replaceChildren(el("div", { id: "notes" }), filterBar(choices), browser);
  }
  rollouts.offered = offered;
  $("#notes").replaceChildren(...notes());
  applyFilters();
  if (fresh && rollouts.open) openRollout(rollouts.open);
}

function notes() {
  const counted = view.runs.map((run) => [run, run.blocks.reduce((sum, block) => sum + block.rollouts.length, 0)]);
  return counted.filter(([run, shown]) => shown < run.rollouts_total).map(([run, shown]) =>
    el("p", { class: "note" }, `${run.name}: showing the last ${shown} of ${run.rollouts_total} rollouts; use --rollouts ${run.rollouts_total} for all.`));
}

function filterBar({ set, status, end }) {
  const change = (name, value) => { rollouts.filters[name] = value; rollouts.page = 0; applyFilters(); };
  const choice = (name, options) => el("label", {}, name, el("select", { "data-filter": name, onchange: (event) => change(name, event.target.value) },
    el("option", { value: "" }, "all"), ...options.map((option) => el("option", { value: option, selected: rollouts.filters[name] === option }, option))));
  const bound = (name) => el("input", { type: "number", step: "any", "data-filter": name, placeholder: name.split(" ")[1], "aria-label": name, value: rollouts.filters[name],
    oninput: (event) => change(name, event.target.value) });
  const range = (name) => el("label", {}, name, el("span", { class: "range" }, bound(`${name} from`), bound(`${name} to`)));
  return el("div", { class: "card filters" },
    el("label", {}, "text", el("input", { type: "search", "data-filter": "text", placeholder: "prompt, completion, id", value: rollouts.filters.text, oninput: (event) => change("text", event.target.value) })),
    ...(set.length ? [choice("set", set)] : []),
    choice("flag", ["any", ...Object.keys(view.flags)]),
    choice("status", status), choice("end", end),
    range("iteration"), range("reward"),
    el("button", { "data-filter": "reset", onclick: () => { Object.assign(rollouts, { filters: {}, page: 0, offered: "" }); drawRollouts(); } }, "Reset"));
}

function matches(row) {
  const f = rollouts.filters;
  if (curves.hiddenRuns.has(row.run)) return false;
  if (f.set && row.set !== f.set) return false;
  if (f.status && row.status !== f.status) return false;
  if (f.end && row.finish_reason !== f.end) return false;
  if (f.flag && !(f.flag === "any" ? Object.keys(row.flags).length : f.flag in row.flags)) return false;
  for (const name of ["iteration", "reward"]) {
    const [low, high] = [f[`${name} from`], f[`${name} to`]];
    if ((low || high) && typeof row[name] !== "number") return false;
    if (low && row[name] < Number(low)) return false;
    if (high && row[name] > Number(high)) return false;
  }
  if (!f.text) return true;
  const wanted = f.text.toLowerCase();
  return [row.prompt, row.completion, row.id ?? "", row.error ?? ""].some((text) => text.toLowerCase().includes(wanted));
}

// Missing values come last in either direction.
function compare(a, b) {
  const missing = (value) => value == null || value === "nan";
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return (a < b ? -1 : a > b ? 1 : 0) * (rollouts.descending ? -1 : 1);
}

function applyFilters() {
  const column = columns().find((c) => c.name === rollouts.sort);
  rollouts.found = view.rollouts.filter(matches);
  if (column) rollouts.found.sort((a, b) => compare(column.key(a), column.key(b)));
  drawList();
}

function sortBy(column) {
  rollouts.descending = rollouts.sort === column.name ? !rollouts.descending : Boolean(column.number) && column.name !== "iteration";
  rollouts.sort = column.name;
  rollouts.page = 0;
  applyFilters();
}

function drawList() {
  const pages = Math.max(1, Math.ceil(rollouts.found.length / PAGE));
  rollouts.page = Math.min(rollouts.page, pages - 1);
  const head = columns().map((column) => {
    const arrow = rollouts.sort === column.name ? (rollouts.descending ? " ↓" : " ↑") : "";
    return el("th", { class: `sortable ${kindOf(column)}`, "data-sort": column.name, title: column.title, onclick: () => sortBy(column) }, el("div", {}, (column.label ?? column.name) + arrow));
  });
  const shown = rollouts.found.slice(rollouts.page * PAGE, (rollouts.page + 1) * PAGE);
  const turn = (by) => { rollouts.page += by; drawList(); };
  $(".list").replaceChildren(
    el("table", {}, el("thead", {}, el("tr", {}, view.runs.length > 1 ? el("th", {}) : null, ...head)), el("tbody", {}, ...shown.map(listRow))),
    el("div", { class: "pager" },
      el("button", { disabled: rollouts.page === 0, "data-turn": "back", onclick: () => turn(-1) }, "← Back"),
      el("span", { id: "count", class: "soft" }, `${rollouts.found.length} of ${view.rollouts.length} rollouts · page ${rollouts.page + 1} of ${pages} · choose one; ↑ and ↓ go on`),
      el("button", { disabled: rollouts.page >= pages - 1, "data-turn": "on", onclick: () => turn(1) }, "On →")));
}

// What an open rollout tells beside the list gives way to the parts of the reward.
function kindOf(column) {
  const told = column.told && view.parts.length > 1 && rollouts.sort !== column.name;
  return [column.number && "number", column.text && "text", told && "told"].filter(Boolean).join(" ");
}

// A cell that is too narrow cuts its text where the line of its own direction ends: to see the end
// of a text, that is the other way round than the text itself reads.
function cutting(text, shown) {
  const first = text.match(/\p{L}/u)?.[0] ?? "";
  const leftward = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]|[\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u.test(first);
  return leftward === (shown === "end") ? "ltr" : "rtl";
}

function listRow(row) {
  const cells = columns().map((column) => {
    const content = column.cell ? column.cell(row) : format(column.key(row));
    const about = column.text ? { title: column.key(row), dir: cutting(column.key(row), column.text) } : {};
    return el("td", { class: kindOf(column), ...about }, ...[content].flat());
  });
  const run = view.runs.length > 1 ? el("td", {}, el("i", { class: "dot", title: view.runs[row.run].name, style: `background: ${runColour(row.run)}` })) : null;
  return el("tr", { "data-rollout": row.place, "aria-selected": String(row === rollouts.open), onclick: () => openRollout(row) }, run, ...cells);
}

function openRollout(row) {
  rollouts.open = row;
  $(".browser").classList.add("open");
  const at = rollouts.found.indexOf(row);
  if (at >= 0) rollouts.page = Math.floor(at / PAGE);
  drawList();
  return drawDetail(row);
}

function step(by) {
  const at = rollouts.found.indexOf(rollouts.open) + by;
  if (at >= 0 && at < rollouts.found.length) openRollout(rollouts.found[at]);
}
