// SPDX-License-Identifier: Apache-2.0
// Marks above the lanes of a timeline: publishes, lent devices, deaths, recoveries, generators that join or leave.

import { causeColor } from "./colors.js";
import { el, fill, hideTooltip, showTooltip } from "./dom.js";
import { duration } from "./formats.js";
import { laneLeft } from "./timeline_canvas.js";

/**
 * A strip of buttons, one for each mark in view. One of them is in the order of Tab; arrows, Home and End go to the
 * others, Enter zooms to it. Returns a function that places them again.
 */
export function bindMarks(strip, canvas, state, show) {
  let placed = "",
    current = 0;
  const describe = (mark, node) => {
    const box = node.getBoundingClientRect();
    showTooltip(markLines(mark, state), box.left, box.top);
  };
  const focusOn = (at) => {
    const nodes = [...strip.children];
    if (!nodes.length) return;
    current = Math.max(0, Math.min(nodes.length - 1, at));
    nodes.forEach((node, number) => node.setAttribute("tabindex", number === current ? 0 : -1));
    nodes[current].focus();
  };
  strip.addEventListener("keydown", (event) => {
    const to = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: strip.children.length - 1 }[event.key];
    if (event.key === "Escape") hideTooltip();
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    focusOn(to);
    event.preventDefault();
  });
  return () => {
    const left = laneLeft(state),
      width = canvas.clientWidth - left;
    const marks = (state.data.marks ?? []).filter((mark) => mark.time_s >= state.from && mark.time_s <= state.to);
    const key = `${state.from} ${state.to} ${width} ${marks.length} ${marks.at(-1)?.time_s} ${state.data.version}`;
    if (key === placed) return;
    placed = key;
    const hadFocus = strip.contains(document.activeElement);
    current = Math.max(0, Math.min(current, marks.length - 1));
    fill(
      strip,
      marks.map((mark, at) => {
        const place = left + ((mark.time_s - state.from) / (state.to - state.from)) * width;
        const node = el("button", {
          type: "button",
          class: `mark ${mark.kind}`,
          tabindex: at === current ? 0 : -1,
          data: at === current ? { key: "m" } : {},
          "aria-label": markLines(mark, state).join(", "),
          style: { left: `${place}px`, "--key": causeColor(mark.kind) },
        });
        node.addEventListener("click", () => zoomTo(mark, state, show));
        node.addEventListener("focus", () => {
          current = at;
          describe(mark, node);
        });
        node.addEventListener("pointerenter", () => describe(mark, node));
        for (const name of ["blur", "pointerleave"]) node.addEventListener(name, hideTooltip);
        return node;
      }),
    );
    strip.hidden = !marks.length;
    if (hadFocus) focusOn(current);
  };
}

function markLines(mark, state) {
  const from = duration(mark.time_s - state.whole.begin);
  const when = mark.end_s ? `from ${from} to ${duration(mark.end_s - state.whole.begin)}` : `at ${from}`;
  return [mark.kind, mark.text, when];
}

function zoomTo(mark, state, show) {
  const end = mark.end_s ?? mark.time_s,
    length = Math.max(2 * (end - mark.time_s), (state.to - state.from) / 4),
    middle = (mark.time_s + end) / 2;
  show(middle - length / 2, middle + length / 2);
}
