// Small parts that several pages share.
import { html, classes, useState, useEffect } from "./base.js";
import { number } from "./format.js";

/** What a link inside the page points to. */
export function href(where, query = {}) {
  const set = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(set).toString();
  return `#/${where.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export function Failure({ error }) {
  return error ? html`<p class="failure" role="alert">${error}</p>` : null;
}

export function Waiting({ what = "Loading…" }) {
  const [late, set] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => set(true), 150);
    return () => clearTimeout(timer);
  }, []);
  return late ? html`<p class="waiting" role="status">${what}</p>` : null;
}

const TONES = { running: "good", finished: "calm", starting: "good", failed: "bad", killed: "bad", stopped: "warn" };

/** A run's state, as a word with a dot. */
export function State({ state }) {
  return html`<span class=${classes("state", TONES[state])}><i aria-hidden="true"></i>${state}</span>`;
}

/** Choices of which one is on. */
export function Choice({ label, value, options, onChange }) {
  return html`<div class="choice" role="radiogroup" aria-label=${label}>
    ${options.map(
      (one) => html`<button type="button" role="radio" key=${one.value} aria-checked=${one.value === value ? "true" : "false"}
        disabled=${Boolean(one.why)} title=${one.why || one.title || ""} onClick=${() => onChange(one.value)}>${one.label}</button>`,
    )}
  </div>`;
}

/** A number with its name below. */
export function Fact({ name, value, title, tone }) {
  return html`<div class=${classes("fact", tone)} title=${title || ""}><dt>${name}</dt><dd>${value}</dd></div>`;
}

/** Why an episode ended, as a word. */
export function Stop({ stop, failed }) {
  const tone = failed ? "bad" : stop === "terminated" ? "" : "warn";
  return html`<span class=${classes("stop", tone)}>${stop || "–"}</span>`;
}

/** A reward: its number, and a bar between the least and the largest of the list. */
export function Reward({ value, low = 0, high = 1 }) {
  if (value === null || value === undefined) return html`<span class="reward none">none</span>`;
  const share = high > low ? Math.round(((value - low) / (high - low)) * 10) : 10;
  return html`<span class="reward"><span>${number(value)}</span><meter aria-hidden="true" min="0" max="10" value=${Math.max(0, Math.min(10, share))}></meter></span>`;
}

/** An interval on a line from `low` to `high`, as a picture beside its numbers. */
export function Interval({ mean, low, high, from, to, zero = false }) {
  const x = (value) => 2 + (96 * (value - from)) / (to - from || 1);
  const known = low !== null && low !== undefined && high !== null && high !== undefined;
  return html`<svg class="interval" viewBox="0 0 100 14" preserveAspectRatio="none" aria-hidden="true">
    <line x1="0" y1="7" x2="100" y2="7" class="axis" />
    ${zero && from < 0 && to > 0 ? html`<line x1=${x(0)} y1="1" x2=${x(0)} y2="13" class="zero" />` : null}
    ${known ? html`<line x1=${x(low)} y1="7" x2=${x(high)} y2="7" class="range" />` : null}
    <rect x=${x(mean) - 1} y="2" width="2" height="10" class="mean" />
  </svg>`;
}
