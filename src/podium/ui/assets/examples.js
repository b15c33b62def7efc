// SPDX-License-Identifier: Apache-2.0
// Rows of a run on fixed data, token by token: which of them are trained.

import { fetchJson, runPath } from "./api.js";
import { choice, el, fill } from "./dom.js";
import { number } from "./formats.js";
import { remember } from "./router.js";
import { loadInto, stateBox } from "./states.js";
import { tokenLegend, tokenView } from "./tokens.js";

const START_LENGTH = 50;

/** Shows the tab. */
export function showExamples(body, { run, route, signal }) {
  loadInto(
    body,
    () => fetchJson(runPath(run.id, "/examples"), { signal }),
    (_, { examples = [] }) => {
      if (!examples.length) {
        fill(body, stateBox("No rows yet", "A run on fixed data keeps the first rows of its first step."));
        return;
      }
      const shown = el("div", {});
      const draw = (at) => {
        remember(route.parts, { row: at === "0" ? "" : at });
        fill(shown, exampleView(examples[Number(at)] ?? examples[0]));
      };
      const first = examples[Number(route.query.row)] ? route.query.row : "0";
      fill(
        body,
        el(
          "div",
          { class: "row controls" },
          choice(
            "row",
            examples.map((each, at) => [String(at), `${at + 1}: ${startOf(each)}`]),
            first,
            draw,
          ),
          el("span", { class: "dim small" }, `the first ${examples.length} rows of step 1`),
        ),
        tokenLegend("mask", []),
        shown,
      );
      draw(first);
    },
    signal,
    "rows",
  );
}

function exampleView(example) {
  const titles = example.documents.length === 2 ? ["Chosen", "Rejected"] : ["Document"];
  return [
    el(
      "p",
      { class: "dim small" },
      `source ${example.source}`,
      example.value ? `, value ${number(example.value)}` : "",
    ),
    el(
      "div",
      { class: example.documents.length === 2 ? "columns" : "" },
      example.documents.map((each, at) => {
        const trained = each.loss_mask.filter(Boolean).length;
        const cut = each.length > each.texts.length ? `, the first ${each.texts.length} are here` : "";
        return el(
          "section",
          { class: "card" },
          el("h2", {}, titles[at] ?? `Document ${at + 1}`),
          el("p", { class: "dim small" }, `${trained} of ${each.length} tokens are trained${cut}`),
          tokenView(each, "mask"),
        );
      }),
    ),
  ];
}

function startOf(example) {
  return example.documents[0]?.texts.join("").replace(/\s+/g, " ").trim().slice(0, START_LENGTH) ?? "";
}
