// A run at a glance: where it stands, what doctor says, its curves.
import { html, useState, useEffect, useMemo, classes } from "./base.js";
import { useAnswer, runPath, path, copy } from "./data.js";
import { number, seconds, bytes, shortName } from "./format.js";
import { href, Failure, Waiting, State, Fact } from "./parts.js";
import { Chart, FIRST_CURVES, heldOut } from "./charts.js";

/** The list of all shown runs. */
export function Runs({ runs }) {
  return html`<main class="page" id="main"><h1>Runs</h1>
    <div class="scroll"><table class="plain"><thead><tr><th>run</th><th class="narrow-off">learns</th><th>state</th><th class="num">step</th><th class="num">latest</th><th class="num narrow-off">wrote</th></tr></thead>
      <tbody>${runs.map((run) => html`<tr key=${run.key}>
        <td><a href=${href(["run", run.key])}>${run.key}</a>${run.problem ? html`<div class="note">${run.problem}</div>` : null}</td>
        <td class="narrow-off">${run.kind}</td><td><${State} state=${run.state} /></td>
        <td class="num">${run.step ?? "–"}${run.total ? ` / ${run.total}` : ""}</td>
        <td class="num">${run.metric ? html`<span class="quiet">${shortName(run.metric)}</span> ${number(run.value)}` : "–"}</td>
        <td class="num narrow-off">${run.age === null || run.age === undefined ? "–" : `${seconds(run.age)} ago`}</td></tr>`)}</tbody></table></div>
  </main>`;
}

const FACTS = [
  ["reward", "reward/mean_drawn"], ["accuracy", "metrics/accuracy"], ["loss", "train/loss"], ["tokens an answer", "tokens/completion_mean"],
  ["cut", "rollout/truncated"], ["age", "staleness/mean"], ["entropy", "train/entropy"], ["step", "time/step"],
];

function Standing({ run, latest, live }) {
  const shown = FACTS.filter(([, name]) => latest[name] !== undefined && !(name === "train/loss" && latest["reward/mean_drawn"] !== undefined));
  return html`<section class="standing" aria-label="latest numbers">
    <dl>
      <${Fact} name="step" value=${`${run.step ?? "–"}${run.total ? ` / ${run.total}` : ""}`} />
      ${shown.map(([label, name]) => html`<${Fact} key=${name} name=${label === "step" ? "a step takes" : label} title=${name}
        value=${name === "time/step" ? seconds(latest[name]) : name === "rollout/truncated" ? `${(100 * latest[name]).toFixed(0)}%` : number(latest[name])} />`)}
    </dl>
    ${live ? html`<p class="live" role="status">following as it is written</p>` : null}
  </section>`;
}

function Findings({ run }) {
  const { value, error } = useAnswer(runPath(run, "/findings"));
  if (error) return html`<${Failure} error=${error} />`;
  if (!value) return null;
  if (!value.findings.length) {
    return html`<section class="findings calm"><p><b>doctor</b> found nothing wrong.${value.unjudged.map((one) => html` <span class="quiet">Not judged: ${one}</span>`)}</p></section>`;
  }
  return html`<section class="findings" aria-label="findings of agentrl doctor"><h2>What doctor says</h2>
    ${value.findings.map((one) => html`<article key=${one.kind} class=${one.level}>
      <h3>${one.kind}<small>${one.level}</small></h3><p>${one.symptom}</p><p class="quiet">${one.cause}</p><p>${one.remedy}</p>
      ${one.episodes && !copy ? html`<p><a href=${href(["run", run, "episodes"], { kind: one.episodes.kind, q: one.episodes.query, sort: one.episodes.sort })}>Episodes that show it →</a></p>` : null}
    </article>`)}
    ${value.unjudged.map((one) => html`<p class="quiet">Not judged: ${one}</p>`)}
  </section>`;
}

/** Reads curves of several runs, each with what was measured on held-out tasks. */
function useCurves(runs, names, again) {
  const wanted = useMemo(() => {
    const beside = names.map(heldOut).filter(Boolean);
    return [...names, ...beside, ...beside.flatMap((one) => [`${one}_low`, `${one}_high`])];
  }, [names.join("|")]);
  const query = wanted.map((name) => `name=${encodeURIComponent(name)}`).join("&");
  const one = useAnswer(runs[0] && names.length ? `${runPath(runs[0], "/curves")}?${query}` : null, again);
  const two = useAnswer(runs[1] && names.length ? `${runPath(runs[1], "/curves")}?${query}` : null, again);
  const three = useAnswer(runs[2] && names.length ? `${runPath(runs[2], "/curves")}?${query}` : null, again);
  return [one, two, three].map((answer, i) => ({ run: runs[i], columns: answer.value && answer.value.columns })).filter((found) => found.run && found.columns);
}

