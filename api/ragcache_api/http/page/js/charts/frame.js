// The frame of a chart over time: axes, a cursor for pointer and arrow keys, and its readout.
import { h, s, show } from "../dom.js";
import { clock } from "../format.js";
import { linear, timeTicks } from "./scales.js";

const MARGIN = { top: 10, right: 10, bottom: 22, left: 54 };

/** A chart in `host`. update(spec) draws: times (Unix seconds, one a slot), slot (seconds), scale
 *  ([top, bottom] in pixels → y), yTicks, format, marks(x, y, width), readout(index) →
 *  [{label, color, text}], or empty: nodes to show where there is nothing to draw. */
export function timeChart(host, { label, height = 220, signal }) {
  const plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": label });
  const readout = h("div", { class: "readout", hidden: true, "aria-live": "polite" });
  show(host, h("div", { class: "chart" }, plot, readout));
  const state = { plot, readout, label, height, spec: null, at: null };
  const watcher = new ResizeObserver(() => state.spec && draw(state));
  watcher.observe(plot);
  signal.addEventListener("abort", () => watcher.disconnect());
  listen(state);
  return {
    update(spec) {
      state.spec = spec;
      draw(state);
    },
  };
}

function listen(state) {
  const { plot } = state;
  plot.addEventListener("pointermove", (event) => point(state, slotAt(state, event)));
  plot.addEventListener("pointerleave", () => point(state, null));
  plot.addEventListener("blur", () => point(state, null));
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !state.spec || state.spec.empty) return;
    event.preventDefault();
    const last = state.spec.times.length - 1;
    point(state, Math.min(last, Math.max(0, (state.at ?? last) + step)));
  });
}

function slotAt({ plot, spec }, event) {
  if (!spec || spec.empty) return null;
  const box = plot.getBoundingClientRect();
  const inner = box.width - MARGIN.left - MARGIN.right;
  const share = (event.clientX - box.left - MARGIN.left) / inner;
  return share < 0 || share > 1
    ? null
    : Math.min(spec.times.length - 1, Math.floor(share * spec.times.length));
}

function draw(state) {
  const { plot, spec, height } = state;
  if (spec.empty) {
    show(plot, spec.empty);
    return;
  }
  const width = plot.clientWidth;
  if (width < 80) return;
  const end = spec.times.at(-1) + spec.slot;
  const x = linear([spec.times[0], end], [MARGIN.left, width - MARGIN.right]);
  const y = spec.scale([height - MARGIN.bottom, MARGIN.top]);
  state.x = x;
  show(
    plot,
    s(
      "svg",
      { width, height, "aria-hidden": "true" },
      grid(spec, y, width),
      hours(spec.times[0], end, x, width, height),
      s("g", {}, spec.marks(x, y)),
      s("line", {
        class: "cursor",
        y1: MARGIN.top,
        y2: height - MARGIN.bottom,
        visibility: "hidden",
      }),
    ),
  );
  point(state, state.at);
}

function grid(spec, y, width) {
  return spec.yTicks.map((tick) => [
    s("line", {
      class: "gridline",
      x1: MARGIN.left,
      x2: width - MARGIN.right,
      y1: y(tick),
      y2: y(tick),
    }),
    s(
      "text",
      { class: "tick", x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end" },
      spec.format(tick),
    ),
  ]);
}

function hours(from, to, x, width, height) {
  const withSeconds = to - from <= 120;
  return timeTicks(from, to, Math.max(2, Math.floor(width / 90)))
    .filter((at) => x(at) > MARGIN.left + 14 && x(at) < width - MARGIN.right - 14)
    .map((at) =>
      s(
        "text",
        { class: "tick", x: x(at), y: height - 6, "text-anchor": "middle" },
        clock(at, withSeconds),
      ),
    );
}

function point(state, index) {
  const { plot, readout, spec, x } = state;
  const cursor = plot.querySelector(".cursor");
  state.at = cursor && index !== null && index < spec.times.length ? index : null;
  readout.hidden = state.at === null;
  cursor?.setAttribute("visibility", state.at === null ? "hidden" : "visible");
  if (state.at === null) return;
  const center = x(spec.times[index] + spec.slot / 2);
  cursor.setAttribute("x1", center);
  cursor.setAttribute("x2", center);
  show(readout, h("strong", {}, clock(spec.times[index], true)), rows(spec.readout(index)));
  const left = center > plot.clientWidth / 2 ? center - readout.offsetWidth - 12 : center + 12;
  readout.style.setProperty("left", `${Math.max(0, left)}px`);
}

function rows(entries) {
  const cells = entries.map(({ label, color, text }) =>
    h("tr", {}, h("th", { scope: "row" }, swatch(color), label), h("td", { class: "num" }, text)),
  );
  return h("table", {}, h("tbody", {}, cells));
}

/** A small square of a color. */
export function swatch(color) {
  return h("i", { class: "swatch", style: { "--fill": color } });
}

/** The names of what a chart draws. entries: [{label, color, dashed?}] */
export function legend(entries) {
  return h(
    "ul",
    { class: "legend" },
    entries.map(({ label, color, dashed }) =>
      h(
        "li",
        {},
        dashed === undefined
          ? swatch(color)
          : h("i", { class: `stroke${dashed ? " dashed" : ""}`, style: { "--fill": color } }),
        label,
      ),
    ),
  );
}
