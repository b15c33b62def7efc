// SPDX-License-Identifier: Apache-2.0
// Asks the server, or the data that `podium report` embedded in the page.

import { embeddedAnswer, isReport } from "./embedded.js";

const TOKEN_KEY = "podium-token";
const FIRST_RETRY_S = 1,
  LONGEST_RETRY_S = 30;
// A page that nobody sees for so long stops to listen, and listens again when it is seen.
const UNSEEN_MS = 60000;
let accessToken = null;

/** An answer that is no data. `status` 0: nobody answered. */
class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Takes `#token=...` out of the address, and remembers it for this tab. */
export function takeToken() {
  const given = /^#token=([^&]+)/.exec(location.hash);
  try {
    if (given) sessionStorage.setItem(TOKEN_KEY, decodeURIComponent(given[1]));
    accessToken = sessionStorage.getItem(TOKEN_KEY);
  } catch {
    accessToken = given ? decodeURIComponent(given[1]) : null; // no storage: until the page is loaded again
  }
  if (given) history.replaceState(null, "", `${location.pathname}${location.search}#/`);
}

/** The path of an endpoint of a run. */
export function runPath(id, rest = "", query = {}) {
  return `/api/runs/${encodeURIComponent(id)}${rest}${queryOf(query)}`;
}

/** `?a=1&b=2`, without what is empty. */
export function queryOf(query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${given.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&")}` : "";
}

/** JSON of an endpoint. Raises an ApiError with the server's own words where it has any. */
export async function fetchJson(path, { signal } = {}) {
  if (isReport()) {
    const answer = embeddedAnswer(path);
    if (answer === undefined)
      throw new ApiError(404, "This is not part of the report. Look at the run with `podium ui`.");
    return answer;
  }
  const headers = accessToken ? { Authorization: `Bearer ${accessToken}` } : {};
  let response;
  try {
    response = await fetch(path, { headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is `podium ui` still running?");
  }
  let body = null;
  try {
    body = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (response.ok) throw new ApiError(response.status, "The server's answer is not JSON. Load the page again.");
  }
  if (!response.ok)
    throw new ApiError(response.status, (body && body.error) || `The server answered ${response.status}.`);
  return body;
}

/** How long to wait before the next attempt. */
export function retryDelay(attempt) {
  return Math.min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** attempt);
}

/**
 * Listens to a run until `signal` aborts, while the page is seen. Opens the stream again when it breaks, waiting
 * longer each time. `handlers`: functions by event name; `opened` is called whenever the stream (again) begins.
 */
export function listen(run, handlers, signal) {
  if (isReport()) return;
  let attempt = 0,
    source = null,
    timer = 0,
    unseen = 0,
    isPaused = false;
  const pause = () => {
    isPaused = true;
    clearTimeout(timer);
    source.close();
  };
  const open = () => {
    source = new EventSource(`/api/events${queryOf({ run, token: accessToken })}`);
    source.onopen = () => {
      if (attempt > 0) handlers.opened?.();
      attempt = 0;
      showConnection("live");
    };
    source.onerror = () => {
      source.close();
      const wait = retryDelay(attempt);
      attempt += 1;
      showConnection("gone", wait);
      timer = setTimeout(open, wait * 1000);
    };
    for (const [name, handler] of Object.entries(handlers)) {
      if (name === "opened") continue;
      source.addEventListener(name, (event) => {
        try {
          handler(JSON.parse(event.data));
        } catch (error) {
          console.error(`event ${name}`, error);
        }
      });
    }
  };
  open();
  document.addEventListener(
    "visibilitychange",
    () => {
      clearTimeout(unseen);
      if (document.hidden) unseen = setTimeout(pause, UNSEEN_MS);
      else if (isPaused) {
        isPaused = false;
        attempt = 1; // what was missed is loaded again
        open();
      }
    },
    { signal },
  );
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    clearTimeout(unseen);
    source.close();
    showConnection("");
  });
}

/** Says in the head of the page whether the server is there. */
export function showConnection(state, wait = 0) {
  const node = document.getElementById("connection");
  node.className = state;
  node.textContent = state === "live" ? "connected" : state === "gone" ? `no server, again in ${wait} s` : "";
}
