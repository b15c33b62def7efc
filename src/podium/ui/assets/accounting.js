// SPDX-License-Identifier: Apache-2.0
// Where the time of the workers went: seconds and shares by cause. The causes of a worker add up to its time.

import { fetchJson, runPath } from "./api.js";
import { causeColor } from "./colors.js";
import { choice, el, fill, tableOf } from "./dom.js";
import { showFindings } from "./findings.js";
import { duration, percent } from "./formats.js";
import { loadInto, stateBox } from "./states.js";

const SHOWN_CAUSES = 14;
// Workers of one kind whose idle shares differ by this much are unequal.
const UNEQUAL_SHARE = 0.15;
const READ_AGAIN_MS = 4000;

/** Shows the accounting of a run. */
export function showAccounting(container, context) {
  const { run, signal } = context;
  const findings = el("div", {});
  const reload = loadInto(
    container,
    () => fetchJson(runPath(run.id, "/accounting"), { signal }),
    (_, data) => {
      const workers = data.workers ?? [];
      if (!workers.length) {
        fill(container, el("h2", {}, "Where the time went"), stateBox("Nothing to account yet"));
        return;
      }
      const list = el("div", { class: "accounts" });
      const draw = (by) =>
        fill(
          list,
          by === "kind" ? kindsOf(workers).map((kind) => account(kind)) : workers.map((worker) => account(worker)),
        );
      fill(
        container,
        el(
          "div",
          { class: "row" },
          el("h2", {}, "Where the time went"),
          choice(
            "by",
            [
              ["kind", "kind of worker"],
              ["worker", "worker"],
            ],
            "kind",
            draw,
          ),
        ),
        partNote(data, () => reload(true), signal),
        findings,
        list,
      );
      draw("kind");
    },
    signal,
    "accounting",
  );
  showFindings(findings, context, "time");
}

/** Says that the server has read only the newest part of a long timeline so far, and looks again. */
export function partNote(data, again, signal) {
  if (data.is_whole !== false) return null;
  const timer = setTimeout(again, READ_AGAIN_MS);
  signal.addEventListener("abort", () => clearTimeout(timer));
  return el("p", { class: "dim small" }, "Of the newest part of the timeline: the rest is being read.");
}

/** By kind; a worker and those that replaced it count as one member. */
function kindsOf(workers) {
  const kinds = new Map();
  for (const slot of sums(workers, slotOf)) {
    const kind = kinds.get(slot.kind) ?? [];
    kinds.set(slot.kind, [...kind, slot]);
  }
  return [...kinds].map(([name, members]) => ({ ...sums(members, () => name)[0], count: members.length, members }));
}

function slotOf(worker) {
  return worker.name.split("@")[0];
}

/** Workers with the same name by `nameOf` together. */
function sums(workers, nameOf) {
  const found = new Map();
  for (const worker of workers) {
    const name = nameOf(worker);
    const sum = found.get(name) ?? { name, kind: worker.kind, total_s: 0, seconds: {} };
    sum.total_s += worker.total_s;
    for (const [cause, spent] of Object.entries(worker.seconds)) sum.seconds[cause] = (sum.seconds[cause] ?? 0) + spent;
    found.set(name, sum);
  }
  return [...found.values()];
}

/** Whether a cause is one of waiting. */
export function isIdleCause(cause) {
  return /^(idle|waiting|residency|unknown)/.test(cause); // as podium.observe.causes
}

function idleShare({ seconds, total_s: total }) {
  const idle = Object.entries(seconds).reduce((sum, [cause, spent]) => sum + (isIdleCause(cause) ? spent : 0), 0);
  return total > 0 ? idle / total : 0;
}

/** Says which workers of a kind are idle least and most, where they differ: the others wait for the busiest. */
function spreadOf(members = []) {
  const shares = members
    .map((slot) => [slot.name, idleShare(slot)])
    .sort((a, b) => a[1] - b[1]);
  if (shares.length < 2 || shares.at(-1)[1] - shares[0][1] < UNEQUAL_SHARE) return null;
  const [busiest, laziest] = [shares[0], shares.at(-1)];
  return el(
    "p",
    { class: "small" },
    `Unequal: ${busiest[0]} is idle ${percent(busiest[1])} of its time, ${laziest[0]} ${percent(laziest[1])}.`,
  );
}

function account({ name, count, total_s: total, seconds, members }) {
  const causes = Object.entries(seconds)
    .filter(([, spent]) => spent > 0)
    .sort((a, b) => b[1] - a[1]);
  const shown = causes.slice(0, SHOWN_CAUSES),
    rest = causes.slice(SHOWN_CAUSES).reduce((sum, [, spent]) => sum + spent, 0);
  const idle = causes.filter(([cause]) => isIdleCause(cause)).reduce((sum, [, spent]) => sum + spent, 0);
  const rows = [...shown, ...(rest > 0 ? [["all others", rest]] : [])].map(([cause, spent]) => [
    { cell: [swatch(cause), cause] },
    { cell: duration(spent), class: "num" },
    { cell: percent(spent / total), class: "num" },
  ]);
  return el(
    "div",
    { class: "account" },
    el(
      "h3",
      {},
      name,
      el(
        "span",
        { class: "dim small" },
        ` ${count > 1 ? `${count} workers, ` : ""}${duration(total)}, ${percent(idle / total)} idle`,
      ),
    ),
    el(
      "div",
      {
        class: "bar",
        role: "img",
        "aria-label": `${name}: ${causes
          .slice(0, 4)
          .map(([cause, spent]) => `${cause} ${percent(spent / total)}`)
          .join(", ")}`,
      },
      shown.map(([cause, spent]) =>
        el("i", {
          class: isIdleCause(cause) ? "idle" : null,
          title: `${cause} ${percent(spent / total)}`,
          style: { width: `${(100 * spent) / total}%`, "--key": causeColor(cause) },
        }),
      ),
    ),
    spreadOf(members),
    tableOf(["cause", { cell: "time", class: "num" }, { cell: "share", class: "num" }], rows, {
      label: `Time of ${name}`,
      class: "tight",
    }),
  );
}

function swatch(cause) {
  return el("i", { class: `swatch${isIdleCause(cause) ? " idle" : ""}`, style: { "--key": causeColor(cause) } });
}
