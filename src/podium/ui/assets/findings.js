// SPDX-License-Identifier: Apache-2.0
// What stands out in a run, in sentences: alarms first, then waits, then what would be faster.

import { fetchJson, runPath } from "./api.js";
import { el, fill } from "./dom.js";
import { paced } from "./live.js";
import { addressOf } from "./router.js";

const LOOK_AGAIN_MS = 1500;
const FOLLOW_MS = 15000;
const KIND_NAMES = { alarm: "alarm", note: "note", suggestion: "faster" };
const PLACES = { learning: ["curves", "Curves"], time: ["timeline", "Timeline"] };

/** Shows findings in a container, and again while the run goes on. `about`: only those about it; then no empty state. */
export function showFindings(container, { run, signal, onChange }, about = null) {
  let timer = 0;
  const look = async () => {
    let found;
    try {
      found = await fetchJson(runPath(run.id, "/findings"), { signal });
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted)
        fill(container, about ? null : el("p", { class: "dim" }, `Findings cannot be shown: ${error.message}`));
      return;
    }
    if (signal.aborted) return;
    drawFindings(container, run, found, about);
    clearTimeout(timer);
    if (found.pending) timer = setTimeout(look, LOOK_AGAIN_MS);
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  look();
  onChange?.(paced(look, FOLLOW_MS, signal));
}

function drawFindings(container, run, { findings, pending }, about) {
  const shown = (findings ?? []).filter((each) => !about || each.about === about);
  if (shown.length)
    fill(
      container,
      el(
        "ul",
        { class: "findings", "aria-label": "What stands out" },
        shown.map((each) => findingItem(run, each, about)),
      ),
      pending && !about ? el("p", { class: "dim small" }, "Looking for what would be faster …") : null,
    );
  else if (about) fill(container);
  else
    fill(
      container,
      el(
        "p",
        { class: "dim" },
        pending
          ? "Looking through the run …"
          : findings
            ? "No alarm in the metrics, no slow generator, and nobody waits for long."
            : "The run's records cannot be read.",
      ),
    );
}

function findingItem(run, { kind, about, text }, isThere) {
  const [tab, title] = PLACES[about] ?? PLACES.learning;
  return el(
    "li",
    { class: kind },
    el("span", { class: "tag" }, KIND_NAMES[kind] ?? kind),
    el(
      "span",
      {},
      text,
      isThere ? null : [" ", el("a", { href: addressOf(["run", run.id, tab]), class: "small" }, `→ ${title}`)],
    ),
  );
}
