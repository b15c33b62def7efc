// SPDX-License-Identifier: Apache-2.0
// One run: its head, its tabs, and the overview.

import { fetchJson, listen, runPath } from "./api.js";
import { showCurves, showKeyCurves } from "./curves.js";
import { el, fill, tableOf } from "./dom.js";
import { isReport } from "./embedded.js";
import { showExamples } from "./examples.js";
import { showFindings } from "./findings.js";
import { bytes, moment, plain } from "./formats.js";
import { showHeldout } from "./heldout.js";
import { showRollouts } from "./rollouts.js";
import { addressOf } from "./router.js";
import { statusBadge } from "./runs.js";
import { loadInto, stateBox } from "./states.js";
import { showSystem } from "./system.js";
import { showTimeline } from "./timeline.js";

const TABS = [
  { key: "overview", title: "Overview", show: showOverview },
  { key: "curves", title: "Curves", show: showRunCurves },
  { key: "timeline", title: "Timeline", show: showTimeline },
  { key: "rollouts", title: "Rollouts", show: showRollouts },
  { key: "examples", title: "Trained tokens", show: showExamples },
  { key: "heldout", title: "Held-out answers", show: showHeldout },
  { key: "system", title: "Machine", show: showSystem },
  { key: "recipe", title: "Recipe", show: showRecipe },
];
const OF_PIPELINES = ["overview", "recipe"];

/** Shows a run, on the tab that the address names. */
export function showRun(main, route, signal) {
  const [, id, key = "overview"] = route.parts;
  loadInto(
    main,
    () => fetchJson(runPath(id), { signal }),
    (_, run) => {
      if (run.broken) {
        fill(main, stateBox(`${id} cannot be read`, run.broken, el("a", { class: "button", href: "#/" }, "All runs")));
        return;
      }
      const tabs = TABS.filter((tab) => (run.stages ? OF_PIPELINES.includes(tab.key) : isOf(run, tab)));
      const tab = tabs.find((each) => each.key === key);
      const body = el("div", { class: "tab-body", id: "tab-body" });
      const live = { listeners: [], changes: [] };
      fill(
        main,
        headOf(run, live),
        alarmsOf(run),
        el(
          "nav",
          { class: "tabs", "aria-label": "Views of this run" },
          el(
            "a",
            { class: "visually-hidden", href: "#/", tabindex: -1, data: { key: route.parts.length > 3 ? "" : "u" } },
            "up",
          ),
          tabs.map((each, at) =>
            el(
              "a",
              {
                href: addressOf(["run", id, each.key]),
                data: { key: String(at + 1) },
                "aria-current": each === tab ? "page" : null,
              },
              each.title,
            ),
          ),
        ),
        body,
      );
      main.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
      if (!tab) fill(body, stateBox(`This run has no view “${key}”`));
      else tab.show(body, { run, route, signal, onMetrics: (each) => live.listeners.push(each), onChange: (each) => live.changes.push(each) });
      if (!isReport()) followRun(run, live, signal);
    },
    signal,
    "run",
  );
}

/** Rows of fixed data and rollouts exclude each other: a run has the tab of its kind. */
function isOf(run, tab) {
  if (tab.key === "examples") return run.has_examples;
  return tab.key !== "rollouts" || !run.has_examples;
}

function headOf(run, live) {
  const step = el("span", { class: "fact" });
  const status = el("span", {});
  live.head = (change) => {
    Object.assign(run, change);
    fill(
      step,
      Number.isFinite(run.step)
        ? `${run.stages ? "stages done:" : "step"} ${run.step}${run.steps ? ` of ${run.steps}` : ""}`
        : "no step yet",
    );
    fill(status, statusBadge(run.status));
  };
  live.head({});
  return el(
    "div",
    { class: "run-head" },
    el("h1", {}, run.name || run.id),
    status,
    el("span", { class: "fact" }, run.program),
    step,
  );
}

/** Listeners of metrics get each event, or null where all must be loaded again. Those of changes get nothing. */
function followRun(run, live, signal) {
  const changed = () => live.changes.forEach((listener) => listener());
  const reset = () => {
    live.listeners.forEach((listener) => listener(null));
    changed();
  };
  listen(
    run.id,
    {
      metrics: (event) => {
        if (event.run && event.run !== run.id) return;
        live.head({ step: Math.max(run.step ?? 0, event.step) });
        for (const listener of live.listeners) listener(event);
        changed();
      },
      status: (event) => {
        if (event.run && event.run !== run.id) return;
        const isNew = event.status && event.status !== run.status;
        live.head({ status: event.status ?? run.status, steps: event.steps ?? run.steps });
        if (isNew) changed(); // what the run wrote last
      },
      reset,
      opened: reset,
    },
    signal,
  );
}

function alarmsOf(run) {
  if (!run.alarms?.length) return null;
  return el(
    "section",
    { class: "alarms", role: "alert", "aria-label": "Alarms" },
    run.alarms
      .slice(-3)
      .map((alarm) =>
        el(
          "p",
          {},
          alarm.step === null || alarm.step === undefined ? null : el("strong", {}, `step ${alarm.step}: `),
          briefly(alarm.text),
        ),
      ),
    run.alarms.length > 3
      ? el("p", { class: "small" }, `and ${run.alarms.length - 3} earlier ones, in the overview`)
      : null,
  );
}

