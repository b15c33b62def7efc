// SPDX-License-Identifier: Apache-2.0
// Refreshing a view while its run goes on: not too often, and not while nobody sees it.

/**
 * A function that lets `action` run: at most every `ms`, and only while the page is visible. A call that came too early,
 * or while the page was hidden, is made up for: what was new last is always shown.
 */
export function paced(action, ms, signal) {
  let last = 0,
    timer = 0,
    wanted = false,
    busy = false;
  const act = async () => {
    timer = 0;
    if (!wanted || busy || document.hidden || signal.aborted) return;
    wanted = false;
    busy = true;
    try {
      await action();
    } finally {
      busy = false;
      last = Date.now();
    }
    plan();
  };
  const plan = () => {
    if (wanted && !timer && !busy && !signal.aborted) timer = setTimeout(act, Math.max(0, last + ms - Date.now()));
  };
  document.addEventListener("visibilitychange", plan, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  return () => {
    wanted = true;
    plan();
  };
}
