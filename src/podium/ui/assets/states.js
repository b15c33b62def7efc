// SPDX-License-Identifier: Apache-2.0
// What a view shows while it loads, when it failed, and when there is nothing.

import { retryDelay, showConnection } from "./api.js";
import { el, fill } from "./dom.js";

/** A sentence in the middle of the page, with an optional hint and button. */
export function stateBox(title, hint = null, action = null) {
  return el(
    "div",
    { class: "state" },
    el("p", { class: "state-title" }, title),
    hint ? el("p", {}, hint) : null,
    action,
  );
}

/**
 * Loads data and draws it into a container. While the server does not answer it tries again, waiting longer each time;
 * any other failure is shown with a button. Returns a function that loads again (quietly: without the loading state).
 */
export function loadInto(container, load, draw, signal, what = "data") {
  let attempt = 0,
    timer = 0,
    drawn = false;
  const run = async (quiet = false) => {
    clearTimeout(timer);
    if (!quiet || !drawn) fill(container, el("div", { class: "state loading", role: "status" }, `Loading ${what} …`));
    try {
      const data = await load();
      if (signal.aborted) return;
      if (attempt > 0) showConnection("");
      attempt = 0;
      draw(container, data);
      drawn = true;
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (error.status === undefined) console.error(error);
      const gone = error.status === 0;
      if (gone) {
        timer = setTimeout(() => run(quiet), retryDelay(attempt) * 1000);
        showConnection("gone", retryDelay(attempt));
        attempt += 1;
      }
      if (!(quiet && drawn && gone))
        fill(
          container,
          problemBox(error, what, () => run()),
        );
    }
  };
  signal.addEventListener("abort", () => clearTimeout(timer));
  run();
  return run;
}

function problemBox(error, what, again) {
  const titles = { 0: "No answer from the server", 401: "A token is needed", 403: "Not allowed", 404: "Not found" };
  const title = titles[error.status] ?? `Cannot show the ${what}`;
  const hint =
    error.status === 0
      ? `${error.message} Trying again …`
      : error.status === 401
        ? "Open the address that `podium ui` printed: it ends with #token=…"
        : error.status === undefined
          ? `${error.message}. This is a mistake of the page; the browser's console has details.`
          : error.message;
  const box = stateBox(
    title,
    hint,
    el(
      "div",
      { class: "row center" },
      el("button", { type: "button", on: { click: again } }, "Try again"),
      el("a", { class: "button", href: "#/" }, "All runs"),
    ),
  );
  box.setAttribute("role", "alert");
  box.classList.add("failed");
  return box;
}
