// SPDX-License-Identifier: Apache-2.0
// Draws lanes, marks and the axis of a timeline on a canvas.

import { causeColor, faded } from "./colors.js";
import { duration } from "./formats.js";
import { themeColor } from "./theme.js";

const LANE_TOP = 30,
  LANE = 20,
  NAME = 15,
  NAME_WIDTH = 150;
const OFTEN = ["publish", "lent", "recalled"];

/** Lanes carry their names on the left; on a narrow page above. */
function laneHeight(state) {
  return state.narrow ? LANE + NAME + 5 : LANE + 5;
}

/** Where lanes begin. */
export function laneLeft(state) {
  return state.narrow ? 0 : NAME_WIDTH;
}

/** The moment at a horizontal place of the canvas. */
export function timeAt(canvas, state, x) {
  const left = laneLeft(state);
  return state.from + ((x - left) / (canvas.clientWidth - left)) * (state.to - state.from);
}

/** The worker at a vertical place. */
export function laneAt(state, y) {
  const at = Math.floor((y - LANE_TOP) / laneHeight(state));
  return at >= 0 ? (state.shown?.[at] ?? null) : null;
}

/** Draws everything. Sets state.shown (workers with a lane) and state.hiddenLanes. */
export function drawTimeline(canvas, state) {
  const width = canvas.parentElement?.clientWidth ?? 0;
  if (!width) return;
  state.narrow = width < 620;
  const found = state.data.workers.filter((worker) => worker.name.toLowerCase().includes(state.filter.toLowerCase()));
  state.shown = found.slice(0, state.lanes);
  state.hiddenLanes = found.length - state.shown.length;
  const height = LANE_TOP + Math.max(1, state.shown.length) * laneHeight(state) + 6;
  const ratio = Math.min(2, window.devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const left = laneLeft(state);
  const place = (time) => left + ((time - state.from) / (state.to - state.from)) * (width - left);
  drawAxis(pen, state, left, width, height, place);
  const hatch = hatching(pen),
    ink = themeColor("--text"),
    well = themeColor("--well");
  state.shown.forEach((worker, at) => {
    const top = LANE_TOP + at * laneHeight(state);
    drawLane(pen, worker, state, { left, width, top, place, hatch, ink, well });
  });
  drawMarks(pen, state, left, width, height, place);
  if (state.at !== null && state.at > left) {
    pen.fillStyle = themeColor("--dim");
    pen.fillRect(state.at, LANE_TOP - 6, 1, height - LANE_TOP);
  }
}

function drawLane(pen, worker, state, { left, width, top, place, hatch, ink, well }) {
  pen.fillStyle = ink;
  pen.textAlign = "left";
  if (state.narrow) pen.fillText(shortName(worker.name), 2, top + NAME / 2, width - 4);
  else pen.fillText(shortName(worker.name), 0, top + LANE / 2, left - 10);
  const y = state.narrow ? top + NAME : top;
  pen.fillStyle = well;
  pen.fillRect(left, y, width - left, LANE);
  for (const span of worker.spans) {
    if (span.end_s < state.from || span.begin_s > state.to || state.off.has(`${span.idle ? "1" : "0"}${span.name}`))
      continue;
    const x = Math.max(left, place(span.begin_s)),
      end = Math.min(width, place(span.end_s));
    const wide = Math.max(0.7, end - x);
    const color = causeColor(span.name);
    if (span.idle) {
      pen.fillStyle = faded(color, 0.32);
      pen.fillRect(x, y + 3, wide, LANE - 6);
      if (wide > 5) {
        pen.fillStyle = hatch(color);
        pen.fillRect(x, y + 3, wide, LANE - 6);
      }
    } else {
      pen.fillStyle = color;
      pen.fillRect(x, y, wide, LANE);
      if (wide > 6) {
        pen.fillStyle = "#ffffff55";
        pen.fillRect(x, y, 1, LANE);
      }
    }
    if (wide > 46 && pen.measureText(briefName(span)).width <= wide - 8) {
      pen.fillStyle = span.idle ? ink : "#fff";
      pen.fillText(briefName(span), x + 5, y + LANE / 2 + 0.5);
    }
  }
}

/** Hatching says that a worker waits: the name says for what. */
function briefName({ name, idle }) {
  return idle ? name.replace(/^waiting for (the )?/, "") : name;
}

function shortName(name) {
  const role = name.replace(/@[^#]*#0$/, "").replace(/@[^#]*(?=#)/, ""); // train[0]@node/cpu#0: the first one in its place
  return role.length <= 22 ? role : `${role.slice(0, 10)}…${role.slice(-11)}`;
}

function drawAxis(pen, state, left, width, height, place) {
  const length = state.to - state.from;
  const target = length / Math.max(2, (width - left) / 110);
  const power = 10 ** Math.floor(Math.log10(target));
  const tick =
    target < 1
      ? [1, 2, 5, 10].map((each) => each * power).find((each) => each >= target)
      : ([1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400].find(
          (each) => each >= target,
        ) ?? Math.ceil(target / 86400) * 86400);
  pen.strokeStyle = themeColor("--line");
  pen.fillStyle = themeColor("--dim");
  pen.textAlign = "center";
  pen.lineWidth = 1;
  const base = state.whole.begin;
  for (let at = Math.ceil((state.from - base) / tick); base + at * tick <= state.to; at += 1) {
    const x = Math.round(place(base + at * tick)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, LANE_TOP - 8);
    pen.lineTo(x, height);
    pen.stroke();
    if (x > left + 14 && x < width - 18) pen.fillText(duration(Number((at * tick).toPrecision(8))), x, 7);
  }
}

/** Lines through all lanes where something died, came back, joined or left. Other marks stand above the lanes only. */
function drawMarks(pen, state, left, width, height, place) {
  for (const mark of state.data.marks ?? []) {
    const x = place(mark.time_s);
    if (x < left || x > width || OFTEN.includes(mark.kind)) continue;
    pen.fillStyle = causeColor(mark.kind);
    pen.fillRect(x - 0.5, LANE_TOP - 6, 1, height - LANE_TOP);
  }
}

function hatching(pen) {
  const made = new Map();
  return (color) => {
    if (!made.has(color)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const small = tile.getContext("2d");
      small.strokeStyle = faded(color, 0.85);
      small.lineWidth = 1.2;
      for (const shift of [-6, 0, 6]) {
        small.beginPath();
        small.moveTo(shift, 6);
        small.lineTo(shift + 6, 0);
        small.stroke();
      }
      made.set(color, pen.createPattern(tile, "repeat"));
    }
    return made.get(color);
  };
}
