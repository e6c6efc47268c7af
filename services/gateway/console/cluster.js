// Who is there and how busy: scheduler, workers, ingresses, and whether the gateway would serve a request now.
import { number, seconds } from "./format.js";
import { usePolled } from "./poll.js";
import { Empty, Facts, Fault, Heading, html, Loading, Table } from "./ui.js";

const PERIOD_MS = 1000;
const CLASSES = ["interactive", "analysis", "batch"];
const WORKERS = [
  { name: "Worker" }, { name: "Role", short: true }, { name: "Running", number: true }, { name: "Waiting", number: true },
  { name: "Queued tokens", number: true }, { name: "KV blocks in use" }, { name: "Last heard" },
];
const INGRESSES = [
  { name: "Ingress" }, { name: "Kind" }, { name: "Requests held", number: true }, { name: "Last heard" },
];

export function Cluster({ live, focus, onKeyRefused }) {
  const { data, error } = usePolled("baton/cluster", PERIOD_MS, live, onKeyRefused);
  return html`
    <${Heading} focus=${focus}>Cluster<//>
    ${error && html`<${Fault} error=${error} stale=${Boolean(data)} />`}
    ${!data && !error && html`<${Loading} what="the cluster" />`}
    ${data && html`
      <${Readiness} checks=${data.checks} gateway=${data.gateway} />
      <${Scheduler} scheduler=${data.scheduler} />
      <section aria-labelledby="workers"><h2 id="workers">Workers</h2>
        ${data.workers.length
          ? html`<${Table} label="Workers" columns=${WORKERS} rows=${data.workers.map(workerRow)} />`
          : html`<${Empty}>No worker was heard in the last 10 s.<//>`}
      </section>
      <section aria-labelledby="ingresses"><h2 id="ingresses">Gateways and batch service</h2>
        ${data.ingresses.length
          ? html`<${Table} label="Gateways and batch service" columns=${INGRESSES}
              rows=${data.ingresses.map(ingressRow)} />`
          : html`<${Empty}>None was heard in the last 10 s.<//>`}
      </section>`}`;
}

function Readiness({ checks, gateway }) {
  const failing = Object.keys(checks).filter((name) => !checks[name]);
  return html`<section aria-labelledby="ready"><h2 id="ready">Readiness</h2>
    <p>${failing.length
      ? html`<span class="failed">Not ready: ${failing.join(", ")}</span>`
      : "Ready: a request would be served now."} <span class="quiet">Seen by ${gateway.id}.</span></p>
    <ul class="chips">${Object.entries(checks).map(([name, fine]) => html`
      <li key=${name} class=${fine ? "chip" : "chip failed"}>${name}: ${fine ? "yes" : "no"}</li>`)}</ul>
  </section>`;
}

function Scheduler({ scheduler }) {
  const classes = scheduler
    ? [...new Set([...CLASSES, ...Object.keys(scheduler.queued_by_class)])].map((klass) => [
        `Queued, ${klass}`, number(scheduler.queued_by_class[klass] || 0),
      ])
    : [];
  return html`<section aria-labelledby="scheduler"><h2 id="scheduler">Scheduler</h2>
    ${scheduler
      ? html`<${Facts} label="Scheduler" pairs=${[
          ["Leader", scheduler.id], ["Term", number(scheduler.term)], ["Running", number(scheduler.running)],
          ["Queued", number(scheduler.queued)], ...classes, ["Last heard", `${seconds(scheduler.age_s)} ago`],
        ]} />`
      : html`<p class="failed">No scheduler was heard in the last 10 s. New requests wait.</p>`}
  </section>`;
}

const sum = (list) => list.reduce((total, one) => total + one, 0);

function workerRow(worker) {
  const notes = ["fake", "draining"].filter((note) => worker[note]);
  const name = html`${worker.id}${notes.map((note) => html` <span class="chip">${note}</span>`)}`;
  const slots = worker.max_sequences ? ` of ${number(worker.max_sequences)}` : "";
  return {
    key: worker.id,
    cells: [
      name, worker.role, `${number(worker.running)}${slots}`, number(worker.waiting), number(worker.queue_tokens),
      html`<${Blocks} worker=${worker} />`, `${seconds(worker.age_s)} ago`,
    ],
  };
}

function Blocks({ worker }) {
  const total = sum(worker.total_blocks);
  const used = total - sum(worker.free_blocks);
  const share = total ? used / total : 0;
  return html`<span class="blocks">
    <span class="meter" role="meter" aria-label=${`KV blocks in use on ${worker.id}`} aria-valuemin="0"
      aria-valuemax=${total} aria-valuenow=${used} aria-valuetext=${`${used} of ${total} blocks`}>
      <span class=${share > 0.9 ? "fill full" : "fill"} style=${{ width: `${share * 100}%` }}></span>
    </span>
    <span>${number(used)} of ${number(total)}${share > 0.9 ? " (nearly full)" : ""}</span>
  </span>`;
}

function ingressRow(ingress) {
  const kind = ingress.kind === "batch" ? "batch service" : ingress.kind;
  return { key: ingress.id, cells: [ingress.id, kind, number(ingress.requests), `${seconds(ingress.age_s)} ago`] };
}
