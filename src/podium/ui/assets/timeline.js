// SPDX-License-Identifier: Apache-2.0
// The timeline of a run: a lane per worker, zoom from the whole run to a moment, and where the time went.

import { isIdleCause, partNote, showAccounting } from "./accounting.js";
import { fetchJson, runPath } from "./api.js";
import { causeColor } from "./colors.js";
import { debounced, el, fill } from "./dom.js";
import { isReport } from "./embedded.js";
import { duration } from "./formats.js";
import { paced } from "./live.js";
import { remember } from "./router.js";
import { loadInto, stateBox } from "./states.js";
import { drawTimeline } from "./timeline_canvas.js";
import { grownTimeline } from "./timeline_growth.js";
import { bindMarks } from "./timeline_marks.js";
import { bindPointer } from "./timeline_pointer.js";

const FEW_WORKERS = 8,
  FIRST_LANES = 64;
const SHORTEST_S = 1e-4;
const LIVE_MS = 5000;
// A view of the whole run, of which only the end was loaded again, is loaded whole when the run has become so much longer.
const MOST_GROWTH = 1.3;

/** Shows the timeline tab. */
export function showTimeline(body, context) {
  const { run, signal } = context;
  if (run.has_timeline === false) {
    fill(
      body,
      stateBox("No timeline", "This run wrote no timeline.jsonl: it has not begun, or an earlier version made it."),
    );
    return;
  }
  const chart = el("div", {}),
    accounting = el("section", { class: "card" });
  const note = el("div", {});
  fill(body, note, chart, accounting);
  const readMore = () => {
    const canvas = chart.querySelector("canvas");
    const isZoomed = canvas && (canvas.dataset.from !== "0" || document.activeElement === canvas);
    if (!isZoomed) reload(true);
  };
  const reload = loadInto(
    chart,
    () => fetchJson(runPath(run.id, "/timeline", { points: pointsFor(body) }), { signal }),
    (container, data) => {
      fill(note, partNote(data, readMore, signal));
      drawView(container, marked(data), context);
    },
    signal,
    "timeline",
  );
  showAccounting(accounting, context);
}

function pointsFor(node) {
  return Math.max(300, Math.min(4000, Math.round(node.clientWidth || 1000)));
}

