// SPDX-License-Identifier: Apache-2.0
// The list of episodes: search, sort, pages. A row opens its group.

import { fetchJson, runPath } from "./api.js";
import { choice, debounced, el, fill } from "./dom.js";
import { showGroup } from "./episodes.js";
import { number } from "./formats.js";
import { paced } from "./live.js";
import { addressOf, go, remember } from "./router.js";
import { loadInto, stateBox } from "./states.js";

const SIZE = 50;
const READ_MS = 1000,
  LIST_MS = 5000;
const SORTS = [
  ["-step", "newest"],
  ["step", "oldest"],
  ["reward", "worst reward"],
  ["-reward", "best reward"],
  ["-length", "longest"],
  ["length", "shortest"],
  ["group", "group"],
];

/** Shows the list, or the group that the address names. */
export function showRollouts(body, context) {
  const { run, route } = context;
  if (!run.has_rollouts) {
    fill(
      body,
      stateBox(
        "This run keeps no rollouts",
        "Episodes are written to the run folder when the recipe says so:",
        el("pre", { class: "text left" }, "run:\n  rollouts: {keep: sample, per_step: 32}   # or keep: all"),
      ),
    );
    return;
  }
  const [, , , step, group] = route.parts;
  if (step !== undefined && group !== undefined) showGroup(body, context, step, group);
  else showList(body, context);
}

function showList(body, { run, route, signal, onChange }) {
  const state = { q: "", sort: "-step", step: "", from: "", changed: "", source: "", row: "", page: 1, ...route.query };
  state.page = Number(state.page) || 1;
  const sources = el("datalist", { id: "sources" }),
    list = el("div", {}),
    steps = el("span", { class: "dim small" });
  const change = (values) => {
    Object.assign(state, { page: 1 }, values);
    remember(route.parts, {
      ...state,
      page: state.page > 1 ? state.page : "",
      sort: state.sort === "-step" ? "" : state.sort,
    });
    reload();
  };
  const soon = debounced(() => change({}), 250);
  const later = (values) => {
    Object.assign(state, values); // at once: another field may change before the request
    soon();
  };
  const text = (label, key, attributes) =>
    el(
      "label",
      { class: "field" },
      el("span", {}, label),
      el("input", { value: state[key], ...attributes, on: { input: (event) => later({ [key]: event.target.value }) } }),
    );
  fill(
    body,
    el(
      "div",
      { class: "row controls" },
      el("input", {
        type: "search",
        value: state.q,
        placeholder: "Search prompts and answers …",
        "aria-label": "Search prompts and answers",
        data: { key: "/" },
        on: { input: (event) => later({ q: event.target.value }) },
      }),
      choice("first", SORTS, state.sort, (sort) => change({ sort })),
      text("step", "step", { type: "number", min: 0, class: "short" }),
      text("since step", "from", { type: "number", min: 0, class: "short" }),
      text("changed since step", "changed", {
        type: "number",
        min: 0,
        class: "short",
        title: "answers from this step on, of prompts whose mean reward is another one than at their last step before it",
      }),
      text("source", "source", { type: "text", class: "short", list: "sources" }),
      sources,
      steps,
      state.row !== "" ? el("a", { class: "button", href: addressOf(route.parts) }, `only row ${state.row} ×`) : null,
    ),
    list,
  );
  const load = () =>
    fetchJson(
      runPath(run.id, "/rollouts", {
        step: state.step,
        sort: state.sort,
        q: state.q,
        source: state.source,
        from: state.from,
        changed: state.changed,
        row: state.row,
        page: state.page,
        size: SIZE,
      }),
      { signal },
    );
  let again = 0; // while the server reads files, or searches on, more rows are there each time
  signal.addEventListener("abort", () => clearTimeout(again));
  const reload = loadInto(
    list,
    load,
    (_, data) => {
      clearTimeout(again);
      fill(
        steps,
        data.steps?.[0] !== undefined && data.steps[0] !== null ? `steps ${data.steps[0]} to ${data.steps[1]}` : "",
        isReading(data) ? `, ${percentOf(data.index)} of them read so far` : "",
        data.is_whole === false ? ", searching older ones …" : "",
      );
      if (isReading(data) || data.is_whole === false) again = setTimeout(() => reload(true), READ_MS);
      fill(
        sources,
        (data.sources ?? []).map((source) => el("option", { value: source })),
      );
      drawRows(list, data, run, change);
    },
    signal,
    "rollouts",
  );
  const follow = paced(() => reload(true), LIST_MS, signal);
  onChange?.(() => {
    if (state.page === 1 && state.sort === "-step") follow();
  });
}

