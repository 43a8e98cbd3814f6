"use strict";
// Copying, zooming, and values under the pointer.  The page is complete without it; every text is set as text.

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

// Pictures over the time of a run show one part of it together: a range that is dragged, or the window of a request.
for (const experiment of document.querySelectorAll(".experiment")) {
  const plots = [...experiment.querySelectorAll("svg[data-span]")].map((svg) => {
    const [left, right, low, high] = svg.dataset.span.split(" ").map(Number);
    const texts = [...svg.querySelectorAll(".tick, .begun")].map((text) => ({ text, x: Number(text.getAttribute("x")), said: text.textContent }));
    return { svg, left, right, low, high, texts };
  });
  if (!plots.length) continue;
  const { low: begin, high: end } = plots[0];
  const whole = document.createElement("button");
  whole.type = "button";
  whole.hidden = true;
  whole.addEventListener("click", () => zoom(begin, end));
  plots[0].svg.closest("figure").prepend(whole);

  // Seconds of the run from left to right.
  function zoom(from, until) {
    const first = Math.max(begin, from), last = Math.min(end, until);
    if (!(last > first)) return;
    whole.hidden = first === begin && last === end;
    whole.textContent = `${first.toFixed(2)} s to ${last.toFixed(2)} s: show the whole run`;
    for (const { svg, left, right, low, high, texts } of plots) {
      const scale = (right - left) / (high - low);
      const seen = [left + (first - low) * scale, (last - first) * scale];
      for (const plot of svg.querySelectorAll(".plot")) {
        const [, top, , height] = plot.getAttribute("viewBox").split(" ");
        plot.setAttribute("viewBox", `${seen[0]} ${top} ${seen[1]} ${height}`);
      }
      for (const { text, x, said } of texts) {
        const place = left + ((x - seen[0]) / seen[1]) * (right - left);
        if (text.matches(".begun")) {
          text.setAttribute("x", place);
          text.style.visibility = place < left || place > right ? "hidden" : "";
        } else {
          const second = first + ((x - left) / (right - left)) * (last - first);
          text.textContent = whole.hidden ? said : second.toFixed(last - first > 20 ? 1 : 3);
        }
      }
    }
  }

  for (const { svg, left, right, low, high } of plots) {
    let from = null;
    const second = (event) => {
      const { x } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const [seen, , wide] = svg.querySelector(".plot").getAttribute("viewBox").split(" ").map(Number);
      return low + ((seen + ((x - left) / (right - left)) * wide - left) / (right - left)) * (high - low);
    };
    svg.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      from = second(event);
    });
    svg.addEventListener("pointerup", (event) => {
      const until = second(event);
      if (from !== null && Math.abs(until - from) > (end - begin) / 1e4) zoom(Math.min(from, until), Math.max(from, until));
      from = null;
    });
    svg.addEventListener("dblclick", () => zoom(begin, end));
  }
  for (const link of experiment.querySelectorAll("a[data-window]")) {
    const [from, until] = link.dataset.window.split(" ").map((us) => us / 1e6);
    link.addEventListener("click", (event) => {
      event.preventDefault();
      zoom(from, until);
      plots[0].svg.closest("figure").scrollIntoView();
    });
  }
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
    let at = svg.dataset.along === "y" ? point.y : point.x;
    const plot = svg.querySelector(".plot");
    if (plot) {
      const [seen, , wide] = plot.getAttribute("viewBox").split(" ").map(Number);
      at = seen + ((at - plot.x.baseVal.value) / plot.width.baseVal.value) * wide;
    }
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
