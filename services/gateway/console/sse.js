// Server-sent events from pieces of text cut anywhere.

export class SseParser {
  #rest = "";

  // The data of every event that is complete now.
  push(text) {
    const parts = (this.#rest + text).split("\n\n");
    this.#rest = parts.pop();
    return parts.map(dataOf).filter((data) => data !== "");
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
}
