// Light, dark, or what the system says.
const STORED = "ragcache.theme";
const ORDER = ["system", "light", "dark"];

export function appearance() {
  return document.documentElement.dataset.theme ?? "system";
}

export function nextAppearance() {
  const next = ORDER[(ORDER.indexOf(appearance()) + 1) % ORDER.length];
  if (next === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem(STORED);
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem(STORED, next);
  }
  return next;
}