/** Whether the server still reads files. Before it has counted their rows, it says 0 of 0. */
function isReading({ index, steps }) {
  return Boolean(index) && (index.done < index.of || (index.of === 0 && steps?.length > 0));
}

function percentOf({ done, of }) {
  return `${Math.floor((100 * done) / Math.max(1, of))}%`;
}

function drawRows(container, data, run, change) {
  if (!data.rows.length) {
    const title = data.total ? "No more rows" : "No episode matches";
    fill(
      container,
      data.is_whole === false
        ? stateBox("Searching …", "Nothing was found in the newest episodes. Older ones are searched now.")
        : isReading(data)
          ? stateBox(`Reading the rollouts: ${percentOf(data.index)} …`, "Nothing of what was read so far matches.")
          : stateBox(title, "Search for something else, or clear steps, changes and source."),
    );
    return;
  }
  const range = rewardRange(data.rows);
  const pages = Math.max(1, Math.ceil(data.total / SIZE));
  const pager = () =>
    el(
      "div",
      { class: "row pager" },
      el(
        "button",
        { type: "button", disabled: data.page <= 1, on: { click: () => change({ page: data.page - 1 }) } },
        "← Previous",
      ),
      el(
        "span",
        {},
        `page ${data.page} of ${pages.toLocaleString("en")}, ${data.is_whole === false ? "more than " : ""}${data.total.toLocaleString("en")} episodes`,
      ),
      el(
        "button",
        { type: "button", disabled: data.page >= pages, on: { click: () => change({ page: data.page + 1 }) } },
        "Next →",
      ),
    );
  const top = pager();
  top.firstChild.dataset.key = "[";
  top.lastChild.dataset.key = "]";
  fill(
    container,
    top,
    el(
      "table",
      { class: "list rollouts" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ["step", "group", "reward", "tokens", "ending", "source", "answer"].map((title) =>
            el("th", { scope: "col", class: `r-${title}` }, title),
          ),
        ),
      ),
      el(
        "tbody",
        {},
        data.rows.map((row) => rowOfEpisode(row, run, range)),
      ),
    ),
    data.rows.length > 20 ? pager() : null,
  );
}

function rowOfEpisode(row, run, range) {
  const target = ["run", run.id, "rollouts", String(row.step), String(row.group)];
  const open = (event) => !event.target.closest("a") && go(target, { sample: row.sample });
  const cell = (title, ...content) => el("td", { class: `r-${title}`, data: { label: title } }, content);
  return el(
    "tr",
    { class: row.trained === false ? "untrained" : null, on: { click: open } },
    cell("step", number(row.step)),
    cell(
      "group",
      el(
        "a",
        { href: addressOf(target, { sample: row.sample }), data: { row: `${row.step}-${row.group}-${row.sample}` } },
        `${row.group}.${row.sample}`,
      ),
    ),
    cell("reward", rewardBadge(row.reward, range)),
    cell("tokens", number(row.length)),
    cell("ending", row.ending ?? "–"),
    cell("source", row.source ?? "–"),
    cell(
      "answer",
      row.trained === false
        ? el("span", { class: "badge quiet", title: "the update did not learn from it" }, "not trained")
        : null,
      " ",
      row.preview ?? "",
    ),
  );
}

/** Lowest and highest reward of rows. */
export function rewardRange(rows) {
  const found = rows.map((row) => row.reward).filter(Number.isFinite);
  return found.length ? [Math.min(...found, 0), Math.max(...found, 0)] : [0, 1];
}

/** A reward, coloured between the lowest and the highest. */
export function rewardBadge(reward, [low, high]) {
  if (!Number.isFinite(reward)) return "–";
  const share = high > low ? (reward - low) / (high - low) : 0.5;
  return el("span", { class: "reward", style: { "--share": share.toFixed(3) } }, number(reward));
}
