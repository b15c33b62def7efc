// SPDX-License-Identifier: Apache-2.0
// Several runs: what their recipes differ in, which metrics differ, and their curves over each other.

import { fetchJson, queryOf, runPath } from "./api.js";
import { lineColor } from "./colors.js";
import { showCurves } from "./curves.js";
import { el, fill, tableOf } from "./dom.js";
import { number, plain } from "./formats.js";
import { addressOf, go } from "./router.js";
import { loadInto, stateBox } from "./states.js";

/** Shows the comparison of the runs that the address names. */
export function showCompare(main, route, signal) {
  const ids = (route.query.runs ?? "").split(",").filter(Boolean);
  const load = () =>
    Promise.all([fetchJson("/api/runs", { signal }), ...ids.map((id) => fetchJson(runPath(id), { signal }))]);
  loadInto(
    main,
    load,
    (_, [{ runs: all }, ...runs]) => {
      const others = all.filter((run) => !run.broken && !ids.includes(run.id));
      const picker = el(
        "div",
        { class: "row controls" },
        runs.map((run, at) =>
          el(
            "span",
            { class: "chip" },
            el("i", { style: { background: lineColor(at) } }),
            el("a", { href: addressOf(["run", run.id]) }, run.id),
            el(
              "button",
              {
                type: "button",
                class: "plain",
                "aria-label": `leave out ${run.id}`,
                on: {
                  click: () => go(["compare"], { ...route.query, runs: ids.filter((id) => id !== run.id).join(",") }),
                },
              },
              "×",
            ),
          ),
        ),
        others.length
          ? el(
              "select",
              {
                "aria-label": "Add a run",
                on: {
                  change: (event) => go(["compare"], { ...route.query, runs: [...ids, event.target.value].join(",") }),
                },
              },
              el("option", { value: "" }, "Add a run …"),
              others.map((run) => el("option", { value: run.id }, run.id)),
            )
          : null,
      );
      if (runs.length < 2) {
        fill(
          main,
          el("h1", {}, "Compare"),
          picker,
          stateBox(runs.length ? "Add a second run" : "Choose runs to compare"),
        );
        return;
      }
      const metrics = el("section", { class: "card" }),
        curves = el("div", {});
      fill(main, el("h1", {}, "Compare"), picker, recipeDiff(runs), metrics, el("h2", {}, "Curves"), curves);
      showCurves(curves, { runs, route, signal });
      loadInto(
        metrics,
        () => fetchJson(`/api/compare${queryOf({ a: ids[0], b: ids[1] })}`, { signal }),
        (_, answer) => drawMetrics(metrics, answer, ids),
        signal,
        "comparison",
      );
    },
    signal,
    "runs",
  );
}

function recipeDiff(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.recipe ?? {})))];
  const isIn = (run, key) => run.recipe !== undefined && key in run.recipe;
  const differing = keys.filter((key) => new Set(runs.map((run) => plain(run.recipe?.[key]))).size > 1).sort();
  const everywhere = differing.filter((key) => runs.every((run) => isIn(run, key))),
    somewhere = differing.filter((key) => !everywhere.includes(key));
  const table = (shown) =>
    tableOf(
      ["key", ...runs.map((run) => run.id)],
      shown.map((key) => [
        el("code", {}, breakable(key)),
        ...runs.map((run) => ({
          cell: isIn(run, key) ? el("code", {}, plain(run.recipe[key])) : el("span", { class: "dim" }, "–"),
        })),
      ]),
      { label: "Differences of the recipes" },
    );
  return el(
    "section",
    { class: "card" },
    el("h2", {}, "Recipes"),
    differing.length ? null : el("p", {}, "The recipes are the same."),
    everywhere.length ? table(everywhere) : null,
    somewhere.length
      ? el(
          "details",
          { open: !everywhere.length },
          el("summary", {}, `${somewhere.length} keys that only some of them have`),
          table(somewhere),
        )
      : null,
  );
}

function drawMetrics(container, answer, [a, b]) {
  const given = answer.metrics ?? answer.first_difference ?? [];
  const rows = Array.isArray(given)
    ? given
    : Object.entries(given).map(([name, first]) =>
        first !== null && typeof first === "object" ? { name, ...first } : { name, first_step: first },
      );
  const differing = rows.filter((row) => (row.first_step ?? row.step ?? null) !== null);
  const same = answer.num_equal ?? rows.length - differing.length;
  const cell = (row, key) => (row[key] === undefined || row[key] === null ? "–" : number(row[key]));
  fill(
    container,
    el("h2", {}, `First differences of ${a} and ${b}`),
    differing.length
      ? tableOf(
          [
            "metric",
            { cell: "from step", class: "num" },
            { cell: `last of ${a}`, class: "num" },
            { cell: `last of ${b}`, class: "num" },
          ],
          differing.map((row) => [
            row.name,
            { cell: row.first_step ?? row.step, class: "num" },
            { cell: cell(row, "last_a"), class: "num" },
            { cell: cell(row, "last_b"), class: "num" },
          ]),
          { label: "Metrics that differ" },
        )
      : el("p", {}, "All metrics are the same at the steps that both have."),
    same && differing.length ? el("p", { class: "dim small" }, `${same} other metrics are the same.`) : null,
  );
}

/** A key of a recipe that may be broken after its dots. */
function breakable(key) {
  return key.split(/(?<=\.)/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
}
