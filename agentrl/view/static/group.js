// The episodes of one task side by side, each with its reward and advantage.
import { html, useState, classes } from "./base.js";
import { useAnswer, path, runPath } from "./data.js";
import { number, signed } from "./format.js";
import { href, Failure, Waiting, Choice, Stop } from "./parts.js";
import { Call } from "./messages.js";

/** Messages of a conversation in short. */
export function Short({ messages }) {
  return html`${messages.map((one, at) => html`<div key=${at} class=${classes("short", one.sampled && "sampled")}><span class="who">${one.of !== "assistant" && one.sampled ? one.of : one.role}</span>
    ${one.text ? html`<div class="said">${one.text}${one.length > one.text.length ? "…" : ""}</div>` : null}${one.calls.map((call, number) => html`<${Call} call=${call} key=${number} />`)}</div>`)}`;
}

function Pull({ value, most }) {
  if (value === null || value === undefined) return null;
  const share = most ? Math.round((Math.abs(value) / most) * 50) : 0;
  return html`<svg class="pull" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><line x1="50" y1="0" x2="50" y2="6" class="axis" /><rect x=${value < 0 ? 50 - share : 50} y="1" width=${share} height="4" class=${value < 0 ? "loss" : "gain"} /></svg>`;
}

/** The page of a group. */
export function Group({ run, kind, id, query, go }) {
  const { value, error } = useAnswer(path(runPath(run, "/group"), { kind, id }));
  const order = query.get("by") || "member";
  if (error) return html`<main class="page" id="main"><${Failure} error=${error} /></main>`;
  if (!value) return html`<main class="page" id="main"><${Waiting} /></main>`;
  const members = [...value.members];
  if (order === "reward") members.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const most = Math.max(0, ...members.map((one) => Math.abs(one.advantage ?? 0)));
  const rewards = members.filter((one) => one.counted).map((one) => one.reward);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const prompt = members[0].conversation.find((one) => !one.sampled);
  return html`<main class="page wide" id="main">
    <nav class="crumbs"><a href=${href(["run", run, "episodes"], { kind })}>← episodes</a></nav>
    <h1 class="title">Group ${id}<small>task ${members[0].task} · ${members.length} episodes · mean reward ${number(mean)}</small></h1>
    ${value.said ? html`<p class="quiet">${value.said}</p>` : null}
    ${prompt ? html`<article class="message by-user"><header><span class="who">${prompt.role}</span></header><div class="said">${prompt.text}</div></article>` : null}
    <div class="bar"><${Choice} label="order" value=${order} options=${[{ value: "member", label: "by member" }, { value: "reward", label: "by reward" }]} onChange=${(by) => go(["run", run, "group", kind, id], { by }, true)} /></div>
    <div class="lanes">${members.map((one) => html`<section class=${classes("lane", !one.counted && "faded")} key=${one.place} aria-label=${`member ${one.member}`}>
      <header><a href=${href(["run", run, "episode", kind, String(one.place)])}>member ${one.member}</a><${Stop} stop=${one.stop} failed=${one.failed} />
        <dl><div><dt>reward</dt><dd>${one.reward === null ? "none" : number(one.reward)}</dd></div><div><dt>advantage</dt><dd class=${one.advantage > 0 ? "good" : one.advantage < 0 ? "bad" : ""}>${signed(one.advantage)}</dd></div><div><dt>length</dt><dd>${number(one.tokens)}</dd></div></dl>
        <${Pull} value=${one.advantage} most=${most} />${!one.counted ? html`<p class="quiet small">${one.failed ? "failed" : "replaced by a later attempt"}: it is in no baseline</p>` : null}</header>
      <${Short} messages=${one.conversation.filter((said, at) => at > 0 || said.sampled)} />
      ${one.error ? html`<p class="bad">${one.error}</p>` : null}</section>`)}</div>
  </main>`;
}
