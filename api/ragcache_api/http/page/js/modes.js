// How far each mode is from `exact` on the model, as the gate measured it.
import { h } from "./dom.js";
import { percent } from "./format.js";
import { empty } from "./parts.js";

/** state: as the server tells it. */
export function modeLines({ modes, force_modes }) {
  if (!modes.length) {
    return empty(
      force_modes ? "Every mode serves" : "Not measured yet",
      force_modes
        ? "The setting force_modes is on, so that no mode is measured before it serves."
        : "The first question of a mode measures it, once.",
    );
  }
  return modes.map((mode) => line(mode, force_modes));
}

function line({ mode, kl_divergence, agreement, equal_answers, limit, prompts, passes }, forced) {
  const verdict = passes ? "serves" : forced ? "forced" : "refused";
  return h(
    "div",
    { class: "tier", "data-mode": mode },
    h(
      "div",
      { class: "line" },
      h("strong", {}, mode),
      h(
        "span",
        { class: "num" },
        `${kl_divergence.toFixed(2)} nats`,
        h("span", { class: "muted" }, ` of ${limit.toFixed(2)} at most`),
        h("b", {}, verdict),
      ),
    ),
    h("div", { class: "line muted" }, `${percent(agreement)} of ${prompts} first tokens agree`),
    h("div", { class: "line muted" }, `${percent(equal_answers)} of the answers are those of exact`),
  );
}
