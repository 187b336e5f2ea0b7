// Two runs, or two checkpoints of one, on the same tasks.
import { html, useState, useEffect, classes, usePress } from "./base.js";
import { useAnswer, path, runPath } from "./data.js";
import { number, signed } from "./format.js";
import { href, Failure, Waiting, Interval, Stop } from "./parts.js";
import { Short } from "./group.js";
import { reportName } from "./evaluations.js";

function Side({ number: which, runs, query, change }) {
  const run = query.get(`run${which}`) || runs[Math.min(which - 1, runs.length - 1)].key;
  const { value } = useAnswer(runPath(run, "/evaluations"));
  const reports = value ? value.reports : [];
  const name = query.get(`name${which}`);
  useEffect(() => {
    if (reports.length && !reports.some((one) => one.name === name)) change({ [`run${which}`]: run, [`name${which}`]: reports[which === 1 && runs.length === 1 ? 0 : reports.length - 1].name });
  }, [run, value]);
  return html`<fieldset class="side"><legend>${which === 1 ? "A" : "B"}</legend>
    <label>run <select value=${run} onChange=${(event) => change({ [`run${which}`]: event.target.value, [`name${which}`]: "" })}>${runs.map((one) => html`<option key=${one.key} value=${one.key}>${one.key}</option>`)}</select></label>
    <label>evaluation <select value=${name || ""} onChange=${(event) => change({ [`run${which}`]: run, [`name${which}`]: event.target.value })}>${reports.map((one) => html`<option key=${one.name} value=${one.name}>${reportName(one)}</option>`)}</select></label>
    ${value && !reports.length ? html`<p class="quiet small">It has no evaluation.</p>` : null}</fieldset>`;
}

function Answers({ run, name, task, label }) {
  const step = /^eval-(\d+)$/.exec(name || "");
  const { value, error } = useAnswer(path("/api/task", { run, task, kind: "eval", q: step ? `step=${Number(step[1])}` : "" }));
  if (error) return html`<section class="lane"><${Failure} error=${error} /></section>`;
  if (!value) return html`<section class="lane"><${Waiting} /></section>`;
  return html`<section class="lane" aria-label=${label}><header><b>${label}</b><span class="quiet">${run} ${step ? `step ${Number(step[1])}` : name}</span></header>
    ${value.episodes.map((one) => html`<div key=${one.place} class="one"><p><a href=${href(["run", run, "episode", "eval", String(one.place)])}>reward ${one.reward === null ? "none" : number(one.reward)}</a> <${Stop} stop=${one.stop} failed=${one.failed} /></p><${Short} messages=${one.conversation} /></div>`)}
    ${!value.episodes.length ? html`<p class="empty">No episode of this task is recorded (logging.episodes).</p>` : null}</section>`;
}

/** The page that compares two evaluations. */
export function Compare({ runs, query, go }) {
  const given = Object.fromEntries(["run1", "name1", "run2", "name2", "task", "only"].map((name) => [name, query.get(name)]));
  const change = (more) => go(["compare"], { ...given, ...more }, true);
  const ready = given.run1 && given.name1 && given.run2 && given.name2;
  const { value, error } = useAnswer(ready ? path("/api/compare", { run1: given.run1, name1: given.name1, run2: given.run2, name2: given.name2 }) : null);
  const lead = value ? value.lead : "reward";
  const moved = value ? value.tasks.filter((one) => one.first[lead] !== one.second[lead]) : [];
  const tasks = value ? (given.only === "all" ? value.tasks : moved.length ? moved : value.tasks) : [];
  const widest = value ? Math.max(0.01, ...Object.values(value.metrics).flatMap((one) => [Math.abs(one.low ?? one.mean), Math.abs(one.high ?? one.mean)])) : 1;
  const task = given.task || (tasks[0] && tasks[0].task);
  const at = tasks.findIndex((one) => one.task === task);
  usePress((event) => {
    const step = { j: 1, k: -1 }[event.key];
    if (!step || event.target.closest("input, select, textarea") || !tasks.length) return;
    change({ task: tasks[Math.max(0, Math.min(tasks.length - 1, at + step))].task });
  });
  return html`<main class="page wide" id="main"><h1>Compare</h1>
    <div class="sides"><${Side} number=${1} runs=${runs} query=${query} change=${change} /><${Side} number=${2} runs=${runs} query=${query} change=${change} /></div>
    <${Failure} error=${error} />
    ${value ? html`<div class="scroll"><table class="plain"><thead><tr><th>metric</th><th class="num">B − A</th><th class="num">95% interval</th><th class="num">p</th><th class="num">tasks</th><th><span class="sr">picture</span></th></tr></thead><tbody>
      ${Object.entries(value.metrics).map(([name, one]) => html`<tr key=${name}><th scope="row">${name}</th><td class="num"><b>${signed(one.mean)}</b></td><td class="num">${one.low === null ? "none" : `${signed(one.low)} … ${signed(one.high)}`}</td><td class="num">${one.p === null ? "–" : number(one.p)}</td><td class="num">${one.tasks}</td><td class="wide"><${Interval} ...${one} from=${-widest} to=${widest} zero /></td></tr>`)}
      </tbody></table></div>
      ${value.setups.length ? html`<p class="note">Set differently: ${value.setups.join("; ")}</p>` : null}${value.changed ? html`<p class="note">${value.changed} tasks have other contents in B, and are left out.</p>` : null}
      <div class="bar"><h2>Tasks</h2><p class="quiet">${moved.filter((one) => one.second[lead] > one.first[lead]).length} better in ${lead}, ${moved.filter((one) => one.second[lead] < one.first[lead]).length} worse, ${value.tasks.length - moved.length} the same</p>
        <label class="pick"><input type="checkbox" checked=${given.only === "all"} onChange=${(event) => change({ only: event.target.checked ? "all" : "" })} /> all tasks</label></div>
      <div class="split"><ul class="tasks" aria-label="tasks">${tasks.slice(0, 500).map((one) => html`<li key=${one.task}><a class=${classes(one.task === task && "at")} href=${href(["compare"], { ...given, task: one.task })}><span class="text">${one.task}</span><span class="num">${number(one.first[lead])} → ${number(one.second[lead])}</span></a></li>`)}${tasks.length > 500 ? html`<li class="quiet">${tasks.length - 500} more, the least changed</li>` : null}</ul>
        ${task ? html`<div class="lanes two"><${Answers} run=${given.run1} name=${given.name1} task=${task} label="A" /><${Answers} run=${given.run2} name=${given.name2} task=${task} label="B" /></div>` : null}</div>` : null}
    ${!ready ? html`<p class="empty">Choose two evaluations. Two checkpoints of one run are two of its evaluations.</p>` : null}
  </main>`;
}
