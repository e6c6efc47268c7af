// The chat box.
import { useEffect, useReducer, useRef, useState } from "./vendor/hooks.js";
import { number, seconds } from "./format.js";
import { usePolled } from "./poll.js";
import { Fault, Heading, html, Loading } from "./ui.js";

const MODELS_MS = 30_000;
// As typed, so that a number half written stays as it is.
const kept = { model: "", maxTokens: "256", temperature: "0.7" };

export function Chat({ conversation, focus, onKeyRefused }) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const [options, setOptions] = useState(kept);
  const { data, error } = usePolled("v1/models", MODELS_MS, true, onKeyRefused);
  const end = useRef(null);
  const box = useRef(null);
  Object.assign(kept, options);

  useEffect(() => {
    conversation.onChange = redraw;
    return () => (conversation.onChange = () => {});
  }, [conversation]);
  const last = conversation.turns.at(-1);
  useEffect(() => {
    if (last) end.current?.scrollIntoView({ block: "nearest" });
  }, [last?.id, last?.answer]);

  const models = data ? data.data : [];
  const model = models.some((one) => one.id === options.model) ? options.model : models[0]?.id;
  const fake = models.find((one) => one.id === model)?.owned_by.includes("fake");

  async function send() {
    const question = conversation.draft;
    if (!question.trim() || conversation.busy || !model) return;
    const turn = await conversation.send(question, { ...options, model });
    if (turn.error?.kind === "key") onKeyRefused(turn.error);
    else box.current?.focus();
  }
  function onKeyDown(event) {
    if (event.key === "Enter" && event.target === box.current && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      event.currentTarget.requestSubmit();
    } else if (event.key === "Escape" && conversation.busy) {
      event.preventDefault();
      conversation.stop();
    }
  }
  return html`
    <${Heading} focus=${focus}>Chat<//>
    ${error && html`<${Fault} error=${error} stale=${Boolean(data)} />`}
    ${!data && !error && html`<${Loading} what="the models" />`}
    ${fake && html`<p class="note">Fake workers serve here: what they answer is made up.</p>`}
    <div class="turns" role="log" aria-label="Conversation" aria-busy=${conversation.busy} onKeyDown=${onKeyDown}>
      ${!conversation.turns.length && html`<p class="empty">Nothing asked yet. An answer streams here as it is made.</p>`}
      ${conversation.turns.map((turn) => html`<${Turn} key=${turn.id} turn=${turn} />`)}
      <div ref=${end}></div>
    </div>
    <form class="ask" onSubmit=${(event) => { event.preventDefault(); send(); }} onKeyDown=${onKeyDown}>
      <label for="question">Message <span class="quiet">Enter sends, Shift+Enter starts a line, Escape stops</span></label>
      <textarea id="question" ref=${box} rows="3" value=${conversation.draft}
        onInput=${(event) => conversation.setDraft(event.currentTarget.value)}></textarea>
      <div class="bar-of-controls">
        <${Options} models=${models} model=${model} options=${options} onChange=${setOptions} />
        <div class="buttons">
          ${conversation.turns.length > 0 && !conversation.busy && html`
            <button type="button" onClick=${() => { conversation.turns = []; redraw(); box.current.focus(); }}>
              New conversation</button>`}
          <button type="button" disabled=${!conversation.busy} onClick=${() => conversation.stop()}>Stop</button>
          <button type="submit" class="primary" disabled=${conversation.busy || !model}>Send</button>
        </div>
      </div>
      <p class="quiet" role="status">${statusLine(last)}</p>
    </form>`;
}

function Options({ models, model, options, onChange }) {
  const set = (name) => (event) => onChange({ ...options, [name]: event.currentTarget.value });
  return html`
    <label>Model
      <select value=${model} onChange=${(event) => onChange({ ...options, model: event.currentTarget.value })}>
        ${models.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}
      </select>
    </label>
    <label>Max tokens
      <input type="number" min="1" step="1" required value=${options.maxTokens} onInput=${set("maxTokens")} />
    </label>
    <label>Temperature
      <input type="number" min="0" max="2" step="0.1" required value=${options.temperature} onInput=${set("temperature")} />
    </label>`;
}

function Turn({ turn }) {
  return html`<article>
    <p class="who">You</p><p class="text question">${turn.question}</p>
    <p class="who">Model</p>
    <p class="text answer">${turn.answer}${turn.state === "streaming" && html`<span class="caret" aria-hidden="true"></span>`}</p>
    ${turn.error && html`<${Fault} error=${{ ...turn.error, title: turn.error.title, message: turn.error.message, passing: false }} />`}
    <p class="meta">
      ${statusParts(turn).map((part) => html`<span key=${part}>${part}</span>`)}
      ${turn.traceId && turn.state !== "streaming" && html`<a href=${`#/trace/${turn.traceId}`}>Trace</a>`}
    </p>
  </article>`;
}

function statusParts(turn) {
  const parts = [];
  if (turn.state === "stopped") parts.push("stopped");
  if (turn.ttftMs !== undefined) parts.push(`TTFT ${seconds(turn.ttftMs / 1000)}`);
  if (turn.rate) parts.push(`${turn.rate.toFixed(1)} tokens/s`);
  if (turn.usage) {
    const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: more } = turn.usage;
    parts.push(`${number(prompt)} prompt tokens (${number(more.cached_tokens)} cached)`, `${number(output)} output tokens`);
  }
  if (turn.finish) parts.push(`finish: ${turn.finish}`);
  return parts;
}

function statusLine(turn) {
  if (!turn) return "";
  return { streaming: "Answering.", done: "Answer complete.", stopped: "Stopped.", failed: "Failed; the message is kept." }[turn.state];
}
