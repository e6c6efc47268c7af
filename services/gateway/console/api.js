// The gateway's API, asked with the key of this tab. The key lives in sessionStorage only: it goes when the tab does.
import { SseParser } from "./sse.js";

const KEY = "baton.console.key";

export const storedKey = () => sessionStorage.getItem(KEY) || "";
export const storeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

// An answer that is not the one wanted.
// kind: one of TITLES; passing: asking again may help.
export class ApiError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
    this.title = TITLES[kind];
    this.passing = kind === "away" || kind === "unready";
  }
}

const TITLES = {
  key: "The key is not valid.",
  forbidden: "This key may not see this.",
  missing: "Not here.",
  limit: "A limit is reached.",
  away: "The gateway does not answer.",
  unready: "Not ready.",
  fault: "Something failed in the gateway.",
  refused: "The gateway refused.",
  broken: "The answer broke off.",
};
const KINDS = { 401: "key", 403: "forbidden", 404: "missing", 429: "limit", 502: "away", 503: "unready", 504: "unready" };

async function ask(path, options) {
  // what no header can carry would look like a gateway that does not answer
  if (!/^[\x21-\x7e]*$/.test(storedKey())) throw new ApiError("key", "It holds characters that no key has.");
  const headers = { Authorization: `Bearer ${storedKey()}` };
  if (options.body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers, redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("away", "It may be restarting, or the network is down.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const kind = KINDS[response.status] || (response.status >= 500 ? "fault" : "refused");
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // a proxy's answer: the status must do
  }
  const wait = response.headers.get("Retry-After");
  return new ApiError(kind, wait ? `${message} (retry in ${wait} s)` : message);
}

export async function get(path, signal) {
  return (await ask(path, { signal })).json();
}

// Yields the chunks of a streamed chat completion. Throws ApiError when it fails, also in the middle.
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new SseParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      for (const data of parser.push(value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError("broken", chunk.error.message);
        yield chunk;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("broken", "The connection was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError("broken", "The stream ended without its last event.");
}
