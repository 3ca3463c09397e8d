// Memory of the process, its machine and its GPU, each as a bar of what takes it.
import { partsBar } from "./charts/bars.js";
import { legend } from "./charts/frame.js";
import { h } from "./dom.js";
import { bytes, percent } from "./format.js";

/** memory: as the server tells it, all in bytes. device: null without a GPU. */
export function memoryLines({ process, host, device }) {
  const own = process.rss_bytes - process.mapped_bytes;
  const taken = host.total_bytes - host.available_bytes;
  return [
    line(
      "Host",
      "host",
      host.total_bytes,
      [
        { label: "This process", color: "var(--device)", value: own },
        { label: "Mapped files", color: "var(--host)", value: process.mapped_bytes },
        { label: "Others", color: "var(--shared)", value: Math.max(0, taken - own) },
        {
          label: "Free",
          color: "var(--sunken)",
          value: host.available_bytes - process.mapped_bytes,
        },
      ],
      host.available_bytes,
    ),
    device &&
      line(
        device.name,
        "device",
        device.total_bytes,
        [
          { label: "This process", color: "var(--device)", value: device.reserved_bytes },
          {
            label: "Others",
            color: "var(--shared)",
            value: device.total_bytes - device.free_bytes - device.reserved_bytes,
          },
          { label: "Free", color: "var(--sunken)", value: device.free_bytes },
        ],
        device.free_bytes,
      ),
    h(
      "p",
      { class: "muted" },
      `Resident: ${bytes(process.rss_bytes)}. Pages of mapped files, such as states on disk, leave when the system needs the room.`,
    ),
  ];
}

// available: free, or held by what leaves at need.
function line(title, name, total, parts, available) {
  const kept = parts.map((part) => ({ ...part, value: Math.max(0, part.value) }));
  return h(
    "div",
    { class: "tier", "data-memory": name },
    h(
      "div",
      { class: "line" },
      h("strong", {}, title),
      h(
        "span",
        { class: "num" },
        `${bytes(available)} available`,
        h("span", { class: "muted" }, ` of ${bytes(total)}`),
        h("b", {}, percent(1 - available / total)),
      ),
    ),
    partsBar(kept, `Memory of ${title}`, bytes),
    legend(kept.map((part) => ({ ...part, label: `${part.label} ${bytes(part.value)}` }))),
  );
}
