// SPDX-License-Identifier: Apache-2.0
// Memory, processors and devices of the machines of a run.

import { fetchJson, runPath } from "./api.js";
import { lineChart } from "./chart.js";
import { lineColor } from "./colors.js";
import { el, fill } from "./dom.js";
import { loadInto, stateBox } from "./states.js";

/** Shows the tab. */
export function showSystem(body, { run, signal }) {
  loadInto(
    body,
    () => fetchJson(runPath(run.id, "/system"), { signal }),
    (_, { series = {} }) => {
      const names = Object.keys(series).filter((name) => series[name].step.length);
      if (!names.length) {
        fill(body, stateBox("Nothing about the machine", "The run has recorded no memory, CPU or GPU use: it has taken no step, or its machine does not tell."));
        return;
      }
      const grid = el("div", { class: "charts" });
      fill(body, grid);
      names.forEach((name, at) => {
        const box = el("figure", { class: "chart", "aria-label": name });
        grid.append(box);
        const chart = lineChart(box, { title: name, axis: "step", sync: "podium-system" });
        const { step, value, low, high } = series[name];
        chart.draw([{ label: name, color: lineColor(at), x: step, y: value, low, high }], {
          smoothing: 0,
          axis: "step",
        });
        signal.addEventListener("abort", chart.close);
      });
    },
    signal,
    "system",
  );
}
