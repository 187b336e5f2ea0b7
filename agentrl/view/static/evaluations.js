// Evaluations of a run: every metric with its interval, one column for each evaluation.
import { html, classes } from "./base.js";
import { useAnswer, runPath } from "./data.js";
import { number } from "./format.js";
import { href, Failure, Waiting, Interval } from "./parts.js";

/** An interval in numbers. */
export function bracket(one) {
  return one.low === null || one.low === undefined ? "no interval" : `${number(one.low)} – ${number(one.high)}`;
}

export function reportName(report) {
  return report.step === null ? report.name : `step ${report.step}`;
}

/** The share of episodes that could not be judged. */
function invalidShare(report) {
  const invalid = report.counts.invalid ?? 0;
  return invalid ? `${((100 * invalid) / (invalid + (report.counts.n ?? 0))).toFixed(1)}% invalid` : "";
}

function Value({ found, report, from, to }) {
  if (!found) return html`<span class="quiet">not measured</span>`;
  const share = invalidShare(report);
  const bounds = found.if_wrong === null || found.if_wrong === undefined ? "" : `; all wrong ${number(found.if_wrong)}, all right ${number(found.if_right)}`;
  return html`<b>${number(found.mean)}</b> <span class="quiet">${bracket(found)}</span><${Interval} ...${found} from=${from} to=${to} />${share ? html`<div class="small bad">${share}${bounds}</div>` : null}`;
}

/** The first metric that says how good a model is, by tag of the task. */
function Tags({ reports }) {
  const tags = [...new Set(reports.flatMap((one) => Object.keys(one.tags)))];
  if (!tags.length) return null;
  return html`<h2>By tag</h2><div class="scroll"><table class="plain reports"><thead><tr><th>tag</th>${reports.map((one) => html`<th key=${one.name}>${reportName(one)}</th>`)}</tr></thead>
    <tbody>${tags.map((tag) => html`<tr key=${tag}><th scope="row">${tag}</th>${reports.map((one) => {
      const found = one.tags[tag];
      return html`<td key=${one.name}>${found ? html`<span class="quiet">${found.name}</span> <${Value} found=${found} report=${found} from=${Math.min(0, found.low ?? found.mean)} to=${Math.max(1, found.high ?? found.mean)} />` : html`<span class="quiet">not measured</span>`}</td>`;
    })}</tr>`)}</tbody></table></div>`;
}

const SETUP = [["data", "data"], ["tasks", "tasks"], ["samples", "samples"], ["temperature", "temperature"], ["max_new_tokens", "longest answer"], ["chat_template", "chat template"], ["seed", "seed"]];

/** The page of a run's evaluations. */
export function Evaluations({ run, tick }) {
  const { value, error } = useAnswer(runPath(run, "/evaluations"), tick);
  if (error) return html`<main class="page" id="main"><${Failure} error=${error} /></main>`;
  if (!value) return html`<main class="page" id="main"><${Waiting} /></main>`;
  const reports = value.reports;
  if (!reports.length) return html`<main class="page" id="main"><h1>Evaluations</h1><p class="empty">No evaluation has ended yet.</p></main>`;
  const names = [...new Set(reports.flatMap((one) => Object.keys(one.metrics)))];
  const bounds = Object.fromEntries(names.map((name) => {
    const found = reports.map((one) => one.metrics[name]).filter(Boolean);
    return [name, [Math.min(0, ...found.map((one) => one.low ?? one.mean)), Math.max(1, ...found.map((one) => one.high ?? one.mean))]];
  }));
  const last = reports[reports.length - 1];
  return html`<main class="page" id="main"><h1>Evaluations</h1>
    ${reports.length > 1 ? html`<p><a href=${href(["compare"], { run1: run, name1: reports[0].name, run2: run, name2: last.name })}>Compare ${reportName(reports[0])} with ${reportName(last)}, task by task →</a></p>` : null}
    <div class="scroll"><table class="plain reports"><thead><tr><th>metric</th>${reports.map((one) => html`<th key=${one.name}><a href=${href(["run", run, "episodes"], { kind: "eval", q: one.step === null ? "" : `step=${one.step}` })}>${reportName(one)}</a></th>`)}</tr></thead>
      <tbody>
        <tr><th scope="row">judged</th>${reports.map((one) => html`<td key=${one.name}>${number(one.counts.n)} <span class=${classes(one.counts.invalid ? "bad" : "quiet")}>${number(one.counts.invalid ?? 0)} invalid</span></td>`)}</tr>
        ${names.map((name) => html`<tr key=${name}><th scope="row">${name}</th>${reports.map((one) => {
          const found = one.metrics[name];
          return html`<td key=${one.name}><${Value} found=${found} report=${one} from=${bounds[name][0]} to=${bounds[name][1]} /></td>`;
        })}</tr>`)}
        ${reports.some((one) => Object.keys(one.answers).length) ? html`<tr><th scope="row">answers</th>${reports.map((one) => html`<td key=${one.name} class="small">${Object.entries(one.answers).map(([name, count]) => `${name} ${count}`).join(", ")}</td>`)}</tr>` : null}
        ${reports.some((one) => Object.keys(one.failures).length) ? html`<tr><th scope="row">failures</th>${reports.map((one) => html`<td key=${one.name} class="small bad">${Object.entries(one.failures).map(([name, count]) => `${name} ${typeof count === "number" ? count : ""}`).join(", ")}</td>`)}</tr>` : null}
      </tbody></table></div>
    <p class="quiet small">Intervals are 95%, over tasks. An invalid episode counts in no mean; what a number would be if all of them were wrong, and right, stands beside it.</p>
    <${Tags} reports=${reports} />
    <h2>What was measured</h2>
    <dl class="pairs">${SETUP.filter(([key]) => last.setup[key] !== undefined && last.setup[key] !== null).map(([key, label]) => html`<div key=${key}><dt>${label}</dt><dd>${String(last.setup[key])}</dd></div>`)}</dl>
    ${last.notes.map((note) => html`<p class="note" key=${note}>${String(note)}</p>`)}
  </main>`;
}
