// The panel of documents: dropped files, their progress, search, and which ones a chat asks.

import * as api from "./api.js";
import * as chat from "./chat.js";
import { $, button, bytes, count, h, toast } from "./dom.js";

const BUSY = new Set(["queued", "encoding"]);
/** Milliseconds between two looks at documents that are being encoded. */
const PERIOD = 700;

let listed = [];
let timer = null;
let query = "";
/** Files on their way to the server: name and what became of it. */
const sending = new Map();

export async function load() {
  clearTimeout(timer);
  try {
    listed = query ? await api.documents.search(query) : await api.documents.list();
    $("#documents-error").textContent = "";
  } catch (error) {
    listed = [];
    $("#documents-error").textContent = error.message;
  }
  draw();
  if (listed.some(({ status }) => BUSY.has(status))) timer = setTimeout(load, PERIOD);
}

async function add(files) {
  for (const file of files) {
    sending.set(file.name, "sending");
    draw();
    try {
      await api.documents.add(file);
      sending.delete(file.name);
    } catch (error) {
      sending.delete(file.name);
      toast(`${file.name}: ${error.message}`, "error");
    }
    await load();
  }
}

async function remove(name) {
  try {
    await api.documents.remove(name);
    choose(name, false);
  } catch (error) {
    toast(error.message, "error");
  }
  await load();
  $("#find").focus();
}

function choose(name, chosen) {
  const { documents } = chat.current();
  const place = documents.indexOf(name);
  if (chosen && place < 0) documents.push(name);
  if (!chosen && place >= 0) documents.splice(place, 1);
  drawChosen();
}

/** What the next question asks, as a line above the field. */
export function drawChosen() {
  const { documents, searches } = chat.current();
  const line = $("#chosen");
  const names = searches ? ["those that a search finds"] : documents;
  line.hidden = !names.length;
  line.replaceChildren(
    h("span", { class: "muted" }, "Asks documents:"),
    ...names.map((name) => h("span", { class: "tag" }, name)),
  );
  $("#search-all").checked = Boolean(searches);
  for (const box of document.querySelectorAll("#documents-list input")) {
    box.checked = documents.includes(box.value);
    box.disabled = Boolean(searches);
  }
}

function draw() {
  const items = [...sending.keys()].map((name) => h("li", {}, h("strong", {}, name), h("small", {}, "sending …")));
  items.push(...listed.map(drawOne));
  $("#documents-list").replaceChildren(...items);
  $("#documents-none").hidden = items.length > 0;
  $("#documents-none").textContent = query ? "No document has these words." : "No documents yet.";
  drawChosen();
}

function drawOne(one) {
  const { id, status, progress, error, tokens, size_bytes: size, hits, snippet } = one;
  const facts = [];
  if (tokens) facts.push(`${count(tokens)} tokens`);
  if (size) facts.push(bytes(size));
  if (hits) facts.push(`asked ${hits} ${hits === 1 ? "time" : "times"}`);
  if (status !== "ready") facts.unshift(status);
  return h(
    "li",
    { class: status },
    h(
      "label",
      {},
      h("input", { type: "checkbox", value: id, onchange: (event) => choose(id, event.target.checked) }),
      h("strong", {}, id),
    ),
    button(`Delete ${id}`, "delete", () => remove(id)),
    h("small", {}, facts.join(" · ")),
    snippet ? h("p", { class: "snippet" }, snippet) : null,
    BUSY.has(status) ? h("progress", { max: 1, value: progress, "aria-label": `${id} is encoded` }) : null,
    error ? h("p", { class: "error" }, error) : null,
  );
}

export function begin() {
  const zone = $("#drop");
  const over = (event) => {
    event.preventDefault();
    zone.classList.toggle("over", event.type === "dragover");
  };
  for (const name of ["dragover", "dragleave"]) zone.addEventListener(name, over);
  zone.addEventListener("drop", (event) => {
    over(event);
    add([...event.dataTransfer.files]);
  });
  // A file that misses the zone must not replace the page.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
  $("#file").addEventListener("change", (event) => {
    add([...event.target.files]);
    event.target.value = "";
  });
  let wait = null;
  $("#find").addEventListener("input", (event) => {
    query = event.target.value.trim();
    clearTimeout(wait);
    wait = setTimeout(load, 250);
  });
  $("#search-all").addEventListener("change", (event) => {
    chat.current().searches = event.target.checked;
    drawChosen();
  });
  document.addEventListener("conversation", drawChosen);
}
