// SPDX-License-Identifier: Apache-2.0
// Tokens of an episode, coloured; the one under the pointer, finger or focus says what is known of it.

import { tokenColor } from "./colors.js";
import { el, hideTooltip, showTooltip } from "./dom.js";
import { number } from "./formats.js";

export const TOKEN_COLORS = [
  ["log_prob", "log-prob"],
  ["version", "version"],
  ["mask", "loss mask"],
  ["advantage", "advantage"],
  ["none", "none"],
];
const MOST_TOKENS = 20000;

/** Whether tokens can be shown. */
export function hasTokens(episode) {
  return Array.isArray(episode.texts) && episode.texts.length > 0;
}

/** All tokens of an episode. */
export function tokenView(episode, by) {
  const tokens = tokensOf(episode),
    scale = scaleOf(tokens);
  const shown = tokens.slice(0, MOST_TOKENS);
  const box = el(
    "div",
    { class: "tokens", role: "group", "aria-label": "Tokens. Arrow keys go from one to the next." },
    shown.map((token, at) => {
      const color = tokenColor(token, by, scale);
      return el(
        "span",
        {
          class: `token${token.prompt ? " of-prompt" : ""}`,
          data: { at: String(at) },
          tabindex: at === 0 ? 0 : -1,
          style: color ? { background: color } : {},
        },
        visible(token.text),
      );
    }),
    tokens.length > MOST_TOKENS
      ? el("p", { class: "dim" }, `${tokens.length - MOST_TOKENS} more tokens are in the file.`)
      : null,
  );
  const tell = (node) => {
    const token = shown[Number(node.dataset.at)];
    const { left, bottom } = node.getBoundingClientRect();
    const lines = tokenLines(token);
    node.setAttribute("aria-label", lines.join(", "));
    showTooltip(lines, left - 10, bottom - 14);
  };
  const under = (event) => event.target.closest?.(".token");
  box.addEventListener("pointerover", (event) => (under(event) ? tell(under(event)) : hideTooltip()));
  box.addEventListener("pointerleave", hideTooltip);
  box.addEventListener("click", (event) => under(event)?.focus());
  box.addEventListener("focusin", (event) => {
    if (!under(event)) return;
    box.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    under(event).setAttribute("tabindex", "0");
    tell(under(event));
  });
  box.addEventListener("focusout", hideTooltip);
  box.addEventListener("keydown", (event) => {
    const node = under(event);
    const next = {
      ArrowRight: node?.nextElementSibling,
      ArrowLeft: node?.previousElementSibling,
      Home: box.firstElementChild,
      End: box.lastElementChild,
    }[event.key];
    if (!next?.matches(".token")) return;
    next.focus();
    event.preventDefault();
  });
  return box;
}

function tokensOf(episode) {
  const at = (list, place) => list?.[place] ?? null,
    first = episode.first_token ?? 0;
  return episode.texts.map((text, place) => ({
    text,
    place: first + place,
    id: at(episode.tokens, place),
    logProb: at(episode.log_probs, place),
    version: at(episode.versions, place),
    advantage: at(episode.advantages, place),
    trained: Boolean(at(episode.loss_mask, place)),
    prompt: first + place < (episode.prompt_tokens ?? 0),
  }));
}

function scaleOf(tokens) {
  let newest = 0,
    advantage = 0;
  for (const token of tokens) {
    newest = Math.max(newest, token.version ?? 0);
    advantage = Math.max(advantage, Math.abs(token.advantage ?? 0));
  }
  return { newest, advantage };
}

function tokenLines(token) {
  return [
    `${JSON.stringify(token.text)}  id ${token.id ?? "–"}`,
    `position ${token.place}${token.prompt ? ", prompt" : ""}`,
    token.logProb === null
      ? "log-prob –"
      : `log-prob ${number(token.logProb)} (${number(100 * Math.exp(token.logProb))}%)`,
    `version ${token.version ?? "–"}`,
    `loss mask ${token.trained ? "trained" : "not trained"}`,
    `advantage ${token.advantage === null ? "–" : number(token.advantage)}`,
  ];
}

function visible(text) {
  if (text === "") return "∅";
  return text.replace(/\r/g, "␍").replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}

/** What the colours mean. */
export function tokenLegend(by, episodes) {
  const sample = (text, token, scale) =>
    el("span", { class: "token", style: { background: tokenColor(token, by, scale) ?? "transparent" } }, text);
  const none = { logProb: null, version: null, advantage: null, trained: false };
  const scale = { newest: 0, advantage: 1 };
  if (by === "log_prob")
    return el(
      "p",
      { class: "small legend-line" },
      [0, -1, -3, -6].map((logProb) => [sample(`${logProb}`, { ...none, logProb }, scale), " "]),
      "log-prob; uncoloured: not sampled",
    );
  if (by === "mask")
    return el(
      "p",
      { class: "small legend-line" },
      sample("trained", { ...none, trained: true }, scale),
      " uncoloured: not in the loss",
    );
  if (by === "advantage")
    return el(
      "p",
      { class: "small legend-line" },
      sample("negative", { ...none, advantage: -1 }, scale),
      " ",
      sample("positive", { ...none, advantage: 1 }, scale),
      " stronger: larger, within the answer",
    );
  if (by === "version") {
    const versions = [...new Set(episodes.flatMap((episode) => episode.versions ?? []).filter((each) => each !== null))]
      .sort((a, b) => a - b)
      .slice(-8);
    return el(
      "p",
      { class: "small legend-line" },
      versions.map((version) => [sample(`version ${version}`, { ...none, version }, { newest: versions.at(-1) }), " "]),
      "of the weights; uncoloured: not sampled",
    );
  }
  return null;
}
