// SPDX-License-Identifier: Apache-2.0
// Curves of one or several runs: groups of charts, loaded as they come into sight.

import { fetchJson, runPath } from "./api.js";
import { lineChart } from "./chart.js";
import { lineColor } from "./colors.js";
import { choice, debounced, el, fill } from "./dom.js";
import { isReport } from "./embedded.js";
import { keyMetrics, metricGroups } from "./metric_groups.js";
import { addressOf, remember } from "./router.js";
import { stateBox } from "./states.js";

const POINTS = 1000;
const REDRAW_MS = 500;

/** Shows curves of `runs` (answers of /api/runs/ID) in `body`. */
export function showCurves(body, { runs, route, signal, onMetrics }) {
  const names = [...new Set(runs.flatMap((run) => run.metric_names ?? []))];
  if (!names.length) {
    fill(body, stateBox("No metrics yet", "They appear here when the run has taken its first step."));
    return;
  }
  const settings = {
    axis: route.query.axis === "time" ? "time" : "step",
    smoothing: Number(route.query.smooth) || 0,
    filter: route.query.metric ?? "",
  };
  const store = new MetricStore(runs, signal);
  const groups = el("div", {});
  let charts = [];
  const close = () => charts.forEach((chart) => chart.close());
  signal.addEventListener("abort", close);
  const keep = () =>
    remember(route.parts, {
      ...route.query,
      axis: settings.axis === "time" ? "time" : "",
      smooth: settings.smoothing || "",
      metric: settings.filter,
    });
  const redraw = () => charts.forEach((chart) => chart.draw());
  const build = () => {
    close();
    charts = [];
    const shown = names.filter((name) => name.toLowerCase().includes(settings.filter.toLowerCase()));
    fill(
      groups,
      shown.length
        ? metricGroups(shown, runs.length > 1).map((group) =>
            groupOf(group, settings, store, charts, Boolean(settings.filter)),
          )
        : stateBox("No metric has this in its name"),
    );
  };
  const output = el("output", { class: "small" }, settings.smoothing.toFixed(2));
  fill(
    body,
    el(
      "div",
      { class: "row controls" },
      el("input", {
        type: "search",
        value: settings.filter,
        placeholder: "Filter metrics …",
        "aria-label": "Filter metrics",
        data: { key: "/" },
        on: {
          input: debounced((event) => {
            settings.filter = event.target.value;
            keep();
            build();
          }, 200),
        },
      }),
      el(
        "label",
        { class: "field" },
        el("span", {}, "smoothing"),
        el("input", {
          type: "range",
          min: 0,
          max: 0.99,
          step: 0.01,
          value: settings.smoothing,
          id: "smoothing",
          on: {
            input: (event) => {
              settings.smoothing = Number(event.target.value);
              output.textContent = settings.smoothing.toFixed(2);
              keep();
              redraw();
            },
          },
        }),
        output,
      ),
      choice(
        "axis",
        [
          ["step", "steps"],
          ["time", "time"],
        ],
        settings.axis,
        (axis) => {
          settings.axis = axis;
          keep();
          build();
        },
      ),
      isReport() || runs.length > 1
        ? null
        : el("a", { class: "button", href: addressOf(["compare"], { runs: runs[0].id }) }, "Compare with …"),
    ),
    runs.length > 1
      ? el(
          "ul",
          { class: "legend big" },
          runs.map((run, at) => el("li", {}, el("i", { style: { background: lineColor(at) } }), run.id)),
        )
      : null,
    groups,
  );
  build();
  const soon = debounced(redraw, REDRAW_MS);
  onMetrics?.((event) => {
    if (event === null) {
      // the metrics were written anew, or some were missed: load all again
      store.whole.clear();
      soon();
      return;
    }
    store.add(event);
    const fresh = Object.keys(event.values).filter((name) => !names.includes(name));
    names.push(...fresh);
    if (fresh.length) build();
    else soon();
  });
}

/** The few curves that say most about a run, in `grid`. */
export function showKeyCurves(grid, { run, signal, onMetrics }) {
  const store = new MetricStore([run], signal);
  const settings = { axis: "step", smoothing: 0 };
  const names = keyMetrics(run.metric_names ?? []);
  const charts = names.map((name) =>
    chartOf(grid, { title: name, metrics: [{ name, label: name }] }, settings, store),
  );
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.close()));
  const soon = debounced(() => charts.forEach((chart) => chart.draw()), REDRAW_MS);
  onMetrics?.((event) => {
    if (event === null) store.whole.clear();
    else store.add(event);
    soon();
  });
}

function groupOf(group, settings, store, charts, open) {
  const grid = el("div", { class: "charts" });
  const details = el(
    "details",
    { open: group.open || open },
    el("summary", {}, el("h2", {}, group.title), el("span", { class: "dim small" }, ` ${group.charts.length}`)),
    grid,
  );
  let built = false;
  const build = () => {
    if (built || !details.open) return;
    built = true;
    for (const chart of group.charts) charts.push(chartOf(grid, chart, settings, store));
  };
  details.addEventListener("toggle", build);
  build();
  return details;
}

