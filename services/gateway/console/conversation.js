// A conversation with a model. Lives outside the views: a stream goes on, and nothing typed is lost, while another view
// is open. Knows nothing of markup.
import { streamChat } from "./api.js";

const DRAFT = "baton.console.draft";
const OWNER = "baton.console.draft-owner";

export class Conversation {
  turns = []; // {id, question, answer, state: streaming | done | stopped | failed, error, traceId, ttftMs, rate, usage, finish}
  draft = sessionStorage.getItem(DRAFT) || "";
  busy = false;
  onChange = () => {};
  #stop = null;
  #count = 0;

  setDraft(text) {
    this.draft = text;
    sessionStorage.setItem(DRAFT, text);
    this.onChange();
  }

  // Ask `question` after all that was answered so far. The draft is cleared only when the gateway has taken it.
  async send(question, { model, maxTokens, temperature }) {
    const turn = { id: ++this.#count, question, answer: "", state: "streaming", usage: null };
    const messages = [...this.#history(), { role: "user", content: question }];
    this.turns = [...this.turns, turn];
    this.busy = true;
    this.#stop = new AbortController();
    this.onChange();
    const body = {
      model, messages, max_tokens: Number(maxTokens), temperature: Number(temperature), stream: true, stream_options: { include_usage: true },
    };
    try {
      await this.#read(turn, body, performance.now());
      turn.state = "done";
    } catch (error) {
      turn.state = error.name === "AbortError" ? "stopped" : "failed";
      turn.error = turn.state === "failed" ? error : null;
      if (turn.state === "failed" && !turn.answer && !this.draft) this.setDraft(question);
    } finally {
      this.busy = false;
      this.#stop = null;
      this.onChange();
    }
    return turn;
  }

  // Whose it is from now on. Another's words are forgotten first.
  handTo(owner) {
    if (sessionStorage.getItem(OWNER) !== owner) this.clear();
    sessionStorage.setItem(OWNER, owner);
  }

  stop() {
    this.#stop?.abort();
  }

  // Forget everything.
  clear() {
    this.stop();
    this.turns = [];
    this.setDraft("");
  }

  async #read(turn, body, sentAt) {
    let firstAt = null;
    for await (const chunk of streamChat(body, this.#stop.signal)) {
      if (!turn.traceId) {
        turn.traceId = chunk.id;
        if (this.draft === turn.question) this.setDraft("");
      }
      const text = chunk.choices[0]?.delta?.content || "";
      if (text && firstAt === null) {
        firstAt = performance.now();
        turn.ttftMs = firstAt - sentAt;
      }
      turn.answer += text;
      turn.finish = chunk.choices[0]?.finish_reason || turn.finish;
      if (chunk.usage) {
        turn.usage = chunk.usage;
        const took = (performance.now() - firstAt) / 1000;
        // the first token's time is the TTFT; the others came after it
        turn.rate = firstAt !== null && took > 0 ? (chunk.usage.completion_tokens - 1) / took : null;
      }
      this.onChange();
    }
  }

  #history() {
    const answered = this.turns.filter((turn) => turn.answer && turn.state !== "failed");
    return answered.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.answer },
    ]);
  }
}
