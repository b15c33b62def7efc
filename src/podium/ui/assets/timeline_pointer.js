// SPDX-License-Identifier: Apache-2.0
// Mouse and fingers on the timeline: wheel and pinch zoom, dragging moves, hovering and tapping describe.

import { hideTooltip, showTooltip } from "./dom.js";
import { duration } from "./formats.js";
import { laneAt, timeAt } from "./timeline_canvas.js";

/** Listens to pointers over the canvas until `signal` aborts. */
export function bindPointer(canvas, state, { zoom, show, draw }, signal) {
  const pointers = new Map(); // of fingers or the mouse: {x, y}
  let dragged = false,
    pinch = null;
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = (event.deltaX / canvas.clientWidth) * (state.to - state.from);
        show(state.from + by, state.to + by);
      } else zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * 0.0022))), timeAt(canvas, state, event.offsetX));
      event.preventDefault();
    },
    { passive: false, signal },
  );
  canvas.addEventListener(
    "pointerdown",
    (event) => {
      pointers.set(event.pointerId, { x: event.offsetX, from: state.from, to: state.to });
      dragged = false;
      pinch = pointers.size === 2 ? spread(pointers) : null;
      canvas.setPointerCapture(event.pointerId);
    },
    { signal },
  );
  canvas.addEventListener(
    "pointermove",
    (event) => {
      const held = pointers.get(event.pointerId);
      if (!held) {
        state.at = event.offsetX;
        draw();
        describe(canvas, state, event);
        return;
      }
      if (pointers.size === 2 && pinch) {
        held.x = event.offsetX;
        const now = spread(pointers);
        if (now.gap > 8) zoom(pinch.gap / now.gap, timeAt(canvas, state, now.middle));
        pinch = now;
      } else if (Math.abs(event.offsetX - held.x) > 3 || dragged) {
        dragged = true;
        hideTooltip();
        const by = ((held.x - event.offsetX) / canvas.clientWidth) * (held.to - held.from);
        show(held.from + by, held.to + by);
      }
    },
    { signal },
  );
  const release = (event) => {
    pointers.delete(event.pointerId);
    pinch = null;
    if (!dragged && event.type === "pointerup") describe(canvas, state, event);
  };
  canvas.addEventListener("pointerup", release, { signal });
  canvas.addEventListener("pointercancel", release, { signal });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, timeAt(canvas, state, event.offsetX)), { signal });
  canvas.addEventListener(
    "pointerleave",
    () => {
      state.at = null;
      hideTooltip();
      draw();
    },
    { signal },
  );
}

function spread(pointers) {
  const [a, b] = [...pointers.values()];
  return { gap: Math.abs(a.x - b.x), middle: (a.x + b.x) / 2 };
}

function describe(canvas, state, event) {
  const time = timeAt(canvas, state, event.offsetX),
    second = (state.to - state.from) / canvas.clientWidth;
  const lane = laneAt(state, event.offsetY);
  const span = lane?.spans
    .filter((each) => each.begin_s - second <= time && each.end_s + second >= time)
    .sort((a, b) => Math.abs(a.begin_s + a.end_s - 2 * time) - Math.abs(b.begin_s + b.end_s - 2 * time))
    .find((each) => (each.begin_s <= time && each.end_s >= time) || each.end_s - each.begin_s < 3 * second);
  if (span)
    showTooltip(
      [
        lane.name,
        span.name,
        `${duration(span.end_s - span.begin_s)}, from ${duration(span.begin_s - state.whole.begin)}`,
        span.idle ? "idle" : null,
        span.merged ? "several short ones together: zoom in" : null,
      ].filter(Boolean),
      event.clientX,
      event.clientY,
    );
  else hideTooltip();
}
