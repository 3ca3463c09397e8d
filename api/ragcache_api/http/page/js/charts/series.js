// Points of the last hour gathered into slots of equal length.

const SLOTS = 60;

/** Slots of `minutes` up to now: [{at, points}] and their length in seconds. The last one is not
 *  over yet. */
export function slots(series, minutes) {
  const now = Math.max(series.at(-1)?.at ?? 0, Date.now() / 1000);
  const slot = Math.max(5, (minutes * 60) / SLOTS);
  const end = Math.floor(now / slot) * slot + slot;
  const first = end - slot * SLOTS;
  const filled = Array.from({ length: SLOTS }, (_, index) => ({
    at: first + index * slot,
    points: [],
  }));
  for (const point of series) {
    const index = Math.floor((point.at - first) / slot);
    if (index >= 0 && index < SLOTS) filled[index].points.push(point);
  }
  return { slot, filled };
}

/** The sum of tokens by source over points. */
export function tokensOf(points) {
  const total = {};
  for (const { tokens } of points) {
    for (const [name, number] of Object.entries(tokens ?? {}))
      total[name] = (total[name] ?? 0) + number;
  }
  return total;
}

/** A time of a slot: of medians the mean, of 95th percentiles the worst; null where none. */
export function timeOf(points, name) {
  const known = points.map((point) => point[name]).filter((value) => value > 0);
  if (!known.length) return null;
  if (name.endsWith("p95")) return Math.max(...known);
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}
