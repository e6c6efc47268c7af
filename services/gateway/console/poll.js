// Asking the same again and again, while somebody looks.
import { useEffect, useReducer, useRef } from "./vendor/hooks.js";
import { get } from "./api.js";

const SLOWEST_MS = 10_000;

// The newest answer of `path`: {data, error}. The last data stays when an answer fails. Pauses while the tab is hidden
// or `live` is off; asks less often while the gateway is away. `onKeyRefused` hears that the key is no longer valid.
export function usePolled(path, periodMs, live, onKeyRefused) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  const state = useRef({ path: null, data: null, error: null });
  if (state.current.path !== path) state.current = { path, data: null, error: null };
  useEffect(() => {
    const stop = new AbortController();
    const mine = state.current;
    let timer = 0;
    let pause = periodMs;
    async function turn() {
      if (document.hidden && mine.data) return again();
      try {
        mine.data = await get(path, stop.signal);
        mine.error = null;
        pause = periodMs;
      } catch (error) {
        if (stop.signal.aborted) return;
        mine.error = error;
        pause = Math.min(SLOWEST_MS, pause * 2);
        if (error.kind === "key") return onKeyRefused(error);
      }
      redraw();
      again();
    }
    function again() {
      if (live || (!mine.data && mine.error?.passing)) timer = setTimeout(turn, pause);
    }
    if (live || !mine.data) turn();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, periodMs, live]);
  return state.current;
}
