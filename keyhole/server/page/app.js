// Starts the page: the server's description, the list of conversations, the panel, the field.

import * as api from "./api.js";
import * as chat from "./chat.js";
import * as documents from "./documents.js";
import { $, button, count, h, toast } from "./dom.js";
import * as reading from "./reading.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

/** For the bundled model, which reads a little language of its own. */
const EXAMPLES = [
  [
    "Find a fact",
    "the old river falls . Alma keeps 17 . rain over the quiet field . Moper keeps 42 . young wolf sings near the hill . " +
      "Josa keeps 93 . winter morning waits by a grey stone . Nomar keeps 54 . a bird sleeps under the bridge . question : Moper keeps ? answer :",
  ],
  [
    "Carry out a program",
    "program : s115 takes s113 . s115 adds 2 . s113 adds 1 . s114 adds 2 . s114 takes s113 . s112 is 0 . s113 takes s112 . question : s113 all s115 ? answer :",
  ],
];

async function connect() {
  try {
    Object.assign(chat.server, await api.about());
  } catch (error) {
    $("#model").textContent = error.message;
    if (error.status === 401) askKey();
    else setTimeout(connect, 3000);
    return;
  }
  const { model, policy, layers, version } = chat.server;
  $("#model").textContent = `${model} · ${policy.name}`;
  $("#about").textContent = `Keyhole ${version}, ${model}: ${layers} layers, up to ${count(chat.server.max_tokens)} tokens.`;
  settings.draw();
  drawExamples();
  $("#question").disabled = false;
  document.body.dataset.ready = "";
}

function askKey() {
  openPanel("settings");
  toast("This server wants an API key", "error");
  $("#api-key").focus();
}

function drawExamples() {
  if (chat.server.model !== "keyhole-tiny") return;
  $("#examples").replaceChildren(
    ...EXAMPLES.map(([name, text]) =>
      h("button", { type: "button", class: "example", onclick: () => fill(text) }, h("strong", {}, name), h("span", {}, text)),
    ),
  );
}

function fill(text) {
  const field = $("#question");
  field.value = text;
  fit();
  field.focus();
}

/** The field grows with its text. */
function fit() {
  const field = $("#question");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, window.innerHeight / 3)}px`;
}

function ask(event) {
  event.preventDefault();
  const text = $("#question").value.trim();
  if (!text || chat.isRunning()) return;
  fill("");
  chat.send(text, { compare: $("#compare").checked });
}

async function drawConversations() {
  const found = await store.conversations().catch(() => []);
  const now = chat.current();
  $("#title").textContent = now.title;
  $("#conversations-none").hidden = found.length > 0;
  $("#conversations").replaceChildren(
    ...found.map((one) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            type: "button", class: "wide", title: one.title, "aria-current": one.id === now.id && "true",
            onclick: () => {
              chat.show(one);
              showSidebar(false);
            },
          },
          h("span", {}, one.title),
        ),
        button(`Delete ${one.title}`, "delete", () => forget(one)),
      ),
    ),
  );
}

async function forget(one) {
  await store.remove(one.id);
  if (one.id === chat.current().id) chat.show();
  else drawConversations();
  $("#new").focus();
}

// The panel at the side, and the sidebar where it is narrow.

let opener = null;

function openPanel(view) {
  if ($("#panel").hidden) opener = document.activeElement;
  $("#panel").hidden = false;
  document.body.dataset.panel = view;
  for (const section of document.querySelectorAll("#panel [data-view]")) section.hidden = section.dataset.view !== view;
  markOpeners(view);
  showSidebar(false);
  const title = $(`#panel [data-view=${view}] h2`);
  $("#panel").scrollTop = 0;
  title.focus({ preventScroll: true });
  if (view !== "reading") reading.close();
  if (view === "documents") documents.load();
}

function closePanel() {
  $("#panel").hidden = true;
  delete document.body.dataset.panel;
  markOpeners(null);
  reading.close();
  (opener?.isConnected ? opener : $("#question")).focus();
}

function markOpeners(view) {
  for (const one of document.querySelectorAll("[data-opens]")) {
    one.setAttribute("aria-expanded", String(one.dataset.opens === view));
  }
}

function showSidebar(shown) {
  const was = document.body.classList.contains("sidebar");
  document.body.classList.toggle("sidebar", shown);
  $("#menu").setAttribute("aria-expanded", String(shown));
  if (shown) $("#new").focus();
  else if (was && !$("#panel:not([hidden])")) $("#menu").focus();
}

function begin() {
  settings.theme();
  settings.begin();
  documents.begin();
  reading.begin();
  $("#ask").addEventListener("submit", ask);
  $("#question").addEventListener("input", fit);
  $("#question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  });
  $("#stop").addEventListener("click", () => {
    chat.stop();
    $("#question").focus();
  });
  $("#new").addEventListener("click", () => {
    chat.show();
    showSidebar(false);
    $("#question").focus();
  });
  $("#menu").addEventListener("click", () => showSidebar(true));
  $("#sidebar-close").addEventListener("click", () => showSidebar(false));
  $("#panel-close").addEventListener("click", closePanel);
  for (const one of document.querySelectorAll("[data-opens]")) {
    one.addEventListener("click", () => {
      if (document.body.dataset.panel === one.dataset.opens) closePanel();
      else openPanel(one.dataset.opens);
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented) return;
    if (document.body.classList.contains("sidebar")) showSidebar(false);
    else if (!$("#panel").hidden) closePanel();
    else if (chat.isRunning()) chat.stop();
  });
  document.addEventListener("panel", (event) => openPanel(event.detail));
  document.addEventListener("conversation", drawConversations);
  document.addEventListener("key", askKey);
  document.addEventListener("reconnect", connect);
  chat.show();
  connect();
}

begin();
