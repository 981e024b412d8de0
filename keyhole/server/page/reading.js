// The reading view: what each layer read for a generated token, as a heat over the text and a strip
// over its length.

import { $, count, h, percent } from "./dom.js";

const LEVELS = 5;
/** Unread tokens beside each other that are folded, at least. */
const FOLDED = 16;

let answer = null;
/** The generated token that is shown; `pinned` the one that was chosen, `follows` the newest. */
let shown = 0;
let pinned = 0;
let follows = true;
/** "sparse", "all", or the number of a layer. */
let mode = "sparse";
/** A span for each token of prompt and answer, and the heat that it has. */
let spans = [];
let heat = [];
let passages = [];
let passage = -1;

export const isOpen = () => answer !== null;

export function open(one) {
  answer = one;
  spans = [];
  heat = [];
  follows = one.state === "running";
  // The first token comes from the prompt; the second is the first one under the policy.
  const last = Math.max(0, (one.trace?.tokens.length ?? 0) - 1);
  pinned = shown = follows ? last : Math.min(1, last);
  document.dispatchEvent(new CustomEvent("panel", { detail: "reading" }));
  $("#reading-label").textContent = one.label;
  $("#prompt-text").replaceChildren();
  $("#answer-text").replaceChildren();
  const traced = Boolean(one.trace?.tokens.length);
  $("#reading-none").hidden = traced || one.state === "running";
  $("#reading-body").hidden = !traced;
  if (traced) {
    grow();
    drawLayers();
    choose(pinned);
    toPassage(0);
  }
}

export function close() {
  answer = null;
}

/** Draws what came of the answer that is shown. */
export function update(one) {
  if (one !== answer || !one.trace?.tokens.length) return;
  const begins = $("#reading-body").hidden;
  $("#reading-body").hidden = false;
  $("#reading-none").hidden = true;
  grow();
  if (begins) drawLayers();
  if (follows) choose(one.trace.tokens.length - 1);
  else drawStep();
}

/** The newest tokens as spans. */
function grow() {
  const { prompt, tokens } = answer.trace;
  const add = (texts, from, place, isAnswer) => {
    const made = texts.slice(from).map((text, index) => {
      const span = h("span", isAnswer ? { class: "token", "data-token": from + index } : { class: "token" });
      span.textContent = text;
      return span;
    });
    place.append(...made);
    spans.push(...made);
  };
  if (spans.length < prompt.length) add(prompt, spans.length, $("#prompt-text"), false);
  const texts = tokens.map(({ text }) => text);
  add(texts, spans.length - prompt.length, $("#answer-text"), true);
  $("#prompt-count").textContent = `${count(prompt.length)} tokens`;
  $("#answer-count").textContent = `${count(tokens.length)} tokens`;
  $("#step").max = Math.max(0, tokens.length - 1);
}

function drawLayers() {
  const layers = answer.trace.tokens[0].layers?.length ?? 0;
  const options = [
    ["sparse", "Sparse layers"],
    ["all", "All layers"],
    ...Array.from({ length: layers }, (_, layer) => [String(layer), String(layer)]),
  ];
  $("#layers").replaceChildren(
    ...options.map(([value, name]) =>
      h(
        "label",
        { class: "chip" },
        h("input", {
          type: "radio", name: "layer", value, checked: value === mode,
          "aria-label": /\d/.test(name) ? `Layer ${name}` : name,
          onchange: () => {
            mode = value;
            choose(shown);
            toPassage(0);
          },
        }),
        h("span", {}, name),
      ),
    ),
  );
  if (/\d/.test(mode) && Number(mode) >= layers) mode = "sparse";
}

const isWhole = (ranges, length) => ranges.length === 1 && ranges[0][0] === 0 && ranges[0][1] === length && ranges[0].length === 2;

