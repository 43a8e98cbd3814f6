"use strict";
// Sorting, copying, and values under the pointer.  The page is complete without it; every text is set as text.

// A link to a folded experiment opens it.
function unfold() {
  const shown = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
  const fold = shown && shown.closest("details");
  if (fold && !fold.open) {
    fold.open = true;
    shown.scrollIntoView();
  }
}
addEventListener("hashchange", unfold);
unfold();

for (const command of document.querySelectorAll("pre.command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(command.textContent.trim());
    button.textContent = "Copied";
  });
  command.after(button);
}

// Below a picture: the row of its table that is nearest to the pointer.
for (const svg of document.querySelectorAll("svg[data-at]")) {
  const figure = svg.closest("figure");
  const heads = [...figure.querySelectorAll("thead tr > *")].map((head) => head.textContent);
  const rows = [...figure.querySelectorAll("tbody tr")];
  const places = svg.dataset.at.split(" ").map(Number);
  const line = document.createElement("p");
  line.className = "value";
  line.textContent = "\u00a0";
  figure.querySelector("details").before(line);
  svg.addEventListener("pointermove", (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const at = svg.dataset.along === "y" ? point.y : point.x;
    let nearest = 0;
    places.forEach((place, i) => {
      if (Math.abs(place - at) < Math.abs(places[nearest] - at)) nearest = i;
    });
    // Both sides may have a row there.
    const near = new Set(places.flatMap((place, i) => (Math.abs(place - places[nearest]) < 3 ? i % rows.length : [])));
    const beside = rows.filter((_, i) => near.has(i)).slice(0, 2);
    const said = beside.map((row) => [...row.cells].map((cell, i) => `${heads[i]} ${cell.textContent}`.trim()).join(" · "));
    line.textContent = said.join(" | ");
  });
}
