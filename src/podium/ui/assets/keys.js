// SPDX-License-Identifier: Apache-2.0
// Keys of the page, and the overlay that lists them. Views mark what a key acts on with data-key.

import { el, fill } from "./dom.js";
import { switchTheme } from "./theme.js";

const KEYS = [
  ["?", "these keys"],
  ["/", "go to the filter or search"],
  ["1 … 9", "tab of a run"],
  ["j, k", "next or previous row of a list"],
  ["Enter", "open the row, the link or the button"],
  ["[ , ]", "previous or next page, group or answer"],
  ["+ , -", "timeline: zoom in or out"],
  ["← , →", "timeline: move; tokens: previous or next token"],
  ["0", "timeline: the whole run"],
  ["m", "timeline: to the marks; arrows go to the next or previous one, Enter zooms to it"],
  ["u", "up: from a group to the list, from a run to all runs"],
  ["t", "light or dark"],
  ["Esc", "close, leave a field"],
];

/** Opens the overlay. */
export function showKeys() {
  const dialog = document.getElementById("keys");
  fill(
    dialog,
    el("h2", { id: "keys-title" }, "Keys"),
    el(
      "dl",
      { class: "keys" },
      KEYS.map(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)]),
    ),
    el("button", { type: "button", on: { click: () => dialog.close() } }, "Close"),
  );
  if (!dialog.open) dialog.showModal();
}

/** Acts on a key of the document. */
export function handleKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  const field = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape" && field) field.blur();
  if (field || document.getElementById("keys").open) return;
  const act = { "?": showKeys, t: switchTheme, j: () => stepRow(1), k: () => stepRow(-1) }[event.key];
  if (act) {
    act();
    event.preventDefault();
    return;
  }
  const target = document.querySelector(`[data-key="${CSS.escape(event.key)}"]:not([disabled])`);
  if (!target) return;
  event.preventDefault();
  target.focus();
  if (!target.matches("input, canvas")) target.click();
}

function stepRow(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const at = rows.indexOf(document.activeElement);
  rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + by))].focus();
}
