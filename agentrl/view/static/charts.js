// Curves: one chart for each metric, with zoom, a common cursor, and a line for each run.
import { html, Plot, useEffect, useRef, useState } from "./base.js";
import { number, shortName } from "./format.js";

export const COLOURS = ["--line1", "--line2", "--line3", "--line4", "--line5", "--line6"];
const common = Plot.sync("steps");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Averages each value with the ones before it; gaps stay gaps. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    mass = weight * mass + 1;
    return sum / mass;
  });
}

/** Brings the columns of several runs onto common steps. */
export function joined(series) {
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const columns = series.map((one) => {
    const found = new Array(steps.length).fill(null);
    one.steps.forEach((step, at) => (found[place.get(step)] = one.values[at]));
    return found;
  });
  return [steps, ...columns];
}

/** Draws the lines of one metric. `series`: name, steps, values, and low and high for an interval. */
export function Chart({ title, meaning, unit, series, smooth = 0, zoom, onZoom, height = 190, theme, dots = false }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const shape = series.map((one) => one.name).join("|");
  useEffect(() => {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(200, place.current.clientWidth),
      height,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: { sync: { key: common.key }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false } },
      axes: [
        { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick, Math.abs(tick) < 0.1 && tick !== 0 ? 3 : 2)) },
      ],
      series: [{}, ...series.map((one, i) => ({
        label: one.name, stroke: colour(COLOURS[one.colour ?? i]), width: 1.8, dash: one.dashed ? [5, 4] : undefined,
        points: { show: one.steps.length < 2 || dots || one.dots, size: 5, fill: colour(COLOURS[one.colour ?? i]) }, spanGaps: Boolean(one.dots),
      }))],
      hooks: {
        setCursor: [(u) => setAt(u.cursor.idx ?? null)],
        setSelect: [(u) => u.select.width > 4 && onZoom && onZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")])],
      },
    };
    plot.current = new Plot(options, joined(series.map((one) => ({ ...one, values: smoothed(one.values, one.dots ? 0 : smooth) }))), place.current);
    const reset = () => onZoom && onZoom(null);
    plot.current.over.addEventListener("dblclick", reset);
    const resize = new ResizeObserver(() => plot.current && plot.current.setSize({ width: Math.max(200, place.current.clientWidth), height }));
    resize.observe(place.current);
    return () => {
      resize.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape, height, theme]);
  useEffect(() => {
    if (!plot.current) return;
    plot.current.setData(joined(series.map((one) => ({ ...one, values: smoothed(one.values, one.dots ? 0 : smooth) }))), !zoom);
    if (zoom) plot.current.setScale("x", { min: zoom[0], max: zoom[1] });
  }, [series, smooth, zoom]);
  const data = joined(series);
  const shown = series.map((one, i) => {
    const values = data[i + 1];
    const value = at === null || at === undefined ? values.findLast((v) => v !== null) : values[at];
    return { name: one.name, label: one.label || one.name, value, colour: one.colour ?? i };
  });
  const said = shown.map((one) => `${one.label} ${number(one.value)}`).join(", ");
  const where = at !== null && at !== undefined ? ` at step ${data[0][at]}` : "";
  return html`<figure class="chart">
    <figcaption><span class="metric" title=${meaning}>${title}</span>${unit ? html`<span class="unit">${unit}</span>` : null}
      ${series.length === 1 ? html`<span class="latest">${number(shown[0].value)}<small>${where}</small></span>` : null}</figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${`${title}: ${said}`}></div>
    ${series.length > 1 ? html`<ul class="legend">${shown.map((one) => html`<li key=${one.name}><i class=${`line${one.colour}`}></i>${one.label} <b>${number(one.value)}</b></li>`)}<li class="at">${where}</li></ul>` : null}
  </figure>`;
}

/** The names of the curves that a run is shown by at first: what there is of these. */
export const FIRST_CURVES = [
  "reward/mean_drawn", "metrics/accuracy", "tokens/completion_mean", "train/entropy", "train/loss", "train/token_accuracy", "train/pair_accuracy",
  "rollout/groups_with_signal", "mismatch/kl", "train/grad_norm", "staleness/mean", "time/step",
];

/** The evaluated name that belongs to a sampled one. */
export function heldOut(name) {
  if (name === "reward/mean_drawn") return "eval/reward";
  return name.startsWith("metrics/") ? `eval/${shortName(name)}` : null;
}