/** The layers that are looked at: those that select, all, or one. */
function chosenLayers({ layers, ranges, length }) {
  const all = layers.map((_, layer) => layer);
  if (mode === "all") return all;
  if (mode !== "sparse") return [Number(mode)];
  const sparse = all.filter((layer) => !isWhole(ranges[layers[layer]], length));
  return sparse.length ? sparse : all;
}

/** Share of heads and layers that read each token. */
export function sharesOf(token, layers) {
  const shares = new Float32Array(token.length);
  const weights = new Map();
  for (const layer of layers) {
    const entry = token.layers[layer];
    weights.set(entry, (weights.get(entry) ?? 0) + 1 / layers.length);
  }
  for (const [entry, weight] of weights) {
    for (const [start, end, share = 1] of token.ranges[entry]) {
      for (let place = start; place < end; place += 1) shares[place] += weight * share;
    }
  }
  return shares;
}

/** Shows a generated token, its place in the answer. */
function choose(place) {
  shown = Math.min(Math.max(0, place), answer.trace.tokens.length - 1);
  drawStep();
}

function pin(place) {
  follows = answer.state === "running" && place >= answer.trace.tokens.length - 1;
  pinned = place;
  choose(place);
  toPassage(0);
  passage = -1;
  $("#passage").textContent = "";
}

function drawStep() {
  const token = answer.trace.tokens[shown];
  const { tokens } = answer.trace;
  $("#step").value = shown;
  $("#step-number").textContent = `token ${count(shown + 1)} of ${count(tokens.length)}`;
  $("#step-token").textContent = token.text.trim() || "␣";
  if (!token.ranges) {
    $("#facts").textContent = "The answer became too long: what this token read was not kept.";
    paint(new Float32Array(0), token);
    return;
  }
  const layers = chosenLayers(token);
  const shares = sharesOf(token, layers);
  const read = shares.reduce((sum, share) => sum + share, 0);
  const whom = layers.length === 1 ? `layer ${layers[0]}` : `${layers.length} layers`;
  const isMean = shares.some((share) => share > 1e-4 && share < 1 - 1e-4);
  const isAll = read > token.length - 1e-2;
  const what = isAll
    ? `all ${count(token.length)} tokens`
    : `${isMean ? "on average " : ""}${count(Math.round(read))} of ${count(token.length)} tokens, ${percent(read / token.length)}`;
  const first = shown === 0 ? " It comes from the prompt, which is always computed in full." : "";
  const facts = `For this token ${whom} read ${what}.${first}`;
  $("#facts").textContent = facts;
  $("#step").setAttribute("aria-valuetext", `${$("#step-number").textContent}: ${token.text.trim()}. ${facts}`);
  paint(shares, token);
  drawStrip(token, layers);
}

/** Gives each token its heat, and what is not there yet its grey. */
function paint(shares, { length }) {
  const position = answer.trace.prompt.length + shown;
  passages = [];
  let before = 0;
  spans.forEach((span, place) => {
    let level = "later";
    if (place === position) level = "now";
    else if (length && place < shares.length) level = Math.ceil(shares[place] * LEVELS - 1e-4);
    if (heat[place] !== level) {
      heat[place] = level;
      span.dataset.heat = level;
    }
    const isRead = level > 0;
    if (isRead && !before) passages.push(place);
    before = isRead;
  });
  fold();
}

/** Hides long runs that nobody reads behind a sign. */
function fold() {
  document.querySelectorAll(".fold").forEach((sign) => sign.remove());
  document.querySelectorAll(".token[hidden]").forEach((span) => (span.hidden = false));
  if (!$("#fold").checked) return;
  const split = answer.trace.prompt.length;
  let start = 0;
  for (let place = 0; place <= split; place += 1) {
    if (place < split && heat[place] === 0) continue;
    if (place - start >= FOLDED) {
      for (let hidden = start; hidden < place; hidden += 1) spans[hidden].hidden = true;
      spans[start].before(h("span", { class: "fold" }, ` ⋯ ${count(place - start)} not read ⋯ `));
    }
    start = place + 1;
  }
}

