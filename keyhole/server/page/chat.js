// The conversation: sending, streaming, stopping, editing, answering again.

import * as api from "./api.js";
import { compared, markDifference } from "./compare.js";
import { $, announce, button, bytes, copy, count, h, icon, percent, toast } from "./dom.js";
import { rendered } from "./markdown.js";
import * as reading from "./reading.js";
import * as store from "./store.js";

const { settings } = store;

/** What the server runs, from /v1/keyhole; set by app.js. */
export const server = {};

let conversation = fresh();
/** Elements of an answer that change while it grows. */
const views = new WeakMap();
const running = new Set();

function fresh() {
  // randomUUID exists over HTTPS and on this machine only.
  const id = crypto.getRandomValues(new Uint32Array(4)).join("-");
  return { id, title: "New chat", used: 0, documents: [], messages: [] };
}

export const current = () => conversation;
export const isRunning = () => running.size > 0;

export function show(chosen = fresh()) {
  stop();
  conversation = chosen;
  reading.close();
  draw();
  document.dispatchEvent(new CustomEvent("conversation"));
}

/** Asks a question in the conversation that is shown. */
export async function send(text, { compare = false } = {}) {
  if (!conversation.messages.length) conversation.title = text.slice(0, 60);
  conversation.messages.push({ role: "user", content: text });
  await answer(compare);
}

export function stop() {
  for (const controller of running) controller.abort();
}

async function answer(compare) {
  const labels = compare ? ["full", settings.policy] : [settings.policy];
  const answers = labels.map((policy) => ({
    policy, label: labelOf(policy), text: "", trace: null, counters: null, state: "running",
  }));
  const message = { role: "assistant", answers };
  const body = requestBody();
  conversation.messages.push(message);
  const asked = conversation;
  draw();
  keep(asked);
  announce("The answer begins.");
  setBusy(true);
  await Promise.all(answers.map((one) => stream(one, body, answers)));
  setBusy(isRunning());
  if (asked === conversation) draw();
  const failed = answers.find((one) => one.state === "error");
  announce(failed ? failed.error : "The answer is complete.");
  await keep(asked);
}

function labelOf(policy) {
  const name = policy || server.policy.name;
  if (name === "full") return "full attention";
  const own = name === server.policy.name ? server.policy.token_budget : null;
  const budget = settings.tokenBudget ?? own ?? server.policy.token_budget;
  return budget ? `${name} · ${count(budget)} tokens` : name;
}

/** What all answers of a message ask; each adds what it reads. */
function requestBody() {
  const said = conversation.messages.map(({ role, content, answers }) => ({
    role, content: content ?? answers.at(-1).text,
  }));
  const { maxTokens, temperature, seed, system, topK } = settings;
  const body = { max_tokens: maxTokens, temperature, stream_options: { include_usage: true } };
  if (seed !== null) body.seed = seed;
  if (!server.chat) return { ...body, prompt: said.map(({ content }) => content).join("\n") };
  const { documents } = conversation;
  if (documents.length || conversation.searches) {
    // A question over documents is a conversation of its own.
    body.messages = [said.at(-1)];
    body.documents = conversation.searches ? { search: { query: null, top_k: topK } } : documents;
  } else {
    body.messages = system ? [{ role: "system", content: system }, ...said] : said;
  }
  return body;
}

function reads(policy) {
  const asked = { trace: settings.trace };
  if (policy) asked.policy = policy;
  if (settings.tokenBudget && policy !== "full") asked.token_budget = settings.tokenBudget;
  return asked;
}

async function stream(one, body, answers) {
  const controller = new AbortController();
  running.add(controller);
  const path = server.chat ? "/v1/chat/completions" : "/v1/completions";
  try {
    for await (const chunk of api.stream(path, { ...body, keyhole: reads(one.policy) }, controller.signal)) {
      take(one, chunk);
      later(one, () => refresh(one, answers));
    }
    one.state = "done";
  } catch (error) {
    const stopped = error.name === "AbortError";
    one.state = stopped ? "stopped" : "error";
    if (!stopped) one.error = error.message;
    if (error.status === 401) document.dispatchEvent(new CustomEvent("key"));
  } finally {
    running.delete(controller);
  }
}

