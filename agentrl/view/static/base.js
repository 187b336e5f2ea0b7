// What every module uses of the two libraries. Texts of runs are only ever children of html`...`, which makes them text.
export const { html, render, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback } = window.htmPreact;
export const Plot = window.uPlot;

/** Returns a class name of the parts that hold. */
export function classes(...parts) {
  return parts.filter(Boolean).join(" ");
}

/** Runs a function later, and only once if it is asked for again meanwhile. */
export function useDelayed(run, ms) {
  const timer = useRef(0);
  const latest = useRef(run);
  latest.current = run;
  return useCallback((...given) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(() => latest.current(...given), ms);
  }, [ms]);
}

/** Listens to keys with what was drawn last: a key that follows another at once finds what the first one changed. */
export function usePress(press) {
  const latest = useRef(press);
  latest.current = press;
  useEffect(() => {
    const listen = (event) => latest.current(event);
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, []);
}

/** Whether the window is as narrow as a phone. */
export function useNarrow(width = 720) {
  const [narrow, set] = useState(window.innerWidth < width);
  useEffect(() => {
    const look = () => set(window.innerWidth < width);
    window.addEventListener("resize", look);
    return () => window.removeEventListener("resize", look);
  }, [width]);
  return narrow;
}
