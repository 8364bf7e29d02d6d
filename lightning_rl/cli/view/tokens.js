// One rollout, token by token.

const blend = (hue, strength) => `rgb(var(--hue-${hue}) / ${Math.min(1, strength).toFixed(3)})`;
const diverging = (value, limit) => blend(value < 0 ? "orange" : "blue", 0.75 * Math.abs(value) / limit);
const peak = (values, atLeast) => Math.max(atLeast, most(Array.from(values, (v) => (Number.isFinite(v) ? Math.abs(v) : 0))));
const present = (values) => values.some((value) => !Number.isNaN(value));

// A quantity: its numbers, and the colours they get. `floor` is the least end of a colour scale, so
// that rounding errors stay pale.
const QUANTITIES = {
  logprobs: { label: "engine logprob", kind: "low" },
  trainer_logprobs: { label: "trainer logprob", kind: "low" },
  gap: { label: "gap: trainer − engine", kind: "signed", floor: 0.05, from: (c) => c.trainer_logprobs.map((v, i) => v - c.logprobs[i]) },
  advantages: { label: "advantage", kind: "signed", floor: 1e-6 },
  ref_logprobs: { label: "reference logprob", kind: "low" },
  drift: { label: "drift: trainer − reference", kind: "signed", floor: 0.05, from: (c) => c.trainer_logprobs.map((v, i) => v - c.ref_logprobs[i]) },
  values: { label: "value", kind: "signed", floor: 1e-6 },
  returns: { label: "return", kind: "signed", floor: 1e-6 },
};
const LOWEST = 4; // nats at which a logprob's colour is full
let colourBy = "logprobs";

function quantitiesOf(tokens) {
  const found = {};
  for (const [name, { from }] of Object.entries(QUANTITIES)) {
    const values = from ? from(tokens.columns) : tokens.columns[name];
    if (present(values)) found[name] = values;
  }
  return found;
}

function painter(name, tokens, found) {
  if (name === "mask") return (i) => (tokens.mask[i] ? blend("blue", 0.28) : "transparent");
  if (name === "versions") return (i) => (tokens.versions[i] < 0 ? "transparent" : `${COLOURS[tokens.versions[i] % COLOURS.length]}59`);
  const values = found[name];
  if (!values) return () => "transparent";
  const { kind, floor } = QUANTITIES[name];
  const limit = peak(values, floor ?? 0);
  const colour = kind === "low" ? (v) => blend("violet", 0.75 * -v / LOWEST) : (v) => diverging(v, limit);
  return (i) => (Number.isFinite(values[i]) ? colour(values[i]) : "transparent");
}

function legend(name, tokens, found) {
  const bar = (...colours) => el("i", { style: `background: linear-gradient(90deg, ${colours.join(", ")})` });
  if (name === "mask") return el("span", { class: "scale" }, el("em", { style: `background: ${blend("blue", 0.28)}` }, "trained on"), "others: an environment's, or left out");
  if (name === "versions") {
    const versions = [...new Set(tokens.versions)].filter((v) => v >= 0).sort((a, b) => a - b);
    return el("span", { class: "scale" }, ...versions.map((v) => el("em", { style: `background: ${COLOURS[v % COLOURS.length]}59` }, `version ${v}`)));
  }
  if (!found[name]) return el("span", { class: "scale" }, "not recorded");
  if (QUANTITIES[name].kind === "low") return el("span", { class: "scale" }, "0", bar("transparent", blend("violet", 0.75)), `−${LOWEST} nats and less`);
  const limit = peak(found[name], QUANTITIES[name].floor);
  return el("span", { class: "scale" }, format(-limit), bar(blend("orange", 0.75), "transparent", blend("blue", 0.75)), format(limit));
}

// Whitespace that would not be seen gets a mark; a token inside a character has no text of its own.
function visible(text) {
  if (text === "") return [el("span", { class: "mark" }, "◦")];
  return text.split(/(\n|\t)/).filter(Boolean).flatMap((part) => {
    if (part === "\n") return [el("span", { class: "mark" }, "↵"), "\n"];
    return part === "\t" ? [el("span", { class: "mark" }, "⇥"), "\t"] : [part];
  });
}

// The rows of a rollout, and where each begins in what is told of all.
function rowsOf(row) {
  let [at, promptAt] = [0, 0];
  return row.rows.map((part, number) => {
    const placed = { ...part, number, at, promptAt };
    at += part.tokens;
    promptAt += part.prompt_tokens;
    return placed;
  });
}

// The row whose prompt a model read first. An agent with tools or other roles writes prompts of its
// own; then nothing was generated from the tokens of the data's row.
function promptRead(row) {
  const rows = rowsOf(row);
  return rows.find((part) => part.tokens) ?? rows[0];
}

