// The theme that the reader chose, before anything is painted.
"use strict";
(() => {
  let chosen = "system";
  try { chosen = localStorage.getItem("theme") || "system"; } catch { /* no storage: the system's */ }
  if (chosen !== "system") document.documentElement.dataset.theme = chosen;
})();
