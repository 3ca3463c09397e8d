// Scales and their ticks.

/** value → pixel, linear. */
export function linear([low, high], [from, to]) {
  const reach = high - low || 1;
  return (value) => from + ((value - low) / reach) * (to - from);
}

/** value → pixel, logarithmic; values must be positive. */
export function logarithmic([low, high], [from, to]) {
  const inner = linear([Math.log(low), Math.log(high)], [from, to]);
  return (value) => inner(Math.log(Math.max(value, low)));
}

/** About `number` round values from 0 up to the first one at or above `high`. */
export function ticks(high, number = 4) {
  if (!(high > 0)) return [0, 1];
  const rough = high / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough);
  return Array.from({ length: Math.ceil(high / step) + 1 }, (_, index) => index * step);
}

/** 1, 2, 5 of every decade that [low, high] touches, thinned to decades where they are many. */
export function logTicks(low, high) {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const within = to - from > 3 ? [1] : [1, 2, 5];
  const all = [];
  for (let power = from; power <= to; power += 1)
    all.push(...within.map((each) => each * 10 ** power));
  const first = all.findLastIndex((each) => each <= low);
  const last = all.findIndex((each) => each >= high);
  return all.slice(Math.max(first, 0), last < 0 ? undefined : last + 1);
}

/** Round times of day (Unix seconds) between two, at most `number`. */
export function timeTicks(from, to, number) {
  const steps = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400];
  const step = steps.find((each) => (to - from) / each <= number) ?? 28800;
  const first = Math.ceil(from / step) * step;
  return Array.from(
    { length: Math.floor((to - first) / step) + 1 },
    (_, index) => first + index * step,
  );
}
