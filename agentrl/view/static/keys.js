// The keyboard, and the page that explains it.
import { html, useEffect, useRef, usePress } from "./base.js";

const KEYS = [
  ["j  k", "next, previous episode or task"], ["Enter", "open the episode"], ["/", "filter and search"], ["t", "conversation or tokens"],
  ["← →", "walk along the tokens"], ["g", "the episode's group"], ["o  e  v  c", "overview, episodes, evaluations, compare"], ["d", "dark or light"], ["?", "this help"], ["Esc", "close, leave the field"],
];

const FILTERS = [
  ["reward<0.5", "a number: reward, length, turns, calls, version, age, trained, seconds, context, step, or a metric by its name"],
  ["version:10..20", "a range"], ["stop:length", "stop reason; also tag:, task:, group:"], ["is:failed", "failed, retried or trained; or an answer that is cut, empty, refused or filtered"],
  ['off "exact words"', "texts that are all in the episode"], ["-stop:length", "not so"],
];

/** The help, as a dialog. */
export function Help({ onClose }) {
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  return html`<dialog ref=${dialog} class="help" aria-label="help" onClose=${onClose} onClick=${(event) => event.target === dialog.current && dialog.current.close()}>
    <div><header class="bar"><h2>Keys</h2><span class="spread"></span><button type="button" class="chip" onClick=${() => dialog.current.close()}>close</button></header>
    <dl class="pairs">${KEYS.map(([key, what]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <h2>Filters</h2><dl class="pairs">${FILTERS.map(([key, what]) => html`<div key=${key}><dt class="mono">${key}</dt><dd>${what}</dd></div>`)}</dl>
    <p class="quiet">The address of every page can be kept and shared on this machine.</p></div></dialog>`;
}

/** Listens to the keys that hold everywhere. */
export function useKeys({ run, go, help, dark }) {
  usePress((event) => {
    if (event.metaKey || event.ctrlKey || event.altKey) return;
    const field = event.target.closest("input, select, textarea");
    if (event.key === "Escape" && field) return field.blur();
    if (field) return undefined;
    if (event.key === "?") return help();
    if (event.key === "d") return dark();
    if (event.key === "/") {
      event.preventDefault();
      const search = document.getElementById("search");
      return search ? search.focus() : run && go(["run", run, "episodes"]);
    }
    const page = { o: [], e: ["episodes"], v: ["evaluations"] }[event.key];
    if (page && run) go(["run", run, ...page]);
    if (event.key === "c") go(["compare"], run ? { run1: run } : {});
    return undefined;
  });
}
