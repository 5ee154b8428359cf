
// Links into closed details open them; a choice hides what was not chosen.

function open() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.scrollIntoView();
  }
}

/** A choice of parts shows the chosen one alone. */
function choose(choice) {
  const parts = [...document.querySelectorAll(`[data-part="${choice.id}"]`)];
  const show = () => parts.forEach((part) => { part.hidden = part.id !== choice.value; });
  choice.addEventListener("change", show);
  choice.parentElement.hidden = false;
  show();
}

document.querySelectorAll(".choice select").forEach(choose);
document.querySelectorAll("figure").forEach(showTools);
document.querySelectorAll("table").forEach(enliven);
document.querySelectorAll("#all-runs").forEach(compareCurves);
window.addEventListener("hashchange", open);
open();
