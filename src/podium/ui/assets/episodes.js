// SPDX-License-Identifier: Apache-2.0
// The episodes of one prompt side by side: turns, tool calls, rewards, tokens.

import { fetchJson, runPath } from "./api.js";
import { choice, el, fill, tableOf } from "./dom.js";
import { isReport } from "./embedded.js";
import { number, plain } from "./formats.js";
import { rewardBadge, rewardRange } from "./rollouts.js";
import { addressOf, remember } from "./router.js";
import { loadInto, stateBox } from "./states.js";
import { hasTokens, TOKEN_COLORS, tokenLegend, tokenView } from "./tokens.js";

const MOST_SIDE_BY_SIDE = 16;

/** Shows a group. */
export function showGroup(body, { run, route, signal }, step, group) {
  const query = { view: "tokens", color: "log_prob", ...route.query };
  const isAlone = query.alone === "1";
  const part = isAlone ? { sample: query.sample, token: query.token } : { episode: query.episode };
  const place = `/rollouts/${encodeURIComponent(step)}/${encodeURIComponent(group)}`;
  loadInto(
    body,
    () => fetchJson(runPath(run.id, place, part), { signal }),
    (_, { episodes, first_episode: firstEpisode, left_out: leftOut }) => {
      if (!episodes?.length) {
        fill(
          body,
          stateBox(
            `Step ${step} has no group ${group}`,
            null,
            el("a", { class: "button", href: addressOf(["run", run.id, "rollouts"]) }, "All rollouts"),
          ),
        );
        return;
      }
      const asked = Number(route.query.sample),
        first = Math.max(
          0,
          episodes.findIndex((each) => each.sample === asked),
        );
      const state = {
        ...query,
        at: first,
        wide: query.wide === "1" || (query.wide === undefined && episodes.length > 1),
      };
      const list = el("div", { class: "episodes" }),
        legend = el("div", {});
      const draw = () => {
        remember(route.parts, {
          sample: episodes[state.at].sample,
          view: state.view === "tokens" ? "" : state.view,
          color: state.color === "log_prob" ? "" : state.color,
          wide: state.wide ? "1" : "0",
          alone: query.alone,
          token: query.token,
          episode: query.episode,
        });
        const shown = state.wide ? episodes.slice(0, MOST_SIDE_BY_SIDE) : [episodes[state.at]];
        const range = rewardRange(episodes);
        list.classList.toggle("side", state.wide);
        fill(legend, state.view === "tokens" ? tokenLegend(state.color, episodes) : null);
        fill(
          list,
          shown.map((episode) =>
            episodeCard(episode, state, range, episode === episodes[state.at], leftOutLine(episode, route.parts, isAlone)),
          ),
          state.wide && episodes.length > shown.length
            ? el("p", { class: "dim" }, `${episodes.length - shown.length} more: choose “one answer” to see them.`)
            : null,
        );
      };
      const step1 = (by) => () => {
        state.at = (state.at + by + episodes.length) % episodes.length;
        draw();
        if (state.wide)
          list.children[Math.min(state.at, MOST_SIDE_BY_SIDE - 1)].scrollIntoView({
            block: "nearest",
            inline: "center",
          });
      };
      const prompt = promptOf(episodes[0]);
      fill(
        body,
        el(
          "div",
          { class: "row controls" },
          el("a", { class: "button", href: addressOf(["run", run.id, "rollouts"]), data: { key: "u" } }, "← List"),
          el("strong", {}, `step ${number(episodes[0].step)}, group ${episodes[0].group}`),
          episodes[0].source
            ? el(
                "span",
                { class: "dim" },
                `${episodes[0].source}${episodes[0].row !== null && episodes[0].row !== undefined ? `, row ${episodes[0].row}` : ""}`,
              )
            : null,
          episodes[0].row !== null && episodes[0].row !== undefined
            ? el(
                "a",
                {
                  class: "button",
                  href: addressOf(["run", run.id, "rollouts"], {
                    source: episodes[0].source,
                    row: episodes[0].row,
                    sort: "step",
                  }),
                },
                "This prompt at all steps",
              )
            : null,
          choice(
            "show",
            [
              ["tokens", "tokens"],
              ["turns", "turns"],
            ],
            state.view,
            (view) => {
              state.view = view;
              draw();
            },
          ),
          choice("colour", TOKEN_COLORS, state.color, (color) => {
            state.color = color;
            draw();
          }),
          choice(
            "answers",
            [
              ["1", "side by side"],
              ["0", "one answer"],
            ],
            state.wide ? "1" : "0",
            (wide) => {
              state.wide = wide === "1";
              draw();
            },
          ),
          episodes.length > 1
            ? [
                el(
                  "button",
                  { type: "button", "aria-label": "Previous answer", data: { key: "[" }, on: { click: step1(-1) } },
                  "‹",
                ),
                el(
                  "button",
                  { type: "button", "aria-label": "Next answer", data: { key: "]" }, on: { click: step1(1) } },
                  "›",
                ),
              ]
            : null,
        ),
        prompt
          ? el(
              "details",
              { class: "prompt", open: prompt.length < 600 },
              el("summary", {}, "Prompt"),
              el("div", { class: "said" }, prompt),
            )
          : null,
        legend,
        list,
        otherAnswers(route.parts, isAlone, firstEpisode ?? 0, episodes.length, leftOut ?? 0),
      );
      draw();
    },
    signal,
    "group",
  );
}

