// SPDX-License-Identifier: Apache-2.0
// Builds elements. Text comes in as text nodes only, so whatever a model answered stays text.

const SAFE_LINK = /^#/;

/**
 * An element. `attributes`: `class`, `on` (listeners by event), `data` (data-*), `style` (properties, set through the
 * CSSOM), any attribute by its name; true sets it empty, false, null and undefined leave it out.
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name === "value") node.value = value;
    else if (name.startsWith("on") || (name === "href" && !SAFE_LINK.test(value)) || name === "src")
      throw new Error(`attribute ${name} is not allowed here`);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

/** Appends nodes and texts; nothing for null and false. */
function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replaces what is in a node. */
export function fill(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

/** A table: headings, and rows of cells. A cell is a text, a node, or {cell, class}. */
export function tableOf(headings, rows, attributes = {}) {
  const cell = (tag, each, scope) => {
    const plain = each === null || typeof each !== "object" || each instanceof Node;
    const content = plain ? each : each.cell;
    return el(tag, { class: plain ? null : each.class, scope }, content);
  };
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": attributes.label || "table" },
    el(
      "table",
      { class: attributes.class },
      headings
        ? el(
            "thead",
            {},
            el(
              "tr",
              {},
              headings.map((each) => cell("th", each, "col")),
            ),
          )
        : null,
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((each) => cell("td", each)),
          ),
        ),
      ),
    ),
  );
}

/** A labelled choice. */
export function choice(label, options, value, change) {
  return el(
    "label",
    { class: "field" },
    el("span", {}, label),
    el(
      "select",
      { value, on: { change: (event) => change(event.target.value) } },
      options.map(([each, text]) => el("option", { value: each, selected: each === value }, text)),
    ),
  );
}

/** Calls `action` after `delay` ms without another call. */
export function debounced(action, delay) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), delay);
  };
}

/** Shows a card of lines near a point of the window. */
export function showTooltip(lines, x, y) {
  const box = document.getElementById("tooltip");
  fill(
    box,
    lines.map((line) => el("div", {}, line)),
  );
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(x + 14, window.innerWidth - width - 8))}px`;
  box.style.top = `${y + 18 + height > window.innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

/** Hides it. */
export function hideTooltip() {
  document.getElementById("tooltip").hidden = true;
}
