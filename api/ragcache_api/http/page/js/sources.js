// Where prompt tokens came from, in the order in which every chart stacks them. Cool colors were
// kept, warm ones computed; the custom properties are in style.css.
export const SOURCES = [
  { id: "device", label: "Device", color: "var(--device)" },
  { id: "host", label: "Host", color: "var(--host)" },
  { id: "disk", label: "Disk", color: "var(--disk)" },
  { id: "remote", label: "Remote", color: "var(--remote)" },
  { id: "shared", label: "Shared", color: "var(--shared)" },
  { id: "encoded", label: "Encoded", color: "var(--encoded)" },
  { id: "computed", label: "Computed", color: "var(--computed)" },
];

export const TIERS = ["device", "host", "disk", "remote"];

const known = new Map(SOURCES.map((source) => [source.id, source]));

/** A source by its name; names that this page does not know get the color of text. */
export function source(id) {
  return known.get(id) ?? { id, label: id, color: "var(--muted)" };
}

/** The share of prompt tokens that were not computed, 0 to 1; null where there are none. */
export function keptShare(tokens) {
  const all = SOURCES.reduce((sum, each) => sum + (tokens[each.id] ?? 0), 0);
  const kept = [...TIERS, "shared"].reduce((sum, id) => sum + (tokens[id] ?? 0), 0);
  return all ? kept / all : null;
}
