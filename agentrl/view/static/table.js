// The table of episodes: any number of rows, of which those in the window are asked for and drawn.
import { html, useState, useEffect, useRef, useMemo, useCallback, useDelayed, useNarrow, classes, usePress } from "./base.js";
import { ask, path, runPath, useAnswer, copy } from "./data.js";
import { number, seconds, clock, shortClock, bytes } from "./format.js";
import { href, Failure, Choice, Reward, Stop } from "./parts.js";

const PAGE = 100;
const ROW = 36;
const TALL = 86;

const COLUMNS = [
  { key: "reward", label: "reward", sort: "reward", width: "108px", title: "reward of the episode" },
  { key: "question", label: "asked", width: "minmax(160px, 1.2fr)", title: "the last message before the first answer" },
  { key: "answer", label: "last answer", width: "minmax(160px, 1.6fr)", title: "what the model said last" },
  { key: "stop", label: "end", sort: "stop", width: "104px", title: "stop reason" },
  { key: "tokens", label: "length", sort: "length", width: "72px", num: true, title: "sampled tokens" },
  { key: "turns", label: "turns", sort: "turns", width: "62px", num: true, title: "answers of the model" },
  { key: "calls", label: "calls", sort: "calls", width: "62px", num: true, title: "tool calls" },
  { key: "version", label: "version", sort: "version", width: "76px", num: true, title: "policy version at the start" },
  { key: "age", label: "age", sort: "age", width: "56px", num: true, title: "versions between its oldest token and the step that trained it" },
  { key: "task", label: "task", sort: "task", width: "112px", title: "id of the task" },
  { key: "tag", label: "tag", sort: "tag", width: "76px", title: "kind of the task" },
  { key: "seconds", label: "time", sort: "seconds", width: "70px", num: true, title: "duration" },
  { key: "place", label: "ended", sort: "place", width: "88px", num: true, title: "order in which they ended; shown is when it started" },
];

function columnsOf(rows, kind, metrics, width) {
  let shown = COLUMNS.filter((one) => (one.key !== "tag" || rows.some((row) => row.tag)) && (one.key !== "age" || kind === "train") && (one.key !== "calls" || rows.some((row) => row.calls)));
  const drop = width < 900 ? ["seconds", "task", "version", "calls", "turns", "place"] : width < 1250 ? ["seconds", "task", "calls"] : [];
  shown = shown.filter((one) => !drop.includes(one.key));
  if (kind === "eval") shown.splice(shown.length - 1, 0, { key: "eval_step", label: "step", sort: "step", width: "60px", num: true, title: "step of the evaluation" });
  const extra = metrics.slice(0, width < 900 ? 0 : width < 1400 ? 1 : 2).map((name) => ({ key: name, label: name, sort: name, metric: true, num: true, width: "78px", title: `metric ${name} of the environment` }));
  shown.splice(1, 0, ...extra);
  return shown;
}

function cell(row, column, bounds) {
  const value = column.metric ? row.metrics[column.key] : row[column.key];
  if (column.key === "reward") return html`<${Reward} value=${row.reward} low=${bounds[0]} high=${bounds[1]} />`;
  if (column.key === "stop") return html`<${Stop} stop=${row.stop} failed=${row.failed} />`;
  if (column.key === "seconds") return seconds(value);
  if (column.key === "place") return html`<span title=${clock(row.started)}>${shortClock(row.started)}</span>`;
  if (column.key === "answer") return row.failed && row.error ? html`<span class="bad">${row.error}</span>` : value || html`<span class="quiet">nothing</span>`;
  return typeof value === "number" ? number(value) : (value ?? "–");
}

