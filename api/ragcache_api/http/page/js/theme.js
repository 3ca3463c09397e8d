// A plain script in the head: the chosen appearance and language hold before anything is painted.
(() => {
  const chosen = localStorage.getItem("ragcache.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
