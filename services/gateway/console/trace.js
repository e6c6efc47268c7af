// One request as a waterfall: every span on one time axis, under each the reasons for what was decided in it.
import { useEffect, useState } from "./vendor/hooks.js";
import { dateAndTime, failedStatus, number, pathName, seconds } from "./format.js";
import { usePolled } from "./poll.js";
import { Facts, Fault, Heading, html, Loading, moveFocus } from "./ui.js";

const PERIOD_MS = 1000;
// Spans travel to the gateway after the request ended: the first one comes, or the last one has come, after so long.
const FOUND_MS = 2500;
const SETTLED_MS = 6000;

export function Trace({ id, focus, onKeyRefused }) {
  const [settling, setSettling] = useState(true);
  const [early, setEarly] = useState(true);
  const [selected, setSelected] = useState("");
  useEffect(() => {
    const timers = [setTimeout(() => setEarly(false), FOUND_MS), setTimeout(() => setSettling(false), SETTLED_MS)];
    return () => timers.forEach(clearTimeout);
  }, []);
  const path = `baton/traces/${encodeURIComponent(id)}`;
  const { data, error } = usePolled(path, PERIOD_MS, settling, onKeyRefused);
  const summary = data && data.summary;
  const row = data && (data.rows.find((one) => one.span_id === selected) || data.rows[0]);
  return html`
    <p class="back"><a href="#/requests">← Recent requests</a> <span class="quiet">Escape</span></p>
    <${Heading} focus=${focus}>Request ${summary ? summary.request_id.replace(/^req-/, "").slice(0, 12) : ""}<//>
    ${!data && (!error || (error.kind === "missing" && early)) && html`<${Loading} what="the trace" />`}
    ${!data && error?.kind === "missing" && !early && html`<p class="empty">
      There is no such trace here. A gateway keeps the last ones only, and a key sees its own tenant's.</p>`}
    ${error && error.kind !== "missing" && html`<${Fault} error=${error} stale=${Boolean(data)} />`}
    ${data && html`
      ${summary ? html`<${Summary} summary=${summary} />` : html`<p class="quiet" role="status">
        The request still runs, or its first span was lost.</p>`}
      <div class="split">
        <${Waterfall} rows=${data.rows} length=${data.length_s} selected=${row.span_id} onSelect=${setSelected} />
        <${Details} row=${row} />
      </div>
      <p class="quiet">In a terminal: <code>./baton trace ${data.trace_id.slice(0, 12)}</code></p>`}`;
}

function Summary({ summary }) {
  const failed = failedStatus(summary.status);
  return html`<${Facts} label="The request" pairs=${[
    ["Status", failed ? html`<span class="failed">Failed: ${summary.status}</span>` : summary.status],
    ["Path", pathName(summary.path)],
    ["First token", seconds(summary.ttft_s)],
    ["Total", seconds(summary.total_s)],
    ["Prompt", `${number(summary.prompt_tokens)} tokens`],
    ["Cached", `${number(summary.cached_tokens)} tokens`],
    ["Output", `${number(summary.completion_tokens)} tokens`],
    ["Finish", summary.finish],
    ["Tenant", summary.tenant],
    ["Model", summary.model],
    ["Class", summary.klass],
    ["Started", dateAndTime(summary.start_s)],
  ]} />`;
}

function Waterfall({ rows, length, selected, onSelect }) {
  const onKeyDown = (event) => moveFocus(event, "button.span", (to) => onSelect(to.dataset.span));
  return html`<section class="waterfall" aria-label="Waterfall">
    <${Axis} length=${length} />
    <ol onKeyDown=${onKeyDown}>
      ${rows.map((row) => html`<li key=${row.span_id}>
        <button type="button" class="span" data-span=${row.span_id} aria-pressed=${row.span_id === selected}
          tabindex=${row.span_id === selected ? 0 : -1} onClick=${() => onSelect(row.span_id)}>
          <span class="name" style=${{ paddingLeft: `${Math.min(row.depth, 5) * 0.9}rem` }}>${row.name}</span>
          <span class="service"><span class=${`dot svc-${row.service}`}></span>${row.service}</span>
          <span class="took">${row.failed && html`<span class="failed">failed </span>`}${seconds(row.duration_s)}</span>
          <span class="track" aria-hidden="true">
            <span class=${`bar svc-${row.service}${row.failed ? " bad" : ""}`} style=${place(row, length)}></span>
          </span>
        </button>
        ${row.why.length > 0 && html`<ul class="why" style=${{ marginLeft: `${Math.min(row.depth, 5) * 0.9 + 0.5}rem` }}>
          ${row.why.map((sentence) => html`<li>${sentence}</li>`)}
        </ul>`}
        ${row.span_id === selected && row.facts.length > 0 && html`<div class="inline-facts"><${SpanFacts} row=${row} /></div>`}
      </li>`)}
    </ol>
  </section>`;
}

function Axis({ length }) {
  const marks = [0, 0.25, 0.5, 0.75, 1];
  return html`<div class="axis" aria-hidden="true"><span class="track">
    ${marks.map((at) => html`<span class="mark" style=${{ left: `${at * 100}%` }}>${at ? seconds(length * at) : "0"}</span>`)}
  </span></div>`;
}

function place(row, length) {
  const whole = length || 1;
  return { left: `${(row.start_s / whole) * 100}%`, width: `${(row.duration_s / whole) * 100}%` };
}

function Details({ row }) {
  return html`<aside class="details" aria-label="Selected span">
    <h2>${row.name}</h2>
    <p class="quiet">${row.service}, from ${seconds(row.start_s)} for ${seconds(row.duration_s)}</p>
    ${row.why.length > 0 && html`<h3>Why</h3><ul>${row.why.map((sentence) => html`<li>${sentence}</li>`)}</ul>`}
    ${row.facts.length > 0 && html`<h3>Facts</h3><${SpanFacts} row=${row} />`}
  </aside>`;
}

function SpanFacts({ row }) {
  return html`<${Facts} label="Facts" pairs=${row.facts.map((fact) => [fact.name.replace(/[._]/g, " "), fact.text])} />`;
}