// A row: its prompt, of which the end is seen at once, and its tokens with a mark before each call.
const TAIL = 40;
function rowBlock(row, part, tokens, spans, several) {
  const marks = new Map();
  row.calls.forEach((call, number) => {
    if (call.row === part.number) marks.set(call.start, [...(marks.get(call.start) ?? []), callMark(call, number)]);
  });
  const shown = spans.slice(part.at, part.at + part.tokens).flatMap((span, i) => [...(marks.get(i) ?? []), span]);
  const block = el("div", { class: "text-block mono" }, ...shown);
  if (!several) return [block];
  const prompt = tokens.prompt.slice(part.promptAt, part.promptAt + part.prompt_tokens);
  const tail = (prompt.length > TAIL ? "…" : "") + prompt.slice(-TAIL).join("");
  return [
    el("h3", { "data-row": part.number }, `Row ${part.number + 1}${part.role ? ` · ${part.role}` : ""}, ${part.tokens} tokens after a prompt of ${part.prompt_tokens}`),
    el("details", {}, el("summary", { class: "mono prompt" }, tail), el("div", { class: "text-block mono prompt" }, prompt.join(""))),
    block,
  ];
}

function callMark(call, number) {
  const told = [`call ${number + 1}`, call.finish_reason, call.reward === null ? null : `reward ${format(call.reward)}`, call.scorable === false ? "not trained on" : null];
  return el("span", { class: "call", "data-call": number, title: call.state ?? null }, told.filter(Boolean).join(" · "));
}

// Pictures of a row before or after the end of its prompt; one that is not at hand is told.
function picturesOf(part, shown, inPrompt) {
  const mine = part.pictures.filter((one) => (one.at < part.prompt_tokens) === inPrompt);
  return mine.map((one) => [one, shown[one.digest]
    ? el("img", { class: "picture", src: shown[one.digest], alt: one.label, title: `${one.label}, ${one.tokens} tokens` })
    : el("span", { class: "picture missing", title: one.digest }, `${one.label} is not in the run's folder`)]);
}

// In a completion, as in a tool's result, a picture stands where its placeholders are.
function placePictures(row, spans, shown) {
  for (const part of rowsOf(row)) {
    for (const [one, image] of picturesOf(part, shown, false)) {
      const first = part.at + one.at - part.prompt_tokens;
      spans[first]?.replaceChildren(image);
      for (const span of spans.slice(first + 1, first + one.tokens)) span.hidden = true;
    }
  }
}

function tokenBlock(row, tokens, found, shown) {
  const flagged = new Map();
  for (const [flag, places] of Object.entries(row.flags)) for (const i of places) flagged.set(i, [...(flagged.get(i) ?? []), flag]);
  const spans = tokens.texts.map((text, i) => el("span", {
    class: `token${flagged.has(i) ? " flagged" : ""}${tokens.mask[i] ? "" : " unmasked"}`, "data-token": i,
  }, ...visible(text)));
  placePictures(row, spans, shown);
  const several = row.rows.filter((part) => part.tokens).length > 1;
  const block = several || row.calls.length
    ? el("div", { id: "completion" }, ...rowsOf(row).filter((part) => part.tokens).flatMap((part) => rowBlock(row, part, tokens, spans, several)))
    : el("div", { class: "text-block mono", id: "completion" }, ...spans);
  block.addEventListener("mousemove", (event) => {
    const span = event.target.closest(".token");
    if (span) showTip(event, tokenTip(Number(span.dataset.token), tokens, found, flagged)); else hideTip();
  });
  block.addEventListener("mouseleave", hideTip);
  return block;
}

function tokenTip(i, tokens, found, flagged) {
  const line = (name, value) => el("tr", {}, el("td", {}, name), el("td", {}, value));
  const lines = [
    line("token", `${i + 1} of ${tokens.texts.length}`),
    line("mask", tokens.mask[i] ? "trained on" : "not trained on"),
    line("version", tokens.versions[i] < 0 ? "none" : String(tokens.versions[i])),
    ...Object.entries(found).map(([name, values]) => line(QUANTITIES[name].label, format(values[i]))),
  ];
  if (tokens.mask[i]) lines.push(line("engine probability", `${(100 * Math.exp(tokens.columns.logprobs[i])).toPrecision(3)} %`));
  const flags = (flagged.get(i) ?? []).map((flag) => el("div", { class: "bad" }, view.flags[flag]));
  return el("div", {}, el("b", { class: "mono" }, JSON.stringify(tokens.texts[i])), el("table", {}, ...lines), ...flags);
}

