// SPDX-License-Identifier: Apache-2.0
// One chart: lines with bands, a legend that follows the pointer. uPlot draws.

import { faded } from "./colors.js";
import { el, fill } from "./dom.js";
import { duration, number } from "./formats.js";
import { themeColor } from "./theme.js";

const HEIGHT = 190;

/** Exponential moving average without its bias towards the first value; `weight` 0 leaves the values as they are. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0,
    mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/**
 * A chart in `container`. `lines`: {label, color, x, y, low, high}; `axis`: "step" or "time"; `smoothing` 0 to 0.99;
 * `zoomed(from, to)` is called when the reader selects a range, with nulls when it is given up. Returns {draw, close}.
 */
export function lineChart(container, { title, axis, zoomed, sync }) {
  const legend = el("ul", { class: "legend" });
  const canvas = el("div", { class: "plot" });
  const note = el("span", { class: "dim small" });
  container.append(el("div", { class: "chart-head" }, el("h3", {}, title), note), canvas, legend);
  let plot = null,
    last = null,
    range = null;

  const draw = (lines, options) => {
    last = [lines, options];
    if (!window.uPlot) {
      fill(canvas, el("p", { class: "dim" }, "The plotting library did not load: load the page again."));
      return;
    }
    const { data, series, bands } = plotData(lines, options.smoothing);
    const banded = lines.some((line) => line.low && line.low.some((low, at) => low !== line.high[at]));
    note.textContent = banded ? "mean, band: min to max" : "";
    plot?.destroy();
    fill(canvas);
    plot = new window.uPlot(
      {
        width: Math.max(200, canvas.clientWidth),
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: sync ? { key: sync } : undefined, drag: { x: true, y: false }, points: { size: 6 } },
        scales: { x: { time: false, ...(range && { min: range[0], max: range[1] }) }, y: { range: paddedRange } },
        axes: axesOf(axis),
        series,
        bands,
        hooks: { setCursor: [(u) => drawLegend(legend, lines, options, u)], setSelect: [(u) => select(u)] },
      },
      data,
      canvas,
    );
    drawLegend(legend, lines, options, plot);
    plot.over.addEventListener("dblclick", () => {
      if (range) choose(null);
    });
  };
  const select = (u) => {
    if (u.select.width < 4) return;
    choose([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
  };
  const choose = (chosen) => {
    range = chosen;
    zoomed?.(range?.[0] ?? null, range?.[1] ?? null);
    if (last) queueMicrotask(() => draw(...last));
  };
  const redraw = () => last && draw(...last);
  const resized = new ResizeObserver(
    () =>
      plot &&
      Math.abs(plot.width - canvas.clientWidth) > 2 &&
      plot.setSize({ width: Math.max(200, canvas.clientWidth), height: HEIGHT }),
  );
  resized.observe(canvas);
  document.addEventListener("themechange", redraw);
  return {
    draw,
    close: () => {
      resized.disconnect();
      document.removeEventListener("themechange", redraw);
      plot?.destroy();
    },
  };
}

function plotData(lines, smoothing) {
  const tables = [],
    series = [{}],
    bands = [];
  for (const line of lines) {
    const at = series.length;
    const { x, y, low, high } = sortedLine(line);
    tables.push([x, smoothed(y, smoothing), y, high ?? y, low ?? y]);
    series.push(
      { stroke: line.color, width: 2, points: { show: x.length === 1, size: 6 }, spanGaps: true },
      { stroke: faded(line.color, 0.3), width: 1, points: { show: false }, spanGaps: true, show: smoothing > 0 },
      { stroke: faded(line.color, 0), points: { show: false }, spanGaps: true, show: Boolean(high) },
      { stroke: faded(line.color, 0), points: { show: false }, spanGaps: true, show: Boolean(low) },
    );
    bands.push({ series: [at + 2, at + 3], fill: faded(line.color, 0.14) });
  }
  const data = tables.length ? window.uPlot.join(tables) : [[]];
  return { data, series, bands };
}

function sortedLine(line) {
  if (line.x.every((value, at) => at === 0 || line.x[at - 1] < value)) return line;
  const order = line.x.map((_, at) => at).sort((a, b) => line.x[a] - line.x[b] || a - b);
  const kept = order.filter((at, place) => place + 1 === order.length || line.x[order[place + 1]] !== line.x[at]);
  const pick = (list) => list && kept.map((at) => list[at]);
  return { ...line, x: pick(line.x), y: pick(line.y), low: pick(line.low), high: pick(line.high) };
}

function axesOf(axis) {
  const stroke = themeColor("--dim"),
    grid = { stroke: themeColor("--line"), width: 1 };
  const common = { stroke, grid, ticks: grid, font: "11px system-ui, sans-serif" };
  return [
    {
      ...common,
      size: 30,
      values: (_, ticks) =>
        ticks.map((tick) => (axis === "time" ? duration(tick) : Number.isInteger(tick) ? number(tick) : "")),
    },
    { ...common, size: 54, values: (_, ticks) => ticks.map(number) },
  ];
}

function paddedRange(_, low, high) {
  if (low === null || low === undefined) return [0, 1];
  const isFlat = high - low <= 1e-9 * Math.max(Math.abs(high), Math.abs(low)); // rounding is no movement
  const room = isFlat ? Math.abs(high) * 0.1 || 0.5 : (high - low) * 0.06;
  return [low - room, high + room];
}

function drawLegend(legend, lines, { axis }, plot) {
  const at = plot?.cursor?.idx;
  const x = at === null || at === undefined ? null : plot.data[0][at];
  const where = x === null ? null : axis === "time" ? duration(x) : `step ${number(x)}`;
  fill(
    legend,
    where ? el("li", { class: "dim" }, where) : null,
    lines.map((line, place) => {
      const value = at === null || at === undefined ? lastOf(line.y) : nearest(plot.data[1 + 4 * place], at);
      return el(
        "li",
        {},
        el("i", { style: { background: line.color } }),
        line.label,
        el("b", {}, ` ${number(value ?? null)}`),
      );
    }),
  );
}

function nearest(values, at) {
  for (let by = 0; values && by < values.length; by += 1) {
    if (values[at - by] !== null && values[at - by] !== undefined) return values[at - by];
    if (values[at + by] !== null && values[at + by] !== undefined) return values[at + by];
  }
  return null;
}

function lastOf(values) {
  for (let at = values.length - 1; at >= 0; at -= 1)
    if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}
