// Reading again and again while a view is open and the page can be seen.
import { Problem } from "./api.js";

/** Calls `read` now and every `period` seconds until `signal` aborts. failed: (error) once per
 *  run of failures; recovers silently. */
export function poll(signal, period, read, failed) {
  let failing = false;
  let timer = 0;
  const turn = async () => {
    clearTimeout(timer);
    let wait = period;
    try {
      if (!document.hidden) await read();
      failing = false;
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (!failing) failed(error);
      failing = true;
      wait = Math.max(period, error.wait ?? 0);
      if (error instanceof Problem && (error.status === 401 || error.status === 403)) return;
    }
    if (!signal.aborted) timer = setTimeout(turn, wait * 1000);
  };
  document.addEventListener("visibilitychange", () => document.hidden || turn(), { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  turn();
}
