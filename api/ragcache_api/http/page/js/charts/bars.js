// Shares as bars: tokens of one prompt, fill of a tier, time of each token.
import { h, s } from "../dom.js";
import { count, percent, seconds } from "../format.js";

/** One bar cut into parts. parts: [{label, color, value}]; label: what it says as a whole; format:
 *  of the values. */
export function partsBar(parts, label, format = count) {
  const all = parts.reduce((sum, { value }) => sum + value, 0) || 1;
  return h(
    "div",
    {
      class: "partsbar",
      role: "img",
      "aria-label": `${label}: ${parts.map((part) => `${part.label} ${format(part.value)}`).join(", ")}`,
    },
    parts
      .filter(({ value }) => value > 0)
      .map((part) =>
        h("span", {
          style: { "--fill": part.color, "--share": `${(part.value / all) * 100}%` },
          title: `${part.label}: ${format(part.value)} (${percent(part.value / all)})`,
        }),
      ),
  );
}

/** The fill of a tier, its pinned part hatched; pale where there is no budget to fill. */
export function fillBar({ used, pinned, budget, color, label }) {
  const whole = budget || used || 1;
  const share = (value) => `${Math.min(100, (value / whole) * 100)}%`;
  return h(
    "div",
    {
      class: "fillbar",
      role: "meter",
      "aria-label": label,
      "aria-valuemin": 0,
      "aria-valuemax": whole,
      "aria-valuenow": used,
    },
    h("span", {
      class: budget ? "used" : "used unbounded",
      style: { "--fill": color, "--share": share(used) },
    }),
    pinned > 0 && h("span", { class: "pinned", style: { "--share": share(pinned) } }),
  );
}

/** Seconds between one token and the next, one bar each; the newest at the right. */
export function tokenBars(gaps, { width, height = 72 }) {
  const room = Math.max(1, Math.floor(width / 3));
  const seen = gaps.slice(-room);
  const high = Math.max(...seen, 1e-6);
  const step = Math.min(22, width / Math.max(seen.length, 24));
  return s(
    "svg",
    {
      class: "tokenbars",
      width,
      height,
      role: "img",
      "aria-label": `Time of each of ${gaps.length} tokens, at most ${seconds(high)}`,
    },
    seen.map((gap, index) => {
      const tall = Math.max(1, (gap / high) * (height - 2));
      return s(
        "rect",
        { x: index * step, y: height - tall, width: Math.max(1, step - 1), height: tall },
        s("title", {}, `token ${gaps.length - seen.length + index + 1}: ${seconds(gap)}`),
      );
    }),
  );
}
