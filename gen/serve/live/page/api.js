// Requests to the server, and the events of a call.

import { at } from "./dom.js";

const KEY = "api-key";
const stored = () => { try { return sessionStorage.getItem(KEY) || ""; } catch { return ""; } };

async function askKey() {
  const dialog = at("key");
  at("key-text").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const text = at("key-text").value.trim();
  if (dialog.returnValue !== "use" || !text) return false;
  try { sessionStorage.setItem(KEY, text); } catch { /* it holds for this request alone */ }
  return true;
}

async function send(path, options = {}) {
  for (;;) {
    const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}) };
    if (stored()) headers.Authorization = `Bearer ${stored()}`;
    const answer = await fetch(path, { ...options, headers });
    if (answer.status === 401 && await askKey()) continue;
    if (answer.ok) return answer;
    let said = null;
    try { said = (await answer.json()).error; } catch { /* no JSON */ }
    const message = typeof said === "string" ? said : said?.message;
    throw Object.assign(new Error(message || `the server answered ${answer.status} ${answer.statusText}`), { param: said?.param });
  }
}

export const get = async (path) => (await send(path)).json();
export const post = async (path, body) => (await send(path, { method: "POST", body: JSON.stringify(body) })).json();

// Yield [name, data] of a call until it is over. The signal breaks the connection, which cancels the call.
export async function* events(body, signal) {
  const answer = await send("live/generate", { method: "POST", body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const name = lines.find((line) => line.startsWith("event: "));
      const data = lines.find((line) => line.startsWith("data: "));
      if (name && data) yield [name.slice(7), JSON.parse(data.slice(6))];
    }
  }
}
