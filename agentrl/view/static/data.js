// Where answers come from: the server, or, in a static copy, the data inside the page.
import { useState, useEffect, useRef } from "./base.js";

const embedded = document.getElementById("data");
export const copy = embedded ? JSON.parse(embedded.textContent) : null;

/** Asks a question; throws an Error with a sentence for the reader. */
export async function ask(path, signal) {
  if (copy) return fromCopy(path);
  let answer;
  try {
    answer = await fetch(path, { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("agentrl view does not answer; was it ended in its terminal?");
  }
  if (answer.status === 403) throw new Error("This browser's key is of an earlier agentrl view: open the link that the terminal shows.");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

function fromCopy(path) {
  if (path in copy.answers) return copy.answers[path];
  const [base, query] = path.split("?");
  const wanted = new URLSearchParams(query);
  const all = copy.answers[`${base}?kind=${wanted.get("kind") || "train"}`];
  if (all && base.endsWith("/episodes")) return pageOfCopy(all, wanted);
  if (base.endsWith("/curves") && copy.answers[base]) return copy.answers[base];
  throw new Error("This is not in the static copy. `agentrl view` shows all of the run.");
}

/** A page of the copy's rows: texts are searched in question, answer and task; there is no index here. */
function pageOfCopy(all, wanted) {
  const text = (wanted.get("q") || "").replaceAll('"', "").toLowerCase();
  const sort = wanted.get("sort") || "-place";
  const field = sort.replace(/^-/, "");
  const key = { length: "tokens", index: "member" }[field] || field;
  const value = (row) => (key in row ? row[key] : row.metrics[key]);
  const found = all.rows.filter((row) => !text || [row.question, row.answer, row.task, row.stop, row.error].join("\n").toLowerCase().includes(text));
  found.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (sort.startsWith("-") ? -1 : 1);
  });
  const offset = Number(wanted.get("offset") || 0);
  const limit = Number(wanted.get("limit") || 100);
  return { ...all, rows: found.slice(offset, offset + limit), total: found.length, all: all.rows.length };
}

/** Asks a question whenever its path changes or `again` does; keeps the last answer meanwhile. */
export function useAnswer(path, again = 0) {
  const [state, set] = useState({ path: null, value: null, error: null });
  const kept = useRef(null);
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    ask(path, stop.signal).then(
      (value) => set({ path, value, error: null }),
      (error) => error.name !== "AbortError" && set({ path, value: kept.current === path ? state.value : null, error: error.message }),
    );
    kept.current = path;
    return () => stop.abort();
  }, [path, again]);
  return { value: state.value, error: state.error, fresh: state.path === path };
}

/** Follows a run as it is written: calls `hear` with each event. */
export function useEvents(run, hear) {
  const latest = useRef(hear);
  latest.current = hear;
  useEffect(() => {
    if (!run || copy) return undefined;
    const events = new EventSource(`/api/runs/${encodeURIComponent(run)}/events`);
    events.onmessage = (event) => latest.current(JSON.parse(event.data));
    return () => events.close();
  }, [run]);
}

/** Builds a path with a query of what is set. */
export function path(base, query = {}) {
  const set = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(set).toString();
  return text ? `${base}?${text}` : base;
}

/** Path of a run's answers. */
export function runPath(run, rest = "") {
  return `/api/runs/${encodeURIComponent(run)}${rest}`;
}
