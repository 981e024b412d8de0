// What the browser keeps: settings in localStorage, conversations in IndexedDB.

const SETTINGS = "keyhole.settings";
const KEY = "keyhole.key";

const DEFAULTS = {
  theme: "system",
  policy: "",
  tokenBudget: null,
  trace: true,
  system: "",
  temperature: 0,
  maxTokens: 512,
  seed: null,
  topK: 4,
};

export const settings = { ...DEFAULTS, ...read(SETTINGS) };

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? {};
  } catch {
    return {};
  }
}

export function change(changed) {
  Object.assign(settings, changed);
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // Settings then live as long as the page.
  }
  document.dispatchEvent(new CustomEvent("settings"));
}

/** The API key stays in this tab. */
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const setApiKey = (key) => sessionStorage.setItem(KEY, key);

let opened;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("keyhole", 1);
    request.onupgradeneeded = () =>
      request.result.createObjectStore("conversations", { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function run(mode, work) {
  const transaction = (await database()).transaction("conversations", mode);
  const request = work(transaction.objectStore("conversations"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

/** Conversations, the one that was used last first. */
export async function conversations() {
  const found = await run("readonly", (all) => all.getAll());
  return found.sort((a, b) => b.used - a.used);
}

/** Ranges of a trace beyond which it is not kept: it may be as large as the answer is long. */
const MOST_RANGES = 200_000;

export function save(conversation) {
  conversation.used = Date.now();
  const messages = conversation.messages.map((message) => ({
    ...message,
    answers: message.answers?.map((answer) => {
      const { live, controller, ...kept } = answer;
      return size(kept.trace) > MOST_RANGES ? { ...kept, trace: null } : kept;
    }),
  }));
  return run("readwrite", (all) => all.put(structuredClone({ ...conversation, messages })));
}

const size = (trace) =>
  trace?.tokens.reduce((sum, token) => sum + (token.ranges?.flat().length ?? 0), 0) ?? 0;

export const remove = (id) => run("readwrite", (all) => all.delete(id));
export const clear = () => run("readwrite", (all) => all.clear());
