// SPDX-License-Identifier: Apache-2.0
// Light or dark: as the system says, until the reader chooses.

const THEME_KEY = "podium-theme";

/** Applies the choice of an earlier visit. */
export function startTheme() {
  try {
    const chosen = localStorage.getItem(THEME_KEY);
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // No storage: as the system says.
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announceTheme);
}

/** Changes to the other one. */
export function switchTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(THEME_KEY, next);
  } catch {
    // No storage: until the page is loaded again.
  }
  announceTheme();
}

/** Whether the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** The value of a CSS variable now: canvases do not inherit them. */
export function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function announceTheme() {
  document.dispatchEvent(new Event("themechange"));
}
