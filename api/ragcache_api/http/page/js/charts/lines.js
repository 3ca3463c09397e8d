// Times over time, as lines on a logarithmic scale, broken where nothing was measured.
import { s } from "../dom.js";
import { seconds } from "../format.js";
import { logTicks, logarithmic } from "./scales.js";
import { timeOf } from "./series.js";

/** What timeChart draws. lines: [{name, label, color, dashed}], name as in the series' points. */
export function timesOver({ slot, filled }, lines, empty) {
  const values = lines.map(({ name }) => filled.map(({ points }) => timeOf(points, name)));
  const known = values.flat().filter((value) => value !== null);
  if (!known.length) return { empty };
  const yTicks = logTicks(Math.min(...known), Math.max(...known));
  const times = filled.map(({ at }) => at);
  return {
    times,
    slot,
    yTicks,
    scale: (range) => logarithmic([yTicks[0], yTicks.at(-1)], range),
    format: tick,
    marks: (x, y) =>
      lines.map((line, row) => runs(values[row]).map((run) => drawn(run, line, times, slot, x, y))),
    readout: (index) =>
      lines.map(({ label, color }, row) => ({ label, color, text: seconds(values[row][index]) })),
  };
}

function tick(value) {
  return value < 1
    ? `${Number((value * 1e3).toPrecision(2))} ms`
    : `${Number(value.toPrecision(2))} s`;
}

// Neighboring known values as lists of [index, value].
function runs(values) {
  const all = [[]];
  values.forEach((value, index) => {
    if (value !== null) all.at(-1).push([index, value]);
    else if (all.at(-1).length) all.push([]);
  });
  return all.filter((run) => run.length);
}

function drawn(run, { color, dashed }, times, slot, x, y) {
  const points = run.map(([index, value]) => [x(times[index] + slot / 2), y(value)]);
  if (points.length === 1)
    return s("circle", { cx: points[0][0], cy: points[0][1], r: 2, style: { fill: color } });
  return s("polyline", {
    class: `trend${dashed ? " dashed" : ""}`,
    points: points.join(" "),
    style: { stroke: color },
  });
}
