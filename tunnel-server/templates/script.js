// Reloads the page every 10 s while it is visible, and copies commands. Everything else works without it.
"use strict";

const INTERVAL_MS = 10_000;
const asOf = () => document.getElementById("as-of");
let isLoading = false;

// A reload must not take a text that somebody types or selects.
function isInUse() {
  return document.activeElement?.matches("input") || !getSelection().isCollapsed;
}

async function reload() {
  if (document.hidden || isLoading || isInUse()) {
    return;
  }
  isLoading = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
    if (!answer.ok) {
      throw new Error(answer.statusText);
    }
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!isInUse()) {
      replace(fresh);
    }
  } catch {
    asOf().classList.add("bad");
    const chip = asOf().querySelector(".tag");
    chip.classList.replace("live", "away");
    chip.textContent = "no answer";
  } finally {
    isLoading = false;
  }
}

function replace(fresh) {
  const focusable = () => [...document.querySelectorAll("a, button, input")];
  const focused = focusable().indexOf(document.activeElement);
  for (const selector of ["header", "main"]) {
    document.querySelector(selector).replaceWith(fresh.querySelector(selector));
  }
  document.title = fresh.title;
  if (focused >= 0) {
    focusable()[focused]?.focus({ preventScroll: true });
  }
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 2_000);
  } catch {
    // Without the right to use the clipboard, the text is selected.
    getSelection().selectAllChildren(code);
  }
}

document.documentElement.classList.add("has-script");
document.addEventListener("click", (event) => {
  const button = event.target.closest(".command button");
  if (button) {
    copy(button);
  }
});
document.addEventListener("visibilitychange", reload);
setInterval(reload, INTERVAL_MS);