function chartOf(grid, { title, metrics }, settings, store) {
  const box = el("figure", { class: "chart", "aria-label": title, data: { chart: title } });
  grid.append(box);
  let range = [null, null],
    visible = false,
    closed = false;
  const axis = settings.axis;
  const chart = lineChart(box, {
    title,
    axis,
    sync: `podium-${axis}`,
    zoomed: (from, to) => {
      range = axis === "step" && from !== null ? [Math.floor(from), Math.ceil(to)] : [null, null];
      draw();
    },
  });
  const draw = async () => {
    if (!visible) return;
    let found;
    try {
      found = await store.series(
        metrics.map((metric) => metric.name),
        range,
      );
    } catch (error) {
      if (error.name !== "AbortError" && !closed) fill(box, stateBox(`${title} cannot be shown`, error.message));
      return;
    }
    if (closed) return;
    const lines = found.flatMap(({ run, at, series, begin }) =>
      metrics
        .filter(({ name }) => series[name]?.step.length)
        .map(({ name, label }, place) => ({
          label: store.runs.length > 1 ? run.id : label,
          color: lineColor(store.runs.length > 1 ? at : place),
          x: axis === "time" ? series[name].time_s.map((time) => time - begin) : series[name].step,
          y: series[name].value,
          low: series[name].low,
          high: series[name].high,
        })),
    );
    chart.draw(lines, { smoothing: settings.smoothing, axis });
  };
  const seen = new IntersectionObserver(
    (entries) => {
      if (visible || !entries.some((entry) => entry.isIntersecting)) return;
      visible = true;
      draw();
    },
    { rootMargin: "300px" },
  );
  seen.observe(box);
  return {
    draw,
    close: () => {
      closed = true;
      seen.disconnect();
      chart.close();
    },
  };
}

/** Series of several runs. Charts that ask at the same time share a request; events of a live run are appended. */
class MetricStore {
  constructor(runs, signal) {
    this.runs = runs;
    this.signal = signal;
    this.whole = new Map(); // "run name" -> promise of a series
    this.begins = new Map(); // run -> first time, so that time axes of several runs begin at 0
    this.waiting = null;
  }

  /** [{run, at, series: {name: series}, begin}] for every run. A range of steps is loaded for itself. */
  async series(names, [from, to]) {
    return Promise.all(
      this.runs.map(async (run, at) => {
        const mine = names.filter((name) => (run.metric_names ?? []).includes(name));
        let series;
        if (from !== null) {
          const path = runPath(run.id, "/metrics", { names: mine.join(","), points: POINTS, from, to });
          series = mine.length ? (await fetchJson(path, { signal: this.signal })).series : {};
        } else
          series = Object.fromEntries(await Promise.all(mine.map(async (name) => [name, await this.one(run, name)])));
        const times = Object.values(series)
          .map((each) => each?.time_s?.[0])
          .filter(Number.isFinite);
        const begin = Math.min(this.begins.get(run.id) ?? Infinity, ...times);
        this.begins.set(run.id, begin);
        return { run, at, series, begin: Number.isFinite(begin) ? begin : 0 };
      }),
    );
  }

  one(run, name) {
    const key = `${run.id} ${name}`;
    if (!this.whole.has(key))
      this.whole.set(
        key,
        this.asked(run, name).catch((error) => {
          this.whole.delete(key);
          throw error;
        }),
      );
    return this.whole.get(key);
  }

  asked(run, name) {
    this.waiting ??= new Map();
    if (!this.waiting.size) queueMicrotask(() => this.send());
    const batch = this.waiting.get(run.id) ?? { names: [] };
    if (!this.waiting.has(run.id))
      batch.answer = new Promise((resolve, reject) => Object.assign(batch, { resolve, reject }));
    batch.names.push(name);
    this.waiting.set(run.id, batch);
    return batch.answer.then((series) => series[name] ?? { step: [], time_s: [], value: [], low: [], high: [] });
  }

  send() {
    const batches = this.waiting;
    this.waiting = null;
    for (const [id, { names, resolve, reject }] of batches)
      fetchJson(runPath(id, "/metrics", { names: names.join(","), points: POINTS }), { signal: this.signal }).then(
        ({ series }) => resolve(series),
        reject,
      );
  }

  /** Appends the values of a live step. A step that a resumed run repeats replaces what came after it. */
  async add({ step, time_s: time = Date.now() / 1000, values }) {
    const [run] = this.runs;
    for (const [name, value] of Object.entries(values)) {
      if (!(run.metric_names ?? []).includes(name)) (run.metric_names ??= []).push(name);
      if (!this.whole.has(`${run.id} ${name}`)) continue;
      const series = await this.whole.get(`${run.id} ${name}`).catch(() => null);
      if (!series) continue;
      let end = series.step.length;
      while (end > 0 && series.step[end - 1] >= step) end -= 1;
      for (const list of Object.values(series)) list.length = Math.min(list.length, end);
      series.step.push(step);
      series.time_s.push(time);
      for (const key of ["value", "low", "high"]) series[key].push(value);
    }
  }
}
