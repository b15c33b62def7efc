// SPDX-License-Identifier: Apache-2.0
// Begins the page: picks the view of the address, the theme and the keys.

import { takeToken } from "./api.js";
import { showCompare } from "./compare.js";
import { el, fill, hideTooltip } from "./dom.js";
import { isReport } from "./embedded.js";
import { handleKey, showKeys } from "./keys.js";
import { parseRoute } from "./router.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { stateBox } from "./states.js";
import { startTheme, switchTheme } from "./theme.js";

let leaving = new AbortController(); // aborted when its view is left: requests, streams, listeners

function showRoute() {
  leaving.abort();
  leaving = new AbortController();
  hideTooltip();
  const main = document.getElementById("main");
  const route = parseRoute(location.hash);
  const [view, id] = route.parts;
  drawTrail(route);
  document.title = id ? `${id} · Podium` : "Podium";
  fill(main);
  if (!view) showRuns(main, route, leaving.signal);
  else if (view === "run" && id) showRun(main, route, leaving.signal);
  else if (view === "compare") showCompare(main, route, leaving.signal);
  else
    fill(
      main,
      stateBox(
        "There is no such page",
        "The address may be cut short.",
        el("a", { class: "button", href: "#/" }, "All runs"),
      ),
    );
}

function drawTrail({ parts: [view, id] }) {
  const here = view === "compare" ? "compare" : view === "run" ? id : null;
  fill(
    document.getElementById("trail"),
    el("a", { href: "#/" }, isReport() ? "report" : "runs"),
    here ? ["/", el("span", { class: "here" }, here)] : null,
  );
}

takeToken();
startTheme();
window.addEventListener("hashchange", showRoute);
document.addEventListener("keydown", handleKey);
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("help").addEventListener("click", showKeys);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment is the address of a view
  document.getElementById("main").focus();
});
showRoute();
