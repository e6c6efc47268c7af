// The table of finished requests, newest first.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { dateAndTime, failedStatus, number, pathName, seconds, shortId, timeOfDay } from "./format.js";
import { usePolled } from "./poll.js";
import { Empty, Fault, Heading, html, Loading, moveFocus, Table } from "./ui.js";

const PERIOD_MS = 2000;
const LIMIT = 100;
const COLUMNS = [
  { name: "Time" }, { name: "Tenant", short: true }, { name: "Model" }, { name: "Class", short: true },
  { name: "Status" }, { name: "Path", short: true },
  { name: "Prompt", number: true }, { name: "Cached", number: true }, { name: "Output", number: true },
  { name: "TTFT", number: true }, { name: "Total", number: true },
];
// Kept while other views are open.
const kept = { words: "", failedOnly: false };

export function Requests({ live, cameFrom, focus, onKeyRefused }) {
  const [words, setWords] = useState(kept.words);
  const [failedOnly, setFailedOnly] = useState(kept.failedOnly);
  const [active, setActive] = useState(cameFrom);
  const { data, error } = usePolled(`baton/traces?limit=${LIMIT}`, PERIOD_MS, live, onKeyRefused);
  const table = useRef(null);
  Object.assign(kept, { words, failedOnly });

  // back from a trace: the focus goes to the row it was opened from
  const returned = useRef(!cameFrom);
  useEffect(() => {
    const link = data && !returned.current && table.current?.querySelector(`a[data-trace="${CSS.escape(cameFrom)}"]`);
    if (link) link.focus();
    returned.current ||= Boolean(data);
  }, [data]);

  const all = data ? data.data : [];
  const shown = all.filter((one) => (!failedOnly || failedStatus(one.status)) && matches(one, words));
  const first = shown.some((one) => one.trace_id === active) ? active : shown[0]?.trace_id;
  return html`
    <${Heading} focus=${focus && !cameFrom}>Recent requests<//>
    ${error && html`<${Fault} error=${error} stale=${Boolean(data)} />`}
    <div class="bar-of-controls">
      <label class="grow">Filter
        <input type="search" value=${words} placeholder="tenant, model, status, path, id"
          onInput=${(event) => setWords(event.currentTarget.value)} />
      </label>
      <label class="check">
        <input type="checkbox" checked=${failedOnly} onChange=${(event) => setFailedOnly(event.currentTarget.checked)} />
        Failed only
      </label>
      <p class="quiet count" role="status">${data ? `${shown.length} of ${all.length}` : ""}</p>
    </div>
    <div ref=${table}>
      ${!data && !error && html`<${Loading} what="requests" />`}
      ${data && !all.length && html`<${Empty}>No request has finished yet. <a href="#/chat">Send one</a>.<//>`}
      ${all.length > 0 && !shown.length && html`<${Empty}>No request matches the filter.<//>`}
      ${shown.length > 0 && html`<${Table} label="Recent requests" columns=${COLUMNS}
        onKeyDown=${(event) => moveFocus(event, "a[data-trace]")}
        rows=${shown.map((one) => row(one, one.trace_id === first, setActive))} />`}
    </div>`;
}

// A click anywhere on the row opens it, but not one that selects text or is the link's own.
function open(event, id) {
  if (!event.target.closest("a") && !getSelection().toString()) location.hash = `#/trace/${id}`;
}

function matches(one, words) {
  const hay = [one.tenant, one.model, one.klass, one.status, one.path, pathName(one.path), one.request_id, one.trace_id];
  const text = hay.join(" ").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function row(one, reachable, setActive) {
  const link = html`<a href=${`#/trace/${one.trace_id}`} data-trace=${one.trace_id} tabindex=${reachable ? 0 : -1}
      title=${dateAndTime(one.start_s)} onFocus=${() => setActive(one.trace_id)}
      aria-label=${`Request ${shortId(one.request_id || one.trace_id)} at ${timeOfDay(one.start_s)}`}>
      ${timeOfDay(one.start_s)} <small>${shortId(one.request_id || one.trace_id).slice(0, 6)}</small></a>`;
  const failed = failedStatus(one.status);
  const status = failed ? html`<span class="failed">Failed: ${one.status}</span>` : one.status;
  return {
    key: one.trace_id,
    attributes: { class: failed ? "row failed-row" : "row", onClick: (event) => open(event, one.trace_id) },
    cells: [
      link, one.tenant || "–", one.model || "–", one.klass || "–", status, pathName(one.path),
      number(one.prompt_tokens), number(one.cached_tokens), number(one.completion_tokens),
      seconds(one.ttft_s), seconds(one.total_s),
    ],
  };
}
