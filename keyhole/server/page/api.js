// Requests to the server that this page came from.

import { apiKey } from "./store.js";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  const said = body?.error?.message ?? `The server answered with status ${answer.status}.`;
  throw new ApiError(said, answer.status, body?.error?.code);
}

const json = (body) => ({
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
});

export const about = async () => (await request("/v1/keyhole")).json();

/** The objects of a stream, as they come. */
export async function* stream(path, body, signal) {
  const answer = await request(path, { ...json({ ...body, stream: true }), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const said = JSON.parse(data);
        if (said.error) throw new ApiError(said.error.message, 500, said.error.code);
        yield said;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const place = (name) => `/v1/documents/${encodeURIComponent(name)}`;

export const documents = {
  async list() {
    return (await (await request("/v1/documents")).json()).data;
  },
  async search(query) {
    const asked = new URLSearchParams({ query, top_k: 20 });
    return (await (await request(`/v1/documents?${asked}`)).json()).data;
  },
  async add(file) {
    const form = new FormData();
    form.append("file", file);
    return (await request("/v1/documents?wait=false", { method: "POST", body: form })).json();
  },
  remove: (name) => request(place(name), { method: "DELETE" }),
};
