// A conversation: messages with their tools and calls. Everything a run said is shown as text.
import { html, useState, classes } from "./base.js";
import { ask, path, runPath } from "./data.js";
import { number, bytes, laidOut } from "./format.js";
import { Failure } from "./parts.js";

const SHORT = 6000; // characters shown at first

/** A text, in part if it is long, and whole when it is asked for. */
export function Text({ text, length, whole, kind = "said" }) {
  const [shown, setShown] = useState(null);
  const [error, setError] = useState(null);
  const value = shown ?? text.slice(0, SHORT);
  const left = (length ?? text.length) - value.length;
  const more = async () => {
    if ((length ?? text.length) <= text.length) return setShown(text);
    try {
      setShown(await whole());
    } catch (failure) {
      setError(failure.message);
    }
    return undefined;
  };
  return html`<div class=${kind}>${value}${left > 0 ? html`<span class="quiet">…</span>` : null}</div>
    ${left > 0 ? html`<button type="button" class="chip" onClick=${more}>show all, ${bytes(length ?? text.length)} in characters</button>` : null}<${Failure} error=${error} />`;
}

export function Call({ call }) {
  const called = call.function || {};
  return html`<div class="call"><span class="tag">call</span><b>${called.name || "?"}</b><pre class="code">${laidOut(called.arguments ?? "")}</pre>${call.error ? html`<p class="bad">${call.error}</p>` : null}</div>`;
}

function offered(tools) {
  return tools.map((tool) => (tool.function ? tool.function : tool));
}

function Tools({ tools }) {
  if (!tools || !tools.length) return null;
  return html`<details class="tools"><summary>${tools.length} ${tools.length === 1 ? "tool is" : "tools are"} offered: ${offered(tools).map((one) => one.name).join(", ")}</summary>
    ${offered(tools).map((one) => html`<div class="tool" key=${one.name}><b>${one.name}</b> <span class="quiet">${one.description || ""}</span><pre class="code">${laidOut(one.parameters ?? {})}</pre></div>`)}</details>`;
}

export function Message({ node, index, whole, before }) {
  const role = node.message.role || "?";
  const jumps = node.parent !== null && node.parent !== undefined && node.parent !== before;
  const parts = [
    node.finish_reason && (node.finish_reason === "length" ? "cut at its length limit" : node.finish_reason),
    node.tokens ? `${number(node.tokens)} tokens` : null,
    node.reward !== null && node.reward !== undefined ? `reward ${number(node.reward)}` : null,
  ].filter(Boolean);
  return html`<article class=${classes("message", `by-${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}`, node.sampled && "sampled")} aria-label=${`message ${index}, ${role}`}>
    <header><span class="who">${role}${node.message.name ? ` · ${node.message.name}` : ""}</span>${node.sampled ? html`<span class="tag">sampled</span>` : null}${node.repeated ? html`<span class="tag">as before</span>` : null}
      <span class="quiet">${parts.join(" · ")}</span><span class="quiet index">${index}</span></header>
    ${jumps ? html`<p class="quiet">goes on from message ${node.parent}</p>` : null}
    ${node.reasoning ? html`<details class="thought" open=${node.reasoning_length < 1200}><summary>reasoning, ${number(node.reasoning_length)} characters</summary><${Text} text=${node.reasoning} length=${node.reasoning_length} whole=${async () => (await whole()).reasoning} kind="said quiet" /></details>` : null}
    ${node.text ? html`<${Text} text=${node.text} length=${node.length} whole=${async () => (await whole()).text} />` : null}
    ${(node.message.tool_calls || []).map((call, at) => html`<${Call} call=${call} key=${at} />`)}
    ${!node.text && !node.reasoning && !(node.message.tool_calls || []).length ? html`<p class="quiet">an empty message</p>` : null}
  </article>`;
}

/** The messages of one role, with what came before the task folded. */
export function Conversation({ run, kind, place, role, one }) {
  const first = one.nodes.findIndex((node) => node.sampled);
  const folded = first > 2 ? first - 1 : 0;
  const [open, setOpen] = useState(false);
  const whole = (index) => () => ask(path(runPath(run, `/${kind}/${place}/text`), { role, node: String(index) }));
  const toolset = one.nodes.map((node) => node.tools).find((at) => at !== null && at !== undefined);
  return html`<div class="conversation">
    <${Tools} tools=${toolset === undefined ? null : one.tools[toolset]} />
    ${folded && !open ? html`<button type="button" class="chip fold" onClick=${() => setOpen(true)}>show ${folded} earlier messages of the prompt</button>` : null}
    ${one.nodes.map((node, index) => (index < folded && !open ? null : html`<${Message} key=${index} node=${node} index=${index} before=${index ? index - 1 : null} whole=${whole(index)} />`))}
    ${!one.nodes.length ? html`<p class="empty">No message was stored.</p>` : null}
  </div>`;
}
