// SPDX-License-Identifier: Apache-2.0
// The table of runs: filter, sort, choose several to compare.

import { fetchJson } from "./api.js";
import { el, fill } from "./dom.js";
import { isReport } from "./embedded.js";
import { ago, duration, number } from "./formats.js";
import { addressOf, go, remember } from "./router.js";
import { loadInto, stateBox } from "./states.js";

const POLL_MS = 5000;
const SHOWN_METRICS = ["reward/mean", "loss", "accuracy"];
const COLUMNS = [
  { key: "name", title: "run", value: (run) => run.id },
  { key: "program", title: "program", value: (run) => run.program ?? "" },
  { key: "status", title: "status", value: (run) => (run.broken ? "broken" : (run.status ?? "")) },
  { key: "step", title: "step", value: (run) => run.step ?? -1 },
  { key: "metric", title: "reward or loss", value: (run) => mainMetric(run)?.[1] ?? -Infinity },
  { key: "heldout", title: "held-out", value: (run) => heldoutMetric(run)?.[1] ?? -Infinity },
  { key: "duration", title: "duration", value: (run) => run.duration_s ?? -1 },
  { key: "changed", title: "changed", value: (run) => run.changed_s ?? 0 },
];

/** Shows all runs. */
export function showRuns(main, route, signal) {
  const state = {
    filter: route.query.filter ?? "",
    sort: route.query.sort ?? "changed",
    down: route.query.up === undefined,
    chosen: new Set(),
    runs: [],
  };
  const table = el("div", { class: "runs" });
  const bar = el("div", { class: "chosen", role: "status" });
  const keep = () => {
    const query = { filter: state.filter, sort: state.sort === "changed" ? "" : state.sort, up: state.down ? "" : "1" };
    remember([], query);
  };
  const draw = () =>
    drawTable(
      table,
      state,
      (change) => {
        Object.assign(state, change);
        keep();
        draw();
      },
      () => drawBar(bar, state, draw),
    );
  const filter = el("input", {
    type: "search",
    value: state.filter,
    placeholder: "Filter: name, program, status …",
    data: { key: "/" },
    "aria-label": "Filter runs",
    on: {
      input: (event) => {
        state.filter = event.target.value;
        keep();
        draw();
      },
    },
  });
  fill(main, el("h1", { class: "visually-hidden" }, "Runs"), el("div", { class: "row controls" }, filter), bar, table);
  const reload = loadInto(
    table,
    () => fetchJson("/api/runs", { signal }),
    (_, { runs }) => {
      state.runs = runs;
      draw();
      drawBar(bar, state, draw);
    },
    signal,
    "runs",
  );
  if (isReport()) return;
  const timer = setInterval(() => document.visibilityState === "visible" && reload(true), POLL_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
}

function drawTable(container, state, change, chose) {
  const shown = sorted(
    state.runs.filter((run) => matches(run, state.filter)),
    state,
  );
  if (!state.runs.length) {
    fill(container, stateBox("No runs here yet", "`podium train RECIPE` makes one; it appears here by itself."));
    return;
  }
  if (!shown.length) {
    fill(
      container,
      stateBox("No run matches the filter", `${state.runs.length} runs do not contain “${state.filter}”.`),
    );
    return;
  }
  const focused = document.activeElement?.closest?.("[data-row]")?.dataset.row;
  const heading = ({ key, title }) =>
    el(
      "th",
      {
        scope: "col",
        class: `c-${key}`,
        "aria-sort": state.sort === key ? (state.down ? "descending" : "ascending") : null,
      },
      el(
        "button",
        {
          type: "button",
          class: "plain",
          on: { click: () => change({ sort: key, down: state.sort === key ? !state.down : true }) },
        },
        title,
        state.sort === key ? (state.down ? " ↓" : " ↑") : "",
      ),
    );
  fill(
    container,
    el(
      "table",
      { class: "list" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, el("span", { class: "visually-hidden" }, "choose")),
          COLUMNS.map(heading),
        ),
      ),
      el(
        "tbody",
        {},
        shown.map((run) => rowOf(run, state, chose)),
      ),
    ),
  );
  if (focused) container.querySelector(`[data-row="${CSS.escape(focused)}"]`)?.focus();
}

