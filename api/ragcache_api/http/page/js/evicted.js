// States that left a tier: how many and why, and the latest one by one.
import { h } from "./dom.js";
import { bytes, count } from "./format.js";
import { empty, moduleName, moment, plainTable, tierChip } from "./parts.js";
import { source } from "./sources.js";

const REASONS = ["pressure", "ttl", "manual", "superseded", "corrupt"];
const LATEST = [
  { title: "Module", wide: true, cell: moduleOf },
  { title: "Left", cell: ({ tier }) => tierChip(tier) },
  { title: "Why", cell: ({ reason }) => reason },
  { title: "Size", num: true, cell: ({ nbytes }) => bytes(nbytes) },
  { title: "When", num: true, cell: ({ at }) => moment(at) },
];

/** By tier and reason, and the latest one by one. stats: of the server; latest: newest first. */
export function evictions({ evictions: byTier, engine }, latest) {
  const tiers = Object.keys(byTier).filter((tier) => Object.values(byTier[tier]).some(Boolean));
  if (!tiers.length && !latest.length)
    return empty(
      isOperator(engine) ? "Nothing was evicted" : "Nothing of this namespace was evicted",
      "States leave a tier under pressure, when their time is over, or by hand.",
    );
  const known = new Set([...REASONS, ...tiers.flatMap((tier) => Object.keys(byTier[tier]))]);
  const reasons = [...known].filter((reason) => tiers.some((tier) => byTier[tier][reason]));
  const most = Math.max(...tiers.flatMap((tier) => Object.values(byTier[tier])));
  const columns = [
    { title: "Tier", cell: (tier) => source(tier).label },
    ...reasons.map((reason) => ({
      title: reason,
      num: true,
      cell: (tier) => amount(byTier[tier][reason] ?? 0, most, source(tier).color),
    })),
  ];
  return [
    tiers.length > 0 && plainTable(columns, tiers, "Evictions by tier and reason"),
    latest.length > 0 && plainTable(LATEST, latest, "Latest evictions"),
  ];
}

// The server tells what all namespaces share, counts of evictions too, to the operator alone.
const isOperator = (engine) => Object.keys(engine).length > 0;

function amount(number, most, color) {
  const bar = h("i", {
    class: "amount",
    style: { "--fill": color, "--share": `${(number / most) * 100}%` },
  });
  return h(
    "span",
    { class: "withbar" },
    number ? bar : null,
    h("span", { class: number ? "" : "faint" }, count(number)),
  );
}

function moduleOf({ module, key }) {
  if (module) return moduleName(module);
  return h(
    "code",
    { title: "States of no module: preamble, scaffold or schema" },
    key.slice(0, 12),
  );
}