function paint(row, tokens, found) {
  const colour = painter(colourBy, tokens, found);
  document.querySelectorAll("#completion .token").forEach((span, i) => { span.style.background = colour(i); });
  $("#legend").replaceChildren(legend(colourBy, tokens, found));
}

async function drawDetail(row) {
  const [tokens, shown] = [await tokensOf(row), await pictureData()];
  if (rollouts.open !== row) return; // another one was opened meanwhile
  const found = quantitiesOf(tokens);
  const choices = { mask: "mask", versions: "version", ...Object.fromEntries(Object.entries(QUANTITIES).map(([name, q]) => [name, q.label])) };
  const select = el("select", { "aria-label": "colour by", onchange: (event) => { colourBy = event.target.value; paint(row, tokens, found); } },
    ...Object.entries(choices).filter(([name]) => !(name in QUANTITIES) || name in found)
      .map(([name, label]) => el("option", { value: name, selected: name === colourBy }, label)));
  if (!(colourBy in found) && colourBy in QUANTITIES) colourBy = select.value = "logprobs" in found ? "logprobs" : "mask";
  const read = promptRead(row);
  const seen = picturesOf(read, shown, true).map(([, image]) => image);
  $(".detail").replaceChildren(...details(row), ...transcript(row), el("h3", {}, `Prompt, ${read.prompt_tokens} tokens`),
    ...(seen.length ? [el("div", { class: "pictures", id: "pictures-shown" }, ...seen)] : []),
    el("div", { class: "text-block mono prompt", id: "prompt" }, tokens.prompt.slice(read.promptAt, read.promptAt + read.prompt_tokens).join("")),
    ...(read.number ? [el("h3", {}, "Its row of the data"), el("div", { class: "text-block mono prompt" }, row.prompt)] : []),
    el("h3", {}, `Completion, ${row.tokens} tokens`),
    el("div", { class: "colour" }, el("label", {}, "Colour by ", select), el("span", { id: "legend" })),
    tokenBlock(row, tokens, found, shown), ...given(row));
  paint(row, tokens, found);
}

function details(row) {
  const fact = (name, value) => el("div", {}, el("small", {}, name), value);
  const versions = row.oldest === null ? "none" : row.oldest === row.newest ? row.oldest : `${row.oldest} to ${row.newest}`;
  const facts = [
    fact("reward", format(row.reward)),
    ...Object.entries(row.reward_parts ?? {}).map(([name, value]) => fact(name, format(value))),
    ...Object.entries(row.role_rewards ?? {}).map(([name, value]) => fact(`reward of ${name}`, format(value))),
    ...Object.entries(row.extra ?? {}).map(([name, value]) => fact(name, typeof value === "object" ? JSON.stringify(value) : String(value))),
    fact("iteration", row.iteration), fact("status", row.status), fact("end", row.finish_reason ?? "–"),
    fact("version", versions), fact("largest gap", format(row.gap)), fact("temperature", format(row.temperature)),
    ...(row.fork ? [fact("branched off after", `${row.fork.calls} call${row.fork.calls === 1 ? "" : "s"}`)] : []),
  ];
  const said = Object.entries(row.flags).map(([flag, places]) => el("li", {}, el("span", { class: "flag" }, flag), view.flags[flag],
    ...places.slice(0, 5).map((i) => el("button", { onclick: () => $(`#completion [data-token="${i}"]`).scrollIntoView({ block: "center" }) }, `token ${i + 1}`)),
    places.length > 5 ? ` and ${places.length - 5} more` : null));
  const group = view.rollouts.filter((other) => other.group_id === row.group_id && other.iteration === row.iteration && other.run === row.run);
  return [
    el("h2", { class: "mono" }, row.id ?? `rollout ${row.place}`),
    said.length ? el("ul", { class: "flags-said" }, ...said) : null,
    row.error ? el("p", { class: "bad" }, row.error) : null,
    el("div", { class: "facts" }, ...facts),
    group.length > 1 ? el("h3", {}, `Rewards of its group (${group.length} recorded)`) : null,
    group.length > 1 ? el("div", { class: "siblings" }, ...group.map((other) => el("button", { "aria-current": String(other === row), onclick: () => openRollout(other) }, format(other.reward)))) : null,
  ].filter(Boolean);
}

function given(row) {
  const columns = Object.entries(row.columns ?? {});
  if (!columns.length) return [];
  const value = (item) => (typeof item === "string" ? item : JSON.stringify(item));
  return [el("h3", {}, "Columns of its prompt"), el("table", {}, ...columns.map(([name, item]) => el("tr", {}, el("th", {}, name), el("td", { class: "mono" }, value(item)))))];
}
