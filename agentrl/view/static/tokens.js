// Tokens, coloured by what is known of them; the ledger of the one that is pointed at.
import { html, useState, useEffect, useRef, useMemo, classes, usePress } from "./base.js";
import { useAnswer, runPath } from "./data.js";
import { number, signed } from "./format.js";
import { Choice, Failure, Waiting } from "./parts.js";

const WAYS = {
  mask: { label: "mask", about: "sampled by the policy (loss mask 1), text of messages, and what the chat template put around it" },
  logprob: { label: "logprob", about: "behavior logprob of sampled tokens: the darker, the less likely the token was" },
  age: { label: "age", about: "versions between the token and the step that trained it: the darker, the older" },
  version: { label: "version", about: "policy version that sampled the token" },
  teacher: { label: "gap to teacher", about: "behavior minus teacher logprob: orange where the policy was surer than the teacher, blue where less" },
  trainer: { label: "gap to trainer", about: "behavior minus trainer logprob, from before the update: orange where the server was surer than the trainer, blue where less; the strongest colour is a gap of 0.5" },
  advantage: { label: "advantage", about: "advantage of the episode, the same for all its sampled tokens: green above 0, red below" },
};

function level(value, low, high) {
  return Math.max(0, Math.min(9, Math.round(((value - low) / (high - low || 1)) * 9)));
}

/** Whether a number is recorded for a token. */
function known(values, i) {
  return values.length > i && values[i] !== null;
}

/** The class of a gap: orange above 0, blue below. */
function tint(gap, most) {
  return gap >= 0 ? `more${level(Math.min(most, gap), 0, most)}` : `less${level(Math.min(most, -gap), 0, most)}`;
}

/** The class that colours a token. */
function shade(block, i, way, scale) {
  if (way === "mask") return block.mask[i] ? "sampled" : block.origins[i];
  if (!block.mask[i]) return "faint";
  if (way === "logprob") return `heat${level(Math.min(6, -block.logprobs[i]), 0, 6)}`;
  if (way === "age") return `heat${level(scale.trained - block.versions[i], 0, Math.max(1, scale.oldest))}`;
  if (way === "version") return `heat${level(block.versions[i], scale.least, scale.most)}`;
  if (way === "teacher") return tint(block.logprobs[i] - block.teacher[i], 3);
  if (way === "trainer") return known(block.trainer, i) ? tint(block.logprobs[i] - block.trainer[i], 0.5) : "faint";
  if (way === "advantage") return scale.advantage > 0 ? "gain" : scale.advantage < 0 ? "loss" : "even";
  return "";
}

/** Shows blanks and line ends of a token, which would not be seen. */
function visible(text) {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥") || "∅";
}