/** Keeps the pages of rows that were asked for; a new question forgets them. */
function useRows(run, query, again) {
  const pages = useRef(new Map());
  const [state, set] = useState({ total: null, all: 0, unread: 0, size: 0, damaged: 0, error: null, drawn: 0 });
  const key = path(runPath(run, "/episodes"), query);
  const asked = useRef("");
  const load = useCallback(async (number) => {
    const known = pages.current.get(number);
    if (known && known.key === key && known.again === again) return;
    pages.current.set(number, { key, again, rows: known && known.key === key ? known.rows : null });
    try {
      const found = await ask(path(runPath(run, "/episodes"), { ...query, offset: number * PAGE, limit: PAGE }));
      if (asked.current !== key) return;
      pages.current.set(number, { key, again, rows: found.rows });
      set((old) => ({ ...found, rows: null, error: null, drawn: old.drawn + 1 }));
    } catch (error) {
      pages.current.delete(number);
      if (asked.current === key) set((old) => ({ ...old, error: error.message }));
    }
  }, [key, again]);
  if (asked.current !== key) {
    asked.current = key;
    pages.current = new Map();
  }
  useEffect(() => {
    load(0);
  }, [load]);
  const row = (index) => {
    const page = pages.current.get(Math.floor(index / PAGE));
    return page && page.rows ? page.rows[index % PAGE] : null;
  };
  return { ...state, row, load };
}

/** The page of episodes. */
export function Episodes({ run, query, go, tick, overview }) {
  const only = overview && !overview.episodes.train.bytes && overview.episodes.eval.bytes ? "eval" : "train"; // an evaluation trains nothing
  const kind = query.get("kind") || only;
  const sort = query.get("sort") || "-place";
  const [text, setText] = useState(query.get("q") || "");
  const asked = { kind, q: query.get("q") || "", sort };
  const change = useCallback((more) => go(["run", run, "episodes"], { ...asked, ...more }, true), [run, kind, sort, query.get("q")]);
  const later = useDelayed((value) => change({ q: value }), 250);
  useEffect(() => setText(query.get("q") || ""), [query.get("q")]);
  const found = useRows(run, asked, tick);
  const about = overview ? overview.episodes[kind] : { metrics: [], choices: { stop: [], tag: [] } };
  const add = (term) => change({ q: `${asked.q} ${term}`.trim() });
  const reading = found.unread > 0 && found.size > 0;
  return html`<main class="page wide" id="main"><h1 class="sr">Episodes of ${run}</h1>
    <header class="bar filters">
      <${Choice} label="kind of episodes" value=${kind} options=${[{ value: "train", label: "Training" }, { value: "eval", label: "Evaluation" }]} onChange=${(value) => change({ kind: value })} />
      <label class="search"><span class="sr">filter and search</span>
        <input id="search" type="search" placeholder="reward<0.5 stop:length “text”" value=${text} spellcheck="false" autocomplete="off"
          onInput=${(event) => { setText(event.target.value); later(event.target.value); }} /><kbd aria-hidden="true">/</kbd></label>
      ${about.choices.stop.length > 1 ? html`<label class="pick"><span class="sr">stop reason</span><select value="" onChange=${(event) => add(`stop:${event.target.value}`)}><option value="">end…</option>${about.choices.stop.map((one) => html`<option key=${one}>${one}</option>`)}</select></label>` : null}
      ${about.choices.tag.length ? html`<label class="pick"><span class="sr">tag</span><select value="" onChange=${(event) => add(`tag:"${event.target.value}"`)}><option value="">tag…</option>${about.choices.tag.map((one) => html`<option key=${one}>${one}</option>`)}</select></label>` : null}
      <button type="button" class="chip" onClick=${() => add("is:failed")}>failed</button>
      ${asked.q ? html`<button type="button" class="chip" onClick=${() => change({ q: "" })}>clear ✕</button>` : null}
      <p class="count" role="status">${found.total === null ? "" : asked.q ? `${found.total.toLocaleString("en")} of ${found.all.toLocaleString("en")}` : `${found.all.toLocaleString("en")} episodes`}
        ${reading ? html`<span class="quiet"> · reading older ones, ${Math.round(100 * (1 - found.unread / found.size))}%</span>` : null}
        ${found.damaged ? html`<span class="bad"> · ${found.damaged} damaged lines left out</span>` : null}</p>
    </header>
    <${Failure} error=${found.error} />
    <${Grid} run=${run} found=${found} asked=${asked} kind=${kind} metrics=${about.metrics} go=${go} sort=${sort} onSort=${(value) => change({ sort: value })} />
  </main>`;
}

