// Line icons of 16 units, drawn for this page.
import { s } from "./dom.js";

const PATHS = {
  overview: "M2 13.5h12M3.5 11V8M8 11V3M12.5 11V6",
  modules: "M2.5 3h11v3.2h-11zM2.5 9.8h11V13h-11z M5 6.2v3.6M11 6.2v3.6",
  requests: "M2 4h8M2 8h12M2 12h5M12 4h2M10 12h4",
  schemas: "M3 2.5v11M3 5h4M3 11h4M9 3.2h4.5v3.6H9zM9 9.2h4.5v3.6H9z",
  ingestion: "M8 10V2.5M5 5.2 8 2.3l3 2.9M2.5 10v3.5h11V10",
  ask: "M2.5 3h11v8H8l-3 2.8V11H2.5z",
  documents: "M3.5 2.5h6l3 3v8h-9zM9.5 2.5v3h3M5.8 8.4h4.4M5.8 10.9h4.4",
  replicas: "M2.5 2.5h11v4h-11zM2.5 9.5h11v4h-11zM5 4.5h.1M5 11.5h.1",
  keys: "M4.8 5.4a2.6 2.6 0 1 1 0 5.2 2.6 2.6 0 0 1 0-5.2zM7.4 8H14M11.4 8v2.2M14 8v2.2",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  trash: "M3 4.5h10M6.3 4.5V3h3.4v1.5M4.3 4.5l.6 9h6.2l.6-9M6.8 7v4M9.2 7v4",
  close: "M4 4l8 8M12 4l-8 8",
  check: "M3 8.5 6.5 12 13 4.5",
  warning: "M8 2.2 14.5 13.5h-13zM8 6.5v3.2M8 11.4v.4",
  search: "M7 2.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9zM10.4 10.4 14 14",
  pin: "M5.5 2.5h5M6.5 2.5v4L4.5 9h7l-2-2.5v-4M8 9v4.5",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
  up: "M4 10l4-4 4 4",
  down: "M4 6l4 4 4-4",
  right: "M6 4l4 4-4 4",
  file: "M4 2.5h5l3 3v8H4zM9 2.5v3h3",
  stop: "M4.5 4.5h7v7h-7z",
};

export function icon(name) {
  return s(
    "svg",
    { class: "glyph", viewBox: "0 0 16 16", "aria-hidden": "true" },
    s("path", { d: PATHS[name] }),
  );
}
