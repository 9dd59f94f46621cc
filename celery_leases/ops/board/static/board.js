// Do not refresh the live part while keys are selected or the page is hidden; say so when the board does not answer.
"use strict";
document.addEventListener("htmx:beforeRequest", function (event) {
  const part = event.target;
  if (document.hidden || (part.querySelector && part.querySelector("input:checked"))) event.preventDefault();
});
// Keys may have been selected while the response was on its way.
document.addEventListener("htmx:beforeSwap", function (event) {
  if (event.target.querySelector && event.target.querySelector("input:checked")) event.detail.shouldSwap = false;
});
function stale(isStale) {
  document.getElementById("stale").hidden = !isStale;
}
for (const problem of ["htmx:responseError", "htmx:sendError", "htmx:timeout"]) {
  document.addEventListener(problem, function () { stale(true); });
}
document.addEventListener("htmx:afterOnLoad", function (event) {
  if (event.detail.successful !== false && event.detail.xhr.status < 400) stale(false);
});
document.addEventListener("change", function (event) {
  if (event.target.id !== "all") return;
  for (const box of document.querySelectorAll('input[name="seen"]')) box.checked = event.target.checked;
});