function take(one, chunk) {
  if (chunk.usage) {
    one.counters = chunk.usage.keyhole;
    one.tokens = chunk.usage.completion_tokens;
    one.documents = chunk.usage.keyhole?.documents;
  }
  const choice = chunk.choices[0];
  if (!choice) return;
  one.text += choice.delta?.content ?? choice.text ?? "";
  one.finish = choice.finish_reason ?? one.finish;
  const { keyhole } = choice;
  if (!keyhole) return measure(one);
  one.trace ??= { prompt: [], tokens: [] };
  one.trace.prompt.push(...(keyhole.prompt ?? []));
  one.trace.tokens.push(...keyhole.tokens);
  one.counters = keyhole.counters;
  one.tokens = one.trace.tokens.length;
  if (keyhole.step_ms) one.rate = 1000 / keyhole.step_ms;
}

/** Without a record the pieces are counted, each of which is a token unless the reader is slow. */
function measure(one) {
  const now = performance.now();
  one.first ??= now;
  one.tokens = (one.tokens ?? 0) + 1;
  if (now - one.first > 200) one.rate = (1000 * (one.tokens - 1)) / (now - one.first);
}

let waiting = null;

/** Draws each answer at most once a frame. */
function later(one, work) {
  if (waiting === null) {
    waiting = new Map();
    requestAnimationFrame(() => {
      const due = waiting;
      waiting = null;
      due.forEach((draw) => draw());
    });
  }
  waiting.set(one, work);
}

function refresh(one, answers) {
  const view = views.get(one);
  if (!view) return;
  view.text.replaceChildren(rendered(one.text));
  view.counters.replaceChildren(...counters(one));
  meter(one);
  if (answers.length > 1) markDifference(answers, answers.map((other) => views.get(other)));
  reading.update(one);
  scroll();
}

function scroll() {
  const box = $("#messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

async function keep(asked) {
  try {
    await store.save(asked);
    document.dispatchEvent(new CustomEvent("conversation"));
  } catch (error) {
    toast(`The browser cannot keep this conversation: ${error.message}`, "error");
  }
}

function setBusy(busy) {
  document.body.classList.toggle("busy", busy);
  $("#stop").hidden = !busy;
  $("#send").hidden = busy;
}

// What is on the screen.

function draw() {
  const { messages } = conversation;
  $("#welcome").hidden = messages.length > 0;
  $("#list").replaceChildren(...messages.map((message, index) => drawMessage(message, index)));
  const last = messages.at(-1)?.answers?.at(-1);
  if (last) meter(last);
  else $("#meter").hidden = true;
  for (const bubble of document.querySelectorAll(".bubble")) {
    if (bubble.scrollHeight > bubble.clientHeight) bubble.tabIndex = 0; // scrolls by the keyboard
  }
  $("#messages").scrollTop = $("#messages").scrollHeight;
}

function drawMessage(message, index) {
  if (message.role === "user") return drawQuestion(message, index);
  const { answers } = message;
  const shown = answers.map((one) => drawAnswer(one, message, index));
  const item = h("li", { class: "message assistant" }, answers.length > 1 ? compared(shown) : shown);
  if (answers.length > 1) markDifference(answers, answers.map((one) => views.get(one)));
  return item;
}

function drawQuestion(message, index) {
  const text = h("div", { class: "bubble", role: "group", "aria-label": "Question" }, message.content);
  const tools = h(
    "div",
    { class: "tools" },
    button("Copy question", "copy", () => copy(message.content)),
    button("Edit question", "edit", () => edit(item, message, index)),
  );
  const item = h("li", { class: "message user" }, h("h3", { class: "hidden" }, "You"), text, tools);
  return item;
}

function edit(item, message, index) {
  if (isRunning()) return toast("Stop the answer first");
  const field = h("textarea", { "aria-label": "Question", rows: 4, value: message.content });
  const done = (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text) return;
    const compare = conversation.messages[index + 1]?.answers?.length > 1;
    conversation.messages.length = index;
    reading.close();
    send(text, { compare });
  };
  const form = h(
    "form",
    { class: "edit", onsubmit: done },
    field,
    h(
      "div",
      { class: "row end" },
      button("Cancel", null, draw, { shown: true }),
      h("button", { type: "submit", class: "primary" }, "Ask again"),
    ),
  );
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") draw();
    if (event.key === "Enter" && !event.shiftKey) done(event);
  });
  item.replaceChildren(form);
  field.focus();
}

