"use strict";
// What the page is made of: unpacked data, and helpers to build elements.

const COLOURS = ["#4c6ef5", "#f08c00", "#2b9e6b", "#d6336c", "#7950f2", "#1098ad", "#a0692b", "#868e96"];

// What is shown; `receive` fills it.
const view = { runs: [], metrics: new Set(), rollouts: [], columns: [], flags: {} };

const $ = (selector, root = document) => root.querySelector(selector);

// Strings become text nodes: what a model wrote is never parsed as HTML.
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "rect", "text"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

async function unpack(text) {
  const packed = atob(text);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const elementText = (id) => document.getElementById(id)?.textContent;
const parse = (buffer) => JSON.parse(new TextDecoder().decode(buffer));

// Pictures as data: URLs, by digest. Those of a file are unpacked when they are first needed.
const pictures = {};
let unpackedPictures = null;
async function pictureData() {
  const packed = elementText("pictures");
  unpackedPictures ??= packed && unpack(packed).then((buffer) => Object.assign(pictures, parse(buffer)));
  await unpackedPictures;
  return pictures;
}

// The tokens of a rollout: {prompt, texts, columns, versions, mask}.
async function tokensOf(row) {
  const { block } = row;
  block.numbers ??= unpack(elementText(block.tokens) ?? block.tokens);
  const buffer = await block.numbers;
  const sum = (some, name) => some.reduce((total, one) => total + one[name], 0);
  const before = block.rollouts.slice(0, block.rollouts.indexOf(row));
  const [prompts, completions] = [sum(block.rollouts, "prompt_tokens"), sum(block.rollouts, "tokens")];
  const [promptAt, at] = [sum(before, "prompt_tokens"), sum(before, "tokens")];
  let offset = 0;
  const take = (kind, total, from, count) => {
    const part = new kind(buffer, offset + from * kind.BYTES_PER_ELEMENT, count);
    offset += total * kind.BYTES_PER_ELEMENT;
    return part;
  };
  const words = (ids) => Array.from(ids, (id) => block.texts[id]);
  const prompt = words(take(Uint32Array, prompts, promptAt, row.prompt_tokens));
  const texts = words(take(Uint32Array, completions, at, row.tokens));
  const columns = {};
  for (const name of view.columns) columns[name] = take(Float32Array, completions, at, row.tokens);
  const versions = take(Int32Array, completions, at, row.tokens);
  const mask = take(Uint8Array, completions, at, row.tokens);
  return { prompt, texts, columns, versions, mask };
}

function format(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

const runColour = (place) => COLOURS[place % COLOURS.length];
const dot = (place) => el("i", { class: "dot", style: `background: ${runColour(place)}` });

// The last parts of a path tell several apart.
function shortNames(names) {
  for (let count = 1; count < 8; count++) {
    const short = names.map((name) => name.split("/").slice(-count).join("/"));
    if (new Set(short).size === names.length) return short;
  }
  return names;
}

function showTip(event, ...children) {
  const tip = $("#tip");
  tip.replaceChildren(...children);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = event.clientX + 14 + width > innerWidth;
  const below = event.clientY + 18 + height > innerHeight;
  tip.style.left = `${Math.max(4, right ? event.clientX - width - 10 : event.clientX + 14)}px`;
  tip.style.top = `${Math.max(4, below ? event.clientY - height - 12 : event.clientY + 18)}px`;
}

const hideTip = () => { $("#tip").hidden = true; };
