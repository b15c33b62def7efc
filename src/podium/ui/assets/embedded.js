// SPDX-License-Identifier: Apache-2.0
// Answers from the data inside a report: {"path?query": answer}.

let embeddedData; // undefined: not looked for yet; null: the page has none

function reportData() {
  if (embeddedData === undefined) {
    const node = document.getElementById("podium-data");
    embeddedData = node ? JSON.parse(node.textContent) : null;
  }
  return embeddedData;
}

/** Whether this page is a report: it has its data with it, and no server. */
export function isReport() {
  return reportData() !== null;
}

/** The answer to a path with its query, or undefined. A query that was not stored is answered from the same path. */
export function embeddedAnswer(path) {
  const data = reportData();
  if (Object.hasOwn(data, path)) return data[path];
  const asked = new URL(path, "http://report/");
  const wanted = decodeURIComponent(asked.pathname);
  const stored = Object.entries(data)
    .filter(([key]) => decodeURIComponent(new URL(key, "http://report/").pathname) === wanted)
    .map(([, answer]) => answer);
  if (!stored.length) return undefined;
  if (wanted.endsWith("/metrics")) return embeddedMetrics(stored, asked.searchParams);
  if (wanted.endsWith("/rollouts")) return embeddedRollouts(stored, asked.searchParams);
  return stored[0];
}

function embeddedMetrics(stored, query) {
  const names = query.get("names")?.split(",");
  const from = Number(query.get("from") ?? -Infinity),
    to = Number(query.get("to") ?? Infinity);
  const series = {};
  for (const answer of stored)
    for (const [name, each] of Object.entries(answer.series)) {
      if (names && !names.includes(name)) continue;
      const kept = each.step.map((step, at) => (step >= from && step <= to ? at : -1)).filter((at) => at >= 0);
      series[name] = Object.fromEntries(Object.entries(each).map(([key, list]) => [key, kept.map((at) => list[at])]));
    }
  return { series };
}

const ORDERS = {
  reward: (a, b) => a.reward - b.reward,
  "-reward": (a, b) => b.reward - a.reward,
  length: (a, b) => a.length - b.length,
  "-length": (a, b) => b.length - a.length,
  step: (a, b) => a.step - b.step,
  "-step": (a, b) => b.step - a.step,
  group: (a, b) => a.group - b.group || a.sample - b.sample,
};

function embeddedRollouts(stored, query) {
  const text = (query.get("q") ?? "").toLowerCase();
  const same = (key, row) => !query.get(key) || String(row[key]) === query.get(key);
  const rows = stored
    .flatMap((answer) => answer.rows)
    .filter((row) => same("step", row) && same("group", row) && same("source", row) && same("row", row))
    .filter((row) => row.step >= Number(query.get("from") ?? 0))
    .filter((row) => !text || `${row.preview} ${row.source} ${row.ending}`.toLowerCase().includes(text))
    .sort(ORDERS[query.get("sort")] ?? ORDERS.step);
  const size = Number(query.get("size") ?? 50),
    page = Number(query.get("page") ?? 1);
  return { ...stored[0], total: rows.length, page, rows: rows.slice((page - 1) * size, page * size) };
}