function again(index) {
  if (isRunning()) return toast("Stop the answer first");
  const compare = conversation.messages[index].answers.length > 1;
  conversation.messages.length = index;
  reading.close();
  answer(compare);
}

function drawAnswer(one, message, index) {
  const text = h("div", { class: "text" }, rendered(one.text));
  const line = h("p", { class: "counters" }, ...counters(one));
  const note = h("p", { class: "note", hidden: true });
  views.set(one, { text, counters: line, note });
  const tools = h(
    "div",
    { class: "tools" },
    button("What it read", "eye", () => reading.open(one), { shown: true, class: "read" }),
    button("Copy answer", "copy", () => copy(one.text)),
    button("Answer again", "again", () => again(index)),
  );
  return h(
    "article",
    { class: `answer ${one.state}`, "aria-label": `Answer, ${one.label}` },
    h("h3", { class: "label" }, icon("key"), h("span", {}, one.label)),
    text,
    note,
    ...ending(one),
    line,
    one.documents?.length ? sources(one.documents) : null,
    tools,
  );
}

function ending(one) {
  if (one.state === "error") return [h("p", { class: "error", role: "alert" }, one.error)];
  if (one.state === "stopped") return [h("p", { class: "muted" }, "Stopped.")];
  if (one.finish === "length") return [h("p", { class: "muted" }, "Ended at the limit of new tokens.")];
  return [];
}

function sources(documents) {
  return h(
    "details",
    { class: "sources" },
    h("summary", {}, `${documents.length} ${documents.length === 1 ? "document" : "documents"} read`),
    ...documents.map(({ name, tokens, kept = [] }) =>
      h(
        "div",
        {},
        h("h4", {}, name, tokens ? h("small", {}, ` ${count(tokens)} tokens`) : null),
        ...kept.slice(0, 8).map(({ text }) => (text ? h("blockquote", {}, text) : null)),
      ),
    ),
  );
}

function counters(one) {
  const { attended_fraction: share, kv_bytes_read: read, offloaded_layers: below } = one.counters ?? {};
  const parts = [];
  if (one.tokens) parts.push(`${count(one.tokens)} ${one.tokens === 1 ? "token" : "tokens"}`);
  if (one.rate) parts.push(`${one.rate.toFixed(1)} tokens/s`);
  if (share != null) parts.push(`${percent(share)} of keys read`);
  if (read != null) parts.push(`${bytes(read)} read`);
  if (below != null) parts.push(`${below} layers offloaded`);
  if (!parts.length) return [one.state === "running" ? "reading the prompt …" : ""];
  return parts.map((part) => h("span", {}, part));
}

/** The figures above the field where one writes. */
function meter(one) {
  const { attended_fraction: share, kv_bytes_read: read, offloaded_layers: below } = one.counters ?? {};
  $("#meter").hidden = !one.tokens;
  $("#meter-rate").textContent = one.rate ? one.rate.toFixed(1) : "–";
  $("#meter-share").textContent = share == null ? "–" : percent(share);
  $("#meter-bytes").textContent = read == null ? "–" : bytes(read);
  $("#meter-layers").textContent = below == null ? "0" : `${below} of ${server.layers}`;
  $("#meter-bar").value = share ?? 0;
}