/** What of a long answer is not shown, with links to it. */
function leftOutLine(episode, parts, isAlone) {
  const first = episode.first_token ?? 0,
    more = episode.tokens_left_out ?? 0,
    characters = episode.characters_left_out ?? 0;
  if (!first && !more && !characters) return null;
  const link = (token, text) =>
    el("a", { class: "button", href: addressOf(parts, { sample: episode.sample, alone: "1", token }) }, text);
  return el(
    "p",
    { class: "dim small left-out" },
    [
      first ? `These are the tokens from ${number(first)} on.` : null,
      more ? `${number(more)} more tokens are left out.` : null,
      characters ? `${number(characters)} characters of its messages are left out.` : null,
    ]
      .filter(Boolean)
      .join(" "),
    " ",
    isReport() || isAlone ? null : link("", "This answer alone"),
    first ? link("", "← First tokens") : null,
    isAlone && more ? link(first + (episode.loss_mask ?? episode.tokens ?? []).length, "Next tokens →") : null,
  );
}

/** Links to the answers of a group that are not on this page. */
function otherAnswers(parts, isAlone, first, count, leftOut) {
  const link = (query, text) => el("a", { class: "button", href: addressOf(parts, query) }, text);
  if (isAlone) return el("p", {}, link({}, "← All answers of the group"));
  if (isReport() || (!first && !leftOut)) return null;
  return el(
    "p",
    { class: "dim" },
    `Answers ${first + 1} to ${first + count} of ${first + count + leftOut}. `,
    first ? link({}, "← First answers") : null,
    leftOut ? link({ episode: first + count }, "Next answers →") : null,
  );
}

function episodeCard(episode, state, range, current, leftOut) {
  const components = Object.entries(rewardsOf(episode));
  return el(
    "article",
    { class: `episode${current ? " current" : ""}`, "aria-label": `sample ${episode.sample}` },
    el(
      "header",
      { class: "row" },
      el("h3", {}, `sample ${episode.sample}`),
      rewardBadge(episode.reward, range),
      el(
        "span",
        { class: "dim small" },
        [episode.ending, `${number(sampledTokens(episode))} tokens`, advantageText(episode), versionsText(episode)]
          .filter(Boolean)
          .join(" · "),
      ),
      episode.trained === false ? el("span", { class: "badge quiet" }, "not trained") : null,
    ),
    components.length > 0
      ? tableOf(
          null,
          components.map(([name, value]) => [name, { cell: number(value), class: "num" }]),
          { label: "Rewards by component", class: "tight rewards" },
        )
      : null,
    state.view === "tokens" && hasTokens(episode) ? tokenView(episode, state.color) : turnsOf(episode),
    leftOut,
  );
}

function turnsOf(episode) {
  const messages = messagesOf(episode);
  if (!messages.length) return el("p", { class: "dim" }, "This file has no messages.");
  return el(
    "ol",
    { class: "turns" },
    messages.map((message) =>
      el(
        "li",
        { class: `turn ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other"}` },
        el("div", { class: "who" }, message.role ?? "?", message.name ? ` ${message.name}` : ""),
        message.content
          ? el(
              "div",
              { class: "said" },
              typeof message.content === "string" ? message.content : JSON.stringify(message.content, null, 1),
            )
          : null,
        (Array.isArray(message.tool_calls) ? message.tool_calls : []).map(toolCall),
      ),
    ),
  );
}

function toolCall(call) {
  const made = call?.function ?? call ?? {};
  let given = made.arguments;
  if (typeof given === "string") {
    try {
      given = JSON.parse(given);
    } catch {
      // Not JSON: as the model wrote it.
    }
  }
  const rows = given && typeof given === "object" && !Array.isArray(given) ? Object.entries(given) : null;
  return el(
    "div",
    { class: "call" },
    el("div", { class: "who" }, "calls ", el("code", {}, plain(made.name ?? "?"))),
    rows
      ? el(
          "dl",
          {},
          rows.map(([key, value]) => [el("dt", {}, key), el("dd", {}, plain(value))]),
        )
      : el("div", { class: "said" }, plain(given)),
  );
}

function messagesOf(episode) {
  if (Array.isArray(episode.messages)) return episode.messages;
  try {
    const parsed = JSON.parse(episode.messages ?? "[]");
    return Array.isArray(parsed) ? parsed : [];
  } catch {
    return [];
  }
}

function promptOf(episode) {
  const messages = messagesOf(episode);
  const answer = messages.findIndex((message) => message.role === "assistant");
  const before = (answer < 0 ? messages : messages.slice(0, answer)).map((message) =>
    typeof message.content === "string" ? message.content : JSON.stringify(message.content),
  );
  return before.length ? before.join("\n\n") : (episode.texts ?? []).slice(0, episode.prompt_tokens ?? 0).join("");
}

function rewardsOf(episode) {
  return Array.isArray(episode.rewards) ? Object.fromEntries(episode.rewards) : (episode.rewards ?? {});
}

function sampledTokens(episode) {
  if (episode.tokens_left_out || episode.first_token) return episode.num_tokens - (episode.prompt_tokens ?? 0);
  return (
    (episode.versions ?? episode.log_probs ?? []).filter((each) => each !== null).length ||
    (episode.tokens ?? []).length - (episode.prompt_tokens ?? 0)
  );
}

function advantageText(episode) {
  const found = (episode.advantages ?? []).filter((each) => each !== null);
  return found.length ? `advantage ${number(found.reduce((sum, each) => sum + each, 0) / found.length)}` : null;
}

function versionsText(episode) {
  const found = [...new Set((episode.versions ?? []).filter((each) => each !== null))].sort((a, b) => a - b);
  return found.length ? `version ${found.length > 1 ? `${found[0]} to ${found.at(-1)}` : found[0]}` : null;
}