function toPassage(step) {
  if (!passages.length) return;
  passage = step ? (passage + step + passages.length) % passages.length : 0;
  const span = spans[passages[passage]];
  const box = span.closest(".tokens");
  box.scrollTop = span.offsetTop - box.clientHeight / 3;
  if (!step) return;
  $("#passage").textContent = `passage ${passage + 1} of ${passages.length}`;
  span.classList.remove("flash");
  requestAnimationFrame(() => span.classList.add("flash"));
}

const color = (name) => getComputedStyle($("#strip")).getPropertyValue(name).trim();

/** A row for each layer, the tokens of the text from left to right. */
function drawStrip(token, chosen) {
  const canvas = $("#strip");
  const { layers } = token;
  const height = Math.min(18, Math.max(3, Math.floor(168 / layers.length)));
  const [width, tall] = [canvas.clientWidth, height * layers.length];
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${tall}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(tall * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const total = answer.trace.prompt.length + answer.trace.tokens.length;
  const colors = Array.from({ length: LEVELS + 1 }, (_, level) => color(`--heat-${level}`));
  layers.forEach((_, layer) => {
    const shares = sharesOf(token, [layer]);
    pen.globalAlpha = chosen.includes(layer) ? 1 : 0.35;
    for (let column = 0; column < width; column += 1) {
      const from = Math.floor((column * total) / width);
      const to = Math.max(from + 1, Math.floor(((column + 1) * total) / width));
      let most = 0;
      for (let place = from; place < Math.min(to, token.length); place += 1) most = Math.max(most, shares[place]);
      if (from >= token.length) continue;
      pen.fillStyle = colors[Math.ceil(most * LEVELS - 1e-4)];
      pen.fillRect(column, layer * height, 1, height - 1);
    }
  });
  pen.globalAlpha = 1;
  pen.fillStyle = color("--ink");
  pen.fillRect((answer.trace.prompt.length * width) / total, 0, 1, tall);
  const split = answer.trace.prompt.length / total;
  $("#strip-split").style.insetInlineStart = `${100 * split}%`;
  $("#strip-split").classList.toggle("late", split > 0.5);
  canvas.setAttribute(
    "aria-label",
    `What each of ${layers.length} layers read of ${count(token.length)} tokens. ${$("#facts").textContent}`,
  );
}

/** Brings what was read at a place of the strip into view. */
function stripChosen(event) {
  const { left, width } = event.currentTarget.getBoundingClientRect();
  const place = Math.floor(((event.clientX - left) / width) * spans.length);
  const span = spans[Math.min(Math.max(0, place), spans.length - 1)];
  const box = span.closest(".tokens");
  box.scrollTop = span.offsetTop - box.clientHeight / 2;
}

export function begin() {
  const tokens = $("#answer-text");
  const placeOf = (event) => event.target.dataset.token;
  tokens.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse" && placeOf(event)) choose(Number(placeOf(event)));
  });
  tokens.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse" && answer) choose(follows ? answer.trace.tokens.length - 1 : pinned);
  });
  tokens.addEventListener("click", (event) => {
    if (placeOf(event)) pin(Number(placeOf(event)));
  });
  $("#step").addEventListener("input", (event) => pin(Number(event.target.value)));
  $("#step-back").addEventListener("click", () => pin(Math.max(0, shown - 1)));
  $("#step-on").addEventListener("click", () => pin(Math.min(answer.trace.tokens.length - 1, shown + 1)));
  $("#passage-back").addEventListener("click", () => toPassage(-1));
  $("#passage-on").addEventListener("click", () => toPassage(1));
  $("#fold").addEventListener("change", () => {
    fold();
    toPassage(0);
  });
  $("#strip").addEventListener("click", stripChosen);
  const redraw = () => answer?.trace?.tokens.length && !$("#reading-body").hidden && drawStep();
  window.addEventListener("resize", redraw);
  document.addEventListener("theme", redraw);
}
