// Numbers, times and texts as a reader wants them.

/** A number in a few digits; a dash for none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size >= 100) return value.toFixed(1);
  if (size >= 10) return value.toFixed(Math.min(digits, 2));
  if (size >= 1e-3) return value.toFixed(digits);
  return value === 0 ? "0" : value.toExponential(1);
}

/** A number with its sign. */
export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + number(Math.abs(value), digits);
}

/** Seconds in one unit. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

/** A time of day, with the date if it is another day. */
export function clock(time) {
  if (time === null || time === undefined) return "–";
  const when = new Date(time * 1000);
  const hour = when.toLocaleTimeString("en-GB");
  return when.toDateString() === new Date().toDateString() ? hour : `${when.toLocaleDateString("en-CA")} ${hour}`;
}

/** The same within a column: of another day without its seconds, of another year without its time. */
export function shortClock(time) {
  if (time === null || time === undefined) return "–";
  const when = new Date(time * 1000), now = new Date();
  if (when.toDateString() === now.toDateString()) return clock(time);
  const date = when.toLocaleDateString("en-CA");
  return when.getFullYear() === now.getFullYear() ? `${date.slice(5)} ${when.toLocaleTimeString("en-GB").slice(0, 5)}` : date;
}

/** Bytes in one unit. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) [value, at] = [value / 1000, at + 1];
  return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
}

/** JSON for a reader: a text that holds JSON is laid out. */
export function laidOut(value) {
  if (typeof value !== "string") return JSON.stringify(value, null, 2);
  try {
    const found = JSON.parse(value);
    return typeof found === "object" && found !== null ? JSON.stringify(found, null, 2) : value;
  } catch {
    return value;
  }
}

/** The last part of a metric's name. */
export function shortName(name) {
  return name.split("/").slice(1).join("/") || name;
}
