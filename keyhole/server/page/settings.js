// The panel of settings: what requests read, how tokens are chosen, how the page looks.

import * as chat from "./chat.js";
import { $, count, h } from "./dom.js";
import * as store from "./store.js";

const { settings } = store;

/** Fields of the form: element, setting, and what an empty one means. */
const NUMBERS = [
  ["#token-budget", "tokenBudget", null],
  ["#temperature", "temperature", 0],
  ["#max-tokens", "maxTokens", 512],
  ["#seed", "seed", null],
  ["#top-k", "topK", 4],
];

export function theme() {
  const chosen = settings.theme;
  const dark = chosen === "dark" || (chosen === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.dispatchEvent(new CustomEvent("theme"));
}

/** Fills in what the server knows. */
export function draw() {
  const { server } = chat;
  const own = server.policy;
  const named = (name) => (name === own.name ? `${name} (the server's)` : name);
  const usable = server.policies.filter(({ unavailable }) => unavailable === null);
  if (!usable.some(({ name }) => name === settings.policy)) settings.policy = "";
  $("#policy").replaceChildren(
    h("option", { value: "" }, `as the server: ${own.name}`),
    ...usable.filter(({ name }) => name !== own.name).map(({ name }) => h("option", { value: name }, named(name))),
  );
  $("#policy").value = settings.policy;
  const others = server.policies.filter(({ unavailable }) => unavailable !== null);
  $("#unavailable").hidden = !others.length;
  $("#unavailable ul").replaceChildren(
    ...others.map(({ name, unavailable }) => h("li", {}, h("strong", {}, name), ` ${unavailable}`)),
  );
  drawBudget();
  for (const [selector, name] of NUMBERS) $(selector).value = settings[name] ?? "";
  $("#system").value = settings.system;
  $("#trace").checked = settings.trace;
  $("#api-key").value = store.apiKey();
  for (const choice of document.querySelectorAll("[name=theme]")) choice.checked = choice.value === settings.theme;
  drawPolicy();
}

function drawBudget() {
  const { server } = chat;
  const most = server.policy.token_budget;
  const name = settings.policy || server.policy.name;
  const has = server.policies.find((one) => one.name === name)?.has_budget ?? false;
  const field = $("#token-budget");
  field.disabled = !has;
  if (most) field.max = most;
  field.placeholder = most ? `${most}` : "the policy's default";
  $("#budget-note").textContent = has
    ? `Tokens that a step reads per KV head in a sparse layer${most ? `, at most ${count(most)}` : ""}.`
    : `${name} reads everything and has no budget.`;
}

/** The policy of the next question, beside the field. */
function drawPolicy() {
  const name = settings.policy || chat.server.policy.name;
  const has = chat.server.policies.find((one) => one.name === name)?.has_budget;
  const budget = has ? settings.tokenBudget ?? chat.server.policy.token_budget : null;
  $("#policy-chip span").textContent = budget ? `${name} · ${count(budget)}` : name;
  $("#compare").disabled = name === "full";
  if (name === "full") $("#compare").checked = false;
  $("#compare").closest("label").title = name === "full" ? "Choose a sparse policy in the settings first" : "";
}

export function begin() {
  const form = $("#settings-form");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    const changed = {
      policy: $("#policy").value,
      system: $("#system").value,
      trace: $("#trace").checked,
      theme: form.elements.theme.value,
    };
    for (const [selector, name, empty] of NUMBERS) {
      const field = $(selector);
      if (field.value === "") changed[name] = empty;
      else if (field.checkValidity()) changed[name] = Number(field.value);
      else field.reportValidity();
    }
    store.change(changed);
    theme();
    drawBudget();
    drawPolicy();
  });
  $("#api-key").addEventListener("change", (event) => {
    store.setApiKey(event.target.value.trim());
    document.dispatchEvent(new CustomEvent("reconnect"));
  });
  $("#clear").addEventListener("click", async () => {
    if (!confirm("Delete all conversations of this browser?")) return;
    await store.clear();
    chat.show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
}