function Ledger({ token, block, i, trained, advantage, notRecorded, asText }) {
  if (!token) return html`<aside class="ledger" aria-live="polite"><p class="quiet">Point at a token, or walk with ← and →.</p>${notRecorded.map((one) => html`<p class="quiet small" key=${one}>Not recorded: ${one}.</p>`)}</aside>`;
  const sampled = Boolean(block.mask[i]);
  const version = block.versions[i];
  const rows = [
    ["text", asText ? JSON.stringify(block.texts[i]) : "no tokenizer"],
    ["id", `${block.ids[i]}${block.special.includes(i) ? ", special" : ""}`],
    ["position", number(block.start + i)],
    ["origin", block.origins[i]],
    ["loss mask", String(block.mask[i])],
    ["behavior logprob", sampled ? `${block.logprobs[i].toFixed(4)}  (p ${number(Math.exp(block.logprobs[i]))})` : "not sampled"],
    ["version", sampled ? String(version) : "–"],
    ["age", sampled ? (trained === null ? "not recorded" : String(trained - version)) : "–"],
    ["teacher logprob", !sampled ? "–" : block.teacher.length ? `${block.teacher[i].toFixed(4)}, gap ${signed(block.logprobs[i] - block.teacher[i])}` : "not recorded"],
    ["trainer logprob", !sampled ? "–" : known(block.trainer, i) ? `${block.trainer[i].toFixed(4)}, gap ${signed(block.logprobs[i] - block.trainer[i])}` : "not recorded"],
    ["advantage", !sampled ? "–" : advantage === null || advantage === undefined ? "not recorded" : signed(advantage)],
  ];
  return html`<aside class="ledger" aria-live="polite"><dl>${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="mono">${value}</dd></div>`)}</dl></aside>`;
}

/** The tokens of one role of an episode. */
export function Tokens({ run, kind, place, role, way, onWay, advantage, advantageSaid }) {
  const { value, error } = useAnswer(runPath(run, `/${kind}/${place}/tokens`));
  const [at, setAt] = useState(null); // block and token
  const blocks = value ? value.roles[role] || [] : [];
  const scale = useMemo(() => {
    const versions = blocks.flatMap((block) => block.versions.filter((one) => one !== null));
    const least = Math.min(...versions);
    return { least, most: Math.max(...versions), trained: value ? value.trained : null, oldest: value && value.trained !== null ? value.trained - least : 0, advantage };
  }, [value, role, advantage]);
  useEffect(() => setAt(null), [place, role]);
  usePress((event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !blocks.length || event.target.closest("input, select")) return;
    event.preventDefault();
    setAt((old) => walk(blocks, old, step));
  });
  if (error) return html`<${Failure} error=${error} />`;
  if (!value) return html`<${Waiting} what="Reading the tokens…" />`;
  const teacher = blocks.some((block) => block.teacher.length);
  const why = {
    age: value.trained === null ? "no step of the journal trained this group" : "",
    teacher: teacher ? "" : "no teacher scored this episode",
    trainer: blocks.some((block) => block.trainer.length) ? "" : "kept for logging.trainer_logprobs groups of each step, and this is none of them",
    advantage: advantage === null || advantage === undefined ? advantageSaid || "not recorded" : "",
  };
  const point = (event) => {
    const one = event.target.closest("[data-t]");
    if (one) setAt(one.dataset.t.split(".").map(Number));
  };
  const [b, i] = at || [];
  return html`<div class="tokens">
    <div class="bar"><${Choice} label="colour tokens by" value=${way} options=${Object.entries(WAYS).map(([key, one]) => ({ value: key, label: one.label, why: why[key], title: one.about }))} onChange=${onWay} /></div>
    <p class="quiet small">${WAYS[way].about}. <span>${value.as_text ? value.tokenizer : html`<b>${value.tokenizer}</b>`}</span></p>
    <div class="beside">
      <div class="stream" onMouseOver=${point} onFocusIn=${point} onClick=${point}>
        ${blocks.map((block, number) => html`<${Block} key=${number} block=${block} number=${number} way=${way} scale=${scale} at=${b === number ? i : null} />`)}
        ${!blocks.length ? html`<p class="empty">No tokens are recorded for this role.</p>` : null}
      </div>
      <${Ledger} token=${at} block=${blocks[b]} i=${i} trained=${value.trained} advantage=${advantage} notRecorded=${value.not_recorded} asText=${value.as_text} />
    </div>
  </div>`;
}

function walk(blocks, old, step) {
  let [b, i] = old || [0, -1];
  i += step;
  if (i < 0) [b, i] = b > 0 ? [b - 1, blocks[b - 1].ids.length - 1] : [0, 0];
  if (i >= blocks[b].ids.length) [b, i] = b + 1 < blocks.length ? [b + 1, 0] : [b, blocks[b].ids.length - 1];
  return [b, i];
}

function Block({ block, number: name, way, scale, at }) {
  const place = useRef(null);
  useEffect(() => {
    if (at !== null && place.current) {
      const one = place.current.children[at];
      if (one) one.scrollIntoView({ block: "nearest" });
    }
  }, [at]);
  return html`<div class="block" ref=${place}>${block.texts.map((text, i) => html`<span key=${i} class=${classes("token", shade(block, i, way, scale), block.special.includes(i) && "special", at === i && "at")} data-t=${`${name}.${i}`}>${visible(text)}</span>`)}${block.left_out ? html`<p class="quiet">${number(block.left_out)} more tokens are not shown</p>` : null}</div>`;
}
