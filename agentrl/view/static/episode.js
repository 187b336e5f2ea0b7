// One episode: how it ended, its conversation, its tokens.
import { html, useState, classes, usePress } from "./base.js";
import { ask, useAnswer, path, runPath } from "./data.js";
import { number, signed, seconds, clock } from "./format.js";
import { href, Failure, Waiting, Choice, Fact, Stop } from "./parts.js";
import { Conversation } from "./messages.js";
import { Tokens } from "./tokens.js";

function Head({ run, kind, one }) {
  const row = one.row || {};
  const good = one.reward !== null && !row.failed;
  return html`<dl class="facts">
    <${Fact} name="reward" value=${good ? number(one.reward) : "none"} tone=${good ? "" : "bad"} />
    ${kind === "train" ? html`<${Fact} name="advantage" value=${signed(one.advantage)} title=${one.advantage_said} tone=${one.advantage > 0 ? "good" : one.advantage < 0 ? "bad" : ""} />` : null}
    ${Object.entries(one.metrics || {}).map(([name, value]) => html`<${Fact} key=${name} name=${name} value=${number(value)} />`)}
    <${Fact} name="end" value=${html`<${Stop} stop=${one.stop_reason} failed=${row.failed} />`} />
    <${Fact} name="length" value=${row.tokens === null || row.tokens === undefined ? "–" : `${number(row.tokens)} tokens`} title="sampled tokens" />
    <${Fact} name="turns" value=${number(row.turns)} />
    <${Fact} name="version" value=${one.version ?? "–"} title="policy version at the start" />
    ${kind === "train" ? html`<${Fact} name="age" value=${row.age ?? "–"} title=${row.trained === null || row.trained === undefined ? "no step of the journal trained its group" : `trained in step ${row.trained + 1}`} />` : html`<${Fact} name="step" value=${one.eval_step ?? "–"} />`}
    <${Fact} name="time" value=${seconds(one.seconds)} title=${`started ${clock(row.started)}`} />
  </dl>`;
}

/** The neighbour in the list that the reader came from. */
async function neighbour(run, kind, query, step) {
  if (query.get("at") === null) return null;
  const at = Number(query.get("at")) + step;
  if (at < 0) return null;
  const found = await ask(path(runPath(run, "/episodes"), { kind, q: query.get("q"), sort: query.get("sort"), offset: at, limit: 1 }));
  return found.rows.length ? { at, place: found.rows[0].place } : null;
}

/** The page of an episode. */
export function Episode({ run, kind, place, query, go }) {
  const { value: one, error, fresh } = useAnswer(runPath(run, `/${kind}/${place}`));
  const view = query.get("view") || "messages";
  const roles = one ? Object.keys(one.roles) : [];
  const role = query.get("role") || (roles.includes("assistant") ? "assistant" : roles[0]);
  const keep = { q: query.get("q"), sort: query.get("sort"), at: query.get("at"), view: query.get("view"), colour: query.get("colour"), role: query.get("role") };
  const change = (more) => go(["run", run, "episode", kind, place], { ...keep, ...more }, true);
  const move = async (step) => {
    const next = await neighbour(run, kind, query, step);
    if (next) go(["run", run, "episode", kind, String(next.place)], { ...keep, at: next.at });
  };
  usePress((event) => {
    if (event.target.closest("input, select, textarea") || event.metaKey || event.ctrlKey || event.altKey) return;
    if (event.key === "j") move(1);
    if (event.key === "k") move(-1);
    if (event.key === "t") change({ view: view === "tokens" ? "messages" : "tokens" });
    if (event.key === "g" && one) go(["run", run, "group", kind, one.group_id]);
  });
  const back = href(["run", run, "episodes"], { kind, q: query.get("q"), sort: query.get("sort") });
  if (error) return html`<main class="page" id="main"><p><a href=${back}>← episodes</a></p><${Failure} error=${error} /></main>`;
  if (!one || !fresh) return html`<main class="page" id="main"><${Waiting} /></main>`;
  const others = one.siblings.length - 1;
  return html`<main class="page" id="main">
    <nav class="crumbs" aria-label="where you are"><a href=${back}>← episodes</a>
      <span class="spread"></span>
      ${query.get("at") !== null ? html`<button type="button" class="chip" onClick=${() => move(-1)}>↑ <kbd>k</kbd></button><button type="button" class="chip" onClick=${() => move(1)}>↓ <kbd>j</kbd></button>` : null}</nav>
    <h1 class="title">${one.task_id}<small>
      ${one.group_id ? html`<a href=${href(["run", run, "group", kind, one.group_id])}>group ${one.group_id}</a>, member ${one.index}${others > 0 ? html` of ${one.siblings.length}` : ""}` : null}
      ${one.tag ? html` · tag ${one.tag}` : null}${one.attempt ? html` · attempt ${one.attempt + 1}` : null}${one.retried ? html` · was made again and counts for nothing` : null}</small></h1>
    <${Head} run=${run} kind=${kind} one=${one} />
    ${one.error ? html`<details class="error" open><summary>Error</summary><pre class="code">${one.error}</pre></details>` : null}
    ${Object.keys(one.task || {}).length ? html`<details class="task"><summary>Task</summary><dl class="pairs">${Object.entries(one.task).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${typeof value === "string" ? value : JSON.stringify(value)}</dd></div>`)}</dl></details>` : null}
    <div class="bar sticky">
      <${Choice} label="view" value=${view} options=${[{ value: "messages", label: "Conversation" }, { value: "tokens", label: "Tokens" }]} onChange=${(value) => change({ view: value })} />
      ${roles.length > 1 ? html`<${Choice} label="role" value=${role} options=${roles.map((name) => ({ value: name, label: name }))} onChange=${(value) => change({ role: value })} />` : null}
    </div>
    ${!roles.length ? html`<p class="empty">The episode has no messages.</p>` : view === "tokens"
      ? html`<${Tokens} run=${run} kind=${kind} place=${place} role=${role} way=${query.get("colour") || "logprob"} onWay=${(value) => change({ colour: value })} advantage=${one.advantage} advantageSaid=${one.advantage_said} />`
      : html`<${Conversation} key=${`${place}.${role}`} run=${run} kind=${kind} place=${place} role=${role} one=${one.roles[role]} />`}
  </main>`;
}