function Grid({ run, found, asked, kind, metrics, go, sort, onSort }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600, width: 1200 });
  const [at, setAt] = useState(-1);
  const narrow = useNarrow();
  const tall = narrow ? TALL : ROW;
  useEffect(() => {
    const look = () => box.current && setView({ top: box.current.scrollTop, height: box.current.clientHeight, width: box.current.clientWidth });
    look();
    const resize = new ResizeObserver(look);
    resize.observe(box.current);
    box.current.addEventListener("scroll", look, { passive: true });
    return () => resize.disconnect();
  }, []);
  const total = found.total || 0;
  const first = Math.max(0, Math.floor(view.top / tall) - 6);
  const last = Math.min(total, Math.ceil((view.top + view.height) / tall) + 6);
  for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(first, last - 1) / PAGE); page++) found.load(page);
  const rows = [];
  for (let index = first; index < last; index++) rows.push([index, found.row(index)]);
  const known = rows.map(([, row]) => row).filter(Boolean);
  const rewards = known.map((row) => row.reward).filter((value) => value !== null);
  const bounds = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const columns = narrow ? [] : columnsOf(known, kind, metrics, view.width);
  const template = columns.map((one) => one.width).join(" ");
  const open = (index, row) => go(["run", run, "episode", kind, String(row.place)], { q: asked.q, sort: asked.sort, at: index });
  usePress((event) => {
    if (event.target.closest("input, select, textarea") || event.metaKey || event.ctrlKey || event.altKey) return;
    const step = { j: 1, k: -1 }[event.key];
    if (step) {
      const next = Math.max(0, Math.min(total - 1, at + step));
      setAt(next);
      const [top, bottom] = [next * tall, (next + 1) * tall];
      if (top < box.current.scrollTop) box.current.scrollTop = top;
      if (bottom > box.current.scrollTop + box.current.clientHeight - ROW) box.current.scrollTop = bottom - box.current.clientHeight + ROW;
    } else if (event.key === "Enter" && at >= 0 && found.row(at)) open(at, found.row(at));
  });
  const sortBy = (column) => onSort(sort === `-${column.sort}` ? column.sort : `-${column.sort}`);
  return html`<div class=${classes("grid", narrow && "narrow")} ref=${box} role="table" aria-label="episodes" aria-rowcount=${total} tabindex="0">
    ${narrow ? html`<label class="pick sorts">sort <select value=${sort} onChange=${(event) => onSort(event.target.value)}>
      ${[["-place", "newest"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-length", "longest"], ["length", "shortest"]].map(([value, label]) => html`<option key=${value} value=${value}>${label}</option>`)}</select></label>`
      : html`<div class="row head" role="row" style=${{ gridTemplateColumns: template }}>${columns.map((one) => html`<div key=${one.key} role="columnheader" class=${classes(one.num && "num")} title=${one.title}
          aria-sort=${sort.replace("-", "") === one.sort ? (sort.startsWith("-") ? "descending" : "ascending") : "none"}>
          ${one.sort ? html`<button type="button" onClick=${() => sortBy(one)}>${one.label}${sort.replace("-", "") === one.sort ? (sort.startsWith("-") ? " ↓" : " ↑") : ""}</button>` : one.label}</div>`)}</div>`}
    <div class="rows" role="rowgroup" style=${{ height: `${total * tall}px` }}>
      ${rows.map(([index, row]) => html`<a class=${classes("row", index === at && "at", row && row.failed && "failed")} role="row" aria-rowindex=${index + 1} key=${index} tabindex="-1"
        style=${{ gridTemplateColumns: template, transform: `translateY(${index * tall}px)`, height: `${tall}px` }}
        href=${row ? href(["run", run, "episode", kind, String(row.place)], { q: asked.q, sort: asked.sort, at: index }) : "#"}>
        ${!row ? html`<div role="cell" class="ghost"></div>` : narrow ? html`<div role="cell" class="two"><div><${Reward} value=${row.reward} low=${bounds[0]} high=${bounds[1]} /> <${Stop} stop=${row.stop} failed=${row.failed} /> <span class="quiet">${number(row.tokens)} tokens</span></div><div class="text quiet">${row.question || row.task}</div><div class="text">${row.answer || row.error || "nothing"}</div></div>`
          : columns.map((one) => html`<div key=${one.key} role="cell" class=${classes(one.num && "num", "text")}>${cell(row, one, bounds)}</div>`)}</a>`)}
    </div>
    ${found.total === 0 ? html`<p class="empty">${asked.q ? "No episode fits the filter." : kind === "train" ? "This run has no training episodes (logging.episodes), or none has ended yet." : "This run has no evaluated episodes yet."}</p>` : null}
  </div>`;
}
