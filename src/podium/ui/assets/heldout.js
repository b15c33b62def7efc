// SPDX-License-Identifier: Apache-2.0
// Held-out answers to one prompt over the steps.

import { fetchJson, runPath } from "./api.js";
import { choice, el, fill, tableOf } from "./dom.js";
import { number, plain } from "./formats.js";
import { remember } from "./router.js";
import { loadInto, stateBox } from "./states.js";

const TITLE_LENGTH = 70;

/** Shows the tab. */
export function showHeldout(body, { run, route, signal }) {
  loadInto(
    body,
    () => fetchJson(runPath(run.id, "/heldout"), { signal }),
    (_, { prompts = [] }) => {
      if (!prompts.length) {
        fill(
          body,
          stateBox(
            "No held-out answers yet",
            "Evaluation with `evaluation.generation` writes some of its answers to the run folder; `show` says how many.",
          ),
        );
        return;
      }
      const answers = el("div", {});
      const draw = (at) => {
        remember(route.parts, { prompt: at === "0" ? "" : at });
        const { prompt, answers: given } = prompts[Number(at)] ?? prompts[0];
        const reference = given.find(
          (answer) => answer.reference !== null && answer.reference !== undefined,
        )?.reference;
        let before = null;
        const rows = given.map((answer) => {
          const text = answer.answer ?? answer.text ?? "",
            changed = before !== null && before !== text;
          before = text;
          return [
            { cell: answer.step, class: "num" },
            { cell: number(answer.score), class: "num" },
            { cell: changed ? el("span", { class: "badge live" }, "changed") : "" },
            { cell: text, class: "said" },
          ];
        });
        fill(
          answers,
          el(
            "div",
            { class: "card" },
            el("h2", {}, "Prompt"),
            el("div", { class: "said" }, promptText(prompt)),
            reference === undefined || reference === null
              ? null
              : el("p", { class: "dim" }, `reference: ${plain(reference)}`),
          ),
          tableOf([{ cell: "step", class: "num" }, { cell: "score", class: "num" }, "", "answer"], rows, {
            label: "Answers over the steps",
          }),
        );
      };
      const first = prompts[Number(route.query.prompt)] ? route.query.prompt : "0";
      fill(
        body,
        el(
          "div",
          { class: "row controls" },
          choice(
            "prompt",
            prompts.map((each, at) => [
              String(at),
              promptText(each.prompt).replace(/\s+/g, " ").slice(0, TITLE_LENGTH) || `prompt ${at}`,
            ]),
            first,
            draw,
          ),
          el("span", { class: "dim small" }, `${prompts.length} prompts`),
        ),
        answers,
      );
      draw(first);
    },
    signal,
    "held-out answers",
  );
}

function promptText(prompt) {
  if (Array.isArray(prompt))
    return prompt
      .map((message) => (message && typeof message === "object" ? plain(message.content) : plain(message)))
      .join("\n\n");
  return plain(prompt ?? "");
}
