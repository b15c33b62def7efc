// SPDX-License-Identifier: Apache-2.0
// Colours of lines, phases and tokens.

import { isDark } from "./theme.js";

// Hues that stay apart for most kinds of colour blindness, in light and dark.
const LINE_COLORS = [
  "#3b74d1",
  "#e0792a",
  "#2c9d6b",
  "#c2417c",
  "#8a63c9",
  "#b0922a",
  "#2aa1b3",
  "#d1554c",
  "#7d8a2e",
  "#8d6e63",
];
// By what a name says; the first that fits. A cause of idle time has the colour of what the others did meanwhile.
const PHASE_COLORS = [
  [/recover|respawn|death|dead|left/, "#d1554c"],
  [/start-up|launch|facts|prepar|shut-down|joined|control/, "#8895a7"],
  [/evaluat|heldout/, "#c2417c"],
  [/checkpoint|sav(e|ing)|snapshot/, "#8d6e63"],
  [/tail/, "#5f8fe0"],
  [/grad(e|ing)|grader|reward/, "#c08a1e"],
  [/tool/, "#dd86a4"],
  [/other r/, "#b06fc4"],
  [/lend|lent|recall|residen|sleep|wake|offload|switch/, "#7d8a2e"],
  [/publish|share|install|weights|transfer/, "#8a63c9"],
  [/scor(e|ing)|reference|teacher|critic/, "#2aa1b3"],
  [/update|compute|train|forward|backward|optimizer/, "#2c9d6b"],
  [/rollout|stream|generat|decod|prefill|sampl|episode/, "#3b74d1"],
  [/prompt|data|loader/, "#e0792a"],
];
const NO_CAUSE = "#9aa7b8";

/** The colour of line number `at`. */
export function lineColor(at) {
  return LINE_COLORS[at % LINE_COLORS.length];
}

/** A colour with an opacity of 0 to 1. */
export function faded(color, opacity) {
  return `${color}${Math.round(opacity * 255)
    .toString(16)
    .padStart(2, "0")}`;
}

/** The colour of a phase or, hatched by the caller, of a cause of idle time. The same name always has the same one. */
export function causeColor(name) {
  if (/^(idle|unknown|other)$/.test(name)) return NO_CAUSE;
  const word = name.toLowerCase();
  return PHASE_COLORS.find(([has]) => has.test(word))?.[1] ?? LINE_COLORS[hashOf(name) % LINE_COLORS.length];
}

function hashOf(text) {
  let hash = 7;
  for (let at = 0; at < text.length; at += 1) hash = (hash * 31 + text.charCodeAt(at)) >>> 0;
  return hash;
}

/** The background of a token: [colour or null]. `token` as in tokens.js, `scale` of the episode. */
export function tokenColor(token, by, scale) {
  const dark = isDark();
  if (by === "log_prob") {
    if (token.logProb === null) return null;
    const unlikely = Math.min(1, -token.logProb / 6);
    return `hsl(${Math.round(120 * (1 - unlikely))} 70% ${dark ? 32 : 72}% / ${(0.25 + 0.75 * unlikely).toFixed(2)})`;
  }
  if (by === "version") {
    if (token.version === null) return null;
    return `hsl(${(215 + 67 * (scale.newest - token.version)) % 360} 65% ${dark ? 34 : 80}%)`;
  }
  if (by === "mask") return token.trained ? (dark ? "hsl(150 55% 26%)" : "hsl(150 60% 80%)") : null;
  if (by === "advantage") {
    if (token.advantage === null || !scale.advantage) return null;
    const size = Math.min(1, Math.abs(token.advantage) / scale.advantage);
    return `hsl(${token.advantage < 0 ? 8 : 215} 75% ${dark ? 40 : 65}% / ${(0.12 + 0.88 * size).toFixed(2)})`;
  }
  return null;
}
