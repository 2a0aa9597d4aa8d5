// What moves on the page. Nothing is computed: every number and every sentence stands in the page as text, and the
// script only shows one of them and hides the others. Without it the page is whole, but does not move.
"use strict";

// The explorer at one stop: texts of the dials, and for each token its depth, shade and sentence. A prompt has none.
function explorerAt(data, stop) {
  return {
    name: data.stops[stop].name,
    roles: data.stops[stop].roles,
    dials: data.stops[stop].dials,
    tokens: data.tokens.map((token) =>
      token.depth.length ? { depth: token.depth[stop], shade: token.shade[stop], said: token.said[stop] } : null),
  };
}

// One of `items` can be reached with Tab; arrows, Home and End move on from there.
function rove(items, chosen) {
  const to = (at) => {
    items.forEach((item, number) => item.setAttribute("tabindex", number === at ? "0" : "-1"));
    items[at].focus();
  };
  items.forEach((item, at) => {
    item.setAttribute("tabindex", at === chosen ? "0" : "-1");
    item.addEventListener("keydown", (event) => {
      const last = items.length - 1;
      const places = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last };
      if (!(event.key in places)) return;
      event.preventDefault();
      to(Math.min(last, Math.max(0, places[event.key])));
    });
  });
}

function startText(box) {
  const said = box.querySelector("[data-said]");
  const tokens = [...box.querySelectorAll("button.token")];
  const show = (token) => {
    tokens.forEach((other) => other.classList.toggle("shown", other === token));
    said.textContent = token.dataset.text + " — " + token.dataset.numbers;
  };
  tokens.forEach((token) => {
    ["focus", "mouseenter", "click"].forEach((kind) => token.addEventListener(kind, () => show(token)));
  });
  rove(tokens, 0);
  return () => {
    const shown = tokens.find((token) => token.classList.contains("shown"));
    if (shown) show(shown);
  };
}

function startExplorer(box) {
  const data = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const slider = box.querySelector("input[type='range']");
  const tokens = [...box.querySelectorAll(".text > .token")];
  const again = startText(box);
  const move = () => {
    const now = explorerAt(data, Number(slider.value));
    box.querySelectorAll("[data-dial]").forEach((dial, at) => { dial.textContent = now.dials[at]; });
    box.querySelector("[data-name]").textContent = now.name;
    box.querySelector("[data-roles]").textContent = now.roles;
    slider.setAttribute("aria-valuetext", now.name + ": " + now.dials.join(", "));
    now.tokens.forEach((one, at) => {
      if (!one) return;
      tokens[at].className = tokens[at].className.replace(/shade-\d/, "shade-" + one.shade);
      tokens[at].querySelector(".depth").textContent = one.depth;
      tokens[at].dataset.numbers = one.said;
      tokens[at].setAttribute("aria-label", tokens[at].dataset.text + ", " + one.said);
      tokens[at].classList.toggle("other", one.said.includes("likeliest there:"));
    });
    again();
  };
  slider.addEventListener("input", move);
  box.querySelector(".slider").hidden = false;
  move();
}

function startTheme(button) {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
  const say = () => button.setAttribute("aria-pressed", String(theme() === "dark"));
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    say();
  });
  dark.addEventListener("change", say);
  button.hidden = false;
  say();
}

// A link of the table of contents unfolds the part that it leads to.
function unfoldTarget() {
  const part = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (part && part.tagName === "DETAILS") {
    part.open = true;
    part.scrollIntoView();
  }
}

if (typeof document !== "undefined") {
  document.querySelectorAll("[data-explorer]").forEach(startExplorer);
  document.querySelectorAll("[data-text-box]").forEach(startText);
  startTheme(document.getElementById("theme"));
  window.addEventListener("hashchange", unfoldTarget);
  unfoldTarget();
}
