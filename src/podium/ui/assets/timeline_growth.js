// SPDX-License-Identifier: Apache-2.0
// Adds what is new to the timeline that the page has.

/** What the page has until `fresh.since_s`, and from then on what the server sent. */
export function grownTimeline(data, fresh) {
  const since = fresh.since_s;
  for (const worker of fresh.workers) {
    const known = data.workers.find((each) => each.name === worker.name);
    if (!known) continue; // a new worker makes the server send everything
    const spans = known.spans.filter((span) => span.begin_s < since);
    for (const span of spans) span.end_s = Math.min(span.end_s, since);
    for (const span of worker.spans) {
      const last = spans.at(-1);
      if (last && isOnePart(last, span)) last.end_s = span.end_s;
      else spans.push(span);
    }
    known.spans = spans;
  }
  const marks = [...(data.marks ?? []).filter((mark) => mark.time_s < since), ...fresh.marks];
  return { ...data, marks, end_s: fresh.end_s, whole: fresh.whole, version: fresh.version };
}

function isOnePart(a, b) {
  const isSame = a.name === b.name && a.span === b.span && !a.merged && !b.merged;
  return isSame && Math.abs(a.end_s - b.begin_s) < 1e-5;
}
