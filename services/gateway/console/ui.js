// Markup as tagged templates, and the small parts every view uses. Values always become text, never markup.
import { h } from "./vendor/preact.js";
import { useEffect, useRef } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);

// The heading a view begins with. It takes the focus when the view was reached from another one, so that a screen
// reader and the Tab key go on from there.
export function Heading({ children, focus }) {
  const element = useRef(null);
  useEffect(() => {
    if (focus) element.current.focus();
  }, []);
  return html`<h1 ref=${element} tabindex="-1">${children}</h1>`;
}

export function Loading({ what }) {
  return html`<p class="quiet" role="status">Loading ${what}.</p>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

// What went wrong and what can be done. `error`: an ApiError; `stale`: older data is still shown below.
export function Fault({ error, stale }) {
  return html`<div class="fault" role="alert">
    <strong>${error.title}</strong> ${error.message}
    ${stale && html`<span> What is shown below is the last answer.</span>`}
    ${error.passing && html`<span> Trying again.</span>`}
  </div>`;
}

// Term and value pairs; pairs whose value is null or empty are left out.
export function Facts({ pairs, label }) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="facts" aria-label=${label}>
    ${shown.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

// A table that becomes cards on a narrow screen. Explicit roles, because CSS that changes `display` takes them away.
// `columns`: {name, number?, short?}, where short cells share a line of the card; `rows`: {key, cells, attributes?}.
export function Table({ label, columns, rows, onKeyDown }) {
  const kind = (column) => (column.number ? "number short" : column.short ? "short" : "");
  return html`<table role="table" aria-label=${label} onKeyDown=${onKeyDown}>
    <thead role="rowgroup"><tr role="row">
      ${columns.map((column) => html`<th role="columnheader" scope="col" class=${kind(column)}>${column.name}</th>`)}
    </tr></thead>
    <tbody role="rowgroup">
      ${rows.map((row) => html`<tr role="row" key=${row.key} ...${row.attributes}>
        ${row.cells.map((cell, i) => html`
          <td role="cell" class=${kind(columns[i])} data-label=${columns[i].name}>${cell}</td>`)}
      </tr>`)}
    </tbody>
  </table>`;
}

// Up, Down, Home and End move the focus among the elements that match `selector` inside the event's own element.
export function moveFocus(event, selector, onMoved) {
  const steps = { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity };
  if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
  const all = [...event.currentTarget.querySelectorAll(selector)];
  const at = all.indexOf(document.activeElement);
  if (at < 0) return;
  event.preventDefault();
  const to = all[Math.max(0, Math.min(all.length - 1, at + steps[event.key]))];
  to.focus();
  if (onMoved) onMoved(to);
}