function seriesOf(found, name) {
  const several = found.length > 1;
  return found.flatMap(({ run, columns }, number) => {
    const series = []; // several runs have a colour each; of one run, what was sampled and what was held out
    const add = (column, label, dots) => {
      const values = columns[column];
      if (!values || values.every((value) => value === null)) return;
      const kept = columns.step.map((step, i) => [step, values[i]]).filter(([, value]) => value !== null || !dots);
      series.push({ name: `${run} ${label}`, label: several ? `${run} ${label}` : label, steps: kept.map(([step]) => step), values: kept.map(([, value]) => value), dots, dashed: dots, colour: several ? number : Number(dots) });
    };
    add(name, "sampled", false);
    if (heldOut(name)) add(heldOut(name), "held out", true);
    return series;
  });
}

/** The first page of a run. */
export function Overview({ run, runs, query, go, tick, latest: heard, live, theme }) {
  const { value, error } = useAnswer(runPath(run), tick);
  const [smooth, setSmooth] = useState(0);
  const [zoom, setZoom] = useState(null);
  const known = (value ? value.metrics : []).map((one) => one.name);
  const chosen = query.get("c") ? query.get("c").split(",") : FIRST_CURVES.filter((name) => known.includes(name));
  const beside = (query.get("with") || "").split(",").filter(Boolean);
  const found = useCurves([run, ...beside], chosen, tick);
  useEffect(() => setZoom(null), [run]);
  if (error) return html`<main class="page" id="main"><${Failure} error=${error} /></main>`;
  if (!value) return html`<main class="page" id="main"><${Waiting} /></main>`;
  const change = (more) => go(["run", run], { c: chosen.join(","), with: beside.join(","), ...more });
  const latest = { ...Object.fromEntries(value.metrics.map((one) => [one.name, one.latest])), ...heard };
  const described = new Map(value.metrics.map((one) => [one.name, one]));
  return html`<main class="page" id="main"><h1 class="sr">${run}</h1>
    <${Standing} run=${value.run} latest=${latest} live=${live} />
    ${value.run.problem ? html`<p class="note">${value.run.problem}</p>` : null}
    <${Findings} run=${run} />
    <section aria-label="curves">
      <header class="bar"><h2>Curves</h2>
        <label class="slider">smooth <input type="range" min="0" max="0.95" step="0.05" value=${smooth} onInput=${(event) => setSmooth(Number(event.target.value))} /></label>
        <${Pick} label="add a curve" options=${known.filter((name) => !chosen.includes(name))} onPick=${(name) => change({ c: [...chosen, name].join(",") })} />
        ${runs.length > 1 && beside.length < 2 ? html`<label class="pick">with <select value="" onChange=${(event) => change({ with: [...beside, event.target.value].join(",") })}>
          <option value="">another run…</option>${runs.filter((one) => one.key !== run && !beside.includes(one.key)).map((one) => html`<option key=${one.key} value=${one.key}>${one.key}</option>`)}</select></label>` : null}
        ${beside.map((one) => html`<button type="button" class="chip" key=${one} onClick=${() => change({ with: beside.filter((other) => other !== one).join(",") })}>${one} ✕</button>`)}
        ${zoom ? html`<button type="button" class="chip" onClick=${() => setZoom(null)}>steps ${Math.round(zoom[0])}–${Math.round(zoom[1])} ✕</button>` : html`<span class="quiet hint">drag to zoom</span>`}
      </header>
      ${!known.length ? html`<p class="empty">No step is recorded yet.</p>` : null}
      <div class="charts">${chosen.map((name) => {
        const series = seriesOf(found, name);
        const about = described.get(name) || {};
        const meaning = [name, about.meaning, about.over && `over ${about.over}`, about.good && `good: ${about.good}`].filter(Boolean).join("\n");
        return html`<div class="card" key=${name}>
          ${series.length ? html`<${Chart} title=${name} meaning=${meaning} unit=${about.unit} series=${series} smooth=${smooth} zoom=${zoom} onZoom=${setZoom} theme=${theme} />`
            : html`<figure class="chart"><figcaption><span class="metric">${name}</span></figcaption><p class="empty">not measured</p></figure>`}
          ${about.meaning ? html`<p class="about">${about.meaning}${about.over ? html`, over ${about.over}` : null}${about.good ? html`; <b>good: ${about.good}</b>` : null}</p>` : null}
          <button type="button" class="close" aria-label=${`remove ${name}`} onClick=${() => change({ c: chosen.filter((one) => one !== name).join(",") })}>✕</button>
        </div>`;
      })}</div>
    </section>
    <section class="files"><h2>Files</h2><p class="quiet mono">${value.run.folder}</p>
      <p>Episodes: training ${bytes(value.episodes.train.bytes)}, evaluation ${bytes(value.episodes.eval.bytes)}.</p>
      <details><summary>Recipe as it ran</summary><pre class="code">${JSON.stringify(value.config, null, 2)}</pre></details></section>
  </main>`;
}

/** A field that offers names while one is typed. */
function Pick({ label, options, onPick }) {
  const [text, setText] = useState("");
  const take = (value) => {
    if (options.includes(value)) {
      onPick(value);
      setText("");
    } else setText(value);
  };
  return html`<label class="pick"><span class="sr">${label}</span><input list="curve-names" placeholder=${label} value=${text} onInput=${(event) => take(event.target.value)} />
    <datalist id="curve-names">${options.map((name) => html`<option key=${name} value=${name} />`)}</datalist></label>`;
}
