// The page: its address says what is shown.
import { html, render, useState, useEffect, useCallback, classes } from "./base.js";
import { useAnswer, useEvents, runPath, copy } from "./data.js";
import { href, Failure, Waiting, State } from "./parts.js";
import { Runs, Overview } from "./overview.js";
import { Episodes } from "./table.js";
import { Episode } from "./episode.js";
import { Group } from "./group.js";
import { Evaluations } from "./evaluations.js";
import { Compare } from "./compare.js";
import { Help, useKeys } from "./keys.js";

function readAddress() {
  const [where, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { where: where.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

function useAddress() {
  const [address, set] = useState(readAddress);
  useEffect(() => {
    const look = () => set(readAddress());
    window.addEventListener("hashchange", look);
    return () => window.removeEventListener("hashchange", look);
  }, []);
  const go = useCallback((where, query = {}, instead = false) => {
    const to = href(where, query);
    if (to === location.hash) return;
    if (instead) {
      history.replaceState(null, "", to);
      set(readAddress());
    } else location.hash = to;
  }, []);
  return [address, go];
}

function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // storage is off in this browser: the choice holds for this page
  }
}

function useTheme() {
  const [theme, set] = useState(remembered("agentrl-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  document.documentElement.dataset.theme = theme;
  const turn = useCallback(() => set((old) => {
    const next = old === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("agentrl-theme", next);
    } catch {
      return next; // storage is off
    }
    return next;
  }), []);
  return [theme, turn];
}

function Bar({ runs, run, state, page, theme, turn, help, go }) {
  const tabs = [["Overview", ["run", run], "overview"], ["Episodes", ["run", run, "episodes"], "episodes"], ["Evaluations", ["run", run, "evaluations"], "evaluations"], ["Compare", ["compare"], "compare"]];
  return html`<header class="top"><a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").setAttribute("tabindex", "-1"); document.getElementById("main").focus(); }}>skip to the page</a>
    <a class="brand" href="#/" aria-label="all runs">agentrl</a>
    ${run ? html`<label class="run"><span class="sr">run</span><select value=${run} onChange=${(event) => go(["run", event.target.value, ...(page === "overview" || page === "compare" ? [] : [page])])}>${runs.map((one) => html`<option key=${one.key} value=${one.key}>${one.key}</option>`)}</select></label><${State} state=${state} />` : null}
    ${run ? html`<nav aria-label="pages">${tabs.map(([label, where, key]) => html`<a key=${key} href=${href(where, key === "compare" ? { run1: run } : {})} aria-current=${page === key ? "page" : undefined}>${label}</a>`)}</nav>` : null}
    <span class="spread"></span>
    ${copy ? html`<span class="tag" title=${copy.about}>static copy</span>` : null}
    <button type="button" class="icon" aria-label=${theme === "dark" ? "light colours" : "dark colours"} onClick=${turn}>${theme === "dark" ? "☀" : "☾"}</button>
    <button type="button" class="icon" aria-label="help" onClick=${help}>?</button></header>`;
}

const PAGES = { episode: "episodes", group: "episodes", episodes: "episodes", evaluations: "evaluations" };

function App() {
  const [{ where, query }, go] = useAddress();
  const [theme, turn] = useTheme();
  const [helping, setHelping] = useState(false);
  const [tick, setTick] = useState(0);
  const [heard, setHeard] = useState({ run: null, summary: null, latest: {} });
  const { value, error } = useAnswer("/api/runs");
  const runs = value ? value.runs : [];
  const only = runs.length === 1 ? runs[0].key : null;
  const run = where[0] === "run" ? where[1] : where[0] === "compare" ? query.get("run1") || only || (runs[0] && runs[0].key) : only;
  const known = runs.find((one) => one.key === run);
  const overview = useAnswer(known ? runPath(run) : null, tick);
  useEvents(known ? run : null, (event) => {
    setHeard({ run, ...event });
    setTick((old) => old + 1);
  });
  useKeys({ run: known ? run : null, go, help: () => setHelping(true), dark: turn });
  useEffect(() => window.scrollTo(0, 0), [location.hash.split("?")[0]]);
  if (error) return html`<main class="page" id="main"><${Failure} error=${error} /></main>`;
  if (!value) return html`<main class="page" id="main"><${Waiting} /></main>`;
  const live = heard.run === run && heard.summary;
  const state = live ? heard.summary.state : known && known.state;
  const page = where[0] === "compare" ? "compare" : PAGES[where[2]] || "overview";
  const mine = { run, runs, query, go, tick, theme };
  let shown;
  if (where[0] === "compare") shown = html`<${Compare} ...${mine} />`;
  else if (!run) shown = html`<${Runs} runs=${runs} />`;
  else if (!known) shown = html`<main class="page" id="main"><${Failure} error=${`No run ${run} is shown. Shown are: ${runs.map((one) => one.key).join(", ")}`} /></main>`;
  else if (where[2] === "episodes") shown = html`<${Episodes} key=${run} ...${mine} overview=${overview.value} />`;
  else if (where[2] === "episode") shown = html`<${Episode} ...${mine} kind=${where[3]} place=${where[4]} />`;
  else if (where[2] === "group") shown = html`<${Group} ...${mine} kind=${where[3]} id=${where[4]} />`;
  else if (where[2] === "evaluations") shown = html`<${Evaluations} ...${mine} />`;
  else shown = html`<${Overview} key=${run} ...${mine} latest=${live ? heard.latest : {}} live=${state === "running"} />`;
  document.title = [run, page, "agentrl view"].filter(Boolean).join(" · ");
  return html`<${Bar} runs=${runs} run=${known ? run : null} state=${state} page=${page} theme=${theme} turn=${turn} help=${() => setHelping(true)} go=${go} />${shown}${helping ? html`<${Help} onClose=${() => setHelping(false)} />` : null}`;
}

document.getElementById("app").textContent = "";
render(html`<${App} />`, document.getElementById("app"));
