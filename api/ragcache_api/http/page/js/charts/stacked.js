// Tokens by source over time, as stacked bars.
import { s } from "../dom.js";
import { compact, count } from "../format.js";
import { SOURCES } from "../sources.js";
import { linear, ticks } from "./scales.js";
import { tokensOf } from "./series.js";

/** What timeChart draws. slots: of series.js; empty: what to show where no token was counted. */
export function stacked({ slot, filled }, empty) {
  const totals = filled.map(({ points }) => tokensOf(points));
  const sums = totals.map((tokens) => SOURCES.reduce((sum, { id }) => sum + (tokens[id] ?? 0), 0));
  const high = Math.max(...sums);
  if (!high) return { empty };
  const yTicks = ticks(high);
  const times = filled.map(({ at }) => at);
  return {
    times,
    slot,
    yTicks,
    scale: (range) => linear([0, yTicks.at(-1)], range),
    format: (value) => compact(value).replace(".0 ", " "),
    marks: (x, y) =>
      times.map((at, index) => {
        const unfinished = index === times.length - 1;
        return s(
          "g",
          { class: unfinished && "unfinished" },
          bar(totals[index], x(at) + 0.5, x(at + slot) - 0.5, y),
        );
      }),
    readout: (index) => [
      ...SOURCES.filter(({ id }) => totals[index][id]).map(({ id, label, color }) => ({
        label,
        color,
        text: count(totals[index][id]),
      })),
      { label: "All", color: "transparent", text: count(sums[index]) },
    ],
  };
}

function bar(tokens, left, right, y) {
  let below = 0;
  return SOURCES.filter(({ id }) => tokens[id]).map(({ id, color }) => {
    const top = y(below + tokens[id]);
    const height = y(below) - top;
    below += tokens[id];
    return s("rect", {
      x: left,
      y: top,
      width: Math.max(1, right - left),
      height,
      style: { fill: color },
    });
  });
}
