// A page opened from disk may not read its neighbors, so search results there show titles only.
if (window.location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}

// The theme names two buttons by other words than they show: let a screen reader, and a reader who
// speaks to the computer, use the words that are there.
function nameButtons() {
  document.querySelectorAll(".search-button-field, .theme-switch-button").forEach((button) => {
    button.removeAttribute("aria-label");
  });
  document.querySelectorAll(".theme-switch-button").forEach((button) => {
    const words = document.createElement("span");
    words.className = "visually-hidden";
    words.textContent = "Color mode: ";
    button.prepend(words);
  });
}

// Markup of Sphinx that a screen reader cannot use: folds of the menu without a name, parameters as a
// list of definitions without terms, and entries of the bibliography in roles that do not fit.
function mendRoles() {
  document.querySelectorAll("nav li > details > summary").forEach((summary) => {
    const link = summary.closest("li").querySelector("a");
    summary.setAttribute("aria-label", `Chapters of ${link ? link.textContent.trim() : "this part"}`);
  });
  document.querySelectorAll("dt.sig > dl").forEach((list) => {
    list.setAttribute("role", "list");
    list.querySelectorAll("dd").forEach((item) => item.setAttribute("role", "listitem"));
  });
  document.querySelectorAll(".citation-list, .citation-list > .citation").forEach((entry) => {
    entry.removeAttribute("role");
  });
}

// Whatever scrolls by itself can be reached by the Tab key, and only while it does scroll.
const SCROLLS = ".bd-article :is(pre, table, figure, div.math, .cell_output, .table-scroll, .claims)";
function markScrolling() {
  document.querySelectorAll(SCROLLS).forEach((box) => {
    const scrolls = ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    const wide = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    if (scrolls && wide) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });
}

document.addEventListener("DOMContentLoaded", () => {
  nameButtons();
  mendRoles();
  new ResizeObserver(markScrolling).observe(document.documentElement);
  document.addEventListener("toggle", markScrolling, true); // a fold opens
});