/** Workers of a kind beside each other. Waiting inside a call counts as idle too, as in the table. */
function marked(data) {
  for (const worker of data.workers) for (const span of worker.spans) span.idle ||= isIdleCause(span.name);
  const first = (worker) => (worker.kind === "controller" ? 0 : 1);
  data.workers.sort((a, b) => first(a) - first(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
  return data;
}

function drawView(container, data, { run, route, signal, onMetrics, onChange }) {
  if (!data.workers?.some((worker) => worker.spans.length)) {
    fill(container, stateBox("Nothing on the timeline yet", "Spans appear here a second after the first step."));
    return;
  }
  const [first, last] = data.whole ?? [data.begin_s, data.end_s];
  const whole = { begin: first, end: Math.max(last, first + SHORTEST_S) };
  const state = {
    data,
    whole,
    from: whole.begin,
    to: whole.end,
    lanes: FIRST_LANES,
    filter: "",
    off: new Set(),
    at: null,
  };
  const asked = [Number(route.query.from), Number(route.query.to)];
  const canvas = el("canvas", {
    tabindex: 0,
    role: "img",
    class: "timeline",
    "aria-label":
      "Timeline of the workers. Keys: plus and minus zoom, arrows move, 0 shows the whole run. The table below has the same seconds as text.",
  });
  const where = el("output", { class: "small", "aria-live": "polite", id: "timeline-range" });
  const legend = el("div", { class: "legend-box" }),
    more = el("div", {}),
    strip = el("div", { class: "marks", role: "toolbar", "aria-label": "Marks: arrows go from one to the next" });

  const draw = () => {
    drawTimeline(canvas, state);
    placeMarks();
    const length = state.to - state.from;
    where.textContent = `${duration(state.from - whole.begin)} to ${duration(state.to - whole.begin)} (${duration(length)} of ${duration(whole.end - whole.begin)})`;
    canvas.dataset.from = String(state.from - whole.begin);
    canvas.dataset.to = String(state.to - whole.begin);
  };
  let loadedLength = whole.end - whole.begin;
  const refetch = debounced(async () => {
    const { from, to } = state;
    const margin = (to - from) / 2;
    try {
      const fresh = await fetchJson(
        runPath(run.id, "/timeline", { from_s: from - margin, to_s: to + margin, points: 2 * pointsFor(canvas) }),
        { signal },
      );
      if (state.from !== from || state.to !== to) return;
      state.data = marked(fresh);
      relabel();
      draw();
    } catch (error) {
      if (error.name !== "AbortError") where.textContent = error.message;
    }
  }, 180);
  const keep = debounced(
    () =>
      !signal.aborted &&
      remember(
        route.parts,
        state.from <= whole.begin && state.to >= whole.end
          ? {}
          : { from: (state.from - whole.begin).toFixed(4), to: (state.to - whole.begin).toFixed(4) },
      ),
    200,
  );
  const show = (from, to) => {
    const length = Math.max(SHORTEST_S, Math.min(to - from, whole.end - whole.begin));
    state.from = Math.max(whole.begin, Math.min(from, whole.end - length));
    state.to = state.from + length;
    draw();
    keep();
    if (!isReport()) refetch();
  };
  const zoom = (factor, around = (state.from + state.to) / 2) =>
    show(around - (around - state.from) * factor, around + (state.to - around) * factor);
  const move = (share) =>
    show(state.from + share * (state.to - state.from), state.to + share * (state.to - state.from));
  const relabel = () =>
    fill(
      legend,
      legendOf(state, () => {
        draw();
        relabel();
      }),
    );
  const placeMarks = bindMarks(strip, canvas, state, show);
  const button = (text, label, action, key) =>
    el(
      "button",
      { type: "button", "aria-label": label, data: key ? { key } : {}, title: label, on: { click: action } },
      text,
    );

  fill(
    container,
    el(
      "div",
      { class: "row controls" },
      button("+", "Zoom in (+)", () => zoom(0.5), "+"),
      button("−", "Zoom out (-)", () => zoom(2), "-"),
      button("←", "Earlier", () => move(-0.3)),
      button("→", "Later", () => move(0.3)),
      button("Whole run", "Whole run (0)", () => show(whole.begin, whole.end), "0"),
      stepField(run, whole, show, where, signal),
      data.workers.length <= FEW_WORKERS
        ? null
        : el("input", {
            type: "search",
            placeholder: "Workers …",
            "aria-label": "Filter workers",
            data: { key: "/" },
            on: {
              input: (event) => {
                state.filter = event.target.value;
                draw();
                drawMore();
              },
            },
          }),
      where,
    ),
    el("div", { class: "timeline-box" }, el("div", { class: "lanes" }, canvas, strip), legend),
    more,
  );
  const drawMore = () =>
    fill(
      more,
      state.hiddenLanes > 0
        ? el(
            "button",
            {
              type: "button",
              on: {
                click: () => {
                  state.lanes += 256;
                  draw();
                  drawMore();
                },
              },
            },
            `Show ${Math.min(256, state.hiddenLanes)} more of ${state.hiddenLanes} workers`,
          )
        : null,
    );
  relabel();
  if (Number.isFinite(asked[0]) && Number.isFinite(asked[1]) && route.query.to)
    show(whole.begin + asked[0], whole.begin + asked[1]);
  else draw();
  drawMore();
  bindPointer(canvas, state, { zoom, show, draw }, signal);
  canvas.addEventListener(
    "keydown",
    (event) => {
      const act = {
        "+": () => zoom(0.5),
        "=": () => zoom(0.5),
        "-": () => zoom(2),
        ArrowLeft: () => move(-0.2),
        ArrowRight: () => move(0.2),
        0: () => show(whole.begin, whole.end),
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey) return;
      act();
      event.preventDefault();
    },
    { signal },
  );
  const resized = new ResizeObserver(debounced(draw, 50));
  resized.observe(canvas.parentElement);
  document.addEventListener("themechange", draw, { signal });
  signal.addEventListener("abort", () => resized.disconnect());
  const follow = paced(async () => {
    const { from, to } = state;
    if (to < whole.end) return; // an earlier part is in view, which does not change
    const isWhole = from <= whole.begin,
      isShort = whole.end - whole.begin < MOST_GROWTH * loadedLength;
    const known = { from_s: state.data.begin_s, after: state.data.version, point_s: state.data.point_s };
    const query = { points: (isWhole ? 1 : 2) * pointsFor(canvas), ...(isWhole && !isShort ? {} : known) };
    const fresh = await fetchJson(runPath(run.id, "/timeline", query), { signal }).catch(() => null);
    if (!fresh || state.from !== from || state.to !== to) return; // the reader has moved meanwhile
    const before = causesOf(state.data);
    state.data = fresh.since_s === undefined ? marked(fresh) : grownTimeline(state.data, marked(fresh));
    if (fresh.since_s === undefined && isWhole) loadedLength = fresh.whole[1] - fresh.whole[0];
    whole.end = Math.max(whole.end, fresh.whole[1]);
    state.from = isWhole ? whole.begin : whole.end - (to - from);
    state.to = whole.end;
    if (causesOf(state.data) !== before) relabel();
    draw();
  }, LIVE_MS, signal);
  onMetrics?.((event) => {
    // an end that is not in view is known without asking
    if (event && event.time_s > whole.end && state.to < whole.end) whole.end = event.time_s;
  });
  onChange?.(follow);
}

/** Which causes and marks a timeline has: what the legend lists. */
function causesOf(data) {
  const names = new Set((data.marks ?? []).map((mark) => `mark ${mark.kind}`));
  for (const worker of data.workers) for (const span of worker.spans) names.add(`${span.idle} ${span.name}`);
  return [...names].sort().join();
}

function legendOf(state, changed) {
  const seconds = new Map();
  for (const worker of state.data.workers)
    for (const span of worker.spans) {
      const key = `${span.idle ? "1" : "0"}${span.name}`;
      seconds.set(key, (seconds.get(key) ?? 0) + span.end_s - span.begin_s);
    }
  const entries = [...seconds].sort((a, b) => a[0][0].localeCompare(b[0][0]) || b[1] - a[1]);
  const part = (idle) =>
    entries
      .filter(([key]) => (key[0] === "1") === idle)
      .slice(0, 24)
      .map(([key]) => {
        const name = key.slice(1);
        return el(
          "button",
          {
            type: "button",
            class: `key${idle ? " idle" : ""}`,
            "aria-pressed": String(!state.off.has(key)),
            title: `show or hide ${name}`,
            on: {
              click: () => {
                if (!state.off.delete(key)) state.off.add(key);
                changed();
              },
            },
          },
          el("i", { style: { "--key": causeColor(name) } }),
          name,
        );
      });
  const kinds = [...new Set((state.data.marks ?? []).map((mark) => mark.kind))];
  return [
    el("div", { class: "keys-line" }, el("b", {}, "working"), part(false)),
    entries.some(([key]) => key[0] === "1") ? el("div", { class: "keys-line" }, el("b", {}, "idle"), part(true)) : null,
    kinds.length
      ? el(
          "div",
          { class: "keys-line" },
          el("b", {}, "marks"),
          kinds.map((kind) =>
            el("span", { class: `key mark ${kind}` }, el("i", { style: { "--key": causeColor(kind) } }), kind),
          ),
        )
      : null,
  ];
}

function stepField(run, whole, show, where, signal) {
  const goTo = async (event) => {
    const step = Number(event.target.value);
    if (!event.target.value || !Number.isInteger(step)) return;
    try {
      const { series } = await fetchJson(
        runPath(run.id, "/metrics", { names: "step_s", from: step, to: step, points: 10 }),
        { signal },
      );
      const at = series.step_s?.step.indexOf(step) ?? -1;
      if (at < 0) {
        where.textContent = `step ${step} is not in the metrics`;
        return;
      }
      const time = series.step_s.time_s[at],
        end = time < 1e8 && whole.begin > 1e8 ? whole.begin + time : time;
      const margin = 0.05 * series.step_s.value[at];
      show(end - series.step_s.value[at] - margin, end + margin);
    } catch (error) {
      if (error.name !== "AbortError") where.textContent = error.message;
    }
  };
  return el(
    "label",
    { class: "field" },
    el("span", {}, "step"),
    el("input", {
      type: "number",
      min: 0,
      class: "short",
      "aria-label": "Zoom to one step",
      placeholder: "n",
      on: { change: goTo },
    }),
  );
}
