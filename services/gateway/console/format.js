// Numbers and times as people read them; the same rules as shared/telemetry/units.py.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(1)}ms`;
  if (value < 0.9995) return `${(value * 1000).toFixed(0)}ms`;
  return value < 100 ? `${value.toFixed(2)}s` : `${value.toFixed(0)}s`;
}

const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const dayAndClock = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

// Unix seconds as local time of day.
export const timeOfDay = (unix) => clock.format(new Date(unix * 1000));
export const dateAndTime = (unix) => dayAndClock.format(new Date(unix * 1000));

export const number = (value) => value.toLocaleString("en-GB");

export const pathName = (path) => ({ local: "local", handed_off: "handed off" })[path] || path || "–";

export const shortId = (id) => id.replace(/^req-/, "").slice(0, 12);

export const failedStatus = (status) => !["ok", ""].includes(status);