/** The first sentence of a warning, without the step that stands before it. The overview has the whole. */
function briefly(text) {
  const whole = text.replace(/^(at )?steps? \d+(: | (?=\D))/, "");
  const end = whole.indexOf(". ");
  return end > 0 && end < whole.length - 2 ? `${whole.slice(0, end)} …` : whole;
}

function showRunCurves(body, context) {
  showCurves(body, { runs: [context.run], ...context });
}

function showOverview(body, context) {
  const { run, signal } = context;
  const findings = el("div", {}),
    curves = el("div", { class: "charts small-charts" }),
    facts = el("div", {});
  fill(body, run.stages ? null : [card("What stands out", findings), curves], facts);
  if (!run.stages) {
    showFindings(findings, context);
    showKeyCurves(curves, context);
  }
  drawFacts(facts, run);
  if (run.texts_pending)
    fetchJson(runPath(run.id, "/texts"), { signal }).then(
      ({ texts }) => {
        Object.assign(run, { texts, texts_pending: false });
        drawFacts(facts, run);
      },
      () => {},
    );
}

function drawFacts(body, run) {
  const lineage = run.lineage ?? [],
    events = run.events ?? [],
    checkpoints = run.checkpoints ?? [];
  fill(
    body,
    el(
      "div",
      { class: "columns" },
      card(
        "Summary",
        run.texts?.length
          ? run.stages
            ? el("pre", { class: "lines" }, run.texts.join("\n"))
            : factsOf(run.texts)
          : el("p", { class: "dim" }, run.texts_pending ? "Reading the whole run …" : "Nothing yet."),
      ),
      el(
        "div",
        {},
        run.stages?.length
          ? card(
              "Stages",
              tableOf(
                ["stage", "status", "after"],
                run.stages.map((stage) => [
                  el("a", { href: addressOf(["run", stage.id]) }, stage.name),
                  statusBadge(stage.status),
                  (stage.parents ?? []).join(", ") || "–",
                ]),
                { label: "Stages" },
              ),
            )
          : null,
        run.alarms?.length
          ? card(
              "Alarms",
              tableOf(
                ["step", "what"],
                run.alarms.map((each) => [each.step ?? "–", each.text]),
                { label: "Alarms" },
              ),
            )
          : null,
        card(
          "Events",
          events.length
            ? tableOf(
                ["when", "kind", "what"],
                events.map((each) => [moment(each.time_s), { cell: each.kind, class: "word" }, each.text]),
                { label: "Events" },
              )
            : el("p", { class: "dim" }, "No deaths, recoveries or changes of membership."),
        ),
        run.stages
          ? null
          : card(
              "Checkpoints",
              checkpoints.length
                ? tableOf(
                    ["step", "size", "folder"],
                    checkpoints.map((each) => [each.step, bytes(each.size_bytes), each.path_name]),
                    { label: "Checkpoints" },
                  )
                : el("p", { class: "dim" }, "None yet."),
            ),
        run.stages
          ? null
          : card(
              "Lineage",
              lineage.length
                ? el("ul", { class: "lineage" }, lineage.map(lineageItem))
                : el("p", { class: "dim" }, "This run begins with a model from outside."),
            ),
      ),
    ),
  );
}

function lineageItem(each) {
  if (typeof each !== "object" || each === null) return el("li", {}, plain(each));
  const { kind, key, path, fingerprint, made_by: madeBy, depth = 0 } = each;
  return el(
    "li",
    { style: { "margin-left": `${18 * Math.min(depth, 8)}px` } },
    el("strong", {}, plain(kind ?? "")),
    el("span", { class: "dim" }, ` ${plain(key ?? "")} ${plain(fingerprint ?? "")}`),
    el("div", {}, plain(path ?? "")),
    madeBy ? el("div", { class: "dim" }, `made by ${madeBy}`) : null,
  );
}

/** Lines of `podium show` as a list of facts; those on what the run was made of stand in the lineage. */
function factsOf(lines) {
  const rows = [];
  for (const line of lines) {
    const fact = /^(\S[^:]*):\s+(.*)$/.exec(line);
    if (fact && !/^(data|weights|code|file) \S+$/.test(fact[1])) rows.push([fact[1], [fact[2]]]);
    else if (!fact && rows.length && !/^\s+(made by|data|weights|code)\b/.test(line)) rows.at(-1)[1].push(line);
  }
  return el(
    "dl",
    { class: "facts" },
    rows.map(([key, texts]) => [el("dt", {}, key), el("dd", {}, texts.join("\n"))]),
  );
}

function showRecipe(body, { run }) {
  const rows = Object.entries(run.recipe ?? {});
  const list = el("div", {});
  const draw = (text) => {
    const shown = rows.filter(([key, value]) => `${key} ${plain(value)}`.toLowerCase().includes(text.toLowerCase()));
    fill(
      list,
      shown.length
        ? tableOf(
            ["key", "value"],
            shown.map(([key, value]) => [{ cell: el("code", {}, key) }, el("code", {}, plain(value))]),
            { label: "Recipe" },
          )
        : stateBox("No key or value contains this"),
    );
  };
  fill(
    body,
    el(
      "div",
      { class: "row controls" },
      el("input", {
        type: "search",
        placeholder: "Filter keys and values …",
        "aria-label": "Filter the recipe",
        data: { key: "/" },
        on: { input: (event) => draw(event.target.value) },
      }),
    ),
    list,
  );
  draw("");
}

function card(title, ...content) {
  return el("section", { class: "card" }, el("h2", {}, title), content);
}