function rowOf(run, state, chose) {
  const box = el("input", {
    type: "checkbox",
    "aria-label": `choose ${run.id}`,
    disabled: Boolean(run.broken),
    on: {
      change: (event) => {
        if (event.target.checked) state.chosen.add(run.id);
        else state.chosen.delete(run.id);
        chose();
      },
    },
  });
  box.checked = state.chosen.has(run.id);
  const parent = run.parent && run.id.startsWith(run.parent) ? run.id.slice(0, run.parent.length + 1) : ""; // `pipeline:stage`
  const name = el(
    "a",
    { href: addressOf(["run", run.id]), data: { row: run.id } },
    parent ? el("span", { class: "dim" }, parent) : null,
    parent ? run.id.slice(parent.length) : run.name || run.id,
  );
  const open = (event) => {
    if (!event.target.closest("input, a, button, label")) go(["run", run.id]);
  };
  const cell = (key, ...content) =>
    el(
      "td",
      {
        class: `c-${key}${content[0] === "–" ? " empty" : ""}`,
        data: { label: COLUMNS.find((each) => each.key === key).title },
      },
      content,
    );
  if (run.broken)
    return el(
      "tr",
      { class: "broken", on: { click: open } },
      el("td", { class: "c-box" }, box),
      cell("name", name),
      cell("program", run.program ?? "–"),
      cell("status", statusBadge("broken")),
      el("td", { colspan: 5, class: "c-why" }, run.broken),
    );
  return el(
    "tr",
    { on: { click: open } },
    el("td", { class: "c-box" }, box),
    cell("name", name),
    cell("program", run.program ?? "–"),
    cell("status", statusBadge(run.status)),
    cell("step", progressOf(run)),
    cell("metric", metricText(mainMetric(run))),
    cell("heldout", metricText(heldoutMetric(run))),
    cell("duration", duration(run.duration_s)),
    cell("changed", ago(run.changed_s)),
  );
}

function drawBar(bar, state, draw) {
  const ids = [...state.chosen].filter((id) => state.runs.some((run) => run.id === id));
  bar.hidden = ids.length === 0;
  fill(
    bar,
    `${ids.length} chosen`,
    el(
      "a",
      {
        class: "button",
        href:
          ids.length > 1 ? addressOf(["compare"], { runs: ids.join(",") }) : addressOf(["run", ids[0] ?? "", "curves"]),
      },
      ids.length > 1 ? "Compare curves and recipes" : "Curves",
    ),
    el(
      "button",
      {
        type: "button",
        class: "plain",
        on: {
          click: () => {
            state.chosen.clear();
            draw();
            drawBar(bar, state, draw);
          },
        },
      },
      "Clear",
    ),
  );
}

/** A coloured word for a status. */
export function statusBadge(status) {
  const text = status ?? "unknown";
  const word = text.toLowerCase();
  const tone = /broken|fail|crash|diverge|dead|stopped with/.test(word)
    ? "bad"
    : /running|live|training/.test(word)
      ? "live"
      : /finish|done|complete/.test(word)
        ? "good"
        : "quiet";
  return el("span", { class: `badge ${tone}`, title: text }, text);
}

function progressOf(run) {
  const known = Number.isFinite(run.step) && Number.isFinite(run.steps) && run.steps > 0;
  return [
    el("span", {}, `${run.step ?? "–"}${run.steps ? `/${run.steps}` : ""}`),
    known ? el("progress", { max: run.steps, value: run.step, "aria-label": "progress" }) : null,
  ];
}

function mainMetric(run) {
  const name = SHOWN_METRICS.find((each) => run.metrics?.[each] !== undefined && run.metrics[each] !== null);
  return name ? [name, run.metrics[name]] : null;
}

function heldoutMetric(run) {
  const name = ["heldout/score", "heldout/loss"].find(
    (each) => run.metrics?.[each] !== undefined && run.metrics[each] !== null,
  );
  return name ? [name, run.metrics[name]] : null;
}

function metricText(metric) {
  return metric
    ? [
        number(metric[1]),
        el("span", { class: "dim small" }, ` ${metric[0].replace("heldout/", "").replace("/mean", "")}`),
      ]
    : "–";
}

function matches(run, filter) {
  const text =
    `${run.id} ${run.name ?? ""} ${run.program ?? ""} ${run.broken ? "broken" : (run.status ?? "")}`.toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

function sorted(runs, { sort, down }) {
  const { value } = COLUMNS.find((column) => column.key === sort) ?? COLUMNS.at(-1);
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    return typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
  };
  return [...runs].sort((a, b) => (down ? -order(a, b) : order(a, b)) || a.id.localeCompare(b.id));
}
