// SPDX-License-Identifier: Apache-2.0
// Numbers, times and sizes as short texts.

/** A number with about four digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000) return value.toFixed(0);
  if (size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** 75 -> "1m 15s". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const size = Math.abs(seconds),
    sign = seconds < 0 ? "-" : "";
  if (size === 0) return "0 s";
  if (size < 0.001) return `${sign}${(size * 1e6).toFixed(0)} µs`;
  if (size < 1) return `${sign}${Number((size * 1000).toPrecision(3))} ms`;
  if (size < 60) return `${sign}${Number(size.toPrecision(3))} s`;
  if (size < 3600) return `${sign}${Math.floor(size / 60)}m ${String(Math.floor(size % 60)).padStart(2, "0")}s`;
  if (size < 86400)
    return `${sign}${Math.floor(size / 3600)}h ${String(Math.floor((size % 3600) / 60)).padStart(2, "0")}m`;
  return `${sign}${Math.floor(size / 86400)}d ${Math.floor((size % 86400) / 3600)}h`;
}

/** How long ago a moment (seconds since 1970) was. */
export function ago(moment, now = Date.now() / 1000) {
  if (!moment) return "–";
  const passed = now - moment;
  return passed < 5 ? "now" : `${duration(Math.round(passed))} ago`;
}

/** A moment (seconds since 1970) as the local date and time. */
export function moment(seconds) {
  if (!seconds || seconds < 1e8) return seconds === null || seconds === undefined ? "–" : duration(seconds);
  return new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "short", timeStyle: "medium" });
}

/** 1536 -> "1.5 KiB". */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (size >= 1024 && at < units.length - 1) {
    size /= 1024;
    at += 1;
  }
  return `${Number(size.toPrecision(3))} ${units[at]}`;
}

/** 0.381 -> "38%". */
export function percent(share) {
  if (!Number.isFinite(share)) return "–";
  return share > 0 && share < 0.01 ? "<1%" : `${Math.round(share * 100)}%`;
}

/** A value of a recipe as text. */
export function plain(value) {
  if (value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}
