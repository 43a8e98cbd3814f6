// Code buttons are no landmark, and a keyboard can scroll wide tables and code.
const complete = () => {
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.setAttribute("role", "none");
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
  for (const code of document.querySelectorAll("pre > code")) if (code.tabIndex < 0) code.tabIndex = 0;
};
// What a link leads to is open, and so is everything on paper.
const unfold = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && (target.closest("details") || target.nextElementSibling);
  if (folded && folded.tagName === "DETAILS") folded.open = true;
};
addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
// Of a console the commands are copied, without prompts and what they print.
const commands = (text) => {
  const kept = [];
  let continued = false;
  for (const line of text.split("\n")) {
    if (continued || line.startsWith("$ ")) kept.push(continued ? line : line.slice(2));
    continued = (continued || line.startsWith("$ ")) && line.endsWith("\\");
  }
  return kept.join("\n");
};
const copyCommands = (event) => {
  const button = event.target.closest("button");
  const code = button && button.closest(".language-console")?.querySelector("code");
  if (!code) return;
  event.stopImmediatePropagation();
  navigator.clipboard.writeText(commands(code.textContent));
};
addEventListener("click", copyCommands, true);
unfold();
complete();
new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
