// SPDX-License-Identifier: Apache-2.0
// Rows of a run with fixed data: which of their tokens are trained.

import { fetchJson, runPath } from "./api.js";
import { el, fill } from "./dom.js";
import { percent } from "./formats.js";
import { loadInto, stateBox } from "./states.js";
import { tokenLegend, tokenView } from "./tokens.js";

/** Shows the tab. */
export function showExamples(body, { run, signal }) {
  loadInto(
    body,
    () => fetchJson(runPath(run.id, "/examples"), { signal }),
    (_, { rows = [] }) => {
      if (!rows.length) {
        fill(body, stateBox("No rows", "The run folder has no rows to look at."));
        return;
      }
      fill(
        body,
        tokenLegend("mask", []),
        el(
          "div",
          { class: "episodes" },
          rows.map((row, at) => {
            const trained = (row.loss_mask ?? []).filter(Boolean).length;
            const title = row.step === undefined ? `row ${row.row ?? at}` : `step ${row.step}, row ${row.row ?? at}`;
            return el(
              "article",
              { class: "episode" },
              el(
                "header",
                { class: "row" },
                el("h3", {}, title),
                el(
                  "span",
                  { class: "dim small" },
                  `${row.source ? `${row.source} · ` : ""}${trained} of ${row.texts.length} tokens trained (${percent(trained / row.texts.length)})`,
                ),
              ),
              tokenView(row, "mask"),
            );
          }),
        ),
      );
    },
    signal,
    "rows",
  );
}
